"""SGLang, Megatron and transformers agree on the log-probs of the same tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.types import Ints, Sampling
from areal.workers.sglang.client import SGLangClient
from tests.integration.conftest import KEY, LABEL, RankSlot, ServerSlot
from tests.models import VOCAB_SIZE

TOLERANCE = 1e-4


def by_transformers(folder: Path, ids: Ints) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
    scores = torch.log_softmax(logits[:-1], -1).gather(-1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])
    return np.concatenate([[0.0], scores[:, 0].numpy()])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
async def test_three_engines_give_the_same_logprobs(
    family: str, request: pytest.FixtureRequest, server_slot: ServerSlot, rank_slot: RankSlot
) -> None:
    folder: Path = request.getfixturevalue(f"tiny_{family}")
    server = await asyncio.to_thread(server_slot.serve, folder)
    prompt = np.random.default_rng(0).integers(9, VOCAB_SIZE, 40).astype(np.int32)
    client = SGLangClient(server.url, origin=LABEL.partition(":")[0], vocab_size=VOCAB_SIZE, key=KEY)
    try:
        answer = await client.generate("a" * 32, prompt, Sampling(60, ignore_eos=True))
        ids = np.concatenate([prompt, answer.output_ids])
        scored = await client.score(ids)
    finally:
        await client.close()
    async with rank_slot.lend(folder, version=0) as trainer:
        (trained,) = await trainer.logprobs([ids])
    expected = by_transformers(folder, ids)
    assert expected.std() > 0.5, "a model of equal logits would make every engine agree"
    assert np.abs(trained - expected).max() < TOLERANCE
    assert np.abs(scored - expected).max() < TOLERANCE
    assert np.abs(answer.logprobs - expected[40:]).max() < TOLERANCE
    assert (answer.versions == 0).all()
