"""Simulated trainer ranks: they take time, fail when told to, and check what they are asked to train on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from areal.errors import TrainerError, VersionConflict
from areal.simulation.client import Rendezvous
from areal.simulation.weights import Weights
from areal.types import FlatBatch, Floats, Ints, TensorSpec, TrainRequest, TrainStats
from areal.workers.protocols import WeightGroup


@dataclass(slots=True)
class TrainerTrouble:
    """dead: every call fails. disk_full: of the next file. lose: the next step is taken, and its answer lost. slow:
    factor of all times."""

    dead: bool = False
    disk_full: bool = False
    lose: bool = False
    slow: float = 1.0


class SimulatedTrainer:
    """See `TrainerClient`. tokens_per_s: of training. check(request, weights): told of each step before it is taken.
    groups_of(batch): the group of each sequence."""

    data_parallel = 1

    def __init__(
        self,
        weights: Weights,
        *,
        life: int,
        version: int,
        tokens_per_s: float,
        groups: dict[str, Rendezvous],
        check: Callable[[TrainRequest, Weights], None],
        groups_of: Callable[[FlatBatch], tuple[int, ...]],
        timeout_s: float,
    ) -> None:
        self.weights = weights
        self.version = version
        self.trouble = TrainerTrouble()
        self._life = life
        self._tokens_per_s = tokens_per_s
        self._groups = groups
        self._group = ""
        self._check = check
        self._groups_of = groups_of
        self._timeout_s = timeout_s
        self._last: tuple[tuple[int, int, int], TrainStats] | None = None
        self._staged: tuple[Path, Weights] | None = None
        self._lock = asyncio.Lock()

    @property
    def lost(self) -> str:
        return "trainer rank 0 ended with code -9" if self.trouble.dead else ""

    async def train(self, request: TrainRequest) -> TrainStats:
        async with self._lock:
            await self._busy(0.01)
            key = (request.life, request.from_version, request.batch_id)
            if self._last and self._last[0] == key:
                return self._last[1]
            if key[:2] != (self._life, self.version):
                raise VersionConflict(f"asked for {key}, the trainer is at {self._life}, {self.version}")
            self._check(request, self.weights)
            await self._busy(len(request.batch.ids) / self._tokens_per_s)
            batch = request.batch
            arrays = [batch.ids, batch.lengths, batch.loss_weights, batch.logprobs, batch.versions, batch.advantages]
            body = b"".join(array.tobytes() for array in arrays) + str(request.learning_rate).encode()
            self.weights = self.weights.step(self._groups_of(batch), body)
            self.version += 1
            stats = _stats(request, self.version)
            self._last = key, stats
            if self.trouble.lose:
                self.trouble.lose = False
                raise TrainerError("trainer rank 0: the connection broke")
            return stats

    async def logprobs(self, sequences: Sequence[Ints]) -> list[Floats]:
        await self._busy(0.01)
        return [self.weights.score(len(ids)) for ids in sequences]

    async def export(self, folder: str) -> None:
        await self._busy(0.1)
        self._write(Path(folder), self.weights)

    async def stage(self, folder: str) -> None:
        async with self._lock:
            await self._busy(0.05)
            self._staged = Path(folder), self.weights

    async def write(self) -> None:
        await self._busy(0.5)
        if self._staged is None:
            raise TrainerError("nothing was staged")
        path, weights = self._staged
        self._staged = None
        self._write(path, weights)

    async def specs(self) -> list[TensorSpec]:
        await self._busy(0.01)
        return []

    async def join_group(self, group: WeightGroup) -> None:
        await self._busy(0.01)
        if meeting := self._groups.pop(self._group, None):  # real ranks are in one group at most
            meeting.break_up()
        self._group = group.name
        await self._meet(group.name, "join", group.world_size)

    async def broadcast(self, group: str) -> None:
        await self._busy(0.05)
        if group != self._group or group not in self._groups:
            raise TrainerError(f"no group {group}")
        self._groups[group].sent = self.weights
        await self._meet(group, "send", 0)

    async def leave_group(self, group: str) -> None:
        await self._busy(0.01)
        if meeting := self._groups.pop(group, None):
            meeting.break_up()

    async def close(self) -> None:
        pass

    async def _meet(self, group: str, what: str, size: int) -> None:
        meeting = self._groups.get(group) or self._groups.setdefault(group, Rendezvous(size))
        try:
            async with asyncio.timeout(self._timeout_s):
                await meeting.meet(what)
        except TimeoutError:
            raise TrainerError(f"weight group {group}: no answer within {self._timeout_s:g} s") from None
        except Exception as error:
            raise TrainerError(f"weight group {group}: {error}") from None

    async def _busy(self, seconds: float) -> None:
        self._alive()
        await asyncio.sleep(seconds * self.trouble.slow)
        self._alive()

    def _alive(self) -> None:
        if self.trouble.dead:
            raise TrainerError(self.lost)

    def _write(self, folder: Path, weights: Weights) -> None:
        if self.trouble.disk_full:
            self.trouble.disk_full = False
            raise TrainerError(f"{folder} cannot be written: no space left on device")
        weights.write(folder)


def _stats(request: TrainRequest, version: int) -> TrainStats:
    batch = request.batch
    own = (batch.versions == request.from_version) & (batch.loss_weights > 0)
    return TrainStats(
        version=version,
        loss=float(np.mean(batch.advantages)),
        grad_norm=1.0,
        entropy=1.0,
        clip_fraction=0.0,
        importance_mean=1.0,
        importance_capped=0.0,
        logprob_gap_max=0.0 if own.any() else float("nan"),
        logprob_gap_mean=0.0 if own.any() else float("nan"),
        tokens=len(batch.ids),
        loss_tokens=int((batch.loss_weights > 0).sum()),
        seconds=1.0,
    )
