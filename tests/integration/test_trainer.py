"""Real Megatron-core ranks: numbers against transformers and plain torch, and faults."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal.algorithms.batching import sft_request
from areal.algorithms.packing import plan
from areal.config import Config
from areal.errors import ConfigError, TrainerError, VersionConflict
from areal.types import NOT_SAMPLED, FlatBatch, MiniBatch, TrainRequest, TrainStats
from areal.workers.megatron import wire
from areal.workers.megatron.client import HttpTrainer
from areal.workers.megatron.launcher import start_trainer
from areal.workers.process import free_port
from areal.workers.protocols import WeightGroup
from tests import models
from tests.integration.conftest import RankSlot, version_of

VOCAB = models.VOCAB_SIZE
COMMON = ("optimizer.eps=1e-4", "train.microbatch_tokens=200", "trainer.timeout_s=60")
DECAY = (*COMMON, "optimizer.weight_decay=0.1", "optimizer.clip_grad=0.5")
TWO = (*COMMON, "trainer.ranks=2")
FIRST = 7
"""The version of first weights where ranks are shared."""


@asynccontextmanager
async def trainer(folder: Path, logs: Path, *settings: str, **options: Any) -> AsyncIterator[HttpTrainer]:
    config = Config.load([*COMMON, *settings])
    options = {"life": 0, "roots": [logs, logs.parent, "/proc"]} | options
    client = await start_trainer(config, model_path=str(folder), log_folder=logs, **options)
    try:
        yield client
    finally:
        await client.close()


def sequences(count: int, seed: int = 0, longest: int = 90) -> list[np.ndarray]:
    """Random ids. Not id 0: its embedding is 0, where RMSNorm's gradient is huge."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB, rng.integers(2, longest)).astype(np.int32) for _ in range(count)]


class Reference:
    """The model in transformers, trained by plain torch: no packing, no micro-batches, own formulas."""

    def __init__(self, folder: Path, weight_decay: float = 0.0, clip_grad: float = 1.0) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.clip_grad = clip_grad
        flat = [p for p in self.model.parameters() if p.ndim == 1]
        wide = [p for p in self.model.parameters() if p.ndim > 1]
        self.adam = torch.optim.AdamW(
            [{"params": wide, "weight_decay": weight_decay}, {"params": flat, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
            eps=1e-4,  # above the noise of gradients that are almost 0
        )

    def logprobs(self, ids: np.ndarray, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.from_numpy(ids.astype(np.int64))
        distribution = torch.distributions.Categorical(logits=self.model(tokens[None]).logits[0] / temperature)
        zero = torch.zeros(1)
        return (
            torch.cat((zero, distribution.log_prob(tokens.roll(-1))[:-1])),
            torch.cat((zero, distribution.entropy()[:-1])),
        )

    def train(self, request: TrainRequest) -> dict[str, float]:
        """The statistics that can be computed without the ranks' code."""
        batch = request.batch
        bounds = np.cumsum([0, *batch.lengths])
        rows = [slice(a, b) for a, b in pairwise(bounds)]
        with torch.no_grad():
            proximal = [self.logprobs(batch.ids[row], request.temperature)[0] for row in rows]
        losses, norms, entropies, clipped, importances, tokens = [], [], [], [], [], 0.0
        for mini in request.minibatches * request.passes:
            loss = torch.zeros(())
            for s in (s for shard in mini.shards for micro in shard for s in micro):
                logprobs, entropy = self.logprobs(batch.ids[rows[s]], request.temperature)
                weights = torch.from_numpy(batch.loss_weights[rows[s]])
                if request.kind == "sft":
                    loss = loss - (weights * logprobs).sum()
                else:
                    behaviour = torch.from_numpy(batch.logprobs[rows[s]])
                    importance = (proximal[s] - behaviour).exp().clamp(max=request.importance_cap)
                    ratio = (logprobs - proximal[s]).exp()
                    advantage = float(batch.advantages[s])
                    free, bounded = ratio * advantage, ratio.clamp(1 - request.clip, 1 + request.clip) * advantage
                    loss = loss - (weights * importance * torch.minimum(free, bounded)).sum()
                    clipped.append(float((weights * (bounded < free).detach()).sum()))
                    importances.append(float((weights * importance).sum()))
                entropies.append(float((weights * entropy.detach()).sum()))
            losses.append(float(loss.detach()))
            tokens += mini.loss_tokens
            self.adam.zero_grad()
            (loss / mini.loss_tokens).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)))
            for group in self.adam.param_groups:
                group["lr"] = request.learning_rate
            self.adam.step()
        stats = {"loss": sum(losses) / tokens, "grad_norm": np.mean(norms), "entropy": sum(entropies) / tokens}
        if request.kind == "ppo":
            own = (batch.versions == request.from_version) & (batch.loss_weights > 0)
            gap = np.abs(torch.cat(proximal).numpy() - batch.logprobs)[own]
            stats |= {
                "clip_fraction": sum(clipped) / tokens,
                "importance_mean": sum(importances) / tokens,
                "logprob_gap_max": gap.max() if len(gap) else np.nan,
                "logprob_gap_mean": gap.mean() if len(gap) else np.nan,
            }
        return stats


