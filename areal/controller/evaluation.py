"""Episodes that are not trained on: single ones, and one for each task of an evaluation."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from areal.agents.episode import Episode
from areal.config import Config
from areal.controller.cluster import Cluster
from areal.controller.rollout import Agent, Failure, name_of, run_episode
from areal.controller.watchdog import Watchdog
from areal.deadlines import Deadlines
from areal.errors import TooManyFailures, root_cause
from areal.types import EpisodeRecord, Sampling, Task

log = logging.getLogger("areal")

EVALUATION = -1
"""The group number of episodes that are not trained on."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """rewards: of the episodes that finished, by task id. A failed episode is in `failed`, never a reward (I9)."""

    rewards: dict[str, list[float]]
    failed: int

    @property
    def mean(self) -> float:
        """Mean reward; NaN when no episode finished."""
        return self._mean(lambda reward: reward)

    @property
    def success(self) -> float:
        """Share of episodes with a reward of at least 1; NaN when no episode finished."""
        return self._mean(lambda reward: float(reward >= 1))

    def _mean(self, value: Callable[[float], float]) -> float:
        values = [value(reward) for rewards in self.rewards.values() for reward in rewards]
        return sum(values) / len(values) if values else math.nan


class Outside:
    """Runs episodes that are not trained on, on the current weights. running: those in progress."""

    def __init__(self, config: Config, cluster: Cluster, watchdog: Watchdog, deadlines: Deadlines) -> None:
        self.running: dict[Episode, None] = {}
        self._config = config
        self._cluster = cluster
        self._watchdog = watchdog
        self._deadlines = deadlines
        self._rollouts = 0

    async def rollout(self, agent: Agent, task: Task, *, greedy: bool) -> EpisodeRecord:
        """One episode. Raises what the agent raised."""
        self._rollouts += 1
        async with self._watchdog.warning(self._describe):
            outcome = await self._run(agent, self._rollouts, task, greedy)
        if isinstance(outcome, Failure):
            raise outcome.error
        return outcome

    async def evaluate(self, agent: Agent, rows: Sequence[Task], *, greedy: bool) -> Evaluation:
        """One episode of each row, tried `episode.retries` times more where it fails. Raises TooManyFailures when more
        than `failures.agent` failed for good."""
        config = self._config
        rewards: dict[str, list[float]] = {}
        failures: list[Failure] = []
        # As many at once as training would run: more would only wait at the servers, and time out there.
        room = asyncio.Semaphore(config.servers.max_running * len(self._cluster.fleet.servers))

        async def one(index: int, task: Task) -> None:
            for left in reversed(range(config.episode.retries + 1)):
                outcome = await self._run(agent, index, task, greedy)
                wait.progress()
                if isinstance(outcome, EpisodeRecord):
                    rewards.setdefault(task["id"], []).append(outcome.reward)
                    return
                if not left:
                    failures.append(outcome)
                    log.warning("evaluation of task %s failed: %s", task["id"], outcome.summary)
            if len(failures) > config.failures.agent:
                raise TooManyFailures(f"{len(failures)} evaluation episodes failed; the last:\n{failures[-1].message}")

        try:
            async with self._watchdog.warning(self._describe) as wait, asyncio.TaskGroup() as episodes:
                for index, task in enumerate(rows):
                    await room.acquire()
                    episodes.create_task(one(index, task)).add_done_callback(lambda _: room.release())
        except BaseExceptionGroup as group:
            cause = root_cause(group)
            raise cause from cause.__cause__
        return Evaluation(rewards, len(failures))

    async def _run(self, agent: Agent, index: int, task: Task, greedy: bool) -> EpisodeRecord | Failure:
        config = self._config
        sampling = Sampling(config.sampling.max_new_tokens, 0.0 if greedy else config.sampling.temperature)
        episode = self._cluster.episode(EVALUATION, index, str(task["id"]), sampling, name_of(agent))
        self.running[episode] = None
        try:
            return await run_episode(agent, episode, task, config.episode.timeout_s, self._deadlines)
        finally:
            del self.running[episode]

    def _describe(self) -> list[str]:
        return self._cluster.describe(self.running)
