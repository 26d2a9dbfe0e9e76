"""Episodes that are not trained on: one for each task of an evaluation."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from areal.controller.rollout import Failure
from areal.errors import TooManyFailures, root_cause
from areal.types import EpisodeRecord, Task

log = logging.getLogger("areal")


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


async def evaluate(
    rows: Sequence[Task],
    run: Callable[[int, Task], Awaitable[EpisodeRecord | Failure]],
    *,
    at_once: int,
    retries: int,
    budget: int,
) -> Evaluation:
    """Call run(index, task) on each row, `at_once` of them at a time, and `retries` times more where it fails.
    Raises TooManyFailures when more than `budget` failed for good."""
    rewards: dict[str, list[float]] = {}
    failures: list[Failure] = []

    async def one(index: int, task: Task) -> None:
        for left in reversed(range(retries + 1)):
            outcome = await run(index, task)
            if isinstance(outcome, EpisodeRecord):
                rewards.setdefault(task["id"], []).append(outcome.reward)
                return
            if not left:
                failures.append(outcome)
                log.warning("evaluation of task %s failed: %s", task["id"], outcome.summary)
        if len(failures) > budget:
            raise TooManyFailures(f"{len(failures)} evaluation episodes failed; the last:\n{failures[-1].message}")

    # As many at once as training would run: more would only wait at the servers, on their deadlines.
    room = asyncio.Semaphore(at_once)
    try:
        async with asyncio.TaskGroup() as episodes:
            for index, task in enumerate(rows):
                await room.acquire()
                episodes.create_task(one(index, task)).add_done_callback(lambda _: room.release())
    except BaseExceptionGroup as group:
        cause = root_cause(group)
        raise cause from cause.__cause__
    return Evaluation(rewards, len(failures))
