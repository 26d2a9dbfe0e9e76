"""Records that cross module borders: frozen, slotted, arrays instead of lists.

Position convention, everywhere: entry i of a per-token array belongs to token i, and `logprobs[i]` is
log p(ids[i] | ids[:i]). Entry 0 therefore never carries a loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Task = dict[str, Any]
"""One row of the data set; `task["id"]` is a stable string."""
Message = dict[str, Any]
"""One chat message in OpenAI's form: role, content, and for an assistant `tool_calls`."""

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

Finish = Literal["stop", "length", "abort"]
NOT_SAMPLED = -1
"""The version of a token that no server sampled (prompt, user and tool tokens)."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled. No top_p, top_k or penalties: the ranks could not reproduce the log-probs (I10).

    seed: below 2**63; with it and the position, a server with --enable-deterministic-inference draws each token.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """What one `/generate` call of one server brought back; `finish == "abort"` means partial output."""

    output_ids: Ints
    logprobs: Floats
    versions: Ints
    finish: Finish
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One model call inside an episode, whole: interruptions are already stitched together.

    Shapes: input_ids [P]; output_ids, logprobs, versions [T]. `logprobs` are of the sampled tokens at the
    sampling temperature, each under the weights named by the same entry of `versions` (I6).
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
    """A finished episode: what the ledger keeps. `seconds` is wall time from start to the agent's return."""

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
    """Sequences laid end to end, no padding. T = lengths.sum(), S = number of sequences.

    ids, loss_weights, logprobs, versions: [T]; lengths, advantages: [S]. loss_weights is 0 or 1 in RL (the loss
    mask); SFT may weigh tokens in between. advantages is per sequence (all tokens of an episode share one).
    """

    ids: Ints
    lengths: Ints
    loss_weights: Floats
    logprobs: Floats
    versions: Ints
    advantages: Floats


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One optimizer step. `shards[r]` are the micro-batches of data-parallel rank r, each a tuple of sequence
    indices into the FlatBatch (possibly none); `loss_tokens` is the sum of loss_weights over all ranks, by
    which the summed loss is divided (token mean over the global batch)."""

    shards: tuple[tuple[tuple[int, ...], ...], ...]
    loss_tokens: float


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """One training step, named so that a rank can refuse or repeat it (I4).

    `kind` "ppo" is decoupled PPO (proximal log-probs once, then `passes` times over the mini-batches);
    "sft" is weighted cross-entropy. A step always takes the rank from `from_version` to `from_version + 1`.
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
    """What a step answers; means are over loss tokens of the global batch, in nats where that applies.

    logprob_gap_*: |proximal - behaviour log-prob| over the loss tokens that `from_version` itself sampled
    (NaN when there are none): the numerical disagreement of the two engines.
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
