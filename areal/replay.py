"""Decides a recorded run again, and finds the first decision that this code takes otherwise.

The facts of a ledger are what its scheduler was told and what it decided. Each fact that is not the rest of a decision
names the call that it came from (`_CALLS`); `replay` makes that call on a fresh scheduler, and what this one records
must be the facts that follow. What cannot be seen in the facts is taken as told: when the shell asked for a batch, the
learning rate, and that a group was dropped from outside.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from areal.controller.facts import (
    Admitted,
    BatchFormed,
    Checkpointed,
    Completed,
    Dropped,
    Evaluated,
    Fact,
    Failed,
    Finished,
    GaveUp,
    Published,
    Serving,
    Started,
    Trained,
)
from areal.controller.reader import LedgerReader
from areal.controller.scheduler import OpenGroup, Scheduler, SchedulerSettings
from areal.errors import LedgerError
from areal.run import RunFolder

_DESCRIBED_GROUPS = 8
_SHOWN = 600
"""Characters of a fact that are shown: a failure has a traceback."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first fact that this code does not decide. `str()` is for a person.

    seq: of the recorded fact, counted from 1 as the ledger does. decided: what comes in its place, None for nothing.
    reason: why nothing does. state: where the run stood just before, a line each.
    """

    seq: int
    recorded: Fact
    decided: Fact | None
    reason: str
    state: tuple[str, ...]

    def __str__(self) -> str:
        decided = _show(self.decided) if self.decided is not None else f"nothing: {self.reason}"
        lines = [f"fact {self.seq} differs", f"  recorded  {_show(self.recorded)}", f"  decided   {decided}"]
        return "\n".join([*lines, "just before it", *(f"  {line}" for line in self.state)])


def replay(facts: Iterable[Fact], *settings: SchedulerSettings) -> Difference | None:
    """The first difference, None if there is none. A run that was killed may end in the middle of a decision.

    settings: those of life 0, 1, ...; the last ones hold for all lives that follow. Raises LedgerError for a kind
    of fact that has no call here.
    """
    return _compare(facts, settings)[1]


def replay_run(folder: RunFolder) -> tuple[int, Difference | None]:
    """`replay` of a run folder with the settings that each life had, and the number of facts that were compared.

    The run may go on meanwhile. Raises ConfigError or LedgerError for what cannot be read.
    """
    settings = [SchedulerSettings.from_config(config) for config in folder.configs()]
    with LedgerReader.open(folder.ledger) as ledger:
        return _compare(ledger.facts(), settings)


def _compare(facts: Iterable[Fact], settings: Iterable[SchedulerSettings]) -> tuple[int, Difference | None]:
    run = _Replay(tuple(settings))
    seq = 0
    for seq, fact in enumerate(facts, 1):
        if type(fact) not in _CALLS:
            raise LedgerError(
                f"fact {seq} is {_show(fact)}: replay does not know which call {type(fact).__name__} comes from; add "
                "it to _CALLS of areal/replay.py"
            )
        if difference := run.step(seq, fact):
            return seq, difference
    return seq, None


class _Replay:
    """scheduler: decides. told: folds what is recorded, so always stands just before the next recorded fact.
    decided: facts of the last call that are not compared yet."""

    def __init__(self, settings: tuple[SchedulerSettings, ...]) -> None:
        self.settings = settings
        self.decided: deque[Fact] = deque()
        self.scheduler = Scheduler(settings[0], self.decided.append)
        self.told = Scheduler(settings[0], lambda fact: None)
        self.data_ended = False

    def step(self, seq: int, fact: Fact) -> Difference | None:
        if self.decided and isinstance(fact, Started):  # the life before was killed in the middle of a decision
            self.decided.clear()
            self.scheduler.state = copy.deepcopy(self.told.state)
        reason: object = None
        if not self.decided:
            try:
                reason = _CALLS[type(fact)](self, fact)
            except ValueError as error:
                reason = str(error)
        decided = self.decided.popleft() if self.decided else None
        if isinstance(fact, BatchFormed) and isinstance(decided, BatchFormed):
            decided = replace(decided, learning_rate=fact.learning_rate)
        if decided != fact:
            why = reason if isinstance(reason, str) else "such a call decides nothing here"
            return Difference(seq, fact, decided, why, tuple(self.describe(fact)))
        self.told.apply(fact)
        return None

    def describe(self, fact: Fact) -> Iterable[str]:
        state = self.told.state
        yield (
            f"life {state.life}, version {state.version}, servers at {state.serving}; groups: {state.trained} "
            f"trained, {sum(state.dropped.values())} dropped, {len(state.open)} open"
        )
        yield from self.told.describe()
        about = [state.open[number] for number in [getattr(fact, "group", -1)] if number in state.open]
        if isinstance(fact, BatchFormed) or (isinstance(fact, Dropped) and fact.reason == "stale"):
            about = [group for group in state.open.values() if group.ready]
        yield from map(_describe, about[:_DESCRIBED_GROUPS])
        if len(about) > _DESCRIBED_GROUPS:
            yield f"and {len(about) - _DESCRIBED_GROUPS} more complete groups"

    # -- the calls, each for the fact that it begins with; a text that one returns says why nothing is decided

    def start(self, fact: Started) -> None:
        self.data_ended = False
        life = min(self.scheduler.state.life + 1, len(self.settings) - 1)
        self.scheduler.settings = self.told.settings = self.settings[life]
        self.scheduler.start()

    def admit(self, fact: Admitted) -> str | None:
        if self.data_ended:
            return "a batch was formed of fewer groups than train.batch_groups, which says that the data had ended"
        self.scheduler.admit(fact.task_id, fact.position)
        return None

    def next_batch(self, fact: BatchFormed) -> str | None:
        final = len(fact.groups) < self.scheduler.settings.batch_groups
        if final and self.scheduler.state.running:
            return "too few groups are complete, and the data has not ended: groups still run"
        self.data_ended = self.data_ended or final
        self.scheduler.next_batch(final=final, learning_rate=fact.learning_rate)
        return None

    def drop(self, fact: Dropped) -> str | None:
        match fact.reason:
            case "stale":  # in a call for a batch, which, if it came to one, is recorded after all that were too old
                self.scheduler.next_batch()
            case "data" | "cancelled":
                self.scheduler.drop(fact.group, fact.reason)
            case _:
                return f"nobody outside drops a group with the reason {fact.reason}, and the scheduler does not here"
        return None


_CALLS: dict[type[Fact], Callable[[_Replay, Any], object]] = {
    Started: _Replay.start,
    Admitted: _Replay.admit,
    Finished: lambda run, fact: run.scheduler.finished(fact.group, fact.member, fact.reward, dict(fact.tokens)),
    Failed: lambda run, fact: run.scheduler.failed(fact.group, fact.member, fact.kind, fact.message, fact.tokens),
    GaveUp: lambda run, fact: "a member is given up only when it failed",
    Completed: lambda run, fact: "a group is complete only when its last member ends",
    Dropped: _Replay.drop,
    BatchFormed: _Replay.next_batch,
    Trained: lambda run, fact: run.scheduler.trained(fact.batch),
    Published: lambda run, fact: run.scheduler.published(fact.version),
    Serving: lambda run, fact: run.scheduler.serving(fact.version),
    Checkpointed: lambda run, fact: run.scheduler.checkpointed(fact.version, fact.path),
    Evaluated: lambda run, fact: run.scheduler.evaluated(fact.label, fact.success),
}
"""Kind of fact -> the call that it is the first fact of."""


def _describe(group: OpenGroup) -> str:
    rewards = ", ".join(f"{member}: {reward:.4g}" for member, reward in sorted(group.rewards.items()))
    tokens = ", ".join(f"v{version}: {count}" for version, count in sorted(group.tokens.items()))
    where = "complete" if group.ready else f"waits for {group.pending}"
    what = f"rewards {rewards or 'none'}; tokens {tokens or 'none'}"
    return f"group {group.number} (task {group.task_id!r}) {where}; {what}"


def _show(fact: Fact) -> str:
    text = repr(fact)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"
