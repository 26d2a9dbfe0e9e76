"""Finished episodes as compact binary records.

A record is a header (magic, bytes of payload, CRC-32 of payload) and a payload, all little-endian:

    u32 bytes of the head, head as JSON, f64 [2 + metrics] (reward, seconds, metrics), then of each trajectory
    ids i32 [L], logprobs f32 [L], versions as runs (starts i32 [R], values i32 [R]), loss mask as bits [L]

about 8.2 bytes a token.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import orjson

from areal.types import EpisodeRecord, Ints, Trajectory

_HEADER = struct.Struct("<4sII")
_SIZE = struct.Struct("<I")
_MAGIC = b"EPI1"


def encode(episode: EpisodeRecord) -> bytes:
    """One record. ValueError when the arrays of a trajectory differ in length."""
    shapes: list[tuple[int, int]] = []
    arrays: list[bytes] = []
    for trajectory in episode.trajectories:
        length = len(trajectory.ids)
        if not length == len(trajectory.loss_mask) == len(trajectory.logprobs) == len(trajectory.versions):
            raise ValueError(
                f"group {episode.group}, member {episode.member}: the arrays of a trajectory differ in length"
            )
        starts = _run_starts(trajectory.versions)
        shapes.append((length, len(starts)))
        arrays += (
            trajectory.ids.astype("<i4").tobytes(),
            trajectory.logprobs.astype("<f4").tobytes(),
            starts.tobytes(),
            trajectory.versions[starts].astype("<i4").tobytes(),
            np.packbits(trajectory.loss_mask).tobytes(),
        )
    head = orjson.dumps(
        {
            "group": episode.group,
            "member": episode.member,
            "task_id": episode.task_id,
            "turns": episode.turns,
            "forks": episode.forks,
            "metrics": list(episode.metrics),
            "shapes": shapes,
        }
    )
    floats = np.array([episode.reward, episode.seconds, *episode.metrics.values()], "<f8").tobytes()
    payload = b"".join((_SIZE.pack(len(head)), head, floats, *arrays))
    return _HEADER.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload


def decode(record: bytes) -> EpisodeRecord:
    """The inverse of `encode`. ValueError for a record that is torn or damaged."""
    if len(record) < _HEADER.size:
        raise ValueError(f"{len(record)} bytes are no record")
    magic, size, checksum = _HEADER.unpack_from(record)
    payload = memoryview(record)[_HEADER.size :]
    if magic != _MAGIC or size != len(payload) or checksum != zlib.crc32(payload):
        raise ValueError("the record is torn or damaged")
    (head_size,) = _SIZE.unpack_from(payload)
    head = orjson.loads(payload[_SIZE.size : _SIZE.size + head_size])
    offset = _SIZE.size + head_size

    def take(dtype: str, count: int) -> np.ndarray:
        nonlocal offset
        array = np.frombuffer(payload, dtype, count, offset)
        offset += array.nbytes
        return array.astype(array.dtype.newbyteorder("="))  # a copy: aligned, writable and independent of `record`

    reward, seconds, *metrics = take("<f8", 2 + len(head["metrics"])).tolist()
    trajectories = []
    for length, runs in head["shapes"]:
        ids, logprobs, starts, values = take("<i4", length), take("<f4", length), take("<i4", runs), take("<i4", runs)
        versions = np.repeat(values, np.diff(starts, append=length))
        loss_mask = np.unpackbits(take("u1", (length + 7) // 8), count=length).astype(np.bool_)
        trajectories.append(Trajectory(ids, loss_mask, logprobs, versions))
    return EpisodeRecord(
        group=head["group"],
        member=head["member"],
        task_id=head["task_id"],
        reward=reward,
        trajectories=tuple(trajectories),
        turns=head["turns"],
        forks=head["forks"],
        seconds=seconds,
        metrics=dict(zip(head["metrics"], metrics, strict=True)),
    )


def _run_starts(values: Ints) -> Ints:
    """Where a new value begins, entry 0 included: [R]."""
    changes = np.flatnonzero(values[1:] != values[:-1]) + 1
    return np.concatenate(([0], changes)).astype("<i4") if len(values) else np.empty(0, "<i4")
