"""Tokens/s of real Megatron ranks on long-tailed lengths: algorithm 1 against a fixed number of micro-batches.

Both stay within the same token budget. The fixed number is what one would have to set by hand: the smallest for which
no micro-batch of any batch is over budget, each rank taking an equal count of sequences in the order of arrival.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from areal.algorithms.packing import plan
from areal.config import Config
from areal.types import FlatBatch, MiniBatch, TrainRequest
from areal.workers.megatron.launcher import start_trainer
from benchmarks.table import arguments, report
from tests import models

SEQUENCES, MEDIAN, LONGEST, BUDGET = 256, 64, 1536, 2048
BATCHES = 3


def draw(seed: int) -> FlatBatch:
    """Lognormal lengths, as of reasoning traces; what the tokens are does not matter for speed."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN), 1.2, SEQUENCES), 4, LONGEST).astype(np.int32)
    tokens = int(lengths.sum())
    weights = np.ones(tokens, dtype=np.float32)
    weights[np.cumsum(lengths) - lengths] = 0
    return FlatBatch(
        ids=rng.integers(0, 256, tokens, dtype=np.int32),
        lengths=lengths,
        loss_weights=weights,
        logprobs=np.full(tokens, -5, dtype=np.float32),
        versions=np.zeros(tokens, dtype=np.int32),
        advantages=rng.normal(size=SEQUENCES).astype(np.float32),
    )


def dynamic(batch: FlatBatch, ranks: int) -> MiniBatch:
    loss_tokens = batch.lengths - 1
    (step,) = plan(batch.lengths, loss_tokens, minibatches=1, ranks=ranks, budget=BUDGET, seed=0)
    return step


def fixed(batch: FlatBatch, ranks: int, count: int) -> MiniBatch:
    shards = np.array_split(np.arange(SEQUENCES), ranks)
    return MiniBatch(
        shards=tuple(tuple(tuple(part.tolist()) for part in np.array_split(shard, count)) for shard in shards),
        loss_tokens=float((batch.lengths - 1).sum()),
    )


def largest(batch: FlatBatch, step: MiniBatch) -> int:
    return max(int(batch.lengths[list(micro)].sum()) for shard in step.shards for micro in shard)


async def measure(ranks: int, model: Path, folder: Path) -> list[dict[str, Any]]:
    batches = [draw(seed) for seed in range(BATCHES)]
    count = next(n for n in range(1, SEQUENCES + 1) if all(largest(b, fixed(b, ranks, n)) <= BUDGET for b in batches))
    plans = {
        "algorithm 1": [dynamic(batch, ranks) for batch in batches],
        f"fixed, {count} per rank": [fixed(batch, ranks, count) for batch in batches],
    }
    seconds = dict.fromkeys(plans, 0.0)
    config = Config.load([], {"trainer.ranks": ranks, "train.microbatch_tokens": BUDGET})
    trainer = await start_trainer(config, model_path=str(model), log_folder=folder, life=0)
    version = 0
    try:
        # The first batch warms up. The plans take turns, so that other load on the machine meets both.
        for turn, index in enumerate([0, *range(BATCHES)]):
            for name, steps in plans.items():
                request = TrainRequest(
                    life=0,
                    from_version=version,
                    batch_id=version,
                    kind="ppo",
                    batch=batches[index],
                    minibatches=(steps[index],),
                    learning_rate=1e-6,
                    max_staleness=version,
                )
                stats = await trainer.train(request)
                version = stats.version
                seconds[name] += stats.seconds if turn else 0.0
    finally:
        await trainer.close()
    tokens = sum(int(batch.lengths.sum()) for batch in batches)
    slowest = min(tokens / seconds[name] for name in plans)
    return [
        {
            "ranks": ranks,
            "plan": name,
            "microbatches": round(sum(len(shard) for step in steps for shard in step.shards) / BATCHES, 1),
            "largest": max(largest(batch, step) for batch, step in zip(batches, steps, strict=True)),
            "tokens_s": tokens / seconds[name],
            "speedup": tokens / seconds[name] / slowest,
        }
        for name, steps in plans.items()
    ]


async def main(json_path: str | None) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = await asyncio.to_thread(models.build, folder / "model", "qwen3", hidden_size=128)
        rows = [row for ranks in (1, 2) for row in await measure(ranks, model, folder)]
    report(
        f"packing: {SEQUENCES} sequences a step, median {MEDIAN}, longest {LONGEST}; micro-batches of at most {BUDGET}",
        rows,
        json_path,
    )


if __name__ == "__main__":
    asyncio.run(main(arguments().json))
