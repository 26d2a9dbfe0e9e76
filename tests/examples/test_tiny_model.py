"""The tiny model's folder: what a real model's folder would give, with a tokenizer that loses nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_model
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal.agents.tools import parse_calls, tool

NAMES = ["Albran", "Korburg", "Arvonia"]
TEXTS = [
    "In which city does Albran live?",
    "Albran lives in Korburg.",
    "Korburg belongs to Arvonia.",
    "search",
    "unknown",
]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "In which city does Albran live?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "search", "arguments": {"query": "Albran"}}}],
    },
    {"role": "tool", "content": "Albran lives in Korburg."},
    {"role": "assistant", "content": "Korburg"},
]
RENDERED = """\
<|im_start|>user
In which city does Albran live?<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "search", "arguments": {"query": "Albran"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
Albran lives in Korburg.
</tool_response><|im_end|>
<|im_start|>assistant
Korburg<|im_end|>
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model.build(path, NAMES, TEXTS, seed=0)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def test_a_name_is_the_same_single_token_wherever_it_stands(tokenizer: Any) -> None:
    for name in NAMES:
        [token] = tokenizer.encode(name)
        for text in (f"does {name} live?", f"{name} lives in {name}.", f'{{"query": "{name}"}}', f"\n{name}<|im_end|>"):
            assert tokenizer.encode(text).count(token) == text.count(name), text


def test_a_tool_call_takes_few_tokens(tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template(CONVERSATION[:2], tokenize=False)
    call = rendered[rendered.index("<tool_call>") : rendered.index("\n", rendered.index("</tool_call>"))]
    assert [tokenizer.decode([token]) for token in tokenizer.encode(call)] == [
        "<tool_call>",
        '\n{"name": "',
        "search",
        '", "arguments": {"query": "',
        "Albran",
        '"}}\n',
        "</tool_call>",
        "<|im_end|>",
    ]


@given(text=st.text())
@example(text=RENDERED)
@example(text="Ünknown  words\n\n\tand  Names,<tool_call> {} </tool_call>  <|im_end|>. \x00 日本 🎈")
def test_decoding_gives_back_any_text(text: str, tokenizer: Any) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(data=st.data())
def test_any_sequence_of_tokens_is_a_text(data: st.DataObject, tokenizer: Any) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1)))
    text = tokenizer.decode(ids)
    assert "�" in text or tokenizer.decode(tokenizer.encode(text)) == text


def test_the_template_is_that_of_qwen3_without_the_list_of_tools(tokenizer: Any) -> None:
    def render(messages: list[dict[str, Any]], **options: Any) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    assert render(CONVERSATION) == RENDERED
    assert render(CONVERSATION, tools=[{"name": "search"}], enable_thinking=False) == RENDERED
    assert render(CONVERSATION[:3], add_generation_prompt=True) == RENDERED.removesuffix("Korburg<|im_end|>\n")
    function = {"name": "search", "arguments": '{"query": "Albran"}'}
    sampled = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    assert render([CONVERSATION[0], sampled, *CONVERSATION[2:]]) == RENDERED
    two = render([CONVERSATION[0], {**sampled, "tool_calls": sampled["tool_calls"] * 2}, *CONVERSATION[2:3] * 2])
    assert two.count("</tool_call>\n<tool_call>") == 1
    assert two.count("</tool_response>\n<tool_response>") == 1


def test_the_mask_marks_what_the_assistant_says(tokenizer: Any) -> None:
    encoded = tokenizer.apply_chat_template(CONVERSATION, return_dict=True, return_assistant_tokens_mask=True)
    said = [token for token, own in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if own]
    assert tokenizer.decode(said) == (
        '<tool_call>\n{"name": "search", "arguments": {"query": "Albran"}}\n</tool_call><|im_end|>Korburg<|im_end|>'
    )


def test_a_rendered_call_is_read_back(tokenizer: Any) -> None:
    @tool
    def search(query: str) -> str:
        return query

    content, [call] = parse_calls(tokenizer.apply_chat_template(CONVERSATION[1:2], tokenize=False), {"search": search})
    assert content == "<|im_start|>assistant"
    assert call["function"] == {"name": "search", "arguments": '{"query": "Albran"}'}
    assert "error" not in call


def test_the_model_has_the_scale_that_copying_needs(folder: Path, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            assert float(weight.detach().std()) == pytest.approx(weight.shape[1] ** -0.5, rel=0.1), name
        else:
            assert bool((weight == 1).all()), name


def test_the_weights_depend_on_the_seed_alone(folder: Path, tmp_path: Path) -> None:
    files = {}
    for seed in (0, 1):
        tiny_model.build(tmp_path / str(seed), NAMES, TEXTS, seed)
        files[seed] = (tmp_path / str(seed) / "model.safetensors").read_bytes()
    assert files[0] == (folder / "model.safetensors").read_bytes()
    assert files[1] != files[0]
