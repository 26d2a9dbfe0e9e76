"""The handle of an agent: model calls, tools, deadlines, rewards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from areal.agents.episode import Episode
from areal.agents.tools import tool
from areal.errors import ContextOverflow, DataError, EpisodeError
from areal.types import Completion, Message, Sampling, Task
from tests.agents.conftest import Model

LOOK = '<tool_call>\n{"name": "search", "arguments": {"query": "Paris"}}\n</tool_call><|im_end|>'


@tool
async def search(query: str) -> str:
    """Search the encyclopedia."""
    return f"{query} is in France"


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'


async def answers(model: Model, tools: list[Any], text: str, **options: Any) -> list[str]:
    """What the model is told about the calls in `text`."""
    episode = model.episode(text, **options)
    return await run(episode, tools)


async def run(episode: Episode, tools: list[Any]) -> list[str]:
    reply = await episode.chat([{"role": "user", "content": "?"}], tools=tools)
    return [message["content"] for message in await episode.run_tools(reply)]


async def test_an_agent_from_question_to_record(qwen3: Model) -> None:
    async def agent(episode: Episode, task: Task) -> float:
        messages: list[Message] = [{"role": "user", "content": task["question"]}]
        for _ in range(4):
            reply = await episode.chat(messages, tools=[search])
            messages.append(reply)
            if not reply.get("tool_calls"):
                break
            messages += await episode.run_tools(reply)
        episode.record("messages", len(messages))
        return float(reply["content"].strip() == task["answer"])

    episode = qwen3.episode(LOOK, " France<|im_end|>", group=3, member=1, task_id="t7")
    reward = await agent(episode, {"question": "Where is Paris?", "answer": "France"})
    record = episode.finish(reward, 1.5)
    assert (record.group, record.member, record.task_id) == (3, 1, "t7")
    assert (record.reward, record.turns, record.forks, record.seconds) == (1.0, 2, 0, 1.5)
    assert record.metrics == {"messages": 4.0}
    assert len(record.trajectories) == 1
    assert "<tool_response>\nParis is in France\n</tool_response>" in qwen3.text(qwen3.prompts[1])
    assert len({key for _, _, key in qwen3.calls}) == 1, "one key: the calls stay where their prefix is cached"


async def test_answer_with_no_tokens(qwen3: Model) -> None:
    episode = qwen3.episode("", [])
    assert await episode.chat([{"role": "user", "content": "?"}]) == {"role": "assistant", "content": ""}
    assert len((await episode.generate([1, 2])).output_ids) == 0
    record = episode.finish(0.0, 0.0)
    assert (record.turns, record.trajectories) == (2, ())


async def test_answer_shrinks_to_the_room_that_is_left(qwen3: Model) -> None:
    episode = qwen3.episode(*[[5]] * 4, context_length=100)
    await episode.generate([1] * 10)
    await episode.generate([1] * 90)
    await episode.generate([1] * 99)
    await episode.generate([1] * 10, max_new_tokens=80)
    assert [sampling.max_new_tokens for _, sampling, _ in qwen3.calls] == [64, 10, 1, 80]
    with pytest.raises(ContextOverflow, match=r"'t1'\) has 100 tokens .* context of 100"):
        await episode.generate([1] * 100)
    with pytest.raises(ContextOverflow):
        await episode.chat([{"role": "user", "content": "where " * 200}])
    assert len(qwen3.calls) == 4


@pytest.mark.parametrize("ids", [[], [[1, 2]], [1.5], [2**32 + 1], np.array([2**32 + 1])])
async def test_ids_that_are_no_prompt(qwen3: Model, ids: Any) -> None:
    with pytest.raises(EpisodeError, match="flat, non-empty list of token ids"):
        await qwen3.episode([5]).generate(ids)


async def test_other_misuse_is_named(qwen3: Model) -> None:
    episode = qwen3.episode("yes")
    with pytest.raises(EpisodeError, match="no messages"):
        await episode.chat([])
    with pytest.raises(EpisodeError, match="max_new_tokens=0"):
        await episode.generate([1], max_new_tokens=0)
    with pytest.raises(EpisodeError, match="two tools have the name 'search'"):
        await episode.chat([{"role": "user", "content": "?"}], tools=[search, tool(search.function)])
    with pytest.raises(EpisodeError, match=r"'mine', which episode\.chat never returned"):
        await episode.run_tools({"tool_calls": [{"id": "mine", "function": {"name": "search", "arguments": "{}"}}]})
    with pytest.raises(EpisodeError, match="chat template"):
        await qwen3.episode("yes", template=None).chat([{"role": "user", "content": "?"}])


async def test_the_callers_array_is_copied(qwen3: Model) -> None:
    """I5: what was sent is what is trained, whatever the agent does with its array."""
    episode = qwen3.episode([5])
    ids = np.array([1, 2, 3])
    await episode.generate(ids)
    ids[:] = 0
    assert episode.finish(1.0, 0.0).trajectories[0].ids.tolist() == [1, 2, 3, 5]


async def test_rng_depends_on_seed_group_and_member(qwen3: Model) -> None:
    def draw(seed: int, group: int, member: int) -> float:
        return qwen3.episode(seed=seed, group=group, member=member).rng.random()

    assert draw(1, 2, 3) == draw(1, 2, 3)
    assert len({draw(1, 2, 3), draw(0, 2, 3), draw(1, 3, 3), draw(1, 2, 4), draw(1, 23, 0), draw(12, 3, 0)}) == 6


async def test_sampling_seeds_depend_on_seed_group_member_and_call(qwen3: Model) -> None:
    async def draw(seed: int, group: int, member: int) -> list[int]:
        episode = qwen3.episode([5], [6], seed=seed, group=group, member=member)
        for _ in range(2):
            await episode.generate([1, 2, 3])
        return [sampling.seed for _, sampling, _ in qwen3.calls]

    assert await draw(1, 2, 3) == await draw(1, 2, 3)
    identities = [(1, 2, 3), (0, 2, 3), (1, 3, 3), (1, 2, 4), (1, 23, 0), (12, 3, 0)]
    seeds = [seed for identity in identities for seed in await draw(*identity)]
    assert len(set(seeds)) == 2 * len(identities)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), "1", 1j, [1.0], 10**400])
async def test_a_reward_that_is_no_finite_number_is_an_error(qwen3: Model, reward: object) -> None:
    """I9: never a 0."""
    with pytest.raises(EpisodeError) as error:
        qwen3.episode().finish(reward, 0.0)
    assert repr(reward) in str(error.value)
    assert "searcher" in str(error.value)


@pytest.mark.parametrize("reward", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True)])
async def test_numbers_of_any_kind_are_rewards(qwen3: Model, reward: object) -> None:
    value = qwen3.episode().finish(reward, 0.0).reward
    assert (value, type(value)) == (1.0, float)


async def test_a_task_left_running_cannot_call_after_the_end(qwen3: Model) -> None:
    episode = qwen3.episode([5])
    episode.finish(1.0, 0.0)
    with pytest.raises(EpisodeError, match="had ended"):
        await episode.generate([1])


async def test_calls_of_one_episode_may_overlap(qwen3: Model) -> None:
    episode = qwen3.episode(*[[number] * 3 for number in range(20, 28)])
    conversations = [[{"role": "user", "content": f"sub-agent {n}"}] for n in range(4)]
    await asyncio.gather(*(episode.chat(c) for c in conversations), *(episode.generate([n]) for n in range(4)))
    record = episode.finish(1.0, 0.0)
    assert (record.turns, record.forks, len(record.trajectories)) == (8, 0, 8)
    expected = {(*p, *s) for p, s in zip(qwen3.prompts, qwen3.sampled, strict=True)}
    assert {tuple(t.ids.tolist()) for t in record.trajectories} == expected


async def test_state_says_what_is_awaited_and_since_when(qwen3: Model) -> None:
    """I7: what a watchdog shows."""
    answer = asyncio.Event()

    async def generate(input_ids: Any, sampling: Sampling, *, key: str) -> Completion:
        await answer.wait()
        return await qwen3.generate(input_ids, sampling, key=key)

    started, stop = asyncio.Event(), asyncio.Event()

    async def dig() -> str:
        started.set()
        await stop.wait()
        return "found"

    episode = qwen3.episode(call("dig"), generate=generate, group=3, member=1, task_id="t7")
    assert "awaits its own code" in episode.state
    task = asyncio.create_task(run(episode, [dig]))
    await asyncio.sleep(0)
    before = asyncio.get_running_loop().time()
    assert episode.state.startswith("episode 3.1 (task t7, turn 1) awaits the model, for 0.")
    answer.set()
    await started.wait()
    what, since = episode.awaits
    assert what == "tool dig"
    assert before <= since <= asyncio.get_running_loop().time()
    stop.set()
    assert await task == ["found"]
    assert "its own code" in episode.state


# Tools


async def test_calls_run_at_once_and_answers_keep_their_order(qwen3: Model) -> None:
    barrier = asyncio.Barrier(2)

    async def meet(name: str) -> str:
        await barrier.wait()
        return name

    episode = qwen3.episode(call("meet", '{"name": "a"}') + call("meet", '{"name": "b"}'))
    reply = await episode.chat([{"role": "user", "content": "?"}], tools=[meet])
    async with asyncio.timeout(5):
        messages = await episode.run_tools(reply)
    assert [(m["role"], m["name"], m["content"]) for m in messages] == [("tool", "meet", "a"), ("tool", "meet", "b")]
    assert [m["tool_call_id"] for m in messages] == [c["id"] for c in reply["tool_calls"]]
    assert await episode.run_tools({"role": "assistant", "content": "no calls"}) == []


async def test_a_malformed_call_is_told_to_the_model_and_seen_by_the_agent(qwen3: Model) -> None:
    episode = qwen3.episode(
        '<tool_call>\n{"name": "search", "arguments": {"query": Paris}}\n</tool_call>' + call("find")
    )
    reply = await episode.chat([{"role": "user", "content": "?"}], tools=[search])
    assert "bad JSON" in reply["tool_calls"][0]["error"]
    contents = [message["content"] for message in await episode.run_tools(reply)]
    assert contents == [
        "Error: this call was not run: bad JSON: Expecting value at character 42",
        "Error: this call was not run: there is no tool 'find'; available: search",
    ]


async def test_what_a_tool_raises_is_told_to_the_model(qwen3: Model) -> None:
    async def fails() -> None:
        raise ValueError("no such page")

    def fails_too() -> None:
        raise TimeoutError("slow page")

    assert await answers(qwen3, [fails, fails_too], call("fails") + call("fails_too")) == [
        "Error: ValueError: no such page",
        "Error: TimeoutError: slow page",
    ]


async def test_areals_own_errors_pass_through_a_tool(qwen3: Model) -> None:
    """I9: a failure of the machinery under a tool (here a sub-agent) is not an answer to the model."""
    cancelled = asyncio.Event()

    async def sub_agent() -> str:
        raise DataError("tasks.jsonl:3")

    async def other() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(DataError, match=r"tasks\.jsonl:3"):
        await answers(qwen3, [sub_agent, other], call("sub_agent") + call("other"))
    assert cancelled.is_set()


async def test_a_tool_that_cancels_itself_does_not_look_like_a_cancelled_episode(qwen3: Model) -> None:
    async def odd() -> None:
        raise asyncio.CancelledError

    with pytest.raises(EpisodeError, match="'odd' cancelled itself"):
        await answers(qwen3, [odd], call("odd"))


async def test_what_a_tool_says_can_be_recorded(qwen3: Model) -> None:
    """A file name that is no UTF-8 has lone surrogates."""

    def listing() -> str:
        return "caf\udce9.txt"

    async def missing() -> str:
        raise FileNotFoundError("caf\udce9.txt")

    class Panic(BaseException): ...

    async def panics() -> str:
        raise Panic("out of bounds")

    said = await answers(qwen3, [listing, missing, panics], call("listing") + call("missing") + call("panics"))
    assert said == ["caf?.txt", "Error: FileNotFoundError: caf?.txt", "Error: Panic: out of bounds"]


async def test_a_tool_that_never_returns_is_told_to_the_model(qwen3: Model) -> None:
    """I7: an async one is cancelled, a thread is left behind; the calls beside them have their results."""
    cancelled = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    def never() -> None:
        threading.Event().wait()

    text = call("forever") + call("never") + call("search", '{"query": "Paris"}')
    async with asyncio.timeout(5):
        contents = await answers(qwen3, [forever, never, search], text, tool_timeout_s=0.05)
    assert contents == [
        "Error: forever took longer than 0.05 s and was stopped",
        "Error: never took longer than 0.05 s and was stopped",
        "Paris is in France",
    ]
    assert cancelled.is_set()


async def test_a_tool_that_ignores_its_cancellation_is_left_behind(qwen3: Model) -> None:
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    episode = qwen3.episode(call("stubborn"), tool_timeout_s=0.05)
    async with asyncio.timeout(5):
        (content,) = await run(episode, [stubborn])
    assert "took longer" in content
    (left,) = episode._left_behind
    release.set()
    await left
    await asyncio.sleep(0)
    assert not episode._left_behind


@pytest.mark.parametrize("where", ["model", "async tool", "thread"])
async def test_cancelling_an_episode_releases_it_at_once(qwen3: Model, where: str) -> None:
    """I8."""

    reached = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def forever() -> None:
        reached.set()
        await asyncio.Event().wait()

    def never() -> None:
        loop.call_soon_threadsafe(reached.set)
        threading.Event().wait()

    async def generate(input_ids: Any, sampling: Sampling, *, key: str) -> Completion:
        if where == "model":
            await forever()
        return await qwen3.generate(input_ids, sampling, key=key)

    chosen: Callable[..., Any] = never if where == "thread" else forever
    episode = qwen3.episode(call(chosen.__name__), generate=generate)
    others = asyncio.all_tasks()
    task = asyncio.create_task(run(episode, [chosen]))
    await reached.wait()
    task.cancel()
    for _ in range(5):  # turns of the loop instead of a clock: it waits for nothing
        await asyncio.sleep(0)
    assert task.cancelled()
    assert asyncio.all_tasks() == others, "no tool runs on"


async def test_a_bare_function_is_read_once_per_episode(qwen3: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []
    monkeypatch.setattr("areal.agents.episode.tool", lambda function: reads.append(function) or tool(function))

    async def look() -> str:
        return "here"

    episode = qwen3.episode(call("look"), call("look"))
    for _ in range(2):
        assert await run(episode, [look]) == ["here"]
    assert reads == [look]
