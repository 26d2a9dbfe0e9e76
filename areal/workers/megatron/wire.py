"""Messages between controller and ranks: a safetensors body whose metadata holds JSON. Never pickle.

`split` makes the requests of single ranks: TrainRequests with that rank's sequences, indexed from 0, and one shard per
mini-batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from areal.types import FlatBatch, MiniBatch, TensorSpec, TrainRequest, TrainStats

TOKEN = "AREAL_TRAINER_TOKEN"
"""Environment variable with the bearer token that a rank requires."""


class WireError(ValueError):
    """A malformed body."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Settings of a rank, besides torchrun's RANK and WORLD_SIZE, the store file and the token. checkpoint: a folder
    to load instead of `model_path`, or "". register: the host:port to which the rank sends its address once it is
    ready. roots: the only folders that it may write to."""

    model_path: str
    checkpoint: str
    dtype: str
    life: int
    version: int
    microbatch_tokens: int
    timeout_s: float
    group_timeout_s: float
    register: str
    roots: Sequence[str]
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_grad: float


def pack(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> bytes:
    return save(dict(arrays or {}), {"json": json.dumps(meta)})


def unpack(body: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The inverse of `pack`. Raises WireError."""
    try:
        arrays = load(body)
        size = int.from_bytes(body[:8], "little")
        return json.loads(json.loads(body[8 : 8 + size])["__metadata__"]["json"]), arrays
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise WireError(f"a body of {len(body)} bytes is not a valid message: {error!r}") from None


def pack_request(request: TrainRequest) -> bytes:
    meta = {field.name: getattr(request, field.name) for field in fields(request) if field.name != "batch"}
    meta["minibatches"] = [(mini.shards, mini.loss_tokens) for mini in request.minibatches]
    return pack(meta, {field.name: getattr(request.batch, field.name) for field in fields(request.batch)})


def unpack_request(body: bytes) -> TrainRequest:
    """Raises WireError."""
    meta, arrays = unpack(body)
    try:
        meta["minibatches"] = tuple(
            MiniBatch(tuple(tuple(tuple(micro) for micro in shard) for shard in shards), tokens)
            for shards, tokens in meta["minibatches"]
        )
        return TrainRequest(batch=FlatBatch(**arrays), **meta)
    except (KeyError, TypeError) as error:
        raise WireError(f"not a training request: {error}") from None


def pack_stats(stats: TrainStats) -> bytes:
    return pack({field.name: getattr(stats, field.name) for field in fields(stats)})


def unpack_stats(body: bytes) -> TrainStats:
    """Raises WireError."""
    try:
        return TrainStats(**unpack(body)[0])
    except TypeError as error:
        raise WireError(f"not training statistics: {error}") from None


def pack_sequences(sequences: Sequence[np.ndarray], dtype: type[np.generic]) -> bytes:
    flat = np.concatenate([np.zeros(0, dtype), *sequences], dtype=dtype)
    return pack({}, {"flat": flat, "lengths": np.array([len(s) for s in sequences], dtype=np.int32)})


def unpack_sequences(body: bytes) -> list[Any]:
    """Raises WireError."""
    _, arrays = unpack(body)
    try:
        return np.split(arrays["flat"], np.cumsum(arrays["lengths"])[:-1]) if len(arrays["lengths"]) else []
    except KeyError as error:
        raise WireError(f"not sequences: no {error}") from None


def pack_specs(specs: Sequence[TensorSpec]) -> bytes:
    return pack({"specs": [(spec.name, spec.dtype, spec.shape) for spec in specs]})


def unpack_specs(body: bytes) -> list[TensorSpec]:
    """Raises WireError."""
    try:
        return [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in unpack(body)[0]["specs"]]
    except (KeyError, ValueError, TypeError) as error:
        raise WireError(f"not tensor specs: {error}") from None


def split(request: TrainRequest, ranks: int) -> list[TrainRequest]:
    """One request per data-parallel rank, with its sequences only.

    Raises ValueError if a mini-batch has another number of shards or names a sequence that does not exist.
    """
    for number, mini in enumerate(request.minibatches):
        if len(mini.shards) != ranks:
            raise ValueError(f"mini-batch {number} is planned for {len(mini.shards)} ranks, but there are {ranks}")
    return [_for_rank(request, rank) for rank in range(ranks)]


def _for_rank(request: TrainRequest, rank: int) -> TrainRequest:
    batch = request.batch
    numbers = sorted({s for mini in request.minibatches for micro in mini.shards[rank] for s in micro})
    if numbers and not 0 <= numbers[0] <= numbers[-1] < len(batch.lengths):
        raise ValueError(f"the plan names sequence {numbers[-1]} of a batch of {len(batch.lengths)}")
    local = {number: index for index, number in enumerate(numbers)}
    mine = np.zeros(len(batch.lengths), dtype=bool)
    mine[numbers] = True
    tokens = np.repeat(mine, batch.lengths)
    return replace(
        request,
        batch=FlatBatch(
            ids=batch.ids[tokens],
            lengths=batch.lengths[mine],
            loss_weights=batch.loss_weights[tokens],
            logprobs=batch.logprobs[tokens],
            versions=batch.versions[tokens],
            advantages=batch.advantages[mine],
        ),
        minibatches=tuple(
            MiniBatch((tuple(tuple(local[s] for s in micro) for micro in mini.shards[rank]),), mini.loss_tokens)
            for mini in request.minibatches
        ),
    )
