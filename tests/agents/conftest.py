"""A model that says what a test tells it to, under each of the chat templates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from areal.agents.episode import Episode
from areal.agents.template import Template
from areal.types import Completion, Ints, Sampling
from tests.agents import templates


class Model:
    """Stands where the fleet's `generate` does: answers with the scripted texts or ids, one after the other.

    `calls` keeps each completion with the sampling it was asked for. Token i of call n has version n and log-prob
    -(n + i / 1000), so that a test can tell where each came from.
    """

    def __init__(self, tokenizer: Any, template: Template) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.script: list[str | Sequence[int]] = []
        self.calls: list[tuple[Completion, Sampling, str]] = []

    async def generate(self, input_ids: Ints, sampling: Sampling, *, key: str) -> Completion:
        number = len(self.calls)
        answer = self.script[number]
        if isinstance(answer, str):
            answer = self.tokenizer.encode(answer, add_special_tokens=False)
        ids = np.array(answer, dtype=np.int32)
        logprobs = -(number + np.arange(len(ids), dtype=np.float32) / 1000)
        versions = np.full(len(ids), number, dtype=np.int32)
        ended = not len(ids) or int(ids[-1]) in self.template.special_ids
        completion = Completion(input_ids, ids, logprobs, versions, "stop" if ended else "length")
        self.calls.append((completion, sampling, key))
        return completion

    @property
    def prompts(self) -> list[list[int]]:
        return [completion.input_ids.tolist() for completion, _, _ in self.calls]

    @property
    def sampled(self) -> list[list[int]]:
        return [completion.output_ids.tolist() for completion, _, _ in self.calls]

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def episode(self, *script: str | Sequence[int], **options: Any) -> Episode:
        """An episode in which the model gives these answers."""
        self.script, self.calls = list(script), []
        parts = {"generate": self.generate, "template": self.template, "sampling": Sampling(64), "context_length": 4096}
        return Episode(**{**parts, "task_id": "t1", "agent": "searcher", **options})


@pytest.fixture(scope="session")
def models_by_template(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("tokenizers")
    result = {}
    for name, (_, arguments) in templates.ALL.items():
        tokenizer = templates.tokenizer(folder / name, name)
        result[name] = Model(tokenizer, Template(tokenizer, arguments))
    return result


@pytest.fixture(params=list(templates.ALL))
def model(request: pytest.FixtureRequest, models_by_template: dict[str, Model]) -> Model:
    """The scripted model under each template in turn."""
    return models_by_template[request.param]


@pytest.fixture
def qwen3(models_by_template: dict[str, Model]) -> Model:
    return models_by_template["qwen3"]


@pytest.fixture
def ended(models_by_template: dict[str, Model]) -> Callable[[Model], str]:
    """The text that ends a turn of a model's template ("" for the one without)."""
    ends = {"llama3": "<|eot_id|>", "plain": ""}
    names = {id(each): name for name, each in models_by_template.items()}
    return lambda model: ends.get(names[id(model)], "<|im_end|>")
