"""The agent that README shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from areal.config import SETTINGS
from tests.agents.conftest import Model

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize(("answer", "reward"), [("Jane Austen", 1.0), ("Emily Bronte", 0.0)])
async def test_it_searches_and_is_rewarded(
    qwen3: Model, monkeypatch: pytest.MonkeyPatch, answer: str, reward: float
) -> None:
    found = re.search(r"## An agent\n\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found
    launched: list[Any] = []
    monkeypatch.setattr("areal.cli.launch", lambda main, defaults: launched.append(defaults))
    names: dict[str, Any] = {}
    exec(found[1], names)
    assert launched == [{"data.train": "questions.jsonl"}]
    assert set(launched[0]) <= set(SETTINGS)
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "Who wrote Emma?"}}\n</tool_call><|im_end|>'
    episode = qwen3.episode(call, f"{answer}<|im_end|>")
    assert await names["agent"](episode, {"question": "Who wrote Emma?", "answer": "Jane Austen"}) == reward
    assert "<tool_response>\nJane Austen\n</tool_response>" in qwen3.text(qwen3.prompts[1])
