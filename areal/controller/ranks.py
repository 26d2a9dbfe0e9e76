"""The trainer ranks of a run, across their restarts."""

from __future__ import annotations

from pathlib import Path

from areal.types import TrainRequest, TrainStats
from areal.workers.protocols import TrainerClient, Workers


class Ranks:
    """The one keeper of what is known about the ranks.

    client: of the ranks that run now; each restart brings another one, so hold on to `Ranks`, never to the client.
    version: of the weights that the ranks hold; None while a step is in flight and while they restart.
    step: the request in flight, or whose answer was not awaited because the caller was cancelled.
    restarts: so far.
    """

    def __init__(self, workers: Workers, client: TrainerClient, version: int) -> None:
        self.client = client
        self.version: int | None = version
        self.step: TrainRequest | None = None
        self.restarts = 0
        self._workers = workers

    async def train(self, request: TrainRequest) -> TrainStats:
        """One step. A repeat of the last request gets the stored answer (I4). Raises TrainerError."""
        self.step, self.version = request, None
        stats = await self.client.train(request)
        self.step, self.version = None, stats.version
        return stats

    async def restart(self, version: int, checkpoint: Path | None) -> None:
        """New ranks, at `version`: the weights of `checkpoint`, or of `model.path`. The servers keep generating.
        Raises TrainerError, ProcessError."""
        self.restarts += 1
        self.step = self.version = None
        self.client = await self._workers.restart_trainer(version, checkpoint)
        self.version = version
