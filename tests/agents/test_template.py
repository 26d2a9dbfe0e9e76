"""Messages as text and ids: what is refused, what is shared, what leaves the event loop."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from areal.agents.template import Template
from areal.errors import ConfigError, ForkRefused
from tests.agents import templates
from tests.agents.conftest import Model

USER = {"role": "user", "content": "Where?"}


def test_a_tokenizer_without_template_is_refused(tmp_path: Path) -> None:
    tokenizer = templates.tokenizer(tmp_path, "qwen3")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        Template(tokenizer)


def test_an_argument_that_the_template_does_not_use_is_refused(qwen3: Model) -> None:
    """I10."""
    with pytest.raises(ConfigError, match="'enable_thinkin'"):
        Template(qwen3.tokenizer, {"enable_thinkin": False})


@pytest.mark.parametrize(
    ("source", "says"),
    [("{{ messages[0].content }}", "omits an assistant's content"), ("{{ messages.what() }}", "cannot render")],
)
def test_a_template_that_cannot_be_continued_is_refused_before_the_start(
    tmp_path: Path, source: str, says: str
) -> None:
    tokenizer = templates.tokenizer(tmp_path, "qwen3")
    tokenizer.chat_template = source
    with pytest.raises(ConfigError, match=says):
        Template(tokenizer)


async def test_messages_that_the_template_cannot_render_are_refused(models_by_template: dict[str, Model]) -> None:
    with pytest.raises(ForkRefused, match=r"messages \[user, user\]"):
        await models_by_template["qwen2.5"].template.start([USER, {"role": "user", "content": 3}], None)


async def test_the_members_of_a_group_share_their_first_prompt(qwen3: Model) -> None:
    first, second = [await qwen3.template.start([USER], None) for _ in range(2)]
    assert first is second
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


async def test_long_texts_leave_the_event_loop(tmp_path: Path) -> None:
    tokenizer = templates.tokenizer(tmp_path, "qwen3")
    threads: list[str] = []

    class Watched:
        """A tokenizer without Rust backend that notes where it was called."""

        chat_template = tokenizer.chat_template
        apply_chat_template = tokenizer.apply_chat_template
        added_tokens_decoder = tokenizer.added_tokens_decoder

        def encode(self, text: str, **options: Any) -> list[int]:
            threads.append(threading.current_thread().name)
            return tokenizer.encode(text, **options)

        def decode(self, ids: list[int], **options: Any) -> str:
            threads.append(threading.current_thread().name)
            return tokenizer.decode(ids, **options)

    template = Template(Watched())
    here = threading.current_thread().name
    for size, stays in [(10, True), (10_000, False)]:
        threads.clear()
        ids = await template.start([{"role": "user", "content": "a" * size}], None)
        await template.extend(-1, [{"role": "user", "content": "b" * size}], None)
        assert await template.text(ids) == tokenizer.decode(ids.tolist())
        assert [name == here for name in threads] == [stays] * 3


async def test_tool_calls_of_a_caller_may_be_text_or_objects(model: Model) -> None:
    def history(arguments: Any) -> list[dict[str, Any]]:
        function = {"name": "search", "arguments": arguments}
        calls = [{"id": "1", "type": "function", "function": function}]
        return [USER, {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "Paris"}]

    text, parsed = [await model.template.start(history(a), None) for a in ('{"query": "né"}', {"query": "né"})]
    assert text.tolist() == parsed.tolist()


@pytest.mark.parametrize("name", ["qwen3", "qwen2.5", "llama3"])
async def test_a_malformed_call_is_rendered_as_the_text_it_was(models_by_template: dict[str, Model], name: str) -> None:
    """Only a fork renders an earlier answer at all."""
    model = models_by_template[name]
    call = {"id": "1", "type": "function", "function": {"name": "", "arguments": "\n{oops\n"}, "error": "bad JSON"}
    ids = await model.template.start(
        [USER, {"role": "assistant", "content": "I look.", "tool_calls": [call]}, USER], None
    )
    assert "\nI look.\n<tool_call>\n{oops\n</tool_call><|" in model.text(ids.tolist())


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("qwen3", "Paris", (None, "Paris")),
        ("qwen3", "<think>\nhm\n</think>\n\nParis", ("hm", "Paris")),
        ("qwen3", "\n<think></think>Paris", ("", "Paris")),
        ("qwen3", "<think>\nhm", ("hm", "")),
        ("qwen3", "hm\n</think>\n\nParis", ("hm", "Paris")),
        ("qwen3", "I <think> so", (None, "I <think> so")),
        ("thinker", "hm\n</think>\n\nParis", ("hm", "Paris")),
        ("thinker", "hm", ("hm", "")),
    ],
)
def test_thinking_is_split_from_the_content(
    models_by_template: dict[str, Model], name: str, text: str, expected: tuple[str | None, str]
) -> None:
    assert models_by_template[name].template.split_thinking(text) == expected
