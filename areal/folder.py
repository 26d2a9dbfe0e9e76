"""The folder of one run and its files.

    runs/search-0001/
      config.toml       the effective settings; `areal config` reads them back
      command.json      the program, for `areal resume`
      metrics.jsonl     one line per step
      endpoint.json     address and token of the run while it is in progress, for `areal status`
      logs/             the output of each child process, and files with which running ones find each other
      ledger/           what happened to every group
      checkpoints/      step-40, step-50: Hugging Face format
      summary.json      state of the run so far, or how it ended
      reward.png        the reward curve
    runs/latest         -> search-0001

Everything here blocks on the disk for milliseconds, `draw_curve` for a second: under an event loop, call it in a
thread.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import orjson

from areal.config import Config
from areal.errors import ConfigError
from areal.masking import MaskingFormatter, mask

SUMMARY_KEYS = (
    "steps",
    "version",
    "wall_s",
    "success_before",
    "success_after",
    "greedy_before",
    "greedy_after",
    "max_staleness_trained",
    "groups",
    "tokens_generated",
    "tokens_trained",
    "weights_pause_share",
    "logprob_gap_max",
)
"""Keys that summary.json always has, null if unknown. `groups` has `admitted`, `trained`, `dropped` (reason -> count)
and `open`; success and greedy are shares of evaluation tasks solved, with sampling and greedily. `wall_s` and the last
four cover the last life only; `tokens_trained` includes prompts and repeated steps."""

KEPT_STEPS = 10
"""Steps before a checkpoint whose trajectories stay in the ledger, for `areal inspect`; no resume needs them."""
LOCK = ".areal-lock"
"""Locked by the process that owns a folder of weights."""
CURVE_WINDOW = 5
"""Steps over which the reward curve is averaged."""


def weights_folder(config: Config, run: Path, origin: str) -> Path:
    """Where this life of a run exports weights. Absolute, because an external server has another working directory;
    unique per run and process, because runs may share `weights.folder`."""
    chosen = config.weights.folder
    return (Path(chosen, f"{origin}-{os.getpid()}") if chosen else run / "weights").absolute()


def take_folder(folder: Path) -> int:
    """Create a folder with mode 0700, locked until the returned descriptor is closed.

    An existing folder of that name is deleted, and so are its siblings whose process is dead: on a tmpfs they would
    fill the memory. Raises ConfigError if the folder cannot be created, belongs to another user (who could read and
    change the weights), or to a running process.
    """
    for lock in folder.parent.glob(f"*/{LOCK}"):
        with suppress(OSError):
            # Another user's file may be a pipe or a link.
            descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process is alive
                if os.fstat(descriptor).st_uid == os.getuid():
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
    if (folder / LOCK).exists():
        raise ConfigError(f"the folder {folder} is used by a running process; set weights.folder to another")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        unlocked = folder / f"{LOCK}-new"
        descriptor = os.open(unlocked, os.O_CREAT | os.O_WRONLY, 0o600)
        with suppress(OSError):  # a file system without locks, where leftovers stay
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            unlocked.rename(folder / LOCK)  # visible only once it is locked
    except OSError as error:
        raise ConfigError(f"cannot create {folder}: {error.strerror}; set weights.folder to another folder") from None
    return descriptor


class RunFolder:
    """Paths and files of a run. `create` makes a new folder; the constructor takes an existing one."""

    def __init__(self, path: Path, keep: int = 2):
        self.path = path
        self.config_file = path / "config.toml"
        self.logs = path / "logs"
        self.ledger = path / "ledger"
        self.summary_file = path / "summary.json"
        self._keep = keep
        self._writing = threading.Lock()  # cancelling a task does not stop the thread that it waits for

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """Create `folder`/`name`-<next number>, readable by this user only, and point `latest` at it. mkdir claims the
        number, so that runs starting together get different ones. Raises ConfigError on a disk error."""
        parent = Path(config.folder)
        settings = config.to_toml()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path = _make_numbered(parent, config.name)
            for name in ("logs", "ledger", "checkpoints"):
                (path / name).mkdir(mode=0o700)
            (path / "config.toml").write_text(settings, encoding="utf-8")
            if config.command:
                command = {"command": [mask(word) for word in config.command], "folder": os.getcwd()}
                (path / "command.json").write_bytes(orjson.dumps(command, option=orjson.OPT_INDENT_2))
        except OSError as error:
            raise ConfigError(f"cannot create a run folder in folder={config.folder!r}: {error}") from None
        with suppress(OSError):  # no symbolic links here, or the user has a folder named `latest`
            link = parent / f".latest-{uuid.uuid4().hex}"
            link.symlink_to(path.name)
            try:
                link.replace(parent / "latest")
            finally:
                link.unlink(missing_ok=True)
        return cls(path, config.checkpoint.keep)

    @classmethod
    def open(cls, config: Config) -> RunFolder:
        """The folder of the run that `config` resumes. Its config.toml is replaced and the previous one kept as
        config-<number>.toml. Raises ConfigError on a disk error."""
        path = config.run
        assert path is not None
        try:
            path.chmod(0o700)
            current = path / "config.toml"
            number = sum(1 for _ in path.glob("config-*.toml"))
            shutil.copyfile(current, path / f"config-{number}.toml")
            for partial in (path / "checkpoints").glob(".*"):  # the controller was killed while writing or deleting it
                shutil.rmtree(partial)
            (path / ".config.toml").write_text(config.to_toml(), encoding="utf-8")
            (path / ".config.toml").replace(current)
        except OSError as error:
            raise ConfigError(f"cannot write to the run folder {path}: {error}") from None
        return cls(path, config.checkpoint.keep)

    def configs(self) -> list[Config]:
        """The settings of each life, first to last. Raises ConfigError if this is not a run folder."""
        if not self.config_file.is_file():
            raise ConfigError(f"{self.path} is not the folder of a run: it has no config.toml; look into runs/")
        earlier = takewhile(Path.is_file, (self.path / f"config-{number}.toml" for number in count()))
        return [Config.load([str(file)], recorded=True) for file in (*earlier, self.config_file)]

    def checkpoint(self, step: int) -> Path:
        """Path of the checkpoint of a step. Write it under another name, then rename: this name means complete."""
        return self.path / "checkpoints" / f"step-{step}"

    def checkpoints(self) -> dict[int, Path]:
        """Step -> folder of each checkpoint, oldest first."""
        found = {
            int(match[1]): path
            for path in (self.path / "checkpoints").iterdir()
            if (match := re.fullmatch(r"step-(\d+)", path.name)) and path.is_dir()
        }
        return dict(sorted(found.items()))

    @property
    def checkpointed(self) -> int | None:
        """The step of the newest checkpoint."""
        return max(self.checkpoints(), default=None)

    def prune(self) -> list[int]:
        """Delete all but the newest `checkpoint.keep` checkpoints, and leftovers of earlier calls; return the steps
        deleted. A checkpoint is renamed first, so that a half-deleted one never looks complete."""
        removed = list(self.checkpoints())[: -self._keep]
        for step in removed:
            self.checkpoint(step).rename(self.path / "checkpoints" / f".deleted-{step}-{uuid.uuid4().hex}")
        for leftover in (self.path / "checkpoints").glob(".deleted-*"):
            shutil.rmtree(leftover, ignore_errors=True)  # may be in use; the next call retries
        return removed

    @contextmanager
    def log_file(self) -> Iterator[None]:
        """Copy areal's log messages to logs/controller.log, however the program configures logging."""
        log = logging.getLogger("areal")
        handler = logging.FileHandler(self.logs / "controller.log", delay=True)
        handler.setFormatter(MaskingFormatter("%(asctime)s %(levelname)s %(message)s"))
        level = log.level
        log.addHandler(handler)
        if log.getEffectiveLevel() > logging.INFO:
            log.setLevel(logging.INFO)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
            handler.close()

    def write_summary(self, summary: Mapping[str, Any], *, last: bool = True) -> None:
        """Write summary.json atomically: SUMMARY_KEYS and any other keys given; NaN becomes null. Only the `last`
        summary is flushed to disk."""
        content = dict.fromkeys(SUMMARY_KEYS) | dict(summary)
        options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
        temporary = self.path / ".summary.json"
        with self._writing:
            with temporary.open("wb") as file:
                file.write(orjson.dumps(content, option=options))
                if last:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(self.summary_file)

    def draw_curve(self) -> Path | None:
        """Draw reward.png from metrics.jsonl and summary.json: reward per step, its running mean, success before and
        after. None if there is no reward yet."""
        rewards = self._rewards()
        if not rewards:
            return None
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        steps, values = list(rewards), list(rewards.values())
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.plot(steps, values, ".", color="#9aa5b1", markersize=5, label="reward per step")
        axes.plot(steps, _running_mean(values), color="#1f6feb", linewidth=2, label=f"mean of {CURVE_WINDOW} steps")
        for key, color in (("success_before", "#d1702f"), ("success_after", "#2da44e")):
            if (success := self._summary().get(key)) is not None:
                label = f"{key.replace('_', ' ')} {success:.2f}"
                axes.axhline(success, color=color, linestyle="--", linewidth=1.2, label=label)
        axes.set(title=self.path.name, xlabel="step", ylabel="mean reward")
        axes.grid(alpha=0.25)
        axes.legend(loc="best", frameon=False)
        target = self.path / "reward.png"
        figure.savefig(target, dpi=120)
        return target

    def _rewards(self) -> dict[int, float]:
        """Step -> reward, the last one for a step that was repeated after a crash. Truncated lines are skipped."""
        found: dict[int, float] = {}
        with suppress(FileNotFoundError), (self.path / "metrics.jsonl").open("rb") as file:
            for line in file:
                with suppress(orjson.JSONDecodeError):
                    row = orjson.loads(line)
                    if row.get("reward") is not None:
                        found[row["step"]] = row["reward"]
        return dict(sorted(found.items()))

    def _summary(self) -> dict[str, Any]:
        try:
            return orjson.loads(self.summary_file.read_bytes())
        except FileNotFoundError:
            return {}


def _make_numbered(parent: Path, name: str) -> Path:
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    taken = [int(match[1]) for path in parent.iterdir() if (match := pattern.fullmatch(path.name))]
    number = max(taken, default=0)
    while True:
        number += 1
        path = parent / f"{name}-{number:04d}"
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path


def _running_mean(values: list[float]) -> list[float]:
    windows = (values[max(0, end - CURVE_WINDOW) : end] for end in range(1, len(values) + 1))
    return [math.fsum(window) / len(window) for window in windows]
