"""Supervised fine-tuning on the trainer ranks: a warm start before RL.

await sft(config, batches, "cache/warm")     # then run with model.path=cache/warm
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from numpy.typing import ArrayLike

from areal.algorithms.batching import learning_rate, sft_request
from areal.config import Config
from areal.workers.local import model_folder
from areal.workers.megatron.launcher import start_trainer
from areal.workers.placement import place

log = logging.getLogger("areal")

Example = tuple[ArrayLike, ArrayLike]
"""Token ids [L] and their loss weights [L]; a weight of 0 leaves a token out of the loss."""


async def sft(config: Config, batches: Iterable[Sequence[Example]], folder: Path | str) -> list[float]:
    """Train `model.path` by weighted cross-entropy, one step per batch, and write the model to `folder`.

    Uses the model, optimizer, trainer and placement settings, train.steps (for the learning-rate schedule) and
    train.microbatch_tokens. Returns the loss of each step, in nats per unit of loss weight. Raises ConfigError,
    TrainerError and ProcessError.
    """
    model = await asyncio.to_thread(model_folder, config.model.path)
    losses: list[float] = []
    with tempfile.TemporaryDirectory(prefix="areal-sft-") as logs:
        trainer = await start_trainer(
            config,
            model_path=str(model),
            log_folder=logs,
            life=0,
            devices=place(config).ranks,
            roots=[Path(folder).parent],
        )
        try:
            for step, examples in enumerate(batches):
                request = await asyncio.to_thread(
                    sft_request,
                    examples,
                    life=0,
                    from_version=step,
                    batch_id=step,
                    learning_rate=learning_rate(step, config),
                    ranks=trainer.data_parallel,
                    budget=config.train.microbatch_tokens,
                    seed=config.seed,
                )
                losses.append((await trainer.train(request)).loss)
                if (step + 1) % 50 == 0:
                    log.info("warm start: step %d of %d, loss %.3f", step + 1, config.train.steps, losses[-1])
            await trainer.export(str(folder))
        finally:
            await trainer.close()
    return losses