def sft(version: int, *, ranks: int = 1, seed: int = 0, count: int = 12, batch_id: int | None = None) -> TrainRequest:
    rng = np.random.default_rng(seed)
    return sft_request(
        [(ids, rng.choice([0.0, 0.3, 1.0], len(ids))) for ids in sequences(count, seed)],
        life=0,
        from_version=version,
        batch_id=version if batch_id is None else batch_id,
        learning_rate=1e-3,
        ranks=ranks,
        budget=200,
        minibatches=2,
    )


def ppo(
    version: int, reference: Reference, *, ranks: int = 1, passes: int = 2, temperature: float = 0.8
) -> TrainRequest:
    """Multi-turn-like sequences: sampled stretches of versions `version` and `version - 1` between others."""
    rng = np.random.default_rng(version)
    ids = sequences(14, seed=version)
    weights = [(rng.random(len(s)) < 0.6).astype(np.float32) for s in ids]
    for w in weights:
        w[0] = 0
        w[1] = 1
    with torch.no_grad():
        logprobs = [reference.logprobs(s, temperature)[0].numpy() for s in ids]
    noisy = [
        np.where(w > 0, p + rng.normal(0, 0.3, len(p)), 0).astype(np.float32)
        for p, w in zip(logprobs, weights, strict=True)
    ]
    versions = [np.where(w > 0, version - (rng.random(len(w)) < 0.5), NOT_SAMPLED).astype(np.int32) for w in weights]
    lengths = np.array([len(s) for s in ids], np.int32)
    return TrainRequest(
        life=0,
        from_version=version,
        batch_id=version,
        kind="ppo",
        batch=FlatBatch(
            ids=np.concatenate(ids),
            lengths=lengths,
            loss_weights=np.concatenate(weights),
            logprobs=np.concatenate(noisy),
            versions=np.concatenate(versions),
            advantages=rng.normal(size=len(ids)).astype(np.float32),
        ),
        minibatches=plan(lengths, [w.sum() for w in weights], minibatches=2, ranks=ranks, budget=200, seed=0),
        learning_rate=1e-3,
        passes=passes,
        temperature=temperature,
        clip=0.05,
        importance_cap=1.3,
        max_staleness=1,
    )


def check_stats(stats: TrainStats, expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert getattr(stats, name) == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), name


async def exported(client: HttpTrainer, folder: Path) -> dict[str, torch.Tensor]:
    await client.export(str(folder))
    return load_file(folder / "model.safetensors")


def check_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert (tensor - right[name]).abs().max() < tolerance, name


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
async def test_logprobs_and_weights_equal_transformers(
    family: models.Family, tied: bool, tmp_path: Path, tiny_qwen3: Path, tiny_qwen2: Path, rank_slot: RankSlot
) -> None:
    shared = {("qwen3", True): tiny_qwen3, ("qwen2", False): tiny_qwen2}
    source = shared.get((family, tied)) or models.build(tmp_path / "model", family, tied=tied)
    if family == "llama":  # with the scaled rotary embedding of Llama 3.1, over which the sequences reach
        path = source / "config.json"
        config = json.loads(path.read_text())
        config["rope_parameters"] |= {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
        path.write_text(json.dumps(config))
    reference = Reference(source)
    given = sequences(9, longest=150)
    if source in shared.values():
        lent = rank_slot.lend(source, *(COMMON if source == tiny_qwen3 else DECAY), version=FIRST)
    else:
        lent = trainer(source, tmp_path)
    async with lent as client:
        scores = await client.logprobs([*given, given[0][:1]])
        specs = await client.specs()
        weights = await exported(client, tmp_path / "export")
    assert scores[-1].tolist() == [0.0]
    for ids, score in zip(given, scores, strict=False):
        np.testing.assert_allclose(score, reference.logprobs(ids)[0].detach(), atol=1e-4)

    original = load_file(source / "model.safetensors")
    assert weights.keys() == original.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in original.items())
    assert {spec.name: spec.shape for spec in specs} == {n: tuple(t.shape) for n, t in original.items()}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert torch.equal(again(torch.tensor([[5, 6]])).logits, reference.model(torch.tensor([[5, 6]])).logits)
    text = "Paris is a city"
    assert AutoTokenizer.from_pretrained(tmp_path / "export")(text) == AutoTokenizer.from_pretrained(source)(text)


