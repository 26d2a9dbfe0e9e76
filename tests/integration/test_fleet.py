"""SGLangClient and Fleet over a real SGLang server; log-probs against transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.config import Config
from areal.controller.fleet import Fleet
from areal.errors import ServerError
from areal.types import Completion, Floats, Ints, Sampling
from areal.workers.protocols import make_label
from areal.workers.sglang.client import UNUSABLE_TOKENS, SGLangClient
from tests import models
from tests.integration.conftest import KEY, ORIGIN, Server

END = models.SPECIAL_TOKENS.index("<|im_end|>")
TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def other_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The architecture of tiny_qwen3 with other weights."""
    return models.build(tmp_path_factory.mktemp("models") / "other", "qwen3", seed=1)


def reference(folder: Path, ids: Ints, temperature: float = 1.0) -> Floats:
    """Log-probs [L] of the tokens themselves by transformers; entry 0 is 0."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        logprobs = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)
    picked = logprobs[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
    return np.concatenate((np.zeros(1, np.float32), picked))


def check(completion: Completion, folders: dict[int, Path], temperature: float = 1.0) -> None:
    """Assert that each sampled token has the log-prob that the weights of its own version give it (I6)."""
    whole = np.concatenate((completion.input_ids, completion.output_ids))
    sampled = slice(len(completion.input_ids), None)
    for version in np.unique(completion.versions):
        own = completion.versions == version
        expected = reference(folders[int(version)], whole, temperature)[sampled]
        assert np.abs(completion.logprobs - expected)[own].max() < TOLERANCE


def prompt(length: int, seed: int = 0) -> Ints:
    return np.random.default_rng(seed).integers(10, 400, length).astype(np.int32)


@asynccontextmanager
async def fleet_of(server: Server) -> AsyncIterator[Fleet]:
    client = SGLangClient(server.url, origin=ORIGIN, vocab_size=models.VOCAB_SIZE, key=KEY, timeout_s=60.0)
    fleet = Fleet(Config.load(["servers.request_timeout_s=60"]), [client], origin=ORIGIN, stop_ids=[END])
    run = asyncio.create_task(fleet.run())
    try:
        await fleet.ready()
        yield fleet
    finally:
        await fleet.close()
        await run


def running(server: Server) -> int:
    (load,) = server.get("/v1/loads")["loads"]
    return load["num_running_reqs"] + load["num_waiting_reqs"]


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> float:
    """Wait until the server says so; the seconds that it took."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.01)
    return loop.time() - started


async def load(fleet: Fleet, folder: Path, version: int) -> None:
    """What a publication does, without the trainer."""
    (server,) = fleet.servers
    await fleet.interrupt(server)
    await server.client.load_disk(str(folder), make_label(ORIGIN, version))
    await server.client.flush()
    fleet.accept(server, make_label(ORIGIN, version))


async def test_what_the_server_says_of_itself(sglang_server: Server) -> None:
    async with fleet_of(sglang_server) as fleet:
        info = await fleet.servers[0].client.info()
        assert (info.label, info.context_length) == ("test.0:0", models.CONTEXT_LENGTH)
        assert info.model_path == str(sglang_server.model)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_those_of_the_sampling_distribution(sglang_server: Server, temperature: float) -> None:
    async with fleet_of(sglang_server) as fleet:
        sampling = Sampling(64, temperature, ignore_eos=True)
        completion = await fleet.generate(prompt(20), sampling, key="e")
        assert (len(completion.output_ids), completion.finish) == (64, "length")
        check(completion, {0: sglang_server.model}, temperature)


async def test_score(sglang_server: Server) -> None:
    async with fleet_of(sglang_server) as fleet:
        ids = prompt(80)
        scored = await fleet.servers[0].client.score(ids)
        assert np.abs(scored - reference(sglang_server.model, ids)).max() < TOLERANCE


