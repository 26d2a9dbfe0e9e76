"""Runs groups of episodes: admission, deadlines, retries, cancellation.

`RolloutLoop` holds no policy: the scheduler says whether a group may start (I1), whether a failed episode is tried
again (I9) and when a group is hopeless (I8). A group is one task with its members below it, so that dropping a
group is cancelling that task, and cancelling the loop ends every episode.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import numpy as np

from areal.agents.episode import Episode
from areal.agents.transcript import snapshot
from areal.controller.facts import Dropped, Fact
from areal.controller.ledger import Ledger
from areal.controller.log import RunLog
from areal.controller.scheduler import Scheduler
from areal.data import Tasks
from areal.deadlines import DEADLINES, Deadlines
from areal.errors import (
    ArealError,
    DataError,
    DeadlineExceeded,
    EpisodeError,
    RewardError,
    ServerError,
    TooManyFailures,
    root_cause,
)
from areal.masking import mask
from areal.types import NOT_SAMPLED, EpisodeRecord, Task

MESSAGE_LIMIT = 4000

log = logging.getLogger("areal")

Agent = Callable[[Episode, Task], Awaitable[float]]


@dataclass(slots=True)
class Failure:
    """Why one try of an episode ended without a reward. `kind` is what the scheduler counts it as. `message` goes on
    record: masked, at most MESSAGE_LIMIT characters (the last ones), and without lone surrogates, which UTF-8 has
    not."""

    kind: str
    message: str
    error: BaseException

    def __post_init__(self) -> None:
        self.message = mask(self.message)[-MESSAGE_LIMIT:].encode("utf-8", "replace").decode()

    @property
    def summary(self) -> str:
        """One line."""
        cause = root_cause(self.error)
        text = str(cause).strip().partition("\n")[0]
        return mask(text if isinstance(cause, ArealError) else f"{type(cause).__name__}: {text}")


_left_behind: set[asyncio.Task[float]] = set()
"""Agents that ignored their cancellation: held, so that asyncio does not drop them in mid-flight."""


async def run_episode(
    agent: Agent, episode: Episode, task: Task, timeout_s: float, deadlines: Deadlines = DEADLINES
) -> EpisodeRecord | Failure:
    """Run the agent once, in a task of its own, under its deadline. Only cancellation and areal's own bugs escape.

    The agent gets a copy of the task. One that ignores its cancellation is left behind after `deadlines.agent`: it can
    neither hold up the run nor turn a time-out into a reward.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    running = loop.create_task(_call(agent, episode, snapshot(task)), name=f"agent {episode.key}")
    try:
        await asyncio.wait((running,), timeout=timeout_s)
    except asyncio.CancelledError:
        await _end(running, episode, deadlines.agent)
        raise
    if not running.done():
        message = f"no reward after episode.timeout_s={timeout_s:g}: {episode.state}"
        await _end(running, episode, deadlines.agent)
        return Failure("timeout", message, DeadlineExceeded(message))
    try:
        return episode.finish(running.result(), loop.time() - start)
    except asyncio.CancelledError as error:
        failure = EpisodeError("the agent let a CancelledError out that was not for it")  # nor is it for our caller
        failure.__cause__ = error
        return Failure("agent", f"{failure}:\n{_traceback(error)}", failure)
    except ServerError as error:
        return Failure("server", str(error), error)
    except DataError as error:
        return Failure("data", str(error), error)
    except RewardError as error:
        return Failure("reward", str(error), error)
    except EpisodeError as error:
        return Failure("agent", str(error), error)
    except Exception as error:  # user code: whatever it raises is counted, never a reward (I9)
        return Failure("agent", _traceback(error), error)
    finally:
        episode.end()


async def _call(agent: Agent, episode: Episode, task: Task) -> float:
    try:
        return await agent(episode, task)
    except SystemExit as error:  # it would end the whole program, as if all was well
        raise EpisodeError(f"{name_of(agent)} called sys.exit({error.code!r})") from error
    except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # of a library, such as pytest's or PyO3's: it would end the run
        raise EpisodeError(f"{name_of(agent)} raised {type(error).__name__}: {error}") from error


async def _end(running: asyncio.Task[float], episode: Episode, grace_s: float) -> None:
    """Cancel an agent and give it `grace_s`, or less when the caller is cancelled, too."""
    running.cancel()
    why = "was still ending"
    try:
        await asyncio.wait((running,), timeout=grace_s)
        why = "ignores its cancellation: let CancelledError pass"
    finally:
        episode.end()
        if not running.done():
            episode.abandon()
            log.error("%s; it is left behind, since it %s", episode.state, why)
            _left_behind.add(running)
        running.add_done_callback(_ended)


def _ended(running: asyncio.Task[float]) -> None:
    _left_behind.discard(running)
    if not running.cancelled():
        running.exception()  # nothing waits for it: not worth asyncio's warning


def name_of(agent: Agent) -> str:
    return getattr(agent, "__qualname__", None) or type(agent).__qualname__


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def loss_tokens_by_version(record: EpisodeRecord) -> dict[int, int]:
    """Version -> number of loss tokens: all that the scheduler needs to know of an episode's tokens (I2)."""
    counts: Counter[int] = Counter()
    for trajectory in record.trajectories:
        versions, numbers = np.unique(trajectory.versions[trajectory.loss_mask], return_counts=True)
        counts.update(dict(zip(versions.tolist(), numbers.tolist(), strict=True)))
    counts.pop(NOT_SAMPLED, None)
    return dict(counts)


