from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.algorithms.packing import plan
from areal.types import FlatBatch, MiniBatch, TensorSpec, TrainRequest, TrainStats
from areal.workers.megatron import wire


def request(lengths: list[int], ranks: int, minibatches: int = 2, seed: int = 0) -> TrainRequest:
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    return TrainRequest(
        life=1,
        from_version=3,
        batch_id=4,
        kind="ppo",
        batch=FlatBatch(
            ids=np.arange(tokens, dtype=np.int32),
            lengths=np.array(lengths, dtype=np.int32),
            loss_weights=rng.random(tokens, dtype=np.float32),
            logprobs=rng.normal(size=tokens).astype(np.float32),
            versions=rng.integers(-1, 4, tokens, dtype=np.int32),
            advantages=rng.normal(size=len(lengths)).astype(np.float32),
        ),
        minibatches=plan(lengths, [1.0] * len(lengths), minibatches=minibatches, ranks=ranks, budget=20, seed=seed),
        learning_rate=1e-4,
        max_staleness=2,
    )


def same(left: TrainRequest, right: TrainRequest) -> None:
    for field in fields(TrainRequest):
        if field.name != "batch":
            assert getattr(left, field.name) == getattr(right, field.name)
    for field in fields(FlatBatch):
        a, b = getattr(left.batch, field.name), getattr(right.batch, field.name)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 4), st.integers(0, 9))
def test_each_rank_gets_its_own_sequences_whole(lengths: list[int], ranks: int, seed: int) -> None:
    whole = request(lengths, ranks, seed=seed)
    rows = np.split(whole.batch.ids, np.cumsum(lengths)[:-1])
    for rank, part in enumerate(wire.split(whole, ranks)):
        got = wire.unpack_request(wire.pack_request(part))
        same(got, part)
        mine = np.split(got.batch.ids, np.cumsum(got.batch.lengths)[:-1])
        for ours, theirs in zip(got.minibatches, whole.minibatches, strict=True):
            assert ours.loss_tokens == theirs.loss_tokens
            (shard,) = ours.shards
            for micro, planned in zip(shard, theirs.shards[rank], strict=True):
                for local, number in zip(micro, planned, strict=True):
                    np.testing.assert_array_equal(mine[local], rows[number])
                    assert got.batch.advantages[local] == whole.batch.advantages[number]
        planned = {s for mini in whole.minibatches for micro in mini.shards[rank] for s in micro}
        assert len(got.batch.lengths) == len(planned)
        where = np.isin(whole.batch.ids, got.batch.ids)
        for name in ("loss_weights", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(got.batch, name), getattr(whole.batch, name)[where])


def test_a_plan_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="planned for 2 ranks, but there are 3"):
        wire.split(request([3, 4], 2), 3)
    for number in (2, -1):
        bad = replace(request([3, 4], 1), minibatches=(MiniBatch((((number,),),), 1.0),))
        with pytest.raises(ValueError, match=f"names sequence {number} of a batch of 2"):
            wire.split(bad, 1)


def test_statistics_keep_nan() -> None:
    values = {field.name: 1 for field in fields(TrainStats)}
    got = wire.unpack_stats(wire.pack_stats(TrainStats(**values | {"logprob_gap_max": float("nan")})))
    assert np.isnan(got.logprob_gap_max)
    assert replace(got, logprob_gap_max=1) == TrainStats(**values)


def test_sequences_and_specs() -> None:
    sequences = [np.array([1, 2], np.int32), np.array([], np.int32), np.array([3], np.int32)]
    got = wire.unpack_sequences(wire.pack_sequences(sequences, np.int32))
    assert [s.tolist() for s in got] == [[1, 2], [], [3]]
    assert wire.unpack_sequences(wire.pack_sequences([], np.float32)) == []
    specs = [TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "bfloat16", ())]
    assert wire.unpack_specs(wire.pack_specs(specs)) == specs


@pytest.mark.parametrize("body", [b"", b"garbage", b"\xff" * 64, wire.pack({}), wire.pack({"x": 1})[:-1]])
def test_garbage(body: bytes) -> None:
    for unpack in (wire.unpack_request, wire.unpack_stats, wire.unpack_sequences, wire.unpack_specs):
        with pytest.raises(wire.WireError):
            unpack(body)
