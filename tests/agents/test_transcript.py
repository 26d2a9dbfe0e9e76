"""I5: what training sees is what was sampled, id for id; only the caller can fork."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.agents.tools import tool
from areal.types import NOT_SAMPLED, Message
from tests.agents.conftest import Model

LOOK = '<tool_call>\n{"name": "search", "arguments": {"query": "Paris"}}\n</tool_call>'


@tool
async def search(query: str) -> str:
    """Search the encyclopedia."""
    return f"{query} is a city"


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def check_exact(model: Model) -> None:
    """Each prompt begins with the one before and its answer, id for id."""
    for n in range(1, len(model.prompts)):
        recorded = model.prompts[n - 1] + model.sampled[n - 1]
        assert model.prompts[n][: len(recorded)] == recorded


new_messages = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "tool", "system"]),
        st.text(max_size=12)
        | st.sampled_from(["Paris is a city", "  the", "<tool_response>", "<|im_end|>", "</think>"]),
    ),
    max_size=3,
)
PIECES = [
    "<think>\n",
    "</think>",
    "\n\n",
    LOOK,
    "<tool_call>",
    "</tool_call>",
    " Paris",
    "<|im_start|>",
    "\ud83d"[:0],
    "é",
]


@pytest.mark.parametrize("tools", [None, [search]], ids=["without-tools", "with-tools"])
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_sampled_ids_stay_as_they_are(model: Model, tools: Any, data: st.DataObject) -> None:
    """I5, for answers that no tokenizer would make: split words, half characters, special tokens inside, nothing."""
    ids = st.integers(0, len(model.tokenizer) - 1)
    pieces = st.sampled_from(PIECES).map(lambda text: model.tokenizer.encode(text, add_special_tokens=False))
    end = model.template._sampled_closing or [0]
    answer = st.lists(ids.map(lambda id: [id]) | pieces, max_size=10).map(lambda parts: [id for p in parts for id in p])
    answers = data.draw(st.lists(st.tuples(answer, st.booleans()), min_size=2, max_size=5))
    script = [ids + end * stops for ids, stops in answers]

    async def run() -> None:
        episode = model.episode(*script)
        messages = [user("Where is Paris?"), *data.draw(new_messages)]
        for _ in script:
            reply = await episode.chat(messages, tools=tools)
            messages.append(reply)
            messages += await episode.run_tools(reply)
            messages += data.draw(new_messages)
        check_exact(model)
        assert episode.forks == 0
        trajectories = episode.finish(1.0, 0.0).trajectories
        if not any(script):
            assert trajectories == ()
            return
        (trajectory,) = trajectories
        last = max(n for n, ids in enumerate(script) if ids)
        assert trajectory.ids.tolist() == model.prompts[last] + model.sampled[last]
        # The loss is on the sampled tokens and nothing else, each with its own version and log-prob.
        mask = np.zeros(len(trajectory.ids), dtype=bool)
        for n in range(last + 1):
            start = len(model.prompts[n])
            piece = slice(start, start + len(script[n]))
            mask[piece] = True
            assert trajectory.versions[piece].tolist() == [n] * len(script[n])
            np.testing.assert_array_equal(trajectory.logprobs[piece], model.calls[n][0].logprobs)
        np.testing.assert_array_equal(trajectory.loss_mask, mask)
        assert (trajectory.versions[~mask] == NOT_SAMPLED).all()
        assert (trajectory.logprobs[~mask] == 0).all()

    asyncio.run(run())


async def test_tokenising_again_would_differ(model: Model) -> None:
    """The check above has teeth: rendering the whole conversation again gives other ids than were sampled."""
    letters = [model.tokenizer.encode(letter)[0] for letter in "Paris"]
    episode = model.episode(letters, "yes")
    messages = [user("Where?")]
    messages += [await episode.chat(messages), user("Sure?")]
    await episode.chat(messages)
    check_exact(model)
    whole = (await model.template.start(messages, None)).tolist()
    recorded = model.prompts[0] + letters
    assert whole[: len(recorded)] != recorded


@pytest.mark.parametrize("name", ["qwen2.5", "llama3", "plain"])
@pytest.mark.parametrize("tools", [None, [search]], ids=["without-tools", "with-tools"])
async def test_equals_the_whole_render_where_nothing_is_stripped(
    models_by_template: dict[str, Model], ended: Callable[[Model], str], name: str, tools: Any
) -> None:
    model = models_by_template[name]
    end = ended(model)
    episode = model.episode("the city" + end, "Paris" + end, "cut off", "France" + end)
    messages: list[Message] = [{"role": "system", "content": "Be brief."}, user("Where?")]
    followers = [
        [user("Name it.")],
        [{"role": "tool", "content": "Paris"}] * 2 + [user("the country?")],
        [user("go")],
        [],
    ]
    for follow in followers:
        expected = await model.template.start(messages, tools and [search.schema])
        messages.append(await episode.chat(messages, tools=tools))
        assert model.text(model.prompts[-1]) == model.text(expected.tolist())
        messages += follow
    assert episode.forks == 0


async def test_qwen3_multi_turn_does_not_fork(qwen3: Model) -> None:
    """I5: the template would strip earlier thinking; the transcript keeps it, even when the caller leaves it out."""
    episode = qwen3.episode(
        f"<think>\nhm\n</think>\n\n{LOOK}<|im_end|>", "<think>\nso\n</think>\n\nParis<|im_end|>", "yes"
    )
    messages = [user("Where?")]
    reply = await episode.chat(messages, tools=[search])
    assert reply["reasoning_content"] == "hm"
    messages += [reply, *await episode.run_tools(reply)]
    reply = await episode.chat(messages, tools=[search])
    messages += [{"role": "assistant", "content": reply["content"]}, user("Sure?")]
    await episode.chat(messages, tools=[search])
    check_exact(qwen3)
    assert episode.forks == 0
    assert qwen3.text(qwen3.prompts[2]).endswith(
        "<|im_start|>user\n<tool_response>\nParis is a city\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "<think>\nso\n</think>\n\nParis<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_qwen3_empty_thinking_block_of_the_prompt_stays(models_by_template: dict[str, Model]) -> None:
    model = models_by_template["qwen3-without-thinking"]
    episode = model.episode("Paris<|im_end|>", "yes<|im_end|>")
    messages = [user("Where?")]
    messages += [await episode.chat(messages), user("Sure?")]
    await episode.chat(messages)
    block = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert model.text(model.prompts[1]) == (
        f"<|im_start|>user\nWhere?<|im_end|>\n{block}Paris<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n{block}"
    )
    assert episode.forks == 0


@pytest.mark.parametrize("answer", ["Par", "", "Paris<|im_end|>", "Paris<|endoftext|>"])
async def test_end_of_turn_is_supplied_when_it_was_not_sampled(qwen3: Model, answer: str) -> None:
    episode = qwen3.episode(answer, "yes<|im_end|>")
    messages = [user("Where?")]
    reply = await episode.chat(messages)
    assert reply["content"] == answer.split("<|")[0]
    await episode.chat([*messages, reply, user("Sure?")])
    added = qwen3.prompts[1][len(qwen3.prompts[0] + qwen3.sampled[0]) :]
    expected = "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    assert qwen3.text(added) == (expected if answer.endswith("<|im_end|>") else "<|im_end|>" + expected)
    (trajectory,) = episode.finish(0.0, 0.0).trajectories
    assert trajectory.loss_mask.sum() == len(qwen3.sampled[0]) + len(qwen3.sampled[1])


async def test_half_a_character_is_text_with_a_replacement_and_exact_ids(qwen3: Model) -> None:
    half = qwen3.tokenizer.encode("é")[:1]
    assert qwen3.tokenizer.encode("é")[1:], "é must be two tokens for this test"
    episode = qwen3.episode(half, half)
    messages = [user("Where?")]
    messages.append(await episode.chat(messages))
    assert messages[1]["content"] == "\ufffd"
    await episode.chat(messages)
    check_exact(qwen3)


def edit_user(messages: list[Message]) -> None:
    messages[0] = user("Where is it?")


def edit_reply(messages: list[Message]) -> None:
    messages[1] = {"role": "assistant", "content": "London"}


def edit_reply_in_place(messages: list[Message]) -> None:
    messages[1]["content"] = "London"


def edit_reasoning(messages: list[Message]) -> None:
    messages[1]["reasoning_content"] = "hm!"


def drop_first(messages: list[Message]) -> None:
    del messages[0]


def insert_system(messages: list[Message]) -> None:
    messages.insert(0, {"role": "system", "content": "Be brief."})


@pytest.mark.parametrize(
    "edit",
    [edit_user, edit_reply, edit_reply_in_place, edit_reasoning, drop_first, insert_system],
    ids=lambda f: f.__name__,
)
async def test_an_edit_of_earlier_messages_forks_and_is_counted(
    qwen3: Model, edit: Callable[[list[Message]], None]
) -> None:
    episode = qwen3.episode("<think>\nhm\n</think>\n\nParis<|im_end|>", "yes<|im_end|>", "no<|im_end|>")
    messages = [user("Where?")]
    messages += [await episode.chat(messages), user("Sure?")]
    edit(messages)
    reply = await episode.chat(messages)
    assert episode.forks == 1
    assert qwen3.prompts[1] == (await qwen3.template.start(messages, None)).tolist()
    # The fork goes on as any other conversation, and both sequences are trained, each with its own answers.
    await episode.chat([*messages, reply, user("Hm?")])
    assert episode.forks == 1
    first, second = episode.finish(1.0, 0.0).trajectories
    assert first.ids.tolist() == qwen3.prompts[0] + qwen3.sampled[0]
    assert second.ids.tolist() == qwen3.prompts[2] + qwen3.sampled[2]
    assert first.loss_mask.sum() == len(qwen3.sampled[0])
    assert second.loss_mask.sum() == len(qwen3.sampled[1]) + len(qwen3.sampled[2])


async def test_other_tools_fork(qwen3: Model) -> None:
    episode = qwen3.episode("Paris<|im_end|>", "yes<|im_end|>")
    messages = [user("Where?")]
    messages += [await episode.chat(messages, tools=[search]), user("Sure?")]
    await episode.chat(messages)
    assert episode.forks == 1
    assert "<tools>" not in qwen3.text(qwen3.prompts[1])


async def test_an_edit_late_in_a_conversation_keeps_the_turns_before_it(qwen3: Model) -> None:
    episode = qwen3.episode("Paris<|im_end|>", "yes<|im_end|>", "no<|im_end|>")
    messages = [user("Where?")]
    messages += [await episode.chat(messages), user("Sure?")]
    messages += [await episode.chat(messages), user("Why?")]
    messages[3] = {"role": "assistant", "content": "perhaps"}
    await episode.chat(messages)
    assert episode.forks == 1
    recorded = qwen3.prompts[0] + qwen3.sampled[0]
    assert qwen3.prompts[2][: len(recorded)] == recorded
    assert "perhaps<|im_end|>" in qwen3.text(qwen3.prompts[2])
    assert sum(int(t.loss_mask.sum()) for t in episode.finish(1.0, 0.0).trajectories) == sum(map(len, qwen3.sampled))


async def test_conversations_of_their_own_are_no_forks(qwen3: Model) -> None:
    """Sub-agents, few-shot examples and a context that starts afresh."""
    shots = [user("Where is Rome?"), {"role": "assistant", "content": "Italy"}]
    episode = qwen3.episode("Paris<|im_end|>", "yes<|im_end|>", "no<|im_end|>")
    await episode.chat([*shots, user("Where?")])
    await episode.chat([*shots, user("When?")])
    await episode.chat([user("So far: nothing. Go on.")])
    assert episode.forks == 0
    assert len(episode.finish(1.0, 0.0).trajectories) == 3


async def test_contents_of_any_form_are_recognised(models_by_template: dict[str, Model]) -> None:
    model = models_by_template["qwen3-without-thinking"]
    for parts in ([{"type": "text", "text": "Where?"}], ({"type": "text", "text": "Where?"},)):
        episode = model.episode("Paris<|im_end|>", "yes<|im_end|>")
        messages = [{"role": "user", "content": parts}]
        messages += [await episode.chat(messages), user("Sure?")]
        await episode.chat(messages)
        check_exact(model)
        assert episode.forks == 0


async def test_branches_share_their_beginning_and_count_its_tokens_once(qwen3: Model) -> None:
    episode = qwen3.episode("Paris<|im_end|>", "one", "two<|im_end|>", "one<|im_end|>", "end<|im_end|>")
    messages = [user("Where?")]
    messages += [await episode.chat(messages), user("Best of three?")]
    replies = await asyncio.gather(*(episode.chat(messages) for _ in range(3)))
    await episode.chat([*messages, replies[1], user("Go on.")])
    assert episode.forks == 0
    recorded = qwen3.prompts[2] + qwen3.sampled[2]
    assert qwen3.prompts[4][: len(recorded)] == recorded
    trajectories = episode.finish(1.0, 0.0).trajectories
    assert len(trajectories) == 3
    shared = len(qwen3.prompts[0]) + len(qwen3.sampled[0])
    for trajectory in trajectories:
        assert trajectory.ids[:shared].tolist() == qwen3.prompts[0] + qwen3.sampled[0]
        assert trajectory.versions[shared - 1] == 0
    assert [bool(t.loss_mask[:shared].any()) for t in trajectories] == [True, False, False]
    assert sum(int(t.loss_mask.sum()) for t in trajectories) == sum(map(len, qwen3.sampled))


async def test_of_equal_answers_the_one_that_was_chosen_goes_on(qwen3: Model) -> None:
    letters = [qwen3.tokenizer.encode(letter)[0] for letter in "Paris"]
    for chosen in (0, 1):
        episode = qwen3.episode("Paris", letters, "yes")
        messages = [user("Where?")]
        replies = [await episode.chat(messages), await episode.chat(messages)]
        assert replies[0] == replies[1]
        await episode.chat([*messages, replies[chosen], user("Sure?")])
        start = len(qwen3.prompts[0])
        assert qwen3.prompts[2][start : start + len(qwen3.sampled[chosen])] == qwen3.sampled[chosen]


async def test_an_empty_answer_beside_others_adds_no_trajectory(qwen3: Model) -> None:
    episode = qwen3.episode("Paris<|im_end|>", "", "yes<|im_end|>")
    messages = [user("Where?")]
    messages += [await episode.chat(messages), user("Sure?")]
    assert (await episode.chat(messages))["content"] == ""
    await episode.chat(messages)
    (trajectory,) = episode.finish(1.0, 0.0).trajectories
    assert trajectory.ids.tolist() == qwen3.prompts[2] + qwen3.sampled[2]
    assert trajectory.loss_mask.sum() == len(qwen3.sampled[0]) + len(qwen3.sampled[2])


async def test_ids_continue_the_longest_sequence_that_they_begin_with(qwen3: Model) -> None:
    episode = qwen3.episode([7, 8], [9], [10], [11], [])
    await episode.generate([1, 2, 3])
    await episode.generate([1, 2, 3, 7, 8, 4])
    await episode.generate([1, 2, 3, 7, 8, 5])  # a branch of the first
    await episode.generate([1, 2, 3])  # the same prompt once more
    await episode.generate([1, 2, 3, 7, 8, 4, 9])  # nothing new, and nothing sampled
    assert episode.forks == 0
    trajectories = episode.finish(1.0, 0.0).trajectories
    assert [t.ids.tolist() for t in trajectories] == [[1, 2, 3, 7, 8, 5, 10], [1, 2, 3, 11], [1, 2, 3, 7, 8, 4, 9]]
    assert [t.versions.tolist() for t in trajectories] == [
        [-1, -1, -1, 0, 0, -1, 2],
        [-1, -1, -1, 3],
        [-1, -1, -1, 0, 0, -1, 1],
    ]
    assert [t.loss_mask.nonzero()[0].tolist() for t in trajectories] == [[3, 4, 6], [3], [6]]


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_sampled_token_is_in_the_loss_once(qwen3: Model, data: st.DataObject) -> None:
    """I5, for any tree of branches: each trajectory is a path that the server saw, each token counted once."""
    script = data.draw(st.lists(st.lists(st.integers(3, 6), max_size=3), min_size=1, max_size=7))

    async def run() -> None:
        episode = qwen3.episode(*script)
        for n in range(len(script)):
            said = [prompt + answer for prompt, answer in zip(qwen3.prompts, qwen3.sampled, strict=True)]
            begin = data.draw(st.sampled_from([[], *said]))
            await episode.generate([*begin, *data.draw(st.lists(st.integers(3, 6), min_size=not begin, max_size=2))])
            assert len(qwen3.calls) == n + 1
        trajectories = episode.finish(1.0, 0.0).trajectories
        said = [prompt + answer for prompt, answer in zip(qwen3.prompts, qwen3.sampled, strict=True)]
        assert all(t.ids.tolist() in said for t in trajectories)
        counted = sorted(float(x) for t in trajectories for x in t.logprobs[t.loss_mask])
        assert counted == sorted(float(x) for completion, _, _ in qwen3.calls for x in completion.logprobs)

    asyncio.run(run())
