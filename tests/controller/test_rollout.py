"""RolloutLoop with the real scheduler, ledger, episodes; the model is a coroutine that answers three tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal.agents.episode import Episode
from areal.agents.journal import Journal
from areal.config import Config
from areal.controller import rollout
from areal.controller.facts import Dropped, Fact, Failed, Finished, encode
from areal.controller.ledger import Ledger
from areal.controller.log import RunLog
from areal.controller.rollout import RolloutLoop
from areal.controller.scheduler import BUDGET_OF, Scheduler, SchedulerSettings
from areal.data import Tasks
from areal.deadlines import DEADLINES, Deadlines
from areal.errors import DataError, EpisodeError, RewardError, ServerLost, TooManyFailures
from areal.types import Completion, Sampling, Task


class World:
    """A rollout loop, and what it did."""

    def __init__(self, folder: Path, *given: str | Deadlines) -> None:
        settings = [setting for setting in given if isinstance(setting, str)]
        (deadlines,) = [each for each in given if isinstance(each, Deadlines)] or [DEADLINES]
        self.config = Config.load(["train.batch_groups=2", "group.size=2", "train.steps=4", *settings])
        self.facts: list[Fact] = []
        self.ledger = Ledger.create(folder / "ledger")
        self.log = RunLog(self.ledger)
        self.log.observers.append(self.facts.append)
        self.scheduler = Scheduler(SchedulerSettings.from_config(self.config), self.log.state)
        self.loop = RolloutLoop(
            self.scheduler,
            self.log,
            self.ledger,
            self.episode,
            members=self.config.group.size,
            timeout_s=self.config.episode.timeout_s,
            deadlines=deadlines,
        )

    def episode(self, group: int, member: int, task_id: str, agent: str, first: bool) -> Episode:
        return Episode(
            generate=self.generate,
            template=None,
            sampling=Sampling(8),
            context_length=64,
            group=group,
            member=member,
            task_id=task_id,
            agent=agent,
        )

    async def generate(self, input_ids: Any, sampling: Sampling, *, key: str) -> Completion:
        await asyncio.sleep(0)
        return Completion(
            np.asarray(input_ids, np.int32),
            np.array([5, 6, 7], np.int32),
            np.array([-1, -2, -3], np.float32),
            np.zeros(3, np.int32),
            "stop",
        )

    async def run(self, agent: Any, tasks: Any) -> None:
        async with asyncio.timeout(20):
            await self.loop.run(agent, Tasks(tasks, self.config))

    def of(self, kind: type) -> list[Any]:
        return [fact for fact in self.facts if isinstance(fact, kind)]


@pytest.fixture
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    made = World(tmp_path, *getattr(request, "param", ()))
    yield made
    await made.ledger.close()


def tasks(n: int) -> list[Task]:
    return [{"id": f"t{i}"} for i in range(n)]


async def ask(episode: Episode) -> None:
    await episode.generate([1, 2, 3])


@pytest.mark.parametrize("world", [["data.epochs=1"]], indirect=True)
async def test_every_task_becomes_a_group_of_finished_episodes(world: World) -> None:
    async def agent(episode: Episode, task: Task) -> float:
        await ask(episode)
        return float(episode.member)

    await world.run(agent, tasks(4))
    assert world.loop.exhausted
    assert sorted((f.group, f.member, f.reward) for f in world.of(Finished)) == [
        (g, m, float(m)) for g in range(4) for m in range(2)
    ]
    assert {f.tokens for f in world.of(Finished)} == {((0, 3),)}
    assert not world.loop.running


async def test_i1_no_more_groups_start_than_the_staleness_bound_admits(world: World) -> None:
    gate = asyncio.Event()

    async def agent(episode: Episode, task: Task) -> float:
        await gate.wait()
        return 1.0

    run = asyncio.create_task(world.run(agent, tasks(100)))
    await asyncio.sleep(0.1)
    assert len(world.scheduler.state.open) == 6  # (eta + 1) * B = 3 * 2
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not world.loop.running


@pytest.mark.parametrize("world", [["data.epochs=1"]], indirect=True)
async def test_i9_an_agent_that_raises_once_is_run_again_and_gets_no_reward_for_the_failure(world: World) -> None:
    raised = set()

    async def agent(episode: Episode, task: Task) -> float:
        await ask(episode)
        key = (episode.group, episode.member)
        if key == (1, 0) and key not in raised:
            raised.add(key)
            raise RuntimeError("the reward service hiccuped")
        return 1.0

    await world.run(agent, tasks(3))
    assert len(world.of(Finished)) == 6
    assert {f.reward for f in world.of(Finished)} == {1.0}
    (failure,) = world.of(Failed)
    assert (failure.group, failure.member, failure.kind) == (1, 0, "agent")
    assert "the reward service hiccuped" in failure.message


@pytest.mark.parametrize("world", [["failures.agent=5", "episode.retries=1"]], indirect=True)
async def test_i9_an_agent_that_always_raises_ends_the_run_with_its_traceback(world: World) -> None:
    async def agent(episode: Episode, task: Task) -> float:
        return task["no such key"]

    with pytest.raises(ExceptionGroup) as caught:
        await world.run(agent, tasks(100))
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, TooManyFailures)
    assert "failures.agent=5" in str(error)
    assert "no such key" in str(error)
    assert "test_rollout.py" in str(error)
    assert not world.of(Finished)


@pytest.mark.parametrize("world", [["data.epochs=1", "episode.timeout_s=0.2", "episode.retries=0"]], indirect=True)
async def test_a_member_that_never_ends_is_given_up_and_its_group_dropped_with_the_reason(world: World) -> None:
    async def agent(episode: Episode, task: Task) -> float:
        if task["id"] == "t1" and episode.member == 1:
            await asyncio.Event().wait()
        await ask(episode)
        return 1.0

    await world.run(agent, tasks(3))
    assert [(f.reason) for f in world.of(Dropped)] == ["timeout"]
    assert world.scheduler.state.dropped == {"timeout": 1}


@pytest.mark.parametrize("world", [["data.epochs=1", "episode.retries=0"]], indirect=True)
async def test_i8_members_of_a_hopeless_group_are_cancelled(world: World) -> None:
    cancelled = []

    async def agent(episode: Episode, task: Task) -> float:
        if episode.member == 0:
            raise ServerLost("http://127.0.0.1:1: connection refused")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(episode.group)
            raise
        return 1.0

    await world.run(agent, tasks(2))
    assert sorted(cancelled) == [0, 1]
    assert world.scheduler.state.dropped == {"server": 2}
    assert not world.loop.running


@pytest.mark.parametrize("world", [["data.epochs=1", "episode.retries=0"]], indirect=True)
async def test_a_member_that_ends_when_its_group_was_just_dropped_leaves_nothing_behind(world: World) -> None:
    gate = asyncio.Event()

    async def agent(episode: Episode, task: Task) -> float:
        if episode.member == 0:
            gate.set()  # the other member goes on in the same turn of the loop in which this one fails
            raise RuntimeError("no")
        try:
            await gate.wait()
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            return 1.0
        return 1.0

    await world.run(agent, tasks(2))
    assert world.scheduler.state.dropped == {"agent": 2}
    assert not world.of(Finished)


@pytest.mark.parametrize("world", [["data.epochs=1"]], indirect=True)
async def test_i9_a_timeout_inside_the_agent_is_the_agents_failure_not_the_deadline(world: World) -> None:
    tries = []

    async def agent(episode: Episode, task: Task) -> float:
        tries.append(task["id"])
        if len(tries) == 1:
            raise TimeoutError("a judge did not answer")
        await ask(episode)
        return 0.0

    await world.run(agent, tasks(1))
    assert [f.kind for f in world.of(Failed)] == ["agent"]


async def test_an_agent_that_makes_an_error_of_its_cancellation_is_not_run_again(world: World) -> None:
    started = []

    async def agent(episode: Episode, task: Task) -> float:
        started.append(task["id"])
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            raise RuntimeError("cleaning up") from error
        return 1.0

    run = asyncio.create_task(world.run(agent, tasks(100)))
    await asyncio.sleep(0.1)
    assert len(started) == 12
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(1):
            await run
    assert len(started) == 12
    assert not world.of(Failed)
    assert not world.loop.running


async def test_a_live_stream_without_questions_is_idle_and_not_a_stall(world: World) -> None:
    async def questions() -> AsyncIterator[Task]:
        yield {"id": "only"}
        await asyncio.Event().wait()

    async def agent(episode: Episode, task: Task) -> float:
        await ask(episode)
        return 1.0

    run = asyncio.create_task(world.run(agent, questions()))
    await asyncio.sleep(0.1)
    assert len(world.of(Finished)) == 2
    assert world.loop.idle
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


# -- agents that misbehave


async def _ends_with_its_failure(world: World, agent: Any, text: str, kind: str = "agent") -> None:
    """One failure of each member is enough, with the settings below; then the groups are dropped."""
    await world.run(agent, tasks(2))
    assert not world.of(Finished)
    assert {f.kind for f in world.of(Failed)} == {kind}
    assert all(text in f.message for f in world.of(Failed)), world.of(Failed)[0].message
    assert len(world.of(Dropped)) == 2


ONE_TRY = [["data.epochs=1", "episode.retries=0"]]


@pytest.mark.parametrize("world", ONE_TRY, indirect=True)
async def test_i9_a_cancelled_error_that_the_agent_let_out_is_its_failure(world: World) -> None:
    async def agent(episode: Episode, task: Task) -> float:
        inner = asyncio.create_task(asyncio.sleep(10))
        inner.cancel()
        await inner
        return 1.0

    await _ends_with_its_failure(world, agent, "let a CancelledError out")


@pytest.mark.parametrize("world", ONE_TRY, indirect=True)
async def test_i9_an_agent_that_exits_does_not_end_the_program(world: World) -> None:
    async def agent(episode: Episode, task: Task) -> float:
        raise SystemExit(0)

    await _ends_with_its_failure(world, agent, "called sys.exit(0)")


@pytest.mark.parametrize("world", ONE_TRY, indirect=True)
async def test_i9_what_a_library_derives_from_nothing_else_is_a_failure(world: World) -> None:
    class PanicException(BaseException): ...

    async def agent(episode: Episode, task: Task) -> float:
        raise PanicException("index out of bounds")

    await _ends_with_its_failure(world, agent, "raised PanicException: index out of bounds")


async def test_a_cancelled_error_of_an_agent_does_not_cancel_whoever_wants_its_episode(world: World) -> None:
    async def agent(episode: Episode, task: Task) -> float:
        raise asyncio.CancelledError

    failure = await rollout.run_episode(agent, world.episode(0, 0, "t", "agent", True), {"id": "t"}, 5.0)
    assert isinstance(failure, rollout.Failure)
    assert isinstance(failure.error, EpisodeError)


@pytest.mark.parametrize("fails", [True, False])
async def test_what_an_agent_left_running_begins_no_more_calls(world: World, fails: bool) -> None:
    """Nor is it recorded: it would count as a call of the next try, and stay on record."""
    episode, kept, left = world.episode(0, 0, "t", "agent", True), [], []
    gate = asyncio.Event()
    generate = world.generate

    async def slowly(input_ids: Any, sampling: Sampling, *, key: str) -> Completion:
        if input_ids[0] == 9:
            await gate.wait()
        return await generate(input_ids, sampling, key=key)

    episode._generate = slowly
    episode._journal = Journal(kept.append)

    async def branch() -> None:
        await episode.generate([9])
        await episode.generate([9, 9])

    async def agent(episode: Episode, task: Task) -> float:
        left.append(asyncio.create_task(branch()))
        await episode.generate([1, 2, 3])
        if fails:
            raise ValueError("a branch failed")
        return 1.0

    await rollout.run_episode(agent, episode, {"id": "t"}, 5.0)
    gate.set()
    await asyncio.sleep(0.05)
    assert not left[0].done(), "a loop that catches everything would spin"
    with pytest.raises(EpisodeError, match="after the episode of task 't' had ended"):
        await left[0]
    assert len(kept) == 1


@pytest.mark.parametrize("world", ONE_TRY, indirect=True)
async def test_an_agent_that_never_calls_the_model_is_a_failure(world: World) -> None:
    async def agent(episode: Episode, task: Task) -> float:
        return 1.0

    await _ends_with_its_failure(world, agent, "without having called the model")


@pytest.mark.parametrize("world", ONE_TRY, indirect=True)
async def test_i9_no_finite_number_is_a_failure_of_the_reward(world: World) -> None:
    async def agent(episode: Episode, task: Task) -> float:
        await ask(episode)
        return float("nan")

    await _ends_with_its_failure(world, agent, "return a finite number", "reward")


@pytest.mark.parametrize("world", [[*ONE_TRY[0], "episode.timeout_s=0.2"]], indirect=True)
async def test_i9_a_reward_that_comes_after_the_time_out_does_not_count(world: World) -> None:
    async def agent(episode: Episode, task: Task) -> float:
        await ask(episode)
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            return 1.0
        return 0.5

    await _ends_with_its_failure(world, agent, "no reward after episode.timeout_s=0.2", "timeout")


@pytest.mark.parametrize("world", [[*ONE_TRY[0], "episode.timeout_s=0.2", Deadlines(agent=0.1)]], indirect=True)
async def test_i7_an_agent_that_ignores_its_cancellation_is_left_behind(world: World) -> None:
    """It catches everything in a loop; its calls never return, so that it cannot spin either."""
    rounds, over = 0, False

    async def agent(episode: Episode, task: Task) -> float:
        nonlocal rounds
        while not over:
            rounds += 1
            try:
                await ask(episode)
                await asyncio.sleep(10)
            except BaseException:
                continue
        return 1.0

    started = asyncio.get_running_loop().time()
    await _ends_with_its_failure(world, agent, "no reward after", "timeout")
    assert asyncio.get_running_loop().time() - started < 5
    before = rounds
    await asyncio.sleep(0.1)
    over = True  # for the end of the test's own loop
    assert rounds == before < 20


DROPPED_TOGETHER = ["episode.timeout_s=0.2", "episode.retries=0", "data.epochs=1"]


@pytest.mark.parametrize("world", [DROPPED_TOGETHER], indirect=True)
async def test_an_agent_whose_group_is_dropped_while_it_is_ending_is_left_behind_too(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Both members are too late; the first ends, and with it the group, within the other's time to end."""
    rounds, over = 0, False

    async def agent(episode: Episode, task: Task) -> float:
        nonlocal rounds
        if episode.member == 0:
            try:
                await asyncio.sleep(10)
            finally:
                await asyncio.sleep(0.5)  # or the group may end before the other's deadline has come
        while not over:
            try:
                await ask(episode)
                rounds += 1
                await asyncio.sleep(0.01)
            except (Exception, asyncio.CancelledError):
                continue
        return 1.0

    await world.run(agent, tasks(1))
    assert [drop.reason for drop in world.of(Dropped)] == ["timeout"]
    before = rounds
    await asyncio.sleep(0.1)
    over = True
    assert 0 < rounds == before
    assert "episode 0.1 (task t0, turn" in caplog.text
    assert "it is left behind, since it was still ending" in caplog.text


