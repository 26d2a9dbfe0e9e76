"""Checks of the invariants, from outside: on the facts of a ledger and on what the trainer is asked to train on.

Nothing here uses the scheduler or its state: what is wrong there must not hide itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from areal.controller.facts import (
    Admitted,
    BatchFormed,
    Checkpointed,
    Dropped,
    Fact,
    Finished,
    Serving,
    Started,
    Trained,
)
from areal.simulation.server import CYCLE, SAMPLED
from areal.simulation.weights import Weights
from areal.types import FlatBatch, Ints, TrainRequest

CODE = 900
"""Groups are written into prompts in base CODE."""
LEAST_REWARD = 0.25


class Violation(AssertionError):
    """An invariant does not hold; the message begins with its name."""


def prompt_of(group: int, member: int, length: int) -> Ints:
    """A first prompt [3 + length] that says whose it is."""
    return np.array([1 + group % CODE, 1 + group // CODE, 1 + member, *(5 + i % 7 for i in range(length))], np.int32)


def groups_of(batch: FlatBatch) -> tuple[int, ...]:
    """The groups whose sequences are in a batch, in order of appearance."""
    starts = np.cumsum(batch.lengths) - batch.lengths
    numbers = batch.ids[starts] - 1 + CODE * (batch.ids[starts + 1] - 1)
    return tuple(dict.fromkeys(numbers.tolist()))


def check_request(request: TrainRequest, weights: Weights, max_staleness: int) -> None:
    """I2, I5, I6 and I4 of one training step. Raises Violation."""
    batch = request.batch
    learned = batch.loss_weights > 0
    ids, versions, logprobs = batch.ids[learned], batch.versions[learned], batch.logprobs[learned]
    before: Ints = np.roll(batch.ids, 1)[learned]
    if not np.array_equal(ids, SAMPLED + (before + 7) % CYCLE):
        raise Violation("I5: a token in the loss is not the one that the server sampled there")
    ages = request.from_version - versions
    if len(ages) and not 0 <= ages.min() <= ages.max() <= max_staleness:
        raise Violation(f"I2: staleness {ages.min()} to {ages.max()} in a loss, eta is {max_staleness}")
    known = np.array([*weights.logprobs, weights.logprob], np.float32)
    if not np.array_equal(logprobs, known[versions]):
        raise Violation("I6: a token's log-prob is not of the weights of its version")
    if again := set(groups_of(batch)) & set(weights.groups):
        raise Violation(f"I4: groups {sorted(again)} are in the weights already")


@dataclass(slots=True)
class Audit:
    """Folds the facts of one run, over all its lives, and raises Violation at the first that cannot be."""

    batch_groups: int
    max_staleness: int
    late: str
    members: int
    least_reward: float = LEAST_REWARD
    life: int = -1
    version: int = 0
    serving: int = 0
    trained: dict[int, None] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    open: dict[int, dict[int, float]] = field(default_factory=dict)
    tokens: dict[int, dict[int, int]] = field(default_factory=dict)
    batch: BatchFormed | None = None
    covered: int = 0
    seen: int = 0

    def follow(self, facts: Iterable[Fact]) -> None:
        for fact in facts:
            self.seen += 1
            self._one(fact)

    def _one(self, fact: Fact) -> None:
        match fact:
            case Started():
                _demand(fact.life == self.life + 1, f"I4: life {fact.life} after {self.life}")
                self.life = fact.life
            case Admitted():
                count = len(self.trained) + len(self.open) + 1
                allowed = (self.serving + self.max_staleness + 1) * self.batch_groups
                _demand(count <= allowed, f"I1: group {fact.group} is number {count} of at most {allowed}")
                new = fact.group not in self.open and fact.group not in self.dropped and fact.group not in self.trained
                _demand(new, f"I3: group {fact.group} is admitted twice")
                self.open[fact.group] = {}
                self.tokens[fact.group] = {}
            case Finished():
                _demand(fact.group in self.open, f"I3: group {fact.group} finishes, and is not open")
                _demand(fact.member not in self.open[fact.group], f"I4: {fact.group}.{fact.member} finished twice")
                _demand(fact.reward >= self.least_reward, f"I9: a reward of {fact.reward}, which no agent gave")
                _demand(all(0 <= v <= self.version for v, _ in fact.tokens), f"I6: versions {fact.tokens}")
                self.open[fact.group][fact.member] = fact.reward
                for version, count in fact.tokens:
                    self.tokens[fact.group][version] = self.tokens[fact.group].get(version, 0) + count
            case Dropped():
                _demand(fact.group in self.open, f"I3: group {fact.group} is dropped, and is not open")
                _demand(not (self.batch and fact.group in self.batch.groups), f"I3: {fact.group} is in a batch")
                _demand(fact.reason != "stale" or self.late != "wait", f"I2: group {fact.group} waited, and is too old")
                del self.open[fact.group]
                self.dropped[fact.group] = fact.reason
            case BatchFormed():
                self._batch(fact)
            case Trained():
                batch = self.batch
                _demand(batch is not None and batch.batch == fact.batch, f"I4: batch {fact.batch} is not the open one")
                assert batch
                _demand(fact.version == self.version + 1, f"I4: version {fact.version} after {self.version}")
                for group in batch.groups:
                    del self.open[group]
                    self.trained[group] = None
                self.version, self.batch = fact.version, None
            case Serving():
                _demand(0 <= fact.version <= self.version, f"I1: version {fact.version} is served at {self.version}")
                self.serving = fact.version
            case Checkpointed():
                _demand(self.covered <= fact.version <= self.version, f"I4: a checkpoint of version {fact.version}")
                self.covered = fact.version

    def _batch(self, fact: BatchFormed) -> None:
        _demand(self.batch is None, f"I4: batch {fact.batch} while another is open")
        _demand(fact.from_version == self.version, f"I4: a batch from version {fact.from_version} at {self.version}")
        for group in fact.groups:
            _demand(group in self.open, f"I4: group {group} of batch {fact.batch} is not open")
            versions = self.tokens[group]
            young = [v for v in versions if self.version - v <= self.max_staleness]
            _demand(bool(young), f"I2: nothing of group {group} is young enough for the step from {self.version}")
            if self.late != "mask":
                _demand(len(young) == len(versions), f"I2: group {group} has late tokens, and is not dropped")
        self.batch = fact


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)
