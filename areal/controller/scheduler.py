"""The pure core: decides which groups start, end and are trained. No I/O, no clock, no asyncio, no randomness.

Every method looks at the state, decides, and returns the decision as facts; it changes nothing. `RunLog.commit` makes
the facts happen, and folding the recorded facts of a run again gives the same state.

I1  A group is admitted only while floor((N - 1) / B) <= v + eta.
I2  No token older than eta steps is in the loss of a batch.
I3  Every admitted group is in exactly one of: trained, dropped (counted by reason), open.
I4  A group is in one batch at most, and a batch is trained once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
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


class Scheduler:
    """Reads `state`, which belongs to the caller, and never writes it. The facts that a method returns describe one
    decision: commit all of them before the next call."""

    def __init__(self, settings: SchedulerSettings, state: State) -> None:
        self.settings = settings
        self.state = state

    # -- groups

    def start(self) -> list[Fact]:
        """A controller takes over the run: the next life begins. A kill may have separated the end of an episode from
        what follows from it, which is decided now."""
        facts: list[Fact] = [Started(self.state.life + 1)]
        for group in self.state.open.values():
            if not group.ready:
                facts += [Dropped(group.number, "lost")] if self._is_hopeless(group) else self._settled(group)
        return facts

    def may_admit(self) -> bool:
        """I1 (paper, eq. 3), and no group that could not be trained by `last_version`."""
        settings, state = self.settings, self.state
        count = state.trained + len(state.open) + 1
        if (count - 1) // settings.batch_groups > state.serving + settings.max_staleness:
            return False
        in_batch = len(state.batch.groups) if state.batch else 0
        steps_left = settings.last_version - state.version - (state.batch is not None)
        return len(state.open) - in_batch < steps_left * settings.batch_groups

    def admit(self, task_id: str, position: int) -> list[Fact]:
        """Start a group, numbered from 0, for the task at `position` of the data."""
        if not self.may_admit():
            raise ValueError(f"task {task_id!r} may not start now (I1): ask may_admit() first")
        return [Admitted(self.state.admitted, task_id, position, self.settings.group_size)]

    def finished(self, group: int, member: int, reward: float, tokens: Mapping[int, int]) -> list[Fact]:
        """A member ended with `reward`. tokens: version -> number of its loss tokens.

        Nothing follows for a group that was dropped meanwhile. Raises ValueError for a reward that is not finite, a
        version that does not exist yet, or a member that is not running.
        """
        opened = self._group_of(group, member)
        if opened is None:
            return []
        if not math.isfinite(reward):
            raise ValueError(f"reward {reward} of group {group}, member {member}: a reward must be a finite number")
        counts = tuple(sorted((int(version), int(count)) for version, count in tokens.items() if count))
        if counts and not 0 <= counts[0][0] <= counts[-1][0] <= self.state.version:
            raise ValueError(
                f"group {group}, member {member} has tokens of versions {counts[0][0]} to "
                f"{counts[-1][0]}, but the run has 0 to {self.state.version} (I6)"
            )
        fact = Finished(group, member, float(reward), counts)
        return [fact, *self._settled(opened.after(fact))]

    def failed(self, group: int, member: int, kind: str, message: str, tokens: int = 0) -> list[Fact]:
        """A try of a member failed after `tokens` sampled tokens. kind: a key of BUDGET_OF, and the reason if the group
        is dropped for it.

        A failure is retried, then given up; it never becomes a reward (I9). The member runs again if it is still
        pending afterwards, unless `spent_budget` ends the run.
        """
        opened = self._group_of(group, member)
        if opened is None:
            return []
        fact = Failed(group, member, kind, message, tokens)
        opened = opened.after(fact)
        in_a_row = Counter(self.state.failures_in_a_row)
        in_a_row[kind] += 1
        if self._is_spent(BUDGET_OF[kind], in_a_row) or opened.failures[member] <= self.settings.retries:
            return [fact]
        given_up = GaveUp(group, member)
        opened = opened.after(given_up)
        end = [Dropped(group, kind)] if self._is_hopeless(opened) else self._settled(opened)
        return [fact, given_up, *end]

    def spent_budget(self) -> str | None:
        """The budget that more failures in a row have used up than it allows: the run must end (I9)."""
        in_a_row = self.state.failures_in_a_row
        return next((budget for budget in self.settings.failures if self._is_spent(budget, in_a_row)), None)

    def drop(self, group: int, reason: str) -> list[Fact]:
        """Drop a group for a reason outside ("cancelled", "data"). Nothing follows if it has ended already."""
        self._check_admitted(group)
        if self.state.batch and group in self.state.batch.groups:
            raise ValueError(f"group {group} is in batch {self.state.batch.batch}: it can only be trained")
        return [Dropped(group, reason)] if group in self.state.open else []

    def _is_spent(self, budget: str, in_a_row: Mapping[str, int]) -> bool:
        return sum(n for kind, n in in_a_row.items() if BUDGET_OF[kind] == budget) > self.settings.failures[budget]

    def _is_hopeless(self, group: OpenGroup) -> bool:
        """Whether fewer members than `min_members` can still finish (I8)."""
        return group.members - len(group.gave_up) < min(self.settings.min_members, group.members)

    def _settled(self, group: OpenGroup) -> list[Fact]:
        """What follows once no member of the group is pending."""
        if group.pending:
            return []
        if not group.tokens:
            return [Dropped(group.number, "empty")]
        if self.settings.uniform == "replace" and len(set(group.rewards.values())) == 1:
            return [Dropped(group.number, "uniform")]
        return [Completed(group.number)]

    def _check_admitted(self, group: int) -> None:
        if not 0 <= group < self.state.admitted:
            raise ValueError(f"group {group} was never admitted: the last one is {self.state.admitted - 1}")

    def _group_of(self, group: int, member: int) -> OpenGroup | None:
        self._check_admitted(group)
        opened = self.state.open.get(group)
        if opened is not None and member not in opened.pending:
            raise ValueError(f"member {member} of group {group} is not running; pending: {opened.pending or 'none'}")
        return opened

    # -- batches

    def next_batch(self, *, final: bool = False) -> list[Fact]:
        """The next B complete groups, lowest number first; no BatchFormed while there are too few or a batch is open.
        With late = "wait" they are the B lowest open groups, waited for, so that I1 implies I2.

        Groups that are too stale are dropped on the way (I2). `final`: no other group will ever become complete, so
        that fewer than B may do.
        """
        settings, state = self.settings, self.state
        if state.batch is not None or state.version >= settings.last_version:
            return []
        oldest = max(0, state.version - settings.max_staleness)
        facts: list[Fact] = []
        chosen: list[OpenGroup] = []
        candidates = list(state.open.values())
        if settings.late == "wait":
            candidates = candidates[: settings.batch_groups]
            if not all(group.ready for group in candidates):
                return []
        for group in [g for g in candidates if g.ready]:
            if self._is_stale(group, oldest):
                facts.append(Dropped(group.number, "stale"))
            else:
                chosen.append(group)
                if len(chosen) == settings.batch_groups:
                    break
        if not chosen or (len(chosen) < settings.batch_groups and not final):
            return facts
        masked = sum(count for g in chosen for version, count in g.tokens.items() if version < oldest)
        # One step per version and no batch is ever taken back: the version numbers the batch.
        numbers = tuple(g.number for g in chosen)
        return [*facts, BatchFormed(state.version, state.version, numbers, oldest, masked)]

    def _is_stale(self, group: OpenGroup, oldest: int) -> bool:
        return (max(group.tokens) if self.settings.late == "mask" else min(group.tokens)) < oldest

    def trained(self, batch: int) -> list[Fact]:
        """The step of the open batch is done."""
        if self.state.batch is None or self.state.batch.batch != batch:
            raise ValueError(f"batch {batch} is not the open one ({self.state.batch}): it counts once (I4)")
        return [Trained(batch, self.state.version + 1)]

    # -- weights

    def published(self, version: int) -> list[Fact]:
        """`version` reached the servers."""
        self._check_version(version)
        return [Published(version)]

    def serving(self, version: int) -> list[Fact]:
        """`version` is now the lowest of any server that accepts requests."""
        self._check_version(version)
        return [Serving(version)] if version != self.state.serving else []

    def checkpointed(self, version: int, path: str) -> list[Fact]:
        """A checkpoint of `version` is complete at `path`."""
        self._check_version(version)
        return [Checkpointed(version, path)]

    def evaluated(self, label: str, success: float) -> list[Fact]:
        """An evaluation ended. NaN (no episode finished) is not recorded."""
        return [Evaluated(label, success)] if math.isfinite(success) else []

    def _check_version(self, version: int) -> None:
        if not 0 <= version <= self.state.version:
            raise ValueError(f"version {version} does not exist: the run is at {self.state.version}")
