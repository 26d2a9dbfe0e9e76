"""Servers, ranks and what connects them: fleet and weights over the workers of a run."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from areal.agents.episode import Episode
from areal.agents.journal import Journal
from areal.config import Config
from areal.controller.fleet import Fleet
from areal.controller.ranks import Ranks
from areal.controller.signal import Signal
from areal.controller.weights import WeightSync, probe_ids
from areal.deadlines import DEADLINES, Deadlines
from areal.errors import root_cause
from areal.folder import take_folder, weights_folder
from areal.types import Sampling
from areal.workers.protocols import Workers


class Cluster:
    """Use as `async with`. It comes up at `version`, with the weights of `checkpoint` (None: those of `model.path`).
    on_serving(version): called with the lowest version of any server that accepts requests. changed: notified when
    something needs the attention of the training loop."""

    fleet: Fleet
    ranks: Ranks
    weights: WeightSync

    def __init__(
        self,
        config: Config,
        workers: Workers,
        run_folder: Path,
        *,
        life: int,
        version: int = 0,
        checkpoint: Path | None = None,
        on_serving: Callable[[int], None] = lambda version: None,
        changed: Signal | None = None,
        deadlines: Deadlines = DEADLINES,
    ) -> None:
        self.config = config
        self.workers = workers
        self.folder = run_folder
        self.origin = f"{run_folder.name}.{life}"
        self._life = life
        self._version = version
        self._checkpoint = checkpoint
        self._on_serving = on_serving
        self._changed = changed or Signal()
        self._deadlines = deadlines
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Raises ProcessError or TrainerError when something does not come up, with the last lines of its log."""
        try:
            return await self._start()
        except BaseExceptionGroup as failures:  # of the parts that start side by side
            cause = root_cause(failures)
            raise cause from cause.__cause__

    async def _start(self) -> Self:
        workers, version = self.workers, self._version
        folder = weights_folder(self.config, self.folder, self.origin)
        async with AsyncExitStack() as stack:
            if workers.inline:  # one process, in which a lock would outlive a simulated kill
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            else:
                stack.callback(os.close, await asyncio.to_thread(take_folder, folder))
            stack.push_async_callback(asyncio.to_thread, shutil.rmtree, folder, ignore_errors=True)
            stack.push_async_callback(workers.close)
            trainer, servers = await workers.start(self.folder, self._life, version, self._checkpoint)
            self.ranks = Ranks(workers, trainer, version)
            self.fleet = Fleet(
                self.config,
                servers,
                origin=self.origin,
                stop_ids=workers.stop_ids,
                restart=workers.start_server if workers.can_restart else None,
                exited=workers.server_exited if workers.can_restart else None,
                on_serving=self._on_serving,
                deadlines=self._deadlines,
            )
            self.weights = WeightSync(
                self.config,
                self.fleet,
                self.ranks,
                folder,
                origin=self.origin,
                probe=probe_ids(workers.vocab_size),
                changed=self._changed,
                backend=workers.group_backend,
                deadlines=self._deadlines,
            )
            background = await stack.enter_async_context(asyncio.TaskGroup())
            background.create_task(self.fleet.run(self.weights.sync_server), name="fleet")
            stack.push_async_callback(self.fleet.close)
            if not workers.can_restart:
                stack.push_async_callback(self.weights.close)
                await self.weights.publish(version)  # until then external servers hold other weights
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    def describe(self, episodes: Iterable[Episode]) -> list[str]:
        """What these episodes wait for, the longest wait first, then what the servers do (for the watchdog)."""
        oldest = sorted(episodes, key=lambda episode: episode.awaits[1])[:8]
        return [*(f"{episode.state}{self.fleet.where(episode.key)}" for episode in oldest), *self.fleet.waits()[:8]]

    def episode(
        self, group: int, member: int, task_id: str, sampling: Sampling, agent: str, journal: Journal | None = None
    ) -> Episode:
        """A fresh handle for an agent."""
        return Episode(
            generate=self.fleet.generate,
            template=self.workers.template,
            sampling=sampling,
            context_length=self.workers.context_length,
            tool_timeout_s=self.config.episode.tool_timeout_s,
            group=group,
            member=member,
            task_id=task_id,
            seed=self.config.seed,
            agent=agent,
            journal=journal,
            deadlines=self._deadlines,
        )
