"""The steps of a run: batches to the ranks, weights to the servers, checkpoints to the disk.

Everything that needs the ranks goes through `_with_ranks`: ranks that died or failed half way are restarted from the
last checkpoint, and repeat the steps since with their recorded batches, seeds and learning rates (I4).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from areal.algorithms.batching import build_request, learning_rate
from areal.config import Config
from areal.controller.cluster import Cluster
from areal.controller.facts import BatchFormed
from areal.controller.ledger import Ledger
from areal.controller.log import RunLog
from areal.controller.report import Reporter
from areal.controller.rollout import RolloutLoop
from areal.controller.scheduler import Scheduler
from areal.controller.weights import PublishStats
from areal.errors import TrainerError, VersionConflict
from areal.folder import RunFolder
from areal.types import Batch, TrainStats

log = logging.getLogger("areal")

T = TypeVar("T")


class TrainLoop:
    """background: lives as long as the run, and holds the writing of checkpoints."""

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        log: RunLog,
        ledger: Ledger,
        rollout: RolloutLoop,
        cluster: Cluster,
        folder: RunFolder,
        background: asyncio.TaskGroup,
        reporter: Reporter,
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self._log = log
        self.ledger = ledger
        self.cluster = cluster
        self.folder = folder
        self._rollout = rollout
        self._background = background
        self._reporter = reporter
        self._writing: asyncio.Task[None] | None = None

    async def recover(self) -> None:
        """Bring the ranks of a resumed run to its current step, and publish. Raises TrainerError, PublishError."""
        await self._with_ranks(self._repeat)
        state = self.scheduler.state
        if state.life:
            await self.publish()

    async def next_batch(self) -> Batch | None:
        """Wait for the next batch, on disk. None at the last step and when the data is used up."""
        state = self._log.state
        while state.batch is None:  # else one that an earlier life formed and did not finish
            facts = self.scheduler.next_batch(final=self._rollout.exhausted)
            if facts and isinstance(formed := facts[-1], BatchFormed):
                facts[-1] = replace(formed, learning_rate=learning_rate(state.version, self.config))
            self._log.commit(facts)
            if state.batch:
                break
            if self._rollout.exhausted or state.version >= self.scheduler.settings.last_version:
                return None
            if self.cluster.weights.owing:  # without that server there may never be a batch
                await self._with_ranks(self.cluster.weights.catch_up)
                continue
            await self._log.changed.wait()
        return await self.ledger.batch(state.batch)

    async def train(self, batch: Batch) -> TrainStats:
        """Take the step of `batch`. Raises TrainerError when the ranks fail, and fail again."""
        formed = self.scheduler.state.batch
        assert formed  # its rate: settings may have changed since an earlier controller formed it
        stats = await self._with_ranks(partial(self._train_step, batch, formed.learning_rate))
        self._log.commit(self.scheduler.trained(batch.id))
        return stats

    async def publish(self) -> PublishStats:
        """Bring the ranks' weights to the servers. Raises PublishError, TrainerError."""
        version = self._log.state.version
        published = await self._with_ranks(partial(self.cluster.weights.publish, version))
        self._log.commit(self.scheduler.published(version))
        return published

    async def checkpoint_if_due(self) -> None:
        every = self.config.checkpoint.every
        if every and self.scheduler.state.version % every == 0:
            await self._with_ranks(self._begin_checkpoint)

    async def checkpoint(self) -> None:
        """A checkpoint of the current version, on disk when this returns. Raises TrainerError, LedgerError."""
        await self._with_ranks(self._checkpoint)

    async def stop(self) -> None:
        """Finish the step in flight and write a last checkpoint; nothing is restarted. No checkpoint while ranks still
        repeat steps after a restart: a resume repeats them."""
        await self._end_step()
        if self.cluster.ranks.version == self.scheduler.state.version:
            await self._checkpoint()

    async def _train_step(self, batch: Batch, rate: float) -> TrainStats:
        request = await asyncio.to_thread(
            build_request,
            batch,
            self.config,
            life=self.scheduler.state.life,
            learning_rate=rate,
            ranks=self.cluster.ranks.client.data_parallel,
            seed=self.config.seed,
        )
        return await self.cluster.ranks.train(request)

    async def _end_step(self) -> None:
        """After a stop in mid-step: the ranks finish it all the same, and a repeat gets their answer (I4). A step that
        already counts, and is only repeated, is left alone."""
        request, open_batch = self.cluster.ranks.step, self.scheduler.state.batch
        if request and open_batch and request.batch_id == open_batch.batch:
            await self.cluster.ranks.train(request)
            self._log.commit(self.scheduler.trained(request.batch_id))

    async def _with_ranks(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do what needs the ranks; when they fail, restart them from the last checkpoint and do it once more. A second
        failure of the same work is no accident and ends the run, and so do more than trainer.restarts failures."""
        failed = False
        ranks, limit = self.cluster.ranks, self.config.trainer.restarts
        while True:
            try:
                return await work()
            except VersionConflict:
                raise
            except TrainerError as error:
                if failed or ranks.restarts == limit:
                    raise
                failed = True
                log.warning("the ranks are restarted, %d of %d: %s", ranks.restarts + 1, limit, error)
            if self._writing:  # it may yet move the checkpoint that the ranks start from
                await asyncio.wait((self._writing,))
            saved = self.scheduler.state.checkpoint
            version, path = (saved.version, self.folder.path / "checkpoints" / saved.path) if saved else (0, None)
            await ranks.restart(version, path)
            await self._repeat()
            await self.cluster.weights.catch_up()

    async def _begin_checkpoint(self) -> None:
        """Copy the trainer's state aside; it is written while the run continues. One at a time."""
        version = self.scheduler.state.version
        await self._written()
        if self._saved_version() != version:
            await self.cluster.ranks.client.stage(str(self.folder.checkpoint(version)))
            self._writing = self._background.create_task(self._write_checkpoint(version), name="checkpoint")

    async def _write_checkpoint(self, version: int) -> None:
        try:
            await self.cluster.ranks.client.write()
        except TrainerError as error:
            if not self.cluster.ranks.client.lost:
                raise
            log.warning("the checkpoint of step %d was lost with its rank: %s", version, error)
            return
        self._log.commit(self.scheduler.checkpointed(version, self.folder.checkpoint(version).name))
        await self.ledger.barrier()
        await asyncio.to_thread(self.folder.prune)

    async def _checkpoint(self) -> None:
        await self._begin_checkpoint()
        await self._written()
        if self._saved_version() != self.scheduler.state.version:
            raise TrainerError("the last checkpoint was lost with its rank")

    async def _written(self) -> None:
        """Wait until no checkpoint is being written. Cancelling this wait does not stop the writing."""
        if self._writing:
            await asyncio.wait((self._writing,))
            self._writing.result()

    def _saved_version(self) -> int | None:
        saved = self.scheduler.state.checkpoint
        return saved.version if saved else None

    async def _repeat(self) -> None:
        """Take the steps after the checkpoint again, with their recorded batches and learning rates (I4)."""
        state = self.scheduler.state
        for formed in list(state.repeatable):
            if formed.from_version < (self.cluster.ranks.version or 0):
                continue
            batch = await self.ledger.batch(formed)
            stats = await self._train_step(batch, formed.learning_rate)
            self._reporter.repeated(stats)
            log.info("repeated step %d of %d: loss %.6g", stats.version, state.version, stats.loss)