class RolloutLoop:
    """Keeps as many groups running as the scheduler admits, and commits what becomes of their members.

    new_episode(group, member, task_id, name of the agent, first): makes the handle an agent gets; `first` says that it
    may reuse what an earlier life left of it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        log: RunLog,
        ledger: Ledger,
        new_episode: Callable[[int, int, str, str, bool], Episode],
        *,
        members: int,
        timeout_s: float,
        deadlines: Deadlines = DEADLINES,
    ) -> None:
        self._deadlines = deadlines
        self._scheduler = scheduler
        self._log = log
        self._ledger = ledger
        self._new_episode = new_episode
        self._members = members
        self._timeout_s = timeout_s
        self.running: dict[tuple[int, int], Episode] = {}
        self.exhausted = False
        self.woken = False
        """Whether the last task came after a time in which nothing ran (a service that was asked again)."""
        self._awaits_task = False
        self._groups: dict[int, asyncio.Task[None]] = {}
        log.observers.append(self._observe)

    @property
    def idle(self) -> bool:
        """Whether nothing runs because the source of tasks has none for now (a service without users)."""
        return self._awaits_task and not self.running

    async def run(self, agent: Agent, tasks: Tasks) -> None:
        """Go through the tasks; returns when they are used up and every group has ended.

        Groups that an earlier life left unfinished are resumed first; one whose task came from a stream, which is gone,
        is dropped (reason "data").
        """
        self.exhausted = False
        state, changed = self._log.state, self._log.changed
        async with asyncio.TaskGroup() as groups:
            unfinished = [group for group in state.open.values() if group.pending]
            rows: dict[int, Task] = {}
            if state.position:
                rows = await asyncio.to_thread(tasks.seek, state.position, {group.position for group in unfinished})
            for group in unfinished:
                if group.position in rows:
                    self._start(groups, agent, group.number, rows[group.position], group.pending)
                else:
                    log.warning("group %d is dropped: its task %s cannot be had again", group.number, group.task_id)
                    self._log.commit(self._scheduler.drop(group.number, "data"))
            source = aiter(tasks)
            while True:
                while not self._scheduler.may_admit():
                    await changed.wait()
                await self._ledger.ready()
                self._awaits_task = True
                asked = asyncio.get_running_loop().time()
                try:
                    task, position = await anext(source)
                    self.woken = not self.running and asyncio.get_running_loop().time() > asked + self._deadlines.idle
                except StopAsyncIteration:
                    break
                finally:
                    self._awaits_task = False
                while not self._scheduler.may_admit():  # the servers may have changed while the source was asked
                    await changed.wait()
                number = state.admitted
                self._log.commit(self._scheduler.admit(task["id"], position))
                self._start(groups, agent, number, task, range(self._members))
        self.exhausted = True
        changed.notify()

    def _observe(self, fact: Fact) -> None:
        """Cancel what still runs of a group that was dropped (I8)."""
        if isinstance(fact, Dropped) and (group := self._groups.get(fact.group)):
            group.cancel()

    def _start(self, groups: asyncio.TaskGroup, agent: Agent, number: int, task: Task, members: Iterable[int]) -> None:
        name = f"group {number}"
        self._groups[number] = groups.create_task(self._group(agent, number, task, members), name=name)

    async def _group(self, agent: Agent, number: int, task: Task, numbers: Iterable[int]) -> None:
        try:
            async with asyncio.TaskGroup() as members:
                for member in numbers:
                    members.create_task(self._member(agent, number, member, task), name=f"episode {number}.{member}")
        finally:
            del self._groups[number]

    async def _member(self, agent: Agent, number: int, member: int, task: Task) -> None:
        """One member to its end: finished, not retried any more, or its group dropped."""
        tries = 0
        while True:
            episode = self._new_episode(number, member, task["id"], name_of(agent), not tries)
            self.running[number, member] = episode
            try:
                outcome = await run_episode(agent, episode, task, self._timeout_s, self._deadlines)
            finally:
                del self.running[number, member]
            if isinstance(outcome, EpisodeRecord) and not outcome.turns:
                why = f"{name_of(agent)} returned a reward without having called the model: nothing to learn from"
                outcome = Failure("agent", why, EpisodeError(why))
            if isinstance(outcome, EpisodeRecord):
                counts = loss_tokens_by_version(outcome)
                self._log.commit(self._scheduler.finished(number, member, outcome.reward, counts), outcome)
                return
            log.warning("episode %d.%d (task %s) failed: %s", number, member, task["id"], outcome.summary)
            tries += 1
            kind = outcome.kind
            self._log.commit(self._scheduler.failed(number, member, kind, outcome.message, episode.tokens))
            if budget := self._scheduler.spent_budget():
                limit = self._scheduler.settings.failures[budget]
                raise TooManyFailures(
                    f"more than failures.{budget}={limit} episodes failed without one that finished; the last "
                    f"({kind}, task {task['id']!r}):\n{outcome.message}"
                ) from outcome.error
            group = self._log.state.open.get(number)
            if group is None or member not in group.pending:
                return
            if wait := self._deadlines.retry[kind]:
                await asyncio.sleep(min(wait * 2 ** min(tries - 1, 10), self._deadlines.longest_retry))
