"""The model calls and tool results of an unfinished episode, with which it continues after a crash.

A call is looked up by its content (`model_key`, `tool_key`), not by its number. An agent that repeats a call gets the
recorded answer; a call that differs, because the agent depends on something outside of the episode, runs live.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from areal.types import Completion, Ints, Sampling

_HEAD = 4


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """answer: of the model (without `input_ids`, which `key` identifies), or the text of a tool."""

    key: bytes
    answer: Completion | str


class Journal:
    """The calls of one episode. keep(call): records one. recorded: those of an earlier life, in order."""

    def __init__(self, keep: Callable[[RecordedCall], None], recorded: Iterable[RecordedCall] = ()) -> None:
        self._keep = keep
        self._recorded: dict[bytes, list[RecordedCall]] = {}
        for call in recorded:
            self._recorded.setdefault(call.key, []).append(call)

    def recall(self, key: bytes) -> Completion | str | None:
        """The recorded answer to a call, or None. Each is returned once, and stays recorded."""
        calls = self._recorded.get(key)
        return calls.pop(0).answer if calls else None

    def keep(self, key: bytes, answer: Completion | str) -> None:
        self._keep(RecordedCall(key, answer))


def model_key(ids: Ints, sampling: Sampling) -> bytes:
    """Leaves out the seed, because concurrent calls of an agent may come in another order."""
    asked = (sampling.max_new_tokens, sampling.temperature, sampling.stop_token_ids, sampling.ignore_eos)
    return hashlib.blake2b(ids.tobytes() + repr(asked).encode(), digest_size=16).digest()


def tool_key(call: dict[str, Any]) -> bytes:
    return hashlib.blake2b(orjson.dumps([call["id"], call["function"]]), digest_size=16).digest()


def encode(call: RecordedCall) -> bytes:
    """The length of a JSON header, the header, and the arrays of a completion."""
    head: dict[str, Any] = {"key": call.key.hex()}
    body = b""
    if isinstance(call.answer, str):
        head["text"] = call.answer
    else:
        answer = call.answer
        head["tokens"] = len(answer.output_ids)
        head["rest"] = [answer.finish, answer.interruptions, answer.cached_tokens]
        arrays = ((answer.output_ids, "<i4"), (answer.logprobs, "<f4"), (answer.versions, "<i4"))
        body = b"".join(array.astype(dtype).tobytes() for array, dtype in arrays)
    json = orjson.dumps(head)
    return len(json).to_bytes(_HEAD, "little") + json + body


def decode(record: bytes) -> RecordedCall:
    """The inverse of `encode`, with empty `input_ids`. Raises ValueError for a truncated record."""
    size = _HEAD + int.from_bytes(record[:_HEAD], "little")
    head = orjson.loads(record[_HEAD:size])
    key = bytes.fromhex(head["key"])
    if "text" in head:
        return RecordedCall(key, head["text"])
    count = head["tokens"]
    if len(record) != size + 12 * count:
        raise ValueError(f"a record of {len(record)} bytes cannot have {count} tokens")
    ids = np.frombuffer(record, "<i4", count, size).astype(np.int32)
    logprobs = np.frombuffer(record, "<f4", count, size + 4 * count).astype(np.float32)
    versions = np.frombuffer(record, "<i4", count, size + 8 * count).astype(np.int32)
    finish, interruptions, cached = head["rest"]
    return RecordedCall(key, Completion(ids[:0], ids, logprobs, versions, finish, interruptions, cached))
