"""One run, from start to stop.

    async with Controller(config) as controller:
        await controller.train(agent, tasks)

`train` is the loop of the paper: take the batch that the scheduler formed, train on it, publish the weights; the
rollout loop generates all the while. Everything that lives as long as the run sits in one TaskGroup, so that a part
that dies ends the run with its own traceback. The library owns no loop and no signal handler: any asyncio program
can hold a Controller, or two.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterable, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from areal.agents.episode import Episode
from areal.algorithms.batching import build_request, learning_rate
from areal.config import Config
from areal.controller.cluster import Cluster
from areal.controller.facts import BatchFormed, Completed, Dropped, Fact, Finished, Trained
from areal.controller.ledger import Ledger
from areal.controller.rollout import Agent, Failure, RolloutLoop, Signal, attempt
from areal.controller.scheduler import Scheduler, SchedulerSettings
from areal.controller.watchdog import Watchdog
from areal.data import Tasks
from areal.errors import ArealError, TooManyFailures
from areal.metrics import StepReport
from areal.types import Batch, EpisodeRecord, Group, Sampling, Task, TrainStats

log = logging.getLogger("areal")

CHECKPOINT_ON_STOP_S = 5.0
"""A stopped run may take this long for a last checkpoint; else the one before is named."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """rewards: of the episodes that finished, by task id. A failed episode is in `failed`, never a reward (I9)."""

    rewards: dict[str, list[float]]
    failed: int

    @property
    def mean(self) -> float:
        """Mean reward."""
        return float(np.mean([r for rewards in self.rewards.values() for r in rewards]))

    @property
    def success(self) -> float:
        """Share of episodes with a reward of at least 1."""
        return float(np.mean([r >= 1 for rewards in self.rewards.values() for r in rewards]))


class Controller:
    """Starts servers and ranks, runs agents, trains. Use as `async with`; one run each."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._stack = AsyncExitStack()
        self._changed = Signal()
        self._trained_tokens = 0
        self._gap_max = float("nan")
        self._success: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        """Raises ConfigError before anything starts, ProcessError when a server or rank does not come up."""
        config = self.config
        settings = SchedulerSettings.from_config(config)
        loop = asyncio.get_running_loop()
        self.scheduler = Scheduler(settings, self._record)
        async with AsyncExitStack() as stack:
            self.cluster = cluster = Cluster(config, self._serving)
            self.folder = cluster.folder
            self.ledger = Ledger.create(self.folder.path / "ledger")
            stack.push_async_callback(self.ledger.close)
            stack.callback(self._write_summary)
            self._start_time = loop.time()
            await stack.enter_async_context(cluster)
            self._rollout = RolloutLoop(
                self.scheduler,
                self.ledger,
                self._changed,
                self._training_episode,
                members=config.group.size,
                timeout_s=config.episode.timeout_s,
            )
            self._watchdog = Watchdog(config.watchdog_s, self._describe, lambda: self._rollout.idle)
            self.scheduler.start()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    # -- the main loop

    async def train(self, agent: Agent, tasks: Iterable[Task] | AsyncIterable[Task] | None = None) -> None:
        """Train until `train.steps` or the end of the data; then write a checkpoint.

        tasks: rows for the agent; None takes `data.train`. Raises what ended the run early: an agent's own error
        after too many failures, Stalled, TrainerError, PublishError, ProcessError.
        """
        source = Tasks.from_config(self.config) if tasks is None else Tasks(tasks, self.config)
        try:
            async with asyncio.TaskGroup() as loops:
                background = [
                    loops.create_task(self._rollout.run(agent, source), name="rollout"),
                    loops.create_task(self._watchdog.run(), name="watchdog"),
                ]
                while batch := await self._next_batch():
                    stats = await self._train_step(batch)
                    self.scheduler.trained(batch.id)
                    pause = await self.cluster.weights.publish(stats.version)
                    self.scheduler.published(stats.version)
                    if self.config.checkpoint.every and stats.version % self.config.checkpoint.every == 0:
                        await self._checkpoint()
                    self._report(batch, stats, pause)
                for task in background:
                    task.cancel()
        except asyncio.CancelledError:
            with suppress(ArealError, TimeoutError):
                async with asyncio.timeout(CHECKPOINT_ON_STOP_S):
                    await self._checkpoint()
            raise
        await self._checkpoint()

    async def _next_batch(self) -> Batch | None:
        """Wait for the next batch, on disk. None at the last step and when the data is used up."""
        while (formed := self.scheduler.next_batch(final=self._rollout.exhausted)) is None:
            if self._rollout.exhausted or self.scheduler.done:
                return None
            await self._changed.wait()
        await self.ledger.barrier()
        groups = []
        for number in formed.groups:
            members = self._rollout.finished[number]
            groups.append(Group(number, members[min(members)].task_id, tuple(members[m] for m in sorted(members))))
        return Batch(formed.batch, formed.from_version, tuple(groups))

    async def _train_step(self, batch: Batch) -> TrainStats:
        request = await asyncio.to_thread(
            build_request,
            batch,
            self.config,
            attempt=self.scheduler.state.attempt,
            learning_rate=learning_rate(batch.from_version, self.config),
            ranks=self.cluster.trainer.data_parallel,
            seed=self.config.seed,
        )
        return await self.cluster.trainer.train(request)

    async def _checkpoint(self) -> None:
        version = self.scheduler.state.version
        if self.folder.checkpointed == version:
            return
        path = self.folder.checkpoint(version)
        await self.cluster.trainer.export(str(path))
        self.scheduler.checkpointed(version, path.name)
        await self.ledger.barrier()
        self.folder.prune()

    # -- outside training

    async def evaluate(
        self,
        agent: Agent,
        tasks: Iterable[Task] | None = None,
        *,
        greedy: bool = False,
        label: str = "",
    ) -> Evaluation:
        """Run the agent once on each task with the current weights; nothing is trained.

        tasks: None takes `data.evaluation` or the held-out rows. label: puts the success share into summary.json
        under this name. Raises TooManyFailures when more than `max_failures` episodes failed for good.
        """
        rows = Tasks.evaluation_from_config(self.config) if tasks is None else Tasks.check(tasks)
        rewards: dict[str, list[float]] = {}
        failures: list[Failure] = []

        async def one(index: int, task: Task) -> None:
            for _ in range(self.config.episode.retries + 1):
                outcome = await self._attempt(agent, index, task, greedy)
                if isinstance(outcome, EpisodeRecord):
                    rewards.setdefault(task["id"], []).append(outcome.reward)
                    return
            failures.append(outcome)
            if len(failures) > self.config.max_failures:
                raise TooManyFailures(f"{len(failures)} evaluation episodes failed; the last:\n{outcome.message}")

        # As many at once as training would run: more would only wait at the servers, on their deadlines.
        room = asyncio.Semaphore(self.config.servers.max_running * len(self.cluster.fleet.servers))
        async with asyncio.TaskGroup() as episodes:
            for index, task in enumerate(rows):
                await room.acquire()
                episodes.create_task(one(index, task)).add_done_callback(lambda _: room.release())
        result = Evaluation(rewards, len(failures))
        if label:
            self._success[label] = result.success
        return result

    async def rollout(self, agent: Agent, task: Task, *, greedy: bool = False) -> EpisodeRecord:
        """One episode on the current weights, not trained on. Raises what the agent raised."""
        outcome = await self._attempt(agent, 0, task, greedy)
        if isinstance(outcome, Failure):
            raise outcome.error
        return outcome

    async def _attempt(self, agent: Agent, index: int, task: Task, greedy: bool) -> EpisodeRecord | Failure:
        sampling = Sampling(self.config.sampling.max_new_tokens, 0.0 if greedy else self.config.sampling.temperature)
        episode = self.cluster.episode(EVALUATION, index, str(task["id"]), sampling)
        return await attempt(agent, episode, task, self.config.episode.timeout_s)

    # -- what others tell the controller

    def _training_episode(self, group: int, member: int, task_id: str) -> Episode:
        sampling = Sampling(self.config.sampling.max_new_tokens, self.config.sampling.temperature)
        return self.cluster.episode(group, member, task_id, sampling)

    def _record(self, fact: Fact) -> None:
        """Each fact of the scheduler: to the ledger, and to whoever waits for it."""
        record = self._rollout.finished[fact.group][fact.member] if isinstance(fact, Finished) else None
        self.ledger.append(fact, record)
        if isinstance(fact, Dropped):
            self._rollout.drop(fact.group)
        if isinstance(fact, Completed | Trained):
            self._watchdog.progress()
        self._changed.notify()

    def _serving(self, version: int) -> None:
        self.scheduler.serving(version)

    def _describe(self) -> list[str]:
        loop = asyncio.get_running_loop()
        oldest = sorted(self._rollout.running.values(), key=lambda episode: episode.since)[:8]
        return [*self.scheduler.describe(), *(e.describe(loop.time()) for e in oldest), *self.cluster.describe()]