@pytest.mark.parametrize("world", [[*ONE_TRY[0], "episode.timeout_s=0.2"]], indirect=True)
async def test_i7_an_agent_that_tries_a_prompt_again_which_is_too_long_has_its_deadline(world: World) -> None:
    async def agent(episode: Episode, task: Task) -> float:
        while True:
            try:
                await episode.generate([1] * 64)
            except EpisodeError:
                continue

    await _ends_with_its_failure(world, agent, "no reward after episode.timeout_s=0.2", "timeout")


@pytest.mark.parametrize("world", [["data.epochs=2"]], indirect=True)
async def test_each_episode_has_a_task_of_its_own(world: World) -> None:
    """Members of a group, and later epochs, do not see what an agent did to its task."""
    seen: list[int] = []

    async def agent(episode: Episode, task: Task) -> float:
        seen.append(len(task["messages"]))
        task["messages"].append({"role": "assistant", "content": "mine"})
        task["id"] = "changed"
        await ask(episode)
        return 1.0

    rows = [{"id": f"t{i}", "messages": [{"role": "user", "content": "hello"}]} for i in range(2)]
    await world.run(agent, rows)
    assert seen == [1] * 8


@pytest.mark.parametrize(
    "world",
    [["data.epochs=1", "episode.retries=2", Deadlines(retry=dict.fromkeys(BUDGET_OF, 0.2))]],
    indirect=True,
)
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ServerLost("gone"), "server"),
        (RewardError("busy"), "reward"),
        (KeyError("x"), "agent"),
        (DataError("?"), "data"),
    ],
)
async def test_an_episode_that_failed_waits_longer_each_time(world: World, error: Exception, kind: str) -> None:
    tries: list[float] = []

    async def agent(episode: Episode, task: Task) -> float:
        if (episode.group, episode.member) == (0, 0):
            tries.append(asyncio.get_running_loop().time())
            if len(tries) < 3:
                raise error
        await ask(episode)
        return 1.0

    await world.run(agent, tasks(1))
    assert [f.kind for f in world.of(Failed)] == [kind, kind]
    first, second = tries[1] - tries[0], tries[2] - tries[1]
    assert first >= 0.2
    assert second >= 0.4


@pytest.mark.parametrize("world", [["data.epochs=1"]], indirect=True)
async def test_i4_a_run_that_goes_on_runs_only_what_is_left(world: World) -> None:
    """Members that had finished stay; a task that its source cannot give again drops its group (a live service)."""
    scheduler = world.scheduler
    for number in range(2):
        world.log.commit(scheduler.admit(f"t{number}", number))
    world.log.commit(scheduler.finished(0, 1, 0.25, {0: 3}))
    world.log.commit(scheduler.start())

    async def agent(episode: Episode, task: Task) -> float:
        await ask(episode)
        return 1.0

    await world.run(agent, tasks(3))
    ends = [(f.group, f.member, f.reward) for f in world.of(Finished)]
    assert sorted(ends) == [(0, 0, 1.0), (0, 1, 0.25), (1, 0, 1.0), (1, 1, 1.0), (2, 0, 1.0), (2, 1, 1.0)]


async def test_a_long_or_unprintable_failure_message_can_be_recorded() -> None:
    failure = rollout.Failure("agent", "x" * 100_000 + "last line \udc80", ValueError())
    assert failure.message.endswith("last line ?")
    assert len(encode(Failed(0, 0, "agent", failure.message))) < 5000