async def test_the_longest_prompt_that_an_episode_may_have(sglang_server: Server) -> None:
    async with fleet_of(sglang_server) as fleet:
        longest = models.CONTEXT_LENGTH - UNUSABLE_TOKENS - 1
        completion = await fleet.generate(prompt(longest), Sampling(1), key="e")
        assert len(completion.output_ids) == 1
        with pytest.raises(ServerError, match=f"exceeds the maximum allowed length.*{longest + 1}"):
            await fleet.generate(prompt(longest + 1), Sampling(1), key="e")


async def test_i6_calls_that_new_weights_interrupt(sglang_server: Server, other_qwen3: Path) -> None:
    """Twice, 16 at a time: every token has the version, and the log-prob, of the weights that sampled it."""
    folders = {0: sglang_server.model, 1: other_qwen3, 2: sglang_server.model}
    async with fleet_of(sglang_server) as fleet:
        calls = [
            asyncio.create_task(fleet.generate(prompt(10 + i, i), Sampling(500, ignore_eos=True), key=f"e{i}"))
            for i in range(16)
        ]
        for version in (1, 2):
            await until(lambda: running(sglang_server) == 16)
            await asyncio.sleep(0.3)  # some tokens of each version
            await load(fleet, folders[version], version)
        for call in calls:
            completion = await call
            assert (len(completion.output_ids), completion.interruptions) == (500, 2)
            assert set(completion.versions) == {0, 1, 2}
            assert (np.diff(completion.versions) >= 0).all()
            check(completion, folders)


async def test_an_end_token_in_an_aborted_answer_ends_it(sglang_server: Server) -> None:
    """A hot model ends soon; whatever the moment of the abort, nothing may follow an end token."""
    async with fleet_of(sglang_server) as fleet:
        sampling = Sampling(400, temperature=3.0)
        calls = [asyncio.create_task(fleet.generate(prompt(8, i), sampling, key=f"e{i}")) for i in range(48)]
        while not all(call.done() for call in calls):
            await asyncio.sleep(0.2)  # a busy machine must come some tokens further in between
            (server,) = fleet.servers
            await fleet.interrupt(server)
            fleet.accept(server, "test.0:0")
        interrupted = 0
        for call in calls:
            completion = await call
            ends = np.flatnonzero(completion.output_ids == END)
            assert (ends[0] == len(completion.output_ids) - 1) if len(ends) else len(completion.output_ids) == 400
            interrupted += completion.interruptions
        assert interrupted > 10


async def test_i8_cancelling_frees_the_place(sglang_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet_of(sglang_server) as fleet:
        loop = asyncio.get_running_loop()
        posted: list[float] = []
        client = fleet.servers[0].client
        abort = client.abort

        async def noted(rid: str) -> None:
            await abort(rid)
            posted.append(loop.time())

        monkeypatch.setattr(client, "abort", noted)
        calls = [
            asyncio.create_task(fleet.generate(prompt(10, i), Sampling(3000, ignore_eos=True), key=f"e{i}"))
            for i in range(8)
        ]
        await until(lambda: running(sglang_server) == 8)
        trips = []
        for _ in range(10):  # what a question takes that waits for no token, on a machine as busy as this one
            asked = loop.time()
            await client.info()
            trips.append(loop.time() - asked)
        at_once = max(0.1, 2 * max(trips))
        cancelled = loop.time()
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert loop.time() - cancelled < at_once
        assert await until(lambda: running(sglang_server) == 0) < 20 * at_once
        assert posted[0] - cancelled < at_once
        async with asyncio.timeout(20 * at_once):
            while fleet.stats().running:  # the answers are still on their way
                await asyncio.sleep(0.01)


async def test_what_the_server_refuses_is_named(sglang_server: Server) -> None:
    async with fleet_of(sglang_server) as fleet:
        with pytest.raises(ServerError, match=r"/generate: HTTP 400: .*longer than the model's context length"):
            await fleet.generate(prompt(models.CONTEXT_LENGTH + 5), Sampling(4), key="e")
        assert len((await fleet.generate(prompt(5), Sampling(4, ignore_eos=True), key="e")).output_ids) == 4
