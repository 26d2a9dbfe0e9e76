"""Segment files: finished episodes as compact binary, laid end to end.

A record is a header (magic, bytes of payload, CRC-32 of payload) and a payload, all little-endian:

    u32 bytes of the head, head as JSON, f64 [2 + metrics] (reward, seconds, metrics), then of each trajectory
    ids i32 [L], logprobs f32 [L], versions as runs (starts i32 [R], values i32 [R]), loss mask as bits [L]

about 8.2 bytes a token. A file is written once, from its beginning, by one process; another process starts
another file. A torn record at the end of a file is therefore never followed by anything.
"""

from __future__ import annotations

import os
import struct
import zlib
from io import BufferedWriter
from pathlib import Path

import numpy as np
import orjson

from areal.types import EpisodeRecord, Ints, Trajectory

_HEADER = struct.Struct("<4sII")
_SIZE = struct.Struct("<I")
_MAGIC = b"EPI1"
SEGMENT_BYTES = 64 << 20


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


class Segments:
    """The segment files of one folder. One thread writes; `read` may be called from any."""

    def __init__(self, folder: Path, *, durable: bool, limit: int = SEGMENT_BYTES) -> None:
        """durable: `sync` waits for the disk, not only for the operating system. limit: bytes, then a new file."""
        self._folder = folder
        self._durable = durable
        self._limit = limit
        self._file: BufferedWriter | None = None
        self._offset = 0
        self._last = max(self.numbers(), default=0)

    def numbers(self) -> list[int]:
        """Of the files that exist."""
        return [int(path.stem.removeprefix("segment-")) for path in self._folder.glob("segment-*.bin")]

    @property
    def current(self) -> int | None:
        """The number of the file that `append` goes on with."""
        return self._last if self._file is not None else None

    def append(self, record: bytes) -> tuple[int, int]:
        """(number, offset) of the record, which `read` has after the next `sync`. OSError when the disk is full."""
        if self._file is None or self._offset >= self._limit:
            self.close()
            self._last += 1
            self._file = open(self._path(self._last), "xb", opener=open_private)  # noqa: SIM115
            self._offset = 0
            if self._durable:
                sync_folder(self._folder)
        offset = self._offset
        self._file.write(record)
        self._offset += len(record)
        return self._last, offset

    def read(self, number: int, offset: int, size: int) -> bytes:
        with open(self._path(number), "rb") as file:
            file.seek(offset)
            return file.read(size)

    def sync(self) -> None:
        """Bring what was appended to the disk."""
        if self._file is not None:
            self._file.flush()
            if self._durable:
                os.fsync(self._file.fileno())

    def delete(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            file = self._file
            try:
                self.sync()
            finally:
                self._file = None
                file.close()

    def _path(self, number: int) -> Path:
        return self._folder / f"segment-{number:06d}.bin"


def open_private(path: str, flags: int) -> int:
    """An opener that makes files which only this user may read."""
    return os.open(path, flags, 0o600)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, which syncing a new file alone does not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
