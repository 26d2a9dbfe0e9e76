"""From finished groups to a training request: advantages, staleness mask, flat arrays, plan.

Sequences of advantage 0 (a group whose rewards are all equal) are computed although their gradient is exactly 0: their
tokens belong to the token mean, and entropy, clip fraction and log-prob gap stay those of the whole batch.
`group.uniform = replace` is what saves that work.
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
    """Lay the batch out for the step from `version`, sequence after sequence (I2).

    A token of staleness `version - its version` above max_staleness gets weight 0 with late="mask"; with "drop" and
    "wait" the scheduler has kept such groups out, and one is an error. Every sequence of an episode carries the
    episode's advantage, computed over all members of its group. Sequences left without a loss token are left out.

    Raises ValueError for a trajectory that breaks a contract: a late token with late="drop", a token from a version
    yet to come, a loss on a token that no server sampled or on the first token.
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
    """The decoupled PPO step that consumes `batch`. The same arguments give the same request, so that a recovered run
    repeats the step (I4); each batch draws its own mini-batches from `seed`.

    ranks: data-parallel size. Raises ArealError when no token of the batch can be trained on.
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
            f"batch {batch.id} (groups {numbers}) has no token to train on: its agents sampled none, or all are more "
            f"than staleness.max={config.staleness.max} steps older than version {batch.from_version}"
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

    The first token's weight counts as 0: nothing predicts it. Examples without a weighted token are left out.
    Raises ValueError when a pair differs in length, a weight is negative, or nothing is left.
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
    """Learning rate of the step from version `step`: it rises over `warmup_steps` (the first is not 0) to `lr`, then
    stays or falls (a line or half a cosine) to `min_lr` at the last of `train.steps`, and stays there."""
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
        raise ValueError(f"{where}: a token that no server sampled carries a loss")
    if (trained > version).any():
        raise ValueError(f"{where}: a token of version {trained.max()} cannot be in the step from version {version}")
    keep = mask & (version - versions <= max_staleness)
    if late != "mask" and (keep != mask).any():
        raise ValueError(
            f"{where}: a token of version {trained.min()} is older than max_staleness={max_staleness} allows in the "
            f'step from version {version}, and late="{late}" keeps such a group out of the batch'
        )
    return keep


def _per_sequence(flat: FlatBatch) -> np.ndarray:
    """Sum of loss weights of each sequence, [S]. Every sequence has at least one token."""
    starts = np.cumsum(flat.lengths) - flat.lengths
    return np.add.reduceat(flat.loss_weights, starts, dtype=np.float64)


def _join(arrays: Iterable[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype)
