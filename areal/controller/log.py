"""The run so far: its state, and the stream of facts that changes it.

Every decision is committed here, as facts. Each fact is folded into the state, appended to the
ledger and shown to the observers, in that order and before the next fact, so that the state, the ledger and everything
that watches the run (rollout, watchdog, reporter) can never disagree about what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from areal.controller.facts import Fact, Finished
from areal.controller.ledger import Ledger
from areal.controller.signal import Signal
from areal.controller.state import State
from areal.types import EpisodeRecord


class RunLog:
    """Nothing happens to a run except through `commit`.

    changed: notified after each commit. observers: called with each fact, once the state and the ledger have it; they
    must not raise or block, and may commit nothing themselves.
    """

    def __init__(self, ledger: Ledger) -> None:
        """Folds what the ledger has: nothing for a new run. Raises LedgerError. Blocks while it reads."""
        self.state = State()
        self.changed = Signal()
        self.observers: list[Callable[[Fact], None]] = []
        self._ledger = ledger
        for fact in ledger.facts():
            self.state.apply(fact)

    def commit(self, facts: Sequence[Fact], episode: EpisodeRecord | None = None) -> None:
        """Make `facts` happen, in order. episode: the record of the Finished fact among them; both are stored together.

        Returns at once: wait for `Ledger.barrier` where the disk must have them. Raises LedgerError once the ledger
        cannot be written any more.
        """
        for fact in facts:
            self.state.apply(fact)
            self._ledger.append(fact, episode if isinstance(fact, Finished) else None)
            for observer in self.observers:
                observer(fact)
        if facts:
            self.changed.notify()