async def test_steps_equal_plain_torch(tmp_path: Path, tiny_qwen2: Path, rank_slot: RankSlot) -> None:
    reference = Reference(tiny_qwen2, weight_decay=0.1, clip_grad=0.5)
    async with rank_slot.lend(tiny_qwen2, *DECAY, version=FIRST) as client:
        for request in (sft(FIRST), sft(FIRST + 1, seed=1)):
            stats = await client.train(request)
            check_stats(stats, reference.train(request))
            assert np.isnan([stats.logprob_gap_max, stats.clip_fraction, stats.importance_mean]).all()
        request = ppo(FIRST + 2, reference)
        stats = await client.train(request)
        expected = reference.train(request)
        check_stats(stats, expected)
        assert stats.version == FIRST + 3
        assert stats.tokens == len(request.batch.ids)
        assert stats.loss_tokens == request.batch.loss_weights.sum()
        assert 0 < stats.clip_fraction < 1
        assert 0 < stats.importance_capped < 1
        weights = await exported(client, tmp_path / "export")
    check_weights(weights, reference.model.state_dict(), 1e-5)


async def test_bfloat16_has_float32_master_weights(tmp_path: Path, tiny_qwen3: Path) -> None:
    reference = Reference(tiny_qwen3)
    reference.model.to(torch.bfloat16).to(torch.float32)  # rounded as the ranks' weights are, trained in float32
    request = sft(0)
    async with trainer(tiny_qwen3, tmp_path, "model.dtype=bfloat16") as client:
        # Each update is below what bfloat16 can add to most weights: without a master copy nothing would change.
        for version in range(8):
            small = replace(request, from_version=version, batch_id=version, learning_rate=1e-5)
            stats = await client.train(small)
            expected = reference.train(small)
        weights = await exported(client, tmp_path / "export")
        assert {spec.dtype for spec in await client.specs()} == {"bfloat16"}
    assert stats.loss == pytest.approx(expected["loss"], rel=0.02)
    embedding = load_file(tiny_qwen3 / "model.safetensors")["model.embed_tokens.weight"]
    trained = reference.model.state_dict()["model.embed_tokens.weight"]
    moved = weights["model.embed_tokens.weight"].float() != embedding.bfloat16().float()
    expected_moved = trained.bfloat16() != embedding.bfloat16()
    assert moved.float().mean().item() == pytest.approx(expected_moved.float().mean().item(), abs=0.02)
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"


async def test_two_ranks_equal_one(tmp_path: Path, tiny_qwen3: Path, rank_slot: RankSlot) -> None:
    reference = Reference(tiny_qwen3)

    def lopsided(request: TrainRequest) -> TrainRequest:
        """All of the first mini-batch to rank 1, most of the second to rank 0."""
        first, second = request.minibatches
        (a, b) = second.shards
        return replace(
            request,
            minibatches=(
                MiniBatch(((), first.shards[0] + first.shards[1]), first.loss_tokens),
                MiniBatch((a + b[1:], b[:1]), second.loss_tokens),
            ),
        )

    def joined(request: TrainRequest) -> TrainRequest:
        return replace(
            request,
            minibatches=tuple(MiniBatch((m.shards[0] + m.shards[1],), m.loss_tokens) for m in request.minibatches),
        )

    requests = [
        ppo(FIRST, reference, ranks=2, passes=1),
        lopsided(ppo(FIRST + 1, reference, ranks=2)),
        sft(FIRST + 2, ranks=2),
    ]
    async with rank_slot.lend(tiny_qwen3, *TWO, version=FIRST) as two:
        assert two.data_parallel == 2
        given = sequences(5)
        before = await two.logprobs(given)
        double = [await two.train(request) for request in requests]
        weights_two = await exported(two, tmp_path / "two")
    async with rank_slot.lend(tiny_qwen3, *COMMON, version=FIRST) as one:
        for left, right in zip(before, await one.logprobs(given), strict=True):
            np.testing.assert_allclose(left, right, atol=1e-5)
        single = [await one.train(joined(request)) for request in requests]
        weights_one = await exported(one, tmp_path / "out")
    for left, right in zip(double, single, strict=True):
        for name in TrainStats.__dataclass_fields__:
            if name != "seconds":
                assert getattr(left, name) == pytest.approx(getattr(right, name), rel=1e-5, nan_ok=True), name
    check_weights(weights_two, weights_one, 1e-5)


