"""From finished groups to a training request: advantages, staleness mask, flat arrays, plan.

Sequences of advantage 0 (from a group whose rewards are all equal) are computed although their gradient is exactly 0,
because their tokens count in the token mean and in the statistics of the batch. `group.uniform = replace` avoids this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from areal.algorithms.advantages import grpo
from areal.algorithms.packing import plan
from areal.config import Config
from areal.errors import ArealError
from areal.types import NOT_SAMPLED, Batch, EpisodeRecord, FlatBatch, Floats, TrainRequest, Trajectory


def flatten(
    batch: Batch,
    *,
    version: int,
    max_staleness: int,
    advantage: Literal["grpo", "dr_grpo"],
    late: Literal["mask", "drop", "wait"],
) -> FlatBatch:
    """Flatten the batch for the step from `version` (I2).

    A stale token (`version` minus its version is above max_staleness) gets weight 0 with late="mask"; with "drop" and
    "wait" the scheduler has excluded such groups. Every sequence of an episode has the episode's advantage, computed
    over all members of its group. Sequences without loss tokens are left out.

    Raises ValueError for a trajectory with a stale token unless late="mask", a token of a future version, or a loss on
    the first token or one that no server sampled.
    """
    sequences: list[Trajectory] = []
    weights: list[Floats] = []
    advantages: list[np.float32] = []
    for group in batch.groups:
        values = grpo([episode.reward for episode in group.episodes], std=advantage == "grpo")
        for episode, value in zip(group.episodes, values, strict=True):
            for trajectory in episode.trajectories:
                keep = _young(episode, trajectory, version, max_staleness, late)
                if keep.any():
                    sequences.append(trajectory)
                    weights.append(keep.astype(np.float32))
                    advantages.append(value)
    return FlatBatch(
        ids=_join((s.ids for s in sequences), np.int32),
        lengths=np.array([len(s.ids) for s in sequences], dtype=np.int32),
        loss_weights=_join(weights, np.float32),
        logprobs=_join((s.logprobs for s in sequences), np.float32),
        versions=_join((s.versions for s in sequences), np.int32),
        advantages=np.array(advantages, dtype=np.float32),
    )


def build_request(
    batch: Batch, config: Config, *, life: int, learning_rate: float, ranks: int, seed: int
) -> TrainRequest:
    """The decoupled PPO step that consumes `batch`. The same arguments give the same request, so that a resumed run can
    repeat the step (I4); the mini-batches depend on `seed` and the batch id.

    ranks: data-parallel size. Raises ArealError if the batch has no loss tokens.
    """
    flat = flatten(
        batch,
        version=batch.from_version,
        max_staleness=config.staleness.max,
        advantage=config.algorithm.advantage,
        late=config.staleness.late,
    )
    if not len(flat.lengths):
        numbers = ", ".join(str(group.number) for group in batch.groups)
        raise ArealError(
            f"batch {batch.id} (groups {numbers}) has no token to train on: its agents sampled none, or all are stale "
            f"(staleness.max={config.staleness.max}, version {batch.from_version})"
        )
    return TrainRequest(
        life=life,
        from_version=batch.from_version,
        batch_id=batch.id,
        kind="ppo",
        batch=flat,
        minibatches=plan(
            flat.lengths,
            _per_sequence(flat),
            minibatches=config.train.minibatches,
            ranks=ranks,
            budget=config.train.microbatch_tokens,
            seed=(seed, batch.id),
        ),
        learning_rate=learning_rate,
        passes=config.train.passes,
        temperature=config.sampling.temperature,
        clip=config.algorithm.clip,
        importance_cap=config.algorithm.importance_cap,
        max_staleness=config.staleness.max,
    )


def sft_request(
    examples: Sequence[tuple[ArrayLike, ArrayLike]],
    *,
    life: int,
    from_version: int,
    batch_id: int,
    learning_rate: float,
    ranks: int,
    budget: int,
    minibatches: int = 1,
    seed: int = 0,
) -> TrainRequest:
    """A step of weighted cross-entropy on `examples`: (token ids [L], loss weights [L]) each.

    The first token's weight is ignored, since nothing predicts it. Examples without weighted tokens are left out.
    Raises ValueError if a pair differs in length, a weight is negative, or no example is left.
    """
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for number, (token_ids, token_weights) in enumerate(examples):
        ids, weights = np.asarray(token_ids, dtype=np.int32), np.array(token_weights, dtype=np.float32)
        if ids.shape != weights.shape or ids.ndim != 1:
            raise ValueError(f"example {number} has ids of shape {ids.shape} and weights of shape {weights.shape}")
        if not (weights >= 0).all():
            raise ValueError(f"example {number} has a loss weight that is negative or not a number")
        weights[:1] = 0
        if weights.any():
            pairs.append((ids, weights))
    if not pairs:
        raise ValueError(f"none of the {len(examples)} examples has a token with a loss weight after its first token")
    lengths = np.array([len(ids) for ids, _ in pairs], dtype=np.int32)
    tokens = int(lengths.sum())
    flat = FlatBatch(
        ids=_join((ids for ids, _ in pairs), np.int32),
        lengths=lengths,
        loss_weights=_join((weights for _, weights in pairs), np.float32),
        logprobs=np.zeros(tokens, dtype=np.float32),
        versions=np.full(tokens, NOT_SAMPLED, dtype=np.int32),
        advantages=np.zeros(len(pairs), dtype=np.float32),
    )
    return TrainRequest(
        life=life,
        from_version=from_version,
        batch_id=batch_id,
        kind="sft",
        batch=flat,
        minibatches=plan(
            lengths, _per_sequence(flat), minibatches=minibatches, ranks=ranks, budget=budget, seed=(seed, batch_id)
        ),
        learning_rate=learning_rate,
    )


def learning_rate(step: int, config: Config) -> float:
    """Learning rate of the step from version `step`: rises linearly over `warmup_steps` to `lr` (the first step is not
    0), then stays constant or decays (linear or half a cosine) to `min_lr` at the last of `train.steps`."""
    optimizer = config.optimizer
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / (optimizer.warmup_steps + 1)
    if optimizer.schedule == "constant":
        return optimizer.lr
    span = max(config.train.steps - 1 - optimizer.warmup_steps, 1)
    done = min((step - optimizer.warmup_steps) / span, 1.0)
    left = 1 - done if optimizer.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * left


def _young(
    episode: EpisodeRecord,
    trajectory: Trajectory,
    version: int,
    max_staleness: int,
    late: Literal["mask", "drop", "wait"],
) -> np.ndarray:
    """Which tokens enter the loss, bool [L]."""
    mask, versions = trajectory.loss_mask, trajectory.versions
    trained = versions[mask]
    where = f"group {episode.group}, member {episode.member}"
    if mask[:1].any() or (trained == NOT_SAMPLED).any():
        raise ValueError(f"{where}: a token that no server sampled has a loss")
    if (trained > version).any():
        raise ValueError(f"{where}: a token of version {trained.max()} cannot be in the step from version {version}")
    keep = mask & (version - versions <= max_staleness)
    if late != "mask" and (keep != mask).any():
        raise ValueError(
            f"{where}: a token of version {trained.min()} is stale in the step from version {version} "
            f'(max_staleness={max_staleness}), although late="{late}" excludes such groups'
        )
    return keep


def _per_sequence(flat: FlatBatch) -> np.ndarray:
    """Sum of loss weights of each sequence, [S]. Every sequence has at least one token."""
    starts = np.cumsum(flat.lengths) - flat.lengths
    return np.add.reduceat(flat.loss_weights, starts, dtype=np.float64)


def _join(arrays: Iterable[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype)
