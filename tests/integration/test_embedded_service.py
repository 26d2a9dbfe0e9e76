"""The embedded service with users who ask and rate over HTTP, on real SGLang and a real rank."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import pytest

from areal import Config
from areal.workers.process import free_port

ROOT = Path(__file__).parent.parent.parent


def load_example() -> ModuleType:
    path = ROOT / "examples" / "agentic" / "embedded_service.py"
    spec = importlib.util.spec_from_file_location("embedded_service", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(300)
async def test_the_service_answers_its_users_and_learns_from_their_ratings(
    tiny_qwen3: Path, tmp_path: Path, given_server: dict[str, Any]
) -> None:
    example, port = load_example(), free_port()
    settings = {
        **example.DEFAULTS,
        "model.path": str(tiny_qwen3),
        "model.context_length": 256,
        "folder": str(tmp_path),
        "train.steps": 3,
        "sampling.max_new_tokens": 8,
        "optimizer.lr": 1e-2,
        **given_server,
    }
    service = asyncio.create_task(example.serve(Config.load(defaults=settings), port))
    rated: list[float] = []

    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:

        async def user(number: int) -> None:
            """Asks; likes drafts in which lower-case letters prevail."""
            async with http.post("/ask", json={"question": f"where does person {number} live?"}) as answer:
                assert answer.status == 200, await answer.text()
                drafts = (await answer.json())["drafts"]
            assert len(drafts) == 2
            for draft in drafts:
                text = draft["text"]
                rating = sum(letter.islower() for letter in text) / max(1, len(text))
                async with http.post("/rate", json={"id": draft["id"], "rating": rating}) as answer:
                    assert answer.status == 204, await answer.text()
                rated.append(rating)

        async def users() -> None:
            number = 0
            while not service.done():
                try:
                    async with asyncio.timeout(100):
                        await user(number)
                    number += 1
                except aiohttp.ClientError:
                    await asyncio.sleep(0.2)  # not started yet, or just ended

        visits = asyncio.create_task(users())
        while len(rated) < 2:
            await asyncio.sleep(0.1)
        for body, status in (
            ({"id": "question-1.0", "rating": 1}, 404),
            ({"id": "question-1.0", "rating": 7}, 400),
            ([1], 400),
        ):
            async with http.post("/rate", json=body) as answer:
                assert answer.status == status
        async with http.post("/ask", data=b"not json") as answer:
            assert answer.status == 400
        await service
        visits.cancel()

    summary = json.loads((tmp_path / "service-0001" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["groups"]["trained"] == 12
    lines = [json.loads(line) for line in (tmp_path / "service-0001" / "metrics.jsonl").read_text().splitlines()]
    trained = sum(line["reward"] * 8 for line in lines)  # 4 questions x 2 drafts a step
    assert 0 < trained <= sum(rated) + 1e-6, "a reward that no user gave"
    assert (tmp_path / "service-0001" / "checkpoints" / "step-3" / "model.safetensors").exists()
