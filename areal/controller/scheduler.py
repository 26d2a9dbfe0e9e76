"""The pure core: decides which groups start, end and are trained. No I/O, no clock, no asyncio, no randomness.

`State` is the fold of the facts and knows no policy; `Scheduler` is the policy. Each of its methods decides, turns
the decision into facts, and folds and records each. Folding recorded facts again gives the same state.

I1  A group is admitted only while floor((N - 1) / B) <= v + eta.
I2  No token older than eta steps is in the loss of a batch.
I3  Every admitted group is in exactly one of: trained, dropped (counted by reason), open.
I4  A group is in one batch at most, and a batch is trained once.
Memory holds open groups only; ended ones are counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from areal.config import Config
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
from areal.controller.state import OpenGroup, State

BUDGET_OF = {
    "agent": "agent",
    "timeout": "infrastructure",
    "server": "infrastructure",
    "reward": "reward",
    "data": "data",
}
"""Kind of failure -> the budget (a setting of `failures`) that it counts against."""
_MESSAGE_LIMIT = 4000
_DESCRIBED_GROUPS = 8


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The policy, in numbers. `last_version` is the version after the last training step of the run."""

    batch_groups: int
    max_staleness: int
    late: Literal["mask", "drop", "wait"]
    group_size: int
    min_members: int
    uniform: Literal["train", "replace"]
    retries: int
    failures: Mapping[str, int]
    """Budget -> failed episodes in a row."""
    last_version: int

    @classmethod
    def from_config(cls, config: Config, start_version: int = 0) -> SchedulerSettings:
        group = config.group
        return cls(
            batch_groups=config.train.batch_groups,
            max_staleness=config.staleness.max,
            late=config.staleness.late,
            group_size=group.size,
            min_members=group.min_members or group.size,
            uniform=group.uniform,
            retries=config.episode.retries,
            failures=config.failures.model_dump(),
            last_version=start_version + config.train.steps,
        )


class Verdict(Enum):
    """What the end of one episode means for the caller."""

    WAIT = "other members of the group are still out"
    READY = "the group is complete: a batch may be possible"
    RETRY = "start the member again"
    DROPPED = "the group is dropped: cancel its other members (I8)"
    END_RUN = "too many failures in a row: end the run; the group stays open (I9)"


