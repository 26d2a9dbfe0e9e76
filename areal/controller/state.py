"""Where a run stands: the fold of its facts, without any policy. Folding recorded facts again gives the same state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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


@dataclass(slots=True)
class OpenGroup:
    """A group that is neither trained nor dropped. `after` gives a copy of it as a fact leaves it."""

    number: int
    task_id: str
    position: int
    members: int
    rewards: dict[int, float] = field(default_factory=dict)
    """Of the members that finished."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Loss tokens of the members that finished, by version."""
    failures: dict[int, int] = field(default_factory=dict)
    """Failed tries, by member."""
    failed_tokens: dict[int, int] = field(default_factory=dict)
    """Sampled tokens of the last failed try, by member."""
    gave_up: set[int] = field(default_factory=set)
    ready: bool = False

    @property
    def pending(self) -> list[int]:
        """Members that have neither finished nor been given up: those to run, or running."""
        return [m for m in range(self.members) if m not in self.rewards and m not in self.gave_up]

    def apply(self, fact: Finished | Failed | GaveUp | Completed) -> None:
        match fact:
            case Finished():
                self.rewards[fact.member] = fact.reward
                for version, count in fact.tokens:
                    self.tokens[version] = self.tokens.get(version, 0) + count
            case Failed():
                self.failures[fact.member] = self.failures.get(fact.member, 0) + 1
                self.failed_tokens[fact.member] = fact.tokens
            case GaveUp():
                self.gave_up.add(fact.member)
            case Completed():
                self.ready = True

    def after(self, fact: Finished | Failed | GaveUp | Completed) -> OpenGroup:
        copy = replace(
            self,
            rewards=dict(self.rewards),
            tokens=dict(self.tokens),
            failures=dict(self.failures),
            failed_tokens=dict(self.failed_tokens),
            gave_up=set(self.gave_up),
        )
        copy.apply(fact)
        return copy


@dataclass(slots=True)
class Lengths:
    episodes: int = 0
    tokens: int = 0

    def add(self, episodes: int, tokens: int) -> None:
        self.episodes += episodes
        self.tokens += tokens

    @property
    def mean(self) -> float:
        """Tokens of an episode; 0 without any."""
        return self.tokens / self.episodes if self.episodes else 0.0


@dataclass(slots=True)
class State:
    """Where a run stands: the fold of its facts, in order, without any policy."""

    life: int = -1
    version: int = 0
    """Training steps done."""
    serving: int = 0
    """Lowest version of any server that takes requests (v of I1)."""
    published: int = 0
    checkpoint: Checkpointed | None = None
    position: int = 0
    """Where the next task is, counted through all epochs of the data."""
    admitted: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Groups, by reason."""
    open: dict[int, OpenGroup] = field(default_factory=dict)
    """By number, ascending; those of `batch` are among them until it is trained."""
    batch: BatchFormed | None = None
    """The batch that is formed and not trained."""
    repeatable: list[BatchFormed] = field(default_factory=list)
    """The batches that were trained and that no checkpoint covers, in order."""
    finished: int = 0
    """Episodes that finished."""
    failures: dict[str, int] = field(default_factory=dict)
    """Failed tries of episodes, by kind."""
    failures_in_a_row: dict[str, int] = field(default_factory=dict)
    """By kind, since the last episode that finished, in this life."""
    kept: Lengths = field(default_factory=lambda: Lengths())
    """Of the episodes that were trained on."""
    lost: Lengths = field(default_factory=lambda: Lengths())
    """Of those that failed for good or were dropped, but for groups without reward variance."""
    staleness: dict[int, int] = field(default_factory=dict)
    """Trained loss tokens, by staleness in steps."""
    masked_tokens: int = 0
    """Tokens that were too stale for the loss of their batch."""
    success: dict[str, float] = field(default_factory=dict)
    """By the label of the evaluation."""

    @property
    def max_staleness(self) -> int:
        """The largest staleness of a trained token; 0 before the first step."""
        return max(self.staleness, default=0)

    @property
    def running(self) -> int:
        """Open groups that still wait for a member."""
        return sum(not group.ready for group in self.open.values())

    def apply(self, fact: Fact) -> None:
        match fact:
            case Admitted():
                self.open[fact.group] = OpenGroup(fact.group, fact.task_id, fact.position, fact.members)
                self.admitted += 1
                self.position = max(self.position, fact.position + 1)
            case Finished():
                self.open[fact.group].apply(fact)
                self.finished += 1
                self.failures_in_a_row.clear()
            case Failed():
                self.open[fact.group].apply(fact)
                self.failures[fact.kind] = self.failures.get(fact.kind, 0) + 1
                self.failures_in_a_row[fact.kind] = self.failures_in_a_row.get(fact.kind, 0) + 1
            case GaveUp():
                group = self.open[fact.group]
                group.apply(fact)
                self.lost.add(1, group.failed_tokens.get(fact.member, 0))
            case Completed():
                self.open[fact.group].apply(fact)
            case Dropped():
                group = self.open.pop(fact.group)
                if fact.reason != "uniform":
                    self.lost.add(len(group.rewards), sum(group.tokens.values()))
                self.dropped[fact.reason] = self.dropped.get(fact.reason, 0) + 1
            case BatchFormed():
                self.batch = fact
            case Trained():
                self._train(fact)
            case Published():
                self.published = fact.version
            case Serving():
                self.serving = fact.version
            case Checkpointed():
                self.checkpoint = fact
                self.repeatable = [batch for batch in self.repeatable if batch.from_version >= fact.version]
            case Evaluated():
                self.success[fact.label] = fact.success
            case Started():
                self.life = fact.life
                self.failures_in_a_row.clear()

    def _train(self, fact: Trained) -> None:
        batch = self.batch
        assert batch is not None
        for number in batch.groups:
            group = self.open.pop(number)
            self.kept.add(len(group.rewards), sum(group.tokens.values()))
            for version, count in group.tokens.items():
                if version >= batch.oldest_version:
                    age = batch.from_version - version
                    self.staleness[age] = self.staleness.get(age, 0) + count
        self.repeatable.append(batch)
        self.trained += len(batch.groups)
        self.masked_tokens += batch.masked_tokens
        self.version = fact.version
        self.batch = None
