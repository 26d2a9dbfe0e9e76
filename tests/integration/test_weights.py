"""WeightSync from real Megatron ranks to a real SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from areal.algorithms.batching import sft_request
from areal.config import Config
from areal.controller.fleet import Fleet
from areal.controller.ranks import Ranks
from areal.controller.weights import PublishStats, WeightSync, probe_ids
from areal.errors import PublishError
from areal.types import Floats, Ints, Sampling
from areal.workers.protocols import TrainerClient, Workers
from areal.workers.sglang.client import SGLangClient
from tests import models
from tests.integration.conftest import KEY, ORIGIN, RankSlot, Server, version_of
from tests.integration.test_fleet import check, prompt, running, until

TRANSPORTS = pytest.mark.parametrize("transport", ["disk", "group"])


@dataclass
class Run:
    fleet: Fleet
    weights: WeightSync
    trainer: TrainerClient
    version: int

    async def step(self) -> None:
        """A step with a learning rate that shows."""
        ids = [prompt(40, seed=100 * self.version + i) for i in range(8)]
        request = sft_request(
            [(row, np.ones(len(row), np.float32)) for row in ids],
            life=0,
            from_version=self.version,
            batch_id=self.version,
            learning_rate=3e-3,
            ranks=self.trainer.data_parallel,
            budget=512,
            minibatches=2,
        )
        self.version = (await self.trainer.train(request)).version

    async def publish(self) -> PublishStats:
        return await self.weights.publish(self.version)


@asynccontextmanager
async def running_with(
    server: Server, rank_slot: RankSlot, folder: Path, transport: str, version: int | None = None
) -> AsyncIterator[Run]:
    config = Config.load([f"weights.transport={transport}", "weights.timeout_s=60"])
    client = SGLangClient(server.url, origin=ORIGIN, vocab_size=models.VOCAB_SIZE, key=KEY, timeout_s=60.0)
    fleet = Fleet(config, [client], origin=ORIGIN)
    async with rank_slot.lend(server.model, version=version) as trainer:
        held = await version_of(trainer)
        weights = WeightSync(
            config,
            fleet,
            Ranks(cast(Workers, None), trainer, held),
            folder / "weights",
            origin=ORIGIN,
            probe=probe_ids(models.VOCAB_SIZE),
        )
        run = asyncio.create_task(fleet.run(weights.sync_server))
        try:
            yield Run(fleet, weights, trainer, held)
        finally:
            await weights.close()
            await fleet.close()
            await run


@TRANSPORTS
async def test_i6_published_weights_are_the_trainers(
    sglang_server: Server, rank_slot: RankSlot, tmp_path: Path, transport: str
) -> None:
    """Two publications while calls run: the verified gap, and every token's log-prob by its own weights."""
    async with running_with(sglang_server, rank_slot, tmp_path, transport, version=0) as run:
        folders = {0: sglang_server.model}
        calls = [
            asyncio.create_task(run.fleet.generate(prompt(10, i), Sampling(700, ignore_eos=True), key=f"e{i}"))
            for i in range(8)
        ]
        for version in (1, 2):
            await until(lambda: running(sglang_server) == 8)
            await run.step()
            folders[version] = tmp_path / f"reference-{version}"
            await run.trainer.export(str(folders[version]))
            before = (await run.trainer.logprobs([prompt(60)]))[0]
            stats = await run.publish()
            assert (stats.version, stats.servers, stats.failed) == (version, 1, ())
            assert stats.gap < 1e-4
            after = await run.fleet.servers[0].client.score(prompt(60))
            assert np.abs(after - before).max() < 1e-4
            assert run.fleet.lowest_version() == version
        for call in calls:
            completion = await call
            assert len(completion.output_ids) == 700
            assert set(completion.versions) == {0, 1, 2}
            check(completion, folders)


@TRANSPORTS
async def test_weights_that_are_not_the_trainers_do_not_serve(
    sglang_server: Server, rank_slot: RankSlot, tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verification has teeth: one step's difference is enough for it."""
    async with running_with(sglang_server, rank_slot, tmp_path, transport) as run:
        before = await run.trainer.logprobs([probe_ids(models.VOCAB_SIZE)])
        await run.step()

        async def logprobs(sequences: Sequence[Ints]) -> list[Floats]:
            return before

        monkeypatch.setattr(run.trainer, "logprobs", logprobs)
        server = run.fleet.servers[0]
        with pytest.raises(PublishError, match=r"its log-probs differ from the trainer's by \d"):
            await run.publish()
        assert server.state == "dead"
