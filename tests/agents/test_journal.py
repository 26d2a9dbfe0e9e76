"""What an unfinished episode had is not asked again after a crash: model calls and tool results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.agents.journal import Journal, RecordedCall, decode, encode, model_key
from areal.agents.tools import tool
from areal.types import Completion, EpisodeRecord, Message, Sampling
from tests.agents.conftest import Model

END = "<|im_end|>"
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


def look(query: str) -> str:
    return f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{query}"}}}}\n</tool_call>\n'


SCRIPT = (f"{look('Paris')}{look('Rome')}{END}", f"{look('Paris')}{END}", f"done{END}")


class Life:
    """One try at an episode, with what an earlier one left on record.

    found: what the tool says. searched: queries that it was run with. kept: what was put on record.
    """

    def __init__(
        self, model: Model, script: Sequence[str], recorded: Sequence[RecordedCall] = (), found: str = "is old"
    ) -> None:
        self.found = found
        self.searched: list[str] = []
        self.kept: list[RecordedCall] = []
        read_again = [decode(encode(call)) for call in recorded]
        self.episode = model.episode(*script, journal=Journal(self.kept.append, read_again))

    async def run(self, question: str = "Where?") -> EpisodeRecord:
        @tool
        async def search(query: str) -> str:
            """Search the encyclopedia."""
            self.searched.append(query)
            return f"{query} {self.found}"

        messages: list[Message] = [{"role": "user", "content": question}]
        while True:
            reply = await self.episode.chat(messages, tools=[search])
            messages.append(reply)
            if not reply.get("tool_calls"):
                return self.episode.finish(1.0, 0.0)
            messages += await self.episode.run_tools(reply)


def same(one: EpisodeRecord, other: EpisodeRecord) -> bool:
    """Ids, masks, log-probs and versions."""
    return len(one.trajectories) == len(other.trajectories) > 0 and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in zip(one.trajectories, other.trajectories, strict=True)
        for name in ("ids", "loss_mask", "logprobs", "versions")
    )


async def test_an_episode_on_record_asks_neither_the_model_nor_a_tool(qwen3: Model) -> None:
    first = Life(qwen3, SCRIPT)
    record = await first.run()
    assert first.searched == ["Paris", "Rome", "Paris"]
    assert [type(call.answer) for call in first.kept] == [Completion, str, str, Completion, str, Completion]
    again = Life(qwen3, (), first.kept, found="is new")
    assert same(await again.run(), record)
    assert again.searched == again.kept == []


@pytest.mark.parametrize("cut", range(7))
async def test_a_crash_after_any_call_asks_for_the_rest(qwen3: Model, cut: int) -> None:
    """What is on record stays there: it is not kept a second time."""
    first = Life(qwen3, SCRIPT)
    await first.run()
    recorded = first.kept[:cut]
    turns = sum(isinstance(call.answer, Completion) for call in recorded)
    again = Life(qwen3, SCRIPT[turns:], recorded)
    record = await again.run()
    assert [call.key for call in again.kept] == [call.key for call in first.kept[cut:]]
    assert len(qwen3.calls) == 3 - turns
    assert len(again.searched) == 3 - (cut - turns)
    assert (record.turns, qwen3.text(record.trajectories[0].ids).count(END)) == (3, 7)


async def test_an_agent_that_asks_otherwise_goes_on_live_from_there(qwen3: Model) -> None:
    first = Life(qwen3, SCRIPT)
    await first.run()
    other = Life(qwen3, SCRIPT, first.kept)
    await other.run("Where else?")
    assert len(qwen3.calls) == 3
    assert qwen3.text(qwen3.prompts[0]).count("Where else?") == 1


async def test_a_call_is_found_by_what_was_asked_and_not_by_its_number(qwen3: Model) -> None:
    kept: list[RecordedCall] = []
    episode = qwen3.episode([5], [6], journal=Journal(kept.append))
    await episode.generate([1, 2])
    await episode.generate([3, 4])
    episode = qwen3.episode([7], journal=Journal(kept.append, kept[:]))
    answers = [(await episode.generate(ids)).output_ids.tolist() for ids in ([8, 9], [3, 4], [1, 2])]
    assert answers == [[7], [6], [5]]


async def test_the_same_question_twice_has_both_answers(qwen3: Model) -> None:
    """Each recorded answer is given once; the third time the model is asked."""
    kept: list[RecordedCall] = []
    episode = qwen3.episode([5], [6], journal=Journal(kept.append))
    firsts = [(await episode.generate([1, 2])).output_ids.tolist() for _ in range(2)]
    episode = qwen3.episode([7], journal=Journal(kept.append, kept[:]))
    seconds = [(await episode.generate([1, 2])).output_ids.tolist() for _ in range(3)]
    assert (firsts, seconds) == ([[5], [6]], [[5], [6], [7]])
    assert len(kept) == 3


async def test_a_recalled_completion_has_its_prompt_again(qwen3: Model) -> None:
    """It is not on record: what was asked stands for it."""
    kept: list[RecordedCall] = []
    await qwen3.episode([5], journal=Journal(kept.append)).generate([1, 2])
    recalled = decode(encode(kept[0]))
    assert isinstance(recalled.answer, Completion)
    assert not len(recalled.answer.input_ids)
    episode = qwen3.episode(journal=Journal(kept.append, [recalled]))
    assert (await episode.generate([1, 2])).input_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    "other",
    [Sampling(65), Sampling(64, temperature=0.5), Sampling(64, stop_token_ids=(7,)), Sampling(64, ignore_eos=True)],
)
def test_what_is_asked_of_the_model_is_its_prompt_and_sampling_without_the_seed(other: Sampling) -> None:
    ids = np.array([1, 2, 3], np.int32)
    key = model_key(ids, Sampling(64, seed=1))
    assert key == model_key(ids.copy(), Sampling(64, seed=2))
    assert key not in (model_key(ids, other), model_key(ids[:2], Sampling(64)))


@st.composite
def calls(draw: st.DrawFn) -> RecordedCall:
    key = draw(st.binary(min_size=16, max_size=16))
    if draw(st.booleans()):
        return RecordedCall(key, draw(TEXTS))
    count = draw(st.integers(0, 5))
    int32 = st.integers(0, 2**31 - 1)
    numbers: dict[str, Any] = {"min_size": count, "max_size": count}
    answer = Completion(
        input_ids=np.array([], np.int32),
        output_ids=np.array(draw(st.lists(int32, **numbers)), np.int32),
        logprobs=np.array(draw(st.lists(st.floats(width=32, allow_nan=False), **numbers)), np.float32),
        versions=np.array(draw(st.lists(int32, **numbers)), np.int32),
        finish=draw(st.sampled_from(["stop", "length"])),
        interruptions=draw(st.integers(0, 9)),
        cached_tokens=draw(int32),
    )
    return RecordedCall(key, answer)


@given(calls())
def test_decode_is_the_inverse_of_encode(call: RecordedCall) -> None:
    assert repr(decode(encode(call))) == repr(call)


@given(calls(), st.data())
def test_a_torn_record_is_an_error(call: RecordedCall, data: st.DataObject) -> None:
    record = encode(call)
    end = data.draw(st.integers(0, len(record) - 1))
    with pytest.raises(ValueError):  # noqa: PT011
        decode(record[:end])
    if isinstance(call.answer, Completion):
        with pytest.raises(ValueError, match="cannot have"):
            decode(record + b"more")
