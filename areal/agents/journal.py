"""What an unfinished episode had, so that it can go on after a crash: its model calls and tool results.

A call is found again by what was asked (`model_key`, `tool_key`), not by its number. An agent that asks the same
again gets the recorded answer; one that asks something else, since it depends on more than the episode gives it, goes
on live from there.
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
    """answer: of the model (without `input_ids`, which `key` stands for), or the text that a tool gave."""

    key: bytes
    answer: Completion | str


class Journal:
    """The calls of one episode. keep(call): puts one on record. recorded: those of an earlier controller, in order."""

    def __init__(self, keep: Callable[[RecordedCall], None], recorded: Iterable[RecordedCall] = ()) -> None:
        self._keep = keep
        self._recorded: dict[bytes, list[RecordedCall]] = {}
        for call in recorded:
            self._recorded.setdefault(call.key, []).append(call)

    def recall(self, key: bytes) -> Completion | str | None:
        """The recorded answer to what was asked, each once. It stays on record."""
        calls = self._recorded.get(key)
        return calls.pop(0).answer if calls else None

    def keep(self, key: bytes, answer: Completion | str) -> None:
        self._keep(RecordedCall(key, answer))


def model_key(ids: Ints, sampling: Sampling) -> bytes:
    """The seed is no part of it: of two calls that an agent makes at once, either may come first."""
    asked = (sampling.max_new_tokens, sampling.temperature, sampling.stop_token_ids, sampling.ignore_eos)
    return hashlib.blake2b(ids.tobytes() + repr(asked).encode(), digest_size=16).digest()


def tool_key(call: dict[str, Any]) -> bytes:
    return hashlib.blake2b(orjson.dumps([call["id"], call["function"]]), digest_size=16).digest()


def encode(call: RecordedCall) -> bytes:
    """JSON behind its length, then the arrays of a completion."""
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
    """The inverse of `encode`; `input_ids` of a completion are empty. ValueError for what is torn."""
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
