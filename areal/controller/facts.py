"""What can happen to a run, as records. The ledger keeps them; folded in order they are the state of the run.

A fact says what happened, never why: folding it needs no policy, so a newer version of the code can resume an older
run. Fields may be added with a default; a field or a record that was written once keeps its name.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class Started:
    """A controller took over the run; `life` is 0 for the first."""

    life: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """A group began: `members` episodes of the task at `position`, counted through all epochs of the data."""

    group: int
    task_id: str
    position: int
    members: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A member ended with a reward. `tokens`: (version, number of its loss tokens), versions ascending."""

    group: int
    member: int
    reward: float
    tokens: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """One try of a member failed, `tokens` sampled tokens long. It runs again unless GaveUp or Dropped follows."""

    group: int
    member: int
    kind: str
    message: str
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class GaveUp:
    """A member will not be tried again."""

    group: int
    member: int


@dataclass(frozen=True, slots=True)
class Completed:
    """A group waits for nothing more: it can enter a batch."""

    group: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group ended without being trained."""

    group: int
    reason: str


@dataclass(frozen=True, slots=True)
class BatchFormed:
    """The groups of the step from `from_version`, taken at `learning_rate`. Tokens of versions below `oldest_version`,
    `masked_tokens` of them, stay out of the loss (I2)."""

    batch: int
    from_version: int
    groups: tuple[int, ...]
    oldest_version: int
    masked_tokens: int
    learning_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Trained:
    """The step of `batch` is done and led to `version`."""

    batch: int
    version: int


@dataclass(frozen=True, slots=True)
class Published:
    """`version` reached the servers."""

    version: int


@dataclass(frozen=True, slots=True)
class Serving:
    """`version` is now the lowest of any server that takes requests."""

    version: int


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A checkpoint of `version` is complete at `path`: the steps up to it are final (I4)."""

    version: int
    path: str


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The share of successful episodes of an evaluation that was given a label."""

    label: str
    success: float


Fact = (
    Started
    | Admitted
    | Finished
    | Failed
    | GaveUp
    | Completed
    | Dropped
    | BatchFormed
    | Trained
    | Published
    | Serving
    | Checkpointed
    | Evaluated
)

_KINDS: dict[str, type[Fact]] = {kind.__name__: kind for kind in Fact.__args__}

_TUPLES = {name: [f.name for f in fields(kind) if "tuple" in str(f.type)] for name, kind in _KINDS.items()}
"""Name of the record -> the fields that JSON makes lists of."""


def encode(fact: Fact) -> bytes:
    """JSON: [name of the record, {field: value}]."""
    return orjson.dumps([type(fact).__name__, fact])


def decode(body: bytes) -> Fact:
    """The inverse of `encode`. ValueError for what is not the encoding of a known fact."""
    name, values = orjson.loads(body)
    kind = _KINDS.get(name)
    if kind is None:
        raise ValueError(f"unknown fact {name!r}: it was written by a newer version of areal")
    try:
        for key in _TUPLES.get(name, ()):
            if key in values:
                values[key] = _frozen(values[key])
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