# ------------------------------------------------------------------ what a rank refuses


async def test_once_and_refusals(tmp_path: Path, tiny_qwen3: Path, rank_slot: RankSlot) -> None:
    reference = Reference(tiny_qwen3)
    async with rank_slot.lend(tiny_qwen3, *COMMON, version=7) as client:
        request = ppo(7, reference)
        for wrong in (
            replace(request, from_version=6),
            replace(request, from_version=8),
            replace(request, life=1),
        ):
            with pytest.raises(VersionConflict, match="rank 0"):  # I4
                await client.train(wrong)

        batch = request.batch
        sampled = np.flatnonzero(batch.loss_weights)[3]

        def changed(name: str, index: int, value: float) -> TrainRequest:
            array = getattr(batch, name).copy()
            array[index] = value
            return replace(request, batch=replace(batch, **{name: array}))

        for bad, text in (
            (replace(request, max_staleness=0), "which is stale: staleness.max is 0"),
            (changed("versions", sampled, 5), "which is stale: staleness.max is 1"),
            (changed("versions", sampled, 8), "version 8"),
            (changed("versions", sampled, NOT_SAMPLED), "that no server sampled"),
            (changed("loss_weights", 0, 1), "first token"),
            (changed("ids", sampled, VOCAB), "vocabulary"),
            (changed("logprobs", sampled, np.nan), "gradient norm"),
        ):
            with pytest.raises(TrainerError, match=text):
                await client.train(bad)
        with pytest.raises(TrainerError, match="vocabulary"):
            await client.logprobs([np.array([1, VOCAB], np.int32)])
        with pytest.raises(ValueError, match="planned for 2 ranks"):
            await client.train(ppo(7, reference, ranks=2))

        # Nothing of that was applied.
        stats = await client.train(request)
        check_stats(stats, reference.train(request))
        first = await exported(client, tmp_path / "first")
        assert await client.train(request) == stats  # I4: the stored answer
        again = await exported(client, tmp_path / "again")
        assert all(torch.equal(first[name], again[name]) for name in first)
        with pytest.raises(VersionConflict):
            await client.train(replace(request, batch_id=99))


async def test_wrong_token(tiny_qwen3: Path, rank_slot: RankSlot) -> None:
    async with rank_slot.lend(tiny_qwen3, *COMMON) as client, aiohttp.ClientSession() as session:
        for headers in ({}, {"Authorization": "Bearer guess"}, {"Authorization": "Bearer é"}):
            for path in ("health", "train", "nothing"):
                async with session.post(f"{client._urls[0]}/{path}", headers=headers, data=b"") as response:
                    assert response.status == 401
        async with client._session.post(f"{client._urls[0]}/train", data=b"not safetensors") as response:
            assert response.status == 400
        (rank,) = client._children
        assert client._session.headers["Authorization"].split()[1] not in rank.log.read_text()


# ------------------------------------------------------------------ faults


async def test_no_room_for_an_export(tmp_path: Path, tiny_qwen3: Path, rank_slot: RankSlot) -> None:
    async with rank_slot.lend(tiny_qwen3, *COMMON) as client:
        folder = tmp_path / "weights"
        whole = await exported(client, folder)
        async with client._session.get(f"{client._urls[0]}/health") as response:
            pid = (await response.json())["pid"]
        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        for target in (folder, tmp_path / "other"):
            with pytest.raises(TrainerError, match=r"cannot write the weights to .*; [\d,]+ MB are free"):
                await client.export(str(target))
        assert [path.name for path in tmp_path.iterdir()] == ["weights"]
        check_weights(load_file(folder / "model.safetensors"), whole, 1e-9)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        await client.export(str(folder))  # replaces it
        with pytest.raises(TrainerError, match="cannot write"):
            await client.export("/proc/weights")


