import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from areal.controller import codec
from areal.types import EpisodeRecord, Trajectory

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def trajectories(draw):
    length = draw(st.integers(0, 40))
    return Trajectory(
        ids=draw(hnp.arrays(np.int32, length)),
        loss_mask=draw(hnp.arrays(np.bool_, length)),
        logprobs=draw(hnp.arrays(np.float32, length)),
        versions=draw(hnp.arrays(np.int32, length, elements=st.integers(-1, 3))),
    )


records = st.builds(
    EpisodeRecord,
    group=st.integers(0, 2**53),
    member=st.integers(0, 2**31),
    task_id=_TEXT,
    reward=st.floats(),
    trajectories=st.lists(trajectories(), max_size=3).map(tuple),
    turns=st.integers(0, 2**31),
    forks=st.integers(0, 2**31),
    seconds=st.floats(),
    metrics=st.dictionaries(_TEXT, st.floats(), max_size=3),
)


def same(a: object, b: object) -> bool:
    """Equality that looks into arrays and takes NaN as equal to itself."""
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b or (a != a and b != b)


@given(records)
def test_an_episode_survives_its_encoding(record):
    assert same(codec.decode(codec.encode(record)), record)


@given(records, st.data())
def test_a_torn_or_damaged_record_is_refused(record, data):
    whole = codec.encode(record)
    with pytest.raises(ValueError, match=r"torn or damaged|no record"):
        codec.decode(whole[: data.draw(st.integers(0, len(whole) - 1))])
    damaged = bytearray(whole)
    damaged[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError, match="torn or damaged"):
        codec.decode(bytes(damaged))


def test_arrays_of_different_length_are_refused():
    trajectory = Trajectory(
        np.arange(3, dtype=np.int32), np.ones(3, np.bool_), np.zeros(2, np.float32), np.zeros(3, np.int32)
    )
    with pytest.raises(ValueError, match=r"group 4, member 2.*differ in length"):
        codec.encode(EpisodeRecord(4, 2, "t", 1.0, (trajectory,)))


def test_a_token_takes_little_more_than_eight_bytes():
    length = 10_000
    trajectory = Trajectory(
        np.arange(length, dtype=np.int32),
        np.ones(length, np.bool_),
        np.zeros(length, np.float32),
        np.repeat(np.arange(2, dtype=np.int32), length // 2),
    )
    assert len(codec.encode(EpisodeRecord(0, 0, "t", 1.0, (trajectory,)))) < 8.2 * length