class Scheduler:
    """Events in, decisions out. `record` gets each fact right after it is folded into `state`."""

    def __init__(self, settings: SchedulerSettings, record: Callable[[Fact], None]) -> None:
        self.settings = settings
        self.state = State()
        self._record = record

    def apply(self, fact: Fact) -> None:
        """Fold a fact of an earlier life. It is not recorded again."""
        self.state.apply(fact)

    def _happened(self, fact: Fact) -> None:
        self.state.apply(fact)
        self._record(fact)

    # -- groups

    def start(self) -> int:
        """A controller takes the run over (after a replay, if any). Returns its life, counted from 0."""
        self._happened(Started(self.state.life + 1))
        for group in [g for g in self.state.open.values() if not g.ready]:  # a crash can part an end from what follows
            if group.members - len(group.gave_up) < min(self.settings.min_members, group.members):
                self._drop(group.number, "lost")
            elif not group.pending:
                self._settle(group)
        return self.state.life

    def may_admit(self) -> bool:
        """I1 (paper, eq. 3), and no group that could not be trained by `last_version`."""
        settings, state = self.settings, self.state
        count = state.trained + len(state.open) + 1
        if (count - 1) // settings.batch_groups > state.serving + settings.max_staleness:
            return False
        in_batch = len(state.batch.groups) if state.batch else 0
        steps_left = settings.last_version - state.version - (state.batch is not None)
        return len(state.open) - in_batch < steps_left * settings.batch_groups

    def admit(self, task_id: str, position: int) -> int:
        """Start a group for the task at `position` of the data. Returns its number, counted from 0."""
        if not self.may_admit():
            raise ValueError(f"task {task_id!r} may not start now (I1): ask may_admit() first")
        number = self.state.admitted
        self._happened(Admitted(number, task_id, position, self.settings.group_size))
        return number

    def finished(self, group: int, member: int, reward: float, tokens: Mapping[int, int]) -> Verdict:
        """A member ended with `reward`. tokens: version -> number of its loss tokens.

        A member of a group that is dropped already changes nothing. ValueError for a reward that is not finite, a
        version that does not exist yet, or a member that was not out.
        """
        opened = self._member(group, member)
        if opened is None:
            return Verdict.DROPPED
        if not math.isfinite(reward):
            raise ValueError(f"reward {reward} of group {group}, member {member}: a reward must be a finite number")
        counts = tuple(sorted((int(version), int(count)) for version, count in tokens.items() if count))
        if counts and not 0 <= counts[0][0] <= counts[-1][0] <= self.state.version:
            raise ValueError(
                f"group {group}, member {member} has tokens of versions {counts[0][0]} to "
                f"{counts[-1][0]}, but the run has 0 to {self.state.version} (I6)"
            )
        self._happened(Finished(group, member, float(reward), counts))
        return self._settle(opened)

    def failed(self, group: int, member: int, kind: str, message: str, tokens: int = 0) -> Verdict:
        """A try of a member failed after `tokens` sampled tokens. kind: a key of BUDGET_OF; the reason if the group is
        dropped.

        A failure is retried, then given up; it never becomes a reward (I9).
        """
        opened = self._member(group, member)
        if opened is None:
            return Verdict.DROPPED
        # Lone surrogates, which a decoded traceback may have, cannot be written as UTF-8.
        text = message[-_MESSAGE_LIMIT:].encode("utf-8", "replace").decode()
        self._happened(Failed(group, member, kind, text, tokens))
        budget = BUDGET_OF[kind]
        in_a_row = sum(n for other, n in self.state.failures_in_a_row.items() if BUDGET_OF[other] == budget)
        if in_a_row > self.settings.failures[budget]:
            return Verdict.END_RUN
        if opened.failures[member] <= self.settings.retries:
            return Verdict.RETRY
        self._happened(GaveUp(group, member))
        if opened.members - len(opened.gave_up) < min(self.settings.min_members, opened.members):
            return self._drop(group, kind)
        return self._settle(opened)

    def drop(self, group: int, reason: str) -> None:
        """Drop a group for a reason outside ("cancelled", "data"). Nothing happens if it has ended already."""
        self._check_admitted(group)
        if self.state.batch and group in self.state.batch.groups:
            raise ValueError(f"group {group} is in batch {self.state.batch.batch}: it can only be trained")
        if group in self.state.open:
            self._drop(group, reason)

    def _drop(self, group: int, reason: str) -> Verdict:
        self._happened(Dropped(group, reason))
        return Verdict.DROPPED

    def _settle(self, group: OpenGroup) -> Verdict:
        """The fate of a group after one of its members finished or was given up."""
        if group.pending:
            return Verdict.WAIT
        if not group.tokens:
            return self._drop(group.number, "empty")
        if self.settings.uniform == "replace" and len(set(group.rewards.values())) == 1:
            return self._drop(group.number, "uniform")
        self._happened(Completed(group.number))
        return Verdict.READY

    def _check_admitted(self, group: int) -> None:
        if not 0 <= group < self.state.admitted:
            raise ValueError(f"group {group} was never admitted: the last one is {self.state.admitted - 1}")

    def _member(self, group: int, member: int) -> OpenGroup | None:
        self._check_admitted(group)
        opened = self.state.open.get(group)
        if opened is not None and member not in opened.pending:
            raise ValueError(f"member {member} of group {group} is not out: waited for {opened.pending or 'none'}")
        return opened

    # -- batches

    def next_batch(self, *, final: bool = False, learning_rate: float = 0.0) -> BatchFormed | None:
        """The next B complete groups, lowest number first, or None while there are too few or a batch is open. With
        late = "wait" they are the B lowest open ones, waited for, so that I1 implies I2.

        Groups that are too old are dropped on the way (I2). `final`: no other group will ever become complete, so
        fewer than B may do. learning_rate: of the step, should it come to one.
        """
        settings, state = self.settings, self.state
        if state.batch is not None or state.version >= settings.last_version:
            return None
        oldest = max(0, state.version - settings.max_staleness)
        chosen: list[OpenGroup] = []
        candidates = list(state.open.values())
        if settings.late == "wait":
            candidates = candidates[: settings.batch_groups]
            if not all(group.ready for group in candidates):
                return None
        for group in [g for g in candidates if g.ready]:
            if self._too_old(group, oldest):
                self._drop(group.number, "stale")
            else:
                chosen.append(group)
                if len(chosen) == settings.batch_groups:
                    break
        if not chosen or (len(chosen) < settings.batch_groups and not final):
            return None
        masked = sum(count for g in chosen for version, count in g.tokens.items() if version < oldest)
        # One step per version and no batch is ever taken back: the version numbers the batch.
        numbers = tuple(g.number for g in chosen)
        batch = BatchFormed(state.version, state.version, numbers, oldest, masked, learning_rate)
        self._happened(batch)
        return batch

    def _too_old(self, group: OpenGroup, oldest: int) -> bool:
        return (max(group.tokens) if self.settings.late == "mask" else min(group.tokens)) < oldest

    def trained(self, batch: int) -> int:
        """The step of the open batch is done. Returns the new version."""
        if self.state.batch is None or self.state.batch.batch != batch:
            raise ValueError(f"batch {batch} is not the open one ({self.state.batch}): it counts once (I4)")
        self._happened(Trained(batch, self.state.version + 1))
        return self.state.version

    # -- weights

    def published(self, version: int) -> None:
        """`version` reached the servers."""
        self._check_version(version)
        self._happened(Published(version))

    def serving(self, version: int) -> None:
        """`version` is now the lowest of any server that takes requests."""
        self._check_version(version)
        if version != self.state.serving:
            self._happened(Serving(version))

    def checkpointed(self, version: int, path: str) -> None:
        """A checkpoint of `version` is complete at `path`."""
        self._check_version(version)
        self._happened(Checkpointed(version, path))

    def evaluated(self, label: str, success: float) -> None:
        """An evaluation ended. NaN (no episode finished) is not recorded."""
        if math.isfinite(success):
            self._happened(Evaluated(label, success))

    def _check_version(self, version: int) -> None:
        if not 0 <= version <= self.state.version:
            raise ValueError(f"version {version} does not exist: the run is at {self.state.version}")

    # -- what is waited for

    def describe(self) -> list[str]:
        """What the run waits for, a line each, for the watchdog (I7)."""
        state = self.state
        lines = []
        if state.batch is not None:
            groups = state.batch.groups
            lines.append(f"training of batch {state.batch.batch} ({len(groups)} groups) from version {state.version}")
        if state.serving < state.version:
            lines.append(f"servers at version {state.serving}, trained is {state.version}")
        ready = sum(g.ready for g in state.open.values()) - (len(state.batch.groups) if state.batch else 0)
        lines.append(
            f"a batch needs {self.settings.batch_groups} groups: {ready} complete, {state.running} running, "
            f"another {'may' if self.may_admit() else 'may not'} start"
        )
        waiting = [group for group in state.open.values() if not group.ready]
        for group in waiting[:_DESCRIBED_GROUPS]:
            members = ", ".join(
                f"{m} (failed {group.failures[m]}x)" if m in group.failures else str(m) for m in group.pending
            )
            lines.append(f"group {group.number} (task {group.task_id!r}) waits for member {members}")
        if len(waiting) > _DESCRIBED_GROUPS:
            lines.append(f"and {len(waiting) - _DESCRIBED_GROUPS} more groups")
        return lines
