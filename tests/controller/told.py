"""A scheduler whose decisions happen at once, as `RunLog.commit` makes them happen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from areal.controller.facts import BatchFormed, Fact
from areal.controller.scheduler import Scheduler, SchedulerSettings
from areal.controller.state import State


class Told:
    """record: gets each fact, once it is folded. `finished` and `failed` return the kind of the last fact that they
    led to, None if they led to nothing."""

    def __init__(self, settings: SchedulerSettings, record: Callable[[Fact], object] = lambda fact: None) -> None:
        self.state = State()
        self.decide = Scheduler(settings, self.state)
        self._record = record

    @property
    def settings(self) -> SchedulerSettings:
        return self.decide.settings

    @settings.setter
    def settings(self, settings: SchedulerSettings) -> None:
        self.decide.settings = settings

    def commit(self, facts: list[Fact]) -> type[Fact] | None:
        for fact in facts:
            self.state.apply(fact)
            self._record(fact)
        return type(facts[-1]) if facts else None

    def start(self) -> int:
        """The life that begins."""
        self.commit(self.decide.start())
        return self.state.life

    def may_admit(self) -> bool:
        return self.decide.may_admit()

    def admit(self, task_id: str, position: int) -> int:
        """The number of the new group."""
        self.commit(self.decide.admit(task_id, position))
        return self.state.admitted - 1

    def finished(self, group: int, member: int, reward: float, tokens: Mapping[int, int]) -> type[Fact] | None:
        return self.commit(self.decide.finished(group, member, reward, tokens))

    def failed(self, group: int, member: int, kind: str, message: str, tokens: int = 0) -> type[Fact] | None:
        return self.commit(self.decide.failed(group, member, kind, message, tokens))

    def drop(self, group: int, reason: str) -> None:
        self.commit(self.decide.drop(group, reason))

    def next_batch(self, *, final: bool = False, learning_rate: float = 0.0) -> BatchFormed | None:
        facts = self.decide.next_batch(final=final)
        formed = None
        if facts and isinstance(facts[-1], BatchFormed):
            formed = facts[-1] = replace(facts[-1], learning_rate=learning_rate)
        self.commit(facts)
        return formed

    def trained(self, batch: int) -> int:
        """The new version."""
        self.commit(self.decide.trained(batch))
        return self.state.version

    def published(self, version: int) -> None:
        self.commit(self.decide.published(version))

    def serving(self, version: int) -> None:
        self.commit(self.decide.serving(version))

    def checkpointed(self, version: int, path: str) -> None:
        self.commit(self.decide.checkpointed(version, path))
