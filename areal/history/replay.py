"""Decides a recorded run again, and finds the first decision that this code takes otherwise.

The facts of a ledger are what its scheduler was told and what it decided. Each fact that is not the rest of a decision
names the call that it came from (`_CALLS`); `replay` makes that call on a fresh scheduler, and what this one records
must be the facts that follow. What cannot be seen in the facts is taken as told: when the shell asked for a batch, the
learning rate, and that a group was dropped from outside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
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
from areal.controller.scheduler import Scheduler, SchedulerSettings
from areal.controller.state import OpenGroup, State
from areal.controller.watchdog import waits_of
from areal.errors import LedgerError
from areal.folder import RunFolder

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
                "it to _CALLS of areal/history/replay.py"
            )
        if difference := run.step(seq, fact):
            return seq, difference
    return seq, None


class _Replay:
    """state: the fold of the recorded facts, so that it always stands just before the next one. decided: facts of the
    last decision that are not compared yet."""

    def __init__(self, settings: tuple[SchedulerSettings, ...]) -> None:
        self.settings = settings
        self.decided: deque[Fact] = deque()
        self.state = State()
        self.scheduler = Scheduler(settings[0], self.state)
        self.data_ended = False

    def step(self, seq: int, fact: Fact) -> Difference | None:
        if isinstance(fact, Started):  # the controller may have been killed in the middle of a decision
            self.decided.clear()
        reason = "such a call decides nothing here"
        if not self.decided:
            try:
                answer = _CALLS[type(fact)](self, fact)
            except ValueError as error:
                answer = str(error)
            if isinstance(answer, str):
                reason = answer
            else:
                self.decided.extend(answer)
        decided = self.decided.popleft() if self.decided else None
        if isinstance(fact, BatchFormed) and isinstance(decided, BatchFormed):
            decided = replace(decided, learning_rate=fact.learning_rate)
        if decided != fact:
            return Difference(seq, fact, decided, reason, tuple(self.describe(fact)))
        self.state.apply(fact)
        return None

    def describe(self, fact: Fact) -> Iterable[str]:
        state = self.state
        yield (
            f"life {state.life}, version {state.version}, servers at {state.serving}; groups: {state.trained} "
            f"trained, {sum(state.dropped.values())} dropped, {len(state.open)} open"
        )
        yield from waits_of(self.scheduler)
        about = [state.open[number] for number in [getattr(fact, "group", -1)] if number in state.open]
        if isinstance(fact, BatchFormed) or (isinstance(fact, Dropped) and fact.reason == "stale"):
            about = [group for group in state.open.values() if group.ready]
        yield from map(_describe, about[:_DESCRIBED_GROUPS])
        if len(about) > _DESCRIBED_GROUPS:
            yield f"and {len(about) - _DESCRIBED_GROUPS} more complete groups"

    # -- the call that each fact is the first of; a text instead of facts says why nothing is decided

    def start(self, fact: Started) -> Sequence[Fact]:
        self.data_ended = False
        self.scheduler.settings = self.settings[min(self.state.life + 1, len(self.settings) - 1)]
        return self.scheduler.start()

    def admit(self, fact: Admitted) -> Sequence[Fact] | str:
        if self.data_ended:
            return "a batch was formed of fewer groups than train.batch_groups, which says that the data had ended"
        return self.scheduler.admit(fact.task_id, fact.position)

    def next_batch(self, fact: BatchFormed) -> Sequence[Fact] | str:
        final = len(fact.groups) < self.scheduler.settings.batch_groups
        if final and self.state.running:
            return "too few groups are complete, and the data has not ended: groups still run"
        self.data_ended = self.data_ended or final
        return self.scheduler.next_batch(final=final)

    def drop(self, fact: Dropped) -> Sequence[Fact] | str:
        match fact.reason:
            case "stale":  # in a call for a batch, which, if one was formed, is recorded after all that were stale
                return self.scheduler.next_batch()
            case "data" | "cancelled":
                return self.scheduler.drop(fact.group, fact.reason)
            case _:
                return f"no group is dropped from outside for {fact.reason!r}, and not by the scheduler here"


_CALLS: dict[type[Fact], Callable[[_Replay, Any], Sequence[Fact] | str]] = {
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