async def test_half_a_step_is_no_version(tmp_path: Path, tiny_qwen3: Path, rank_slot: RankSlot) -> None:
    """The second update of the step fails: the weights belong to no version and are not given away."""
    async with rank_slot.lend(tiny_qwen3, *COMMON) as client:
        request = sft(await version_of(client))
        last = max(s for micro in request.minibatches[1].shards[0] for s in micro)
        batch = request.batch
        weights = batch.loss_weights.copy()
        weights[batch.lengths[: last + 1].sum() - 1] = np.inf
        with pytest.raises(TrainerError, match="gradient norm"):
            await client.train(replace(request, batch=replace(batch, loss_weights=weights)))
        for refused in (
            client.train(request),
            client.export(str(tmp_path / "export")),
            client.logprobs(sequences(1)),
        ):
            with pytest.raises(TrainerError, match="of no version"):
                await refused
        assert not (tmp_path / "export").exists()
        await rank_slot.spoil(client)


async def test_a_rank_that_fails_does_not_hold_the_others(tiny_qwen3: Path, rank_slot: RankSlot) -> None:
    async with rank_slot.lend(tiny_qwen3, *TWO) as client:
        version = await version_of(client)
        request = sft(version, ranks=2)
        loser = request.minibatches[1].shards[1][0][0]  # a sequence of rank 1
        ids = request.batch.ids.copy()
        ids[request.batch.lengths[:loser].sum()] = VOCAB
        started = time.monotonic()
        with pytest.raises(TrainerError, match=r"rank 1.*vocabulary"):
            await client.train(replace(request, batch=replace(request.batch, ids=ids)))
        failed = time.monotonic()

        # One rank still works on a call that was given up when the other gets the next.
        bodies = [wire.pack_request(r) for r in wire.split(request, 2)]
        other = wire.pack_request(replace(wire.split(request, 2)[1], batch_id=99))
        answers = await asyncio.gather(
            client._post(0, "train", bodies[0], wire.unpack_stats, 30),
            client._post(1, "train", other, wire.unpack_stats, 30),
            return_exceptions=True,
        )
        for answer in answers:
            with pytest.raises(TrainerError, match=rf"batches \[{version}, 99\] at the same time"):
                raise answer
        began = time.monotonic()
        assert (await client.train(request)).version == version + 1  # both ranks are at the same version still
        assert failed - started < max(10, 5 * (time.monotonic() - began)), "rank 0 waited for the one that failed"


async def test_killed_rank(tiny_qwen3: Path, rank_slot: RankSlot) -> None:
    async with rank_slot.lend(tiny_qwen3, *TWO) as client:
        began = time.monotonic()
        await client.train(sft(await version_of(client), ranks=2, count=100))
        short_s = time.monotonic() - began
        long = sft(await version_of(client), ranks=2, count=2000)
        step = asyncio.create_task(client.train(long))
        await asyncio.sleep(1.0)
        assert not step.done()
        client._children[1].kill()
        killed = time.monotonic()
        with pytest.raises(TrainerError, match="rank 1 ended with code 137; the last lines of ") as raised:
            await step
        assert str(raised.value).endswith(client._children[1].tail())
        assert "rank 1 of 2 is ready" in client._children[1].log.read_text()
        assert time.monotonic() - killed < max(5, 5 * short_s), "of a step that takes 20 times as long as the short one"
        with pytest.raises(TrainerError, match="rank 1 ended"):
            await client.specs()


