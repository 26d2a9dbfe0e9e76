"""Records shared between modules: frozen, slotted, arrays instead of lists.

Position convention: entry i of a per-token array belongs to token i, and `logprobs[i]` is log p(ids[i] | ids[:i]).
Entry 0 therefore never has a loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Task = dict[str, Any]
"""One row of the data set; `task["id"]` is a stable string."""
Message = dict[str, Any]
"""One chat message in OpenAI's format: role, content, and for an assistant `tool_calls`."""

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

Finish = Literal["stop", "length", "abort"]
NOT_SAMPLED = -1
"""The version of a token that no server sampled (prompt, user and tool tokens)."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled. No top_p, top_k or penalties: the ranks could not reproduce the log-probs (I10).

    seed: below 2**63; servers with --enable-deterministic-inference draw each token from it and the position.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to one `/generate` request; `finish == "abort"` means partial output."""

    output_ids: Ints
    logprobs: Floats
    versions: Ints
    finish: Finish
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole model call of an episode, its requests joined.

    Shapes: input_ids [P]; output_ids, logprobs, versions [T]. `logprobs` are those of the sampled tokens at the
    sampling temperature, under the weights that the same entry of `versions` names (I6).
    """

    input_ids: Ints
    output_ids: Ints
    logprobs: Floats
    versions: Ints
    finish: Finish
    interruptions: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One token sequence that training sees. All arrays have shape [L].

    loss_mask is True on sampled tokens only; versions is NOT_SAMPLED and logprobs 0 elsewhere.
    """

    ids: Ints
    loss_mask: Bools
    logprobs: Floats
    versions: Ints


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """A finished episode as the ledger keeps it. `seconds` is the wall time from start to the agent's return."""

    group: int
    member: int
    task_id: str
    reward: float
    trajectories: tuple[Trajectory, ...]
    turns: int = 0
    forks: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """The finished episodes of one task. `number` counts admitted groups from 0."""

    number: int
    task_id: str
    episodes: tuple[EpisodeRecord, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups that the step from `from_version` to `from_version + 1` consumes."""

    id: int
    from_version: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """Sequences concatenated without padding. T = lengths.sum(), S = number of sequences.

    ids, loss_weights, logprobs, versions: [T]; lengths, advantages: [S]. loss_weights is 0 or 1 in RL (the loss
    mask) and may lie in between in SFT. All tokens of an episode share one advantage.
    """

    ids: Ints
    lengths: Ints
    loss_weights: Floats
    logprobs: Floats
    versions: Ints
    advantages: Floats


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One optimizer update. `shards[r]` are the micro-batches of data-parallel rank r (possibly none), each a tuple of
    sequence indices into the FlatBatch. The summed loss is divided by `loss_tokens`, the sum of loss_weights over all
    ranks (a token mean over the mini-batch)."""

    shards: tuple[tuple[tuple[int, ...], ...], ...]
    loss_tokens: float


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """One training step from `from_version` to `from_version + 1`, named so that a rank can refuse or repeat it (I4).

    `kind` "ppo" is decoupled PPO (proximal log-probs once, then `passes` over the mini-batches); "sft" is weighted
    cross-entropy.
    """

    life: int
    from_version: int
    batch_id: int
    kind: Literal["ppo", "sft"]
    batch: FlatBatch
    minibatches: tuple[MiniBatch, ...]
    learning_rate: float
    passes: int = 1
    temperature: float = 1.0
    clip: float = 0.2
    importance_cap: float = 5.0
    max_staleness: int = 0


@dataclass(frozen=True, slots=True)
class TrainStats:
    """Statistics of a step. Means are over the loss tokens of the global batch, in nats where that applies.

    logprob_gap_*: |proximal - behaviour log-prob| over the loss tokens sampled by `from_version` itself (NaN if there
    are none), which is the numerical difference between the two engines.
    """

    version: int
    loss: float
    grad_norm: float
    entropy: float
    clip_fraction: float
    importance_mean: float
    importance_capped: float
    logprob_gap_max: float
    logprob_gap_mean: float
    tokens: int
    loss_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name (Hugging Face), dtype ("float32", "bfloat16") and shape of one exported tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
