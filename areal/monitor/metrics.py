"""Metrics: the report of a step, the files and services it is written to, a rate, and the staleness of a batch.

`metrics.jsonl` is always written, TensorBoard and W&B as set in `metrics.sinks`. One thread does all writing, because
a network file system or W&B may block for seconds. A failed write does not stop the run: it is logged once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import orjson

from areal.errors import ConfigError
from areal.types import Batch

log = logging.getLogger("areal.monitor.metrics")
NAN = math.nan


@dataclass(frozen=True, slots=True)
class StepReport:
    """A training step as the controller sees it. NaN means unknown.

    version: after the step. staleness: steps -> tokens in the loss. masked_share: 0..1, share of the batch's sampled
    tokens that were masked as stale. generated_tokens_per_s: since the last step; trained_tokens_per_s: while the
    trainer works. paused_share: 0..1, share of time that servers were paused for weights. logprob_gap:
    TrainStats.logprob_gap_max. success: of the last evaluation. seconds: since the last step.
    """

    step: int
    steps: int
    version: int
    reward_mean: float = NAN
    groups: int = 0
    staleness: Mapping[int, int] = field(default_factory=dict)
    masked_share: float = 0.0
    generated_tokens_per_s: float = NAN
    trained_tokens_per_s: float = NAN
    paused_share: float = NAN
    logprob_gap: float = NAN
    success: float = NAN
    episodes_running: int = 0
    groups_open: int = 0
    seconds: float = NAN
    notes: tuple[str, ...] = ()

    def metrics(self) -> dict[str, Any]:
        """The numbers under their names in metrics.jsonl."""
        numbers = {name: value for name, value in asdict(self).items() if name not in ("step", "steps", "notes")}
        return {"reward": numbers.pop("reward_mean"), **numbers}


class Sink(Protocol):
    """A destination for numbers by flat names, used by the writer thread only."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_sinks(sinks: Sequence[str]) -> None:
    """Raise ConfigError for a sink whose package is missing."""
    for sink in sinks:
        spec = find_spec(sink)
        if spec is None or spec.origin is None:  # no origin: a folder of that name, such as W&B creates
            raise ConfigError(f'metrics.sinks={list(sinks)}: {sink} is not installed; pip install "areal[{sink}]"')


class Metrics:
    """`async with Metrics(folder, config.metrics.sinks) as metrics: metrics.log(step, {...})`

    folder: of the run; W&B uses its name for the run. settings: shown in W&B. inline: write without a thread.
    Raises ConfigError for a sink whose package is missing, and on entering for one that does not open.
    """

    def __init__(
        self,
        folder: Path,
        sinks: Sequence[str] = (),
        project: str = "areal",
        settings: Mapping[str, Any] | None = None,
        *,
        inline: bool = False,
    ):
        check_sinks(sinks)
        self._folder = folder
        self._names = sinks
        self._project = project
        self._settings = settings or {}
        self._sinks: list[Sink] = []
        self._queue: SimpleQueue[tuple[int, float, dict[str, Any]] | None] = SimpleQueue()
        self._thread = None if inline else threading.Thread(target=self._run, name="areal-metrics", daemon=True)
        self._warned = False

    async def __aenter__(self) -> Metrics:
        await asyncio.to_thread(self._open)
        if self._thread is not None:
            self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Queue the numbers of one step. A value may be a mapping (name -> number)."""
        item = (step, time.time(), dict(values))
        if self._thread is None:
            self._write(*item)
        else:
            self._queue.put(item)

    def close(self, timeout_s: float = 10.0) -> None:
        """Block until everything is written and the sinks are closed; after timeout_s, warn and give up."""
        if self._thread is None:
            self._close_all()
            return
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("metrics: still writing after %g s; the last may be missing in %s", timeout_s, self._names)

    def _open(self) -> None:
        self._file = (self._folder / "metrics.jsonl").open("ab")
        for name in self._names:
            try:
                if name == "tensorboard":
                    self._sinks.append(TensorBoard(self._folder / "tensorboard"))
                else:
                    self._sinks.append(Wandb(self._folder, self._project, self._settings))
            except Exception as error:
                raise ConfigError(f"metrics.sinks: {name} does not start: {error}") from error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._write(*item)
        self._close_all()

    def _write(self, step: int, when: float, values: dict[str, Any]) -> None:
        try:
            row = {"step": step, "time": round(when, 3), **values}
            options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
            self._file.write(orjson.dumps(row, option=options))  # NaN becomes null
            self._file.flush()
            flat = dict(_flat(values))
            for sink in self._sinks:
                sink.write(step, flat)
        except Exception as error:
            self._warn(error)

    def _close_all(self) -> None:
        for close in [sink.close for sink in self._sinks] + [self._file.close]:
            try:
                close()
            except Exception as error:
                self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("metrics are incomplete from here on: %s: %s", type(error).__name__, error)


class TensorBoard:
    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A W&B run named after the run folder; WANDB_MODE=offline needs no network."""

    def __init__(self, folder: Path, project: str, settings: Mapping[str, Any]):
        import wandb

        self._run = wandb.init(project=project, name=folder.name, dir=str(folder), config=dict(settings))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float | np.number):
            yield f"{prefix}{name}", float(value)


class Rate:
    """Events per second over a sliding window. `now` is a monotonic time in seconds, such as loop.time()."""

    def __init__(self, window_s: float, now: float):
        self._window_s = window_s
        self._start = now
        self._events: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def add(self, count: float, now: float) -> None:
        self._events.append((now, count))
        self._sum += count
        self._forget(now)

    def per_second(self, now: float) -> float:
        """Over the window, or since the start if that is shorter; 0 before any time has passed."""
        self._forget(now)
        span = min(self._window_s, now - self._start)
        return self._sum / span if span > 0 else 0.0

    def _forget(self, now: float) -> None:
        while self._events and self._events[0][0] <= now - self._window_s:
            self._sum -= self._events.popleft()[1]


def staleness_of(batch: Batch) -> dict[int, int]:
    """Staleness in steps -> number of loss tokens of the batch with that staleness, in ascending order."""
    versions = [
        trajectory.versions[trajectory.loss_mask]
        for group in batch.groups
        for episode in group.episodes
        for trajectory in episode.trajectories
    ]
    if not versions:
        return {}
    found, counts = np.unique(batch.from_version - np.concatenate(versions), return_counts=True)
    return {int(staleness): int(count) for staleness, count in zip(found, counts, strict=True)}