async def test_start_failures(tmp_path: Path, tiny_qwen3: Path) -> None:
    config = Config.load(["trainer.start_timeout_s=60"])
    with pytest.raises(ConfigError, match="no model folder"):
        await start_trainer(config, model_path="no/such", log_folder=tmp_path, life=0)
    with pytest.raises(ConfigError, match=r"placement\.ranks"):
        await start_trainer(config, model_path=str(tiny_qwen3), log_folder=tmp_path, life=0, devices=[0, 1])
    assert not list(tmp_path.iterdir())

    models.build(tmp_path / "model", "qwen3")
    path = tmp_path / "model" / "config.json"
    path.write_text(path.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(TrainerError, match=r"rank 0 ended with code 1(.|\n)*has no tensor model\.layers\.2\."):
        await start_trainer(config, model_path=str(tmp_path / "model"), log_folder=tmp_path, life=0)
    with pytest.raises(TrainerError, match="was not ready after"):
        await start_trainer(
            Config.load(["trainer.start_timeout_s=0.1"]), model_path=str(tiny_qwen3), log_folder=tmp_path, life=0
        )


ADAM = """
from areal.workers.megatron import cpu
assert cpu.install() and cpu.fix_adam_state()
import torch, torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
module = torch.nn.Linear(4, 2)
config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, calculate_per_token_loss=True)
model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), module)
optimizer = get_megatron_optimizer(
    OptimizerConfig(lr=0.1, use_distributed_optimizer=True), [model], use_gloo_process_groups=False)

def step():
    model.zero_grad_buffer()
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    model.finish_grad_sync()
    optimizer.step()

step()
step()
inner = optimizer.chained_optimizers[0]
saved = {p: inner._get_main_param_and_optimizer_states(p) for p in module.parameters()}
saved = {p: {k: v.clone() for k, v in tensors.items() if k != "step"} for p, tensors in saved.items()}
shared = torch.tensor(2.0)
for state in inner.optimizer.state.values():
    state["step"] = shared  # as a loaded checkpoint leaves it
for p, tensors in saved.items():
    inner._set_main_param_and_optimizer_states(p, tensors)
step()
steps = [state["step"].item() for state in inner.optimizer.state.values()]
assert steps == [3.0, 3.0], steps
"""


async def test_loaded_adam_counts_steps_per_parameter() -> None:
    """A private method of Megatron-core is replaced: this fails when it has changed."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", ADAM, stderr=subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()


# ------------------------------------------------------------------ weight groups

RECEIVER = """
import json, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous
from safetensors.torch import save_file

port, name, limit, out = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
specs = json.loads(sys.stdin.read())
print("here", flush=True)
store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=timedelta(seconds=30)))
group, _ = _new_process_group_helper(
    2, 1, [], Backend("gloo"), PrefixStore(name, store), group_name=name, timeout=timedelta(seconds=30))
_world.pg_group_ranks[group] = {0: 0, 1: 1}
received = {}
for tensor_name, dtype, shape in specs[:limit]:
    received[tensor_name] = torch.empty(shape, dtype=getattr(torch, dtype))
    dist.broadcast(received[tensor_name], src=0, group=group)
save_file(received, out)
print("received", flush=True)
if limit < len(specs):
    time.sleep(60)
"""
"""A server's end of the group, in plain torch. It stops after `limit` tensors."""


async def test_broadcast_and_a_receiver_that_stops(tmp_path: Path) -> None:
    wide = models.build(tmp_path / "wide", hidden_size=256)  # more than the sockets hold
    out = tmp_path / "received.safetensors"
    async with trainer(wide, tmp_path, "weights.timeout_s=5") as client:
        specs = await client.specs()

        received_at = 0.0

        async def publish(number: int, limit: int, *, dies: bool = False) -> None:
            nonlocal received_at
            group = WeightGroup(f"publication-{number}", "127.0.0.1", free_port(), 2, "gloo")
            receiver = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", RECEIVER, str(group.port), group.name, str(limit), str(out)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            try:
                receiver.stdin.write(json.dumps([(s.name, s.dtype, s.shape) for s in specs]).encode())
                receiver.stdin.close()
                assert await receiver.stdout.readline() == b"here\n"  # torch takes seconds to import
                await client.join_group(group)
                sending = asyncio.create_task(client.broadcast(group.name))
                assert await receiver.stdout.readline() == b"received\n"
                received_at = time.monotonic()
                if dies:
                    receiver.kill()
                await sending
                await client.leave_group(group.name)
                assert await receiver.wait() == 0
            finally:
                if receiver.returncode is None:
                    receiver.kill()
                await receiver.wait()

        with pytest.raises(TrainerError, match="not joined"):
            await client.broadcast("publication-0")
        for dies in (False, True):
            with pytest.raises(TrainerError, match="weight group publication-1"):
                await publish(1, 3, dies=dies)
            assert time.monotonic() - received_at < 20
        with pytest.raises(TrainerError, match="was not formed"):  # nobody joins
            await client.join_group(WeightGroup("publication-2", "127.0.0.1", free_port(), 2, "gloo"))
        with socket.create_server(("127.0.0.1", 0)) as taken:
            busy = WeightGroup("publication-3", "127.0.0.1", taken.getsockname()[1], 2, "gloo")
            with pytest.raises(TrainerError, match="was not formed"):
                await client.join_group(busy)

        await client.train(sft(0))
        await publish(4, len(specs))
        weights = await exported(client, tmp_path / "export")
    received = load_file(out)
    assert list(weights) == sorted(received)
    assert all(torch.equal(received[name], tensor) for name, tensor in weights.items())
