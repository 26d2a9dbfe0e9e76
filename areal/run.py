"""The folder of one run, and what is in it.

    runs/search-0001/
      config.toml       the effective settings; `areal config` reads them back
      command.json      the program, for `areal resume`
      metrics.jsonl     one line a step
      servers.toml      which servers it is to have; may change while it goes on
      logs/             the output of each child process; while they run, files through which they find each other
      ledger/           what happened to every group
      checkpoints/      step-40, step-50: Hugging Face format
      summary.json      where it stands, and in the end how it ended
      reward.png        the reward curve
    runs/latest         -> search-0001

Everything here touches the disk and blocks for milliseconds, `draw_curve` for a second: call it in a thread where an
event loop is running.
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
"""Keys that summary.json always has, null where the run does not know. `groups` has `admitted`, `trained`, `dropped`
(reason -> count) and `open`; success and greedy are shares of evaluation tasks, sampled and greedy. `wall_s` and the
last four are of the last life, after a resume; `tokens_trained` counts prompts, and repeated steps again."""

LOCK = ".areal-lock"
"""Held by the process that a folder of weights belongs to."""
CURVE_WINDOW = 5
"""Steps over which the drawn reward is averaged."""


def weights_folder(config: Config, run: Path, origin: str) -> Path:
    """Where this process of a run exports weights. Absolute: a server that areal did not start has another working
    folder. Its own for each run and process, since `weights.folder` may be shared."""
    chosen = config.weights.folder
    return (Path(chosen, f"{origin}-{os.getpid()}") if chosen else run / "weights").absolute()


def take_folder(folder: Path) -> int:
    """Make a new folder that only this user can enter, held until the descriptor that is returned is closed.

    One of that name is deleted, and so are its neighbours that killed processes left: on a tmpfs they fill the memory.
    Raises ConfigError when it cannot be made, belongs to somebody else (who could read and change what is written
    there), or to a process that lives.
    """
    for lock in folder.parent.glob(f"*/{LOCK}"):
        with suppress(OSError):
            # A file of somebody else may be a pipe, or a link.
            descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
                if os.fstat(descriptor).st_uid == os.getuid():
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
    if (folder / LOCK).exists():
        raise ConfigError(f"the folder {folder} belongs to a process that lives; set weights.folder to another")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        unlocked = folder / f"{LOCK}-new"
        descriptor = os.open(unlocked, os.O_CREAT | os.O_WRONLY, 0o600)
        with suppress(OSError):  # a file system without locks: there, what is left stays
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            unlocked.rename(folder / LOCK)  # nobody sees it before it is locked
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}; set weights.folder to another") from None
    return descriptor


class RunFolder:
    """Paths and files of a run. `create` makes a new one, the constructor takes one that exists."""

    def __init__(self, path: Path, keep: int = 2):
        self.path = path
        self._keep = keep
        self._writing = threading.Lock()  # a thread goes on when whoever waited for it is cancelled

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """Make `folder`/`name`-<next number>, readable by this user only, and point `latest` at it. The number is
        taken by mkdir, so that two runs that start together get two. Raises ConfigError when the disk refuses."""
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
            raise ConfigError(f"cannot make a run folder in folder={config.folder!r}: {error}") from None
        with suppress(OSError):  # no symbolic links here, or `latest` is something of the user's
            link = parent / f".latest-{uuid.uuid4().hex}"
            link.symlink_to(path.name)
            try:
                link.replace(parent / "latest")
            finally:
                link.unlink(missing_ok=True)
        return cls(path, config.checkpoint.keep)

    @classmethod
    def open(cls, config: Config) -> RunFolder:
        """The folder of the run that `config` goes on with. Its config.toml is replaced; the one before is kept as
        config-<number>.toml. Raises ConfigError when the disk refuses."""
        path = config.run
        assert path is not None
        try:
            path.chmod(0o700)
            current = path / "config.toml"
            number = sum(1 for _ in path.glob("config-*.toml"))
            shutil.copyfile(current, path / f"config-{number}.toml")
            for half in (path / "checkpoints").glob(".*"):  # written or deleted half when the controller was killed
                shutil.rmtree(half)
            (path / ".config.toml").write_text(config.to_toml(), encoding="utf-8")
            (path / ".config.toml").replace(current)
        except OSError as error:
            raise ConfigError(f"cannot write into the run folder {path}: {error}") from None
        return cls(path, config.checkpoint.keep)

    def configs(self) -> list[Config]:
        """The settings of each life, first to last. ConfigError when this is no run folder."""
        if not self.config_file.is_file():
            raise ConfigError(f"{self.path} is not the folder of a run: it has no config.toml; look into runs/")
        earlier = takewhile(Path.is_file, (self.path / f"config-{number}.toml" for number in count()))
        return [Config.load([str(file)], recorded=True) for file in (*earlier, self.config_file)]

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger"

    @property
    def servers_file(self) -> Path:
        return self.path / "servers.toml"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step goes. It counts once it has this name: write it under another, then rename."""
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
        """Delete all but the newest `checkpoint.keep`; returns the steps deleted. A checkpoint loses its name first, so
        that a half-deleted one never looks whole, and what an earlier call left goes too."""
        removed = list(self.checkpoints())[: -self._keep]
        for step in removed:
            self.checkpoint(step).rename(self.path / "checkpoints" / f".deleted-{step}-{uuid.uuid4().hex}")
        for leftover in (self.path / "checkpoints").glob(".deleted-*"):
            shutil.rmtree(leftover, ignore_errors=True)  # somebody may still read it; the next call tries again
        return removed

    @contextmanager
    def log_file(self) -> Iterator[None]:
        """What areal logs, logs/controller.log has, whatever the program does with its own logging."""
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
        """Write summary.json, whole or not at all: SUMMARY_KEYS and whatever else is given; NaN becomes null. Only the
        `last` one waits for the disk."""
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
        """Draw reward.png from metrics.jsonl and summary.json: reward by step, its running mean, success before and
        after. None when there is no reward yet."""
        rewards = self._rewards()
        if not rewards:
            return None
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        steps, values = list(rewards), list(rewards.values())
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.plot(steps, values, ".", color="#9aa5b1", markersize=5, label="reward of a step")
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
        """Step -> reward; a step that was repeated after a crash counts as it was the last time. A line that a crash
        cut off is passed over."""
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
    return [
        math.fsum(window) / len(window)
        for i in range(len(values))
        if (window := values[max(0, i + 1 - CURVE_WINDOW) : i + 1])
    ]
