"""Lives of a real scheduler: what it recorded has no difference, and a changed fact is found where it is."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import precondition, rule

from areal.config import Config
from areal.controller.facts import (
    Admitted,
    BatchFormed,
    Completed,
    Dropped,
    Evaluated,
    Fact,
    Finished,
    GaveUp,
    Serving,
    Started,
    Trained,
)
from areal.controller.ledger import Ledger
from areal.controller.scheduler import SchedulerSettings
from areal.errors import ConfigError, LedgerError
from areal.folder import RunFolder
from areal.history import replay as replay_module
from areal.history.replay import Difference, replay, replay_run
from tests.controller.test_scheduler import SchedulerMachine
from tests.controller.told import Told

FEW = hypothesis_settings(max_examples=30)

PLAIN = SchedulerSettings(
    batch_groups=2,
    max_staleness=1,
    late="mask",
    group_size=2,
    min_members=2,
    uniform="replace",
    retries=1,
    failures={"agent": 10, "infrastructure": 10, "reward": 10, "data": 10},
    last_version=100,
)


@dataclass
class Life:
    """Turns of a controller's loops until the tasks are used up, with a kill and a restart now and then."""

    random: random.Random
    settings: SchedulerSettings
    tasks: int = 40
    kills: int = 0

    def __post_init__(self) -> None:
        self.facts: list[Fact] = []
        self.scheduler = Told(self.settings, self.facts.append)
        self.scheduler.start()

    def run(self) -> list[Fact]:
        while not self._is_over():
            self._turn()
            if self.kills and self.random.random() < 0.05:
                self._kill()
        return self.facts

    def _is_over(self) -> bool:
        state = self.scheduler.state
        ended = state.position >= self.tasks and not state.running
        return state.version >= self.settings.last_version or (ended and not state.open) or len(self.facts) > 1000

    def _turn(self) -> None:
        scheduler, state = self.scheduler, self.scheduler.state
        while scheduler.may_admit() and state.position < self.tasks:
            scheduler.admit(f"task {state.position}", state.position)
        for group in self.random.sample(list(state.open.values()), min(3, len(state.open))):
            for member in group.pending[: self.random.randint(0, 2)]:
                self._end(group.number, member)
        running = [group.number for group in state.open.values() if not group.ready]
        if running and self.random.random() < 0.03:
            scheduler.drop(self.random.choice(running), "cancelled")
        exhausted = state.position >= self.tasks and not state.running
        if state.batch is None and self.random.random() < 0.7:
            scheduler.next_batch(final=exhausted, learning_rate=1e-6 / (1 + state.version))
        elif state.batch:
            scheduler.trained(state.batch.batch)
            scheduler.published(state.version)
            if self.random.random() < 0.3:
                scheduler.checkpointed(state.version, f"step-{state.version}")
        if self.random.random() < 0.8:
            scheduler.serving(self.random.randint(max(0, state.version - 1), state.version))

    def _end(self, group: int, member: int) -> None:
        if self.random.random() < 0.15:
            self.scheduler.failed(group, member, self.random.choice(["agent", "timeout"]), "why")
        else:
            newest = self.scheduler.state.version
            versions = self.random.sample(range(max(0, newest - 3), newest + 1), k=min(2, newest + 1))
            tokens = {version: self.random.randint(0, 3) for version in versions if self.random.random() < 0.7}
            self.scheduler.finished(group, member, self.random.choice([0.0, 1.0]), tokens)

    def _kill(self) -> None:
        """The disk has all but the last facts, whatever decision they belong to."""
        self.kills -= 1
        del self.facts[len(self.facts) - self.random.randint(0, 3) :]
        self.scheduler = Told(self.settings, self.facts.append)
        for fact in self.facts:
            self.scheduler.state.apply(fact)
        self.scheduler.start()


@st.composite
def lives(draw: st.DrawFn, kills: int = 0) -> Life:
    size = draw(st.integers(1, 3))
    settings = SchedulerSettings(
        batch_groups=draw(st.integers(1, 3)),
        max_staleness=draw(st.integers(0, 2)),
        late=draw(st.sampled_from(["mask", "drop"])),
        group_size=size,
        min_members=draw(st.integers(1, size)),
        uniform=draw(st.sampled_from(["train", "replace"])),
        retries=draw(st.integers(0, 1)),
        failures={"agent": 10, "infrastructure": 10, "reward": 10, "data": 10},
        last_version=draw(st.sampled_from([5, 100])),
    )
    life = Life(random.Random(draw(st.integers(0, 2**32))), settings, kills=kills)
    life.run()
    return life


class ReplayMachine(SchedulerMachine):
    """The random life of test_scheduler.py, with restarts under other settings. Only what a controller never does is
    left out: a batch of fewer groups before the end of the data."""

    def __init__(self):
        super().__init__()
        self.earlier: list[SchedulerSettings] = []
        self.ended = False

    @precondition(lambda self: self.may_admit() and not self.ended)
    @rule(fill=st.booleans())
    def admit(self, fill):
        if not self.ended:
            super().admit(fill)

    @rule(final=st.booleans())
    def form(self, final):
        super().form(final and not self.numbers("running"))
        self.ended = self.ended or (self.batch is not None and len(self.batch.groups) < self.settings.batch_groups)

    def restart(self, settings):
        self.earlier.append(self.settings)
        super().restart(settings)
        self.ended = False

    def teardown(self):
        if hasattr(self, "log"):
            assert replay(self.log, *self.earlier, self.settings) is None


TestReplayMachine = ReplayMachine.TestCase
TestReplayMachine.settings = hypothesis_settings(max_examples=50, stateful_step_count=40, deadline=None)


@FEW
@given(lives(kills=3))
def test_what_a_scheduler_recorded_has_no_difference(life: Life) -> None:
    """Also when it was killed in the middle of a decision, and at whatever fact the record ends."""
    assert replay(iter(life.facts), life.settings) is None


def test_the_lives_have_every_decision() -> None:
    settings = replace(PLAIN, max_staleness=1, min_members=1)
    facts = Life(random.Random(3), settings, tasks=300, kills=9).run()
    assert {type(fact) for fact in facts} == set(replay_module._CALLS) - {Evaluated}
    reasons = {fact.reason for fact in facts if isinstance(fact, Dropped)}
    assert {"stale", "uniform", "empty", "cancelled"} <= reasons
    assert sum(isinstance(fact, Started) for fact in facts) > 3


# -- a changed record is found where it was changed


def at_random(life: Life, wanted: object) -> int:
    """Where one of the facts is that `wanted(fact)` accepts."""
    places = [index for index, fact in enumerate(life.facts) if wanted(fact)]
    assume(places)
    return life.random.choice(places)


def differs(facts: list[Fact], life: Life, index: int) -> Difference:
    """The difference is at `index`, and says what is recorded there."""
    difference = replay(facts, life.settings)
    assert difference is not None
    assert (difference.seq, difference.recorded) == (index + 1, facts[index])
    assert difference.decided != facts[index]
    assert difference.state
    return difference


CHANGES = {
    "groups in another order": lambda batch: replace(batch, groups=batch.groups[::-1]),
    "another group": lambda batch: replace(batch, groups=(*batch.groups[:-1], batch.groups[-1] + 1)),
    "a number too high": lambda batch: replace(batch, batch=batch.batch + 1),
    "another version": lambda batch: replace(batch, from_version=batch.from_version + 1),
    "more tokens": lambda batch: replace(batch, oldest_version=batch.oldest_version + 1),
    "fewer masked": lambda batch: replace(batch, masked_tokens=batch.masked_tokens + 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@FEW
@given(life=lives())
def test_another_batch(life: Life, change) -> None:
    index = at_random(life, lambda fact: isinstance(fact, BatchFormed) and change(fact) != fact)
    formed = life.facts[index]
    difference = differs([*life.facts[:index], change(formed), *life.facts[index + 1 :]], life, index)
    assert difference.decided == formed


@FEW
@given(lives())
def test_a_batch_that_is_too_small(life: Life) -> None:
    """Before the end of the data."""
    index = at_random(life, lambda fact: isinstance(fact, BatchFormed) and len(fact.groups) > 1)
    formed = life.facts[index]
    small = replace(formed, groups=formed.groups[:-1])
    difference = differs([*life.facts[:index], small, *life.facts[index + 1 :]], life, index)
    assert difference.decided == formed or "groups still run" in difference.reason


@FEW
@given(lives(), st.booleans())
def test_an_admission_too_early(life: Life, mid: bool) -> None:
    """I1: wherever may_admit() said no."""
    scheduler = Told(life.settings, lambda fact: None)
    refused = []
    for index, fact in enumerate(life.facts):
        if not scheduler.may_admit():
            refused.append(index)
        scheduler.state.apply(fact)
    assume(refused)
    index = life.random.choice(refused)
    number = 1 + max((fact.group for fact in life.facts[:index] if isinstance(fact, Admitted)), default=-1)
    early = Admitted(number, "task", number, life.settings.group_size)
    difference = differs([*life.facts[:index], early, *life.facts[index:]], life, index)
    why = difference.reason
    assert difference.decided is not None or "may not start" in why or "the data had ended" in why


@FEW
@given(lives(), st.sampled_from(["stale", "empty", "uniform", "agent", "timeout", "cancelled"]))
def test_another_reason_of_a_drop(life: Life, reason: str) -> None:
    """A stale group can be dropped from outside as well: that alone is no difference."""
    index = at_random(
        life,
        lambda fact: (
            isinstance(fact, Dropped)
            and fact.reason != reason
            and (fact.reason not in ("stale", "cancelled") or reason != "cancelled")
        ),
    )
    changed = replace(life.facts[index], reason=reason)
    differs([*life.facts[:index], changed, *life.facts[index + 1 :]], life, index)


@pytest.mark.parametrize("kind", [Completed, GaveUp])
@FEW
@given(life=lives())
def test_a_missing_decision(life: Life, kind: type[Fact]) -> None:
    index = at_random(life, lambda fact: isinstance(fact, kind))
    assume(index + 1 < len(life.facts))
    difference = differs([*life.facts[:index], *life.facts[index + 1 :]], life, index)
    assert difference.decided == life.facts[index]


@pytest.mark.parametrize("kind", [Completed, Finished, GaveUp, Trained, Serving, BatchFormed])
@FEW
@given(life=lives())
def test_a_fact_twice(life: Life, kind: type[Fact]) -> None:
    index = at_random(life, lambda fact: isinstance(fact, kind))
    differs([*life.facts[: index + 1], *life.facts[index:]], life, index + 1)


# -- by hand


def finish(scheduler: Told, group: int, rewards: tuple[float, ...] = (1.0, 0.0)) -> None:
    for member, reward in enumerate(rewards):
        scheduler.finished(group, member, reward, {scheduler.state.version: 10})


def begun(settings: SchedulerSettings = PLAIN) -> tuple[Told, list[Fact]]:
    facts: list[Fact] = []
    scheduler = Told(settings, facts.append)
    scheduler.start()
    while scheduler.may_admit():
        scheduler.admit(f"task {scheduler.state.position}", scheduler.state.position)
    return scheduler, facts


def test_a_difference_says_what_where_and_why() -> None:
    scheduler, facts = begun()
    finish(scheduler, 0)
    scheduler.failed(1, 0, "agent", "x" * 3000)
    facts.append(BatchFormed(0, 0, (0, 1), 0, 0))
    difference = replay(facts, PLAIN)
    assert str(difference).splitlines() == [
        "fact 10 differs",
        "  recorded  BatchFormed(batch=0, from_version=0, groups=(0, 1), oldest_version=0, masked_tokens=0, "
        "learning_rate=0.0)",
        "  decided   nothing: such a call decides nothing here",
        "just before it",
        "  life 0, version 0, servers at 0; groups: 0 trained, 0 dropped, 4 open",
        "  a batch needs 2 groups: 1 complete, 3 running, another may not start",
        "  group 1 (task 'task 1') waits for member 0 (failed 1x), 1",
        "  group 2 (task 'task 2') waits for member 0, 1",
        "  group 3 (task 'task 3') waits for member 0, 1",
        "  group 0 (task 'task 0') complete; rewards 0: 1, 1: 0; tokens v0: 20",
    ]
    facts[8] = replace(facts[8], member=7)
    assert "member 7 of group 1 is not running" in str(replay(facts, PLAIN))
    assert max(map(len, str(replay(facts, PLAIN)).splitlines())) < 800
    assert replay([], PLAIN) is None


def test_settings_of_each_life() -> None:
    """What a life with other settings decided is no difference, if these are given."""
    later = replace(PLAIN, retries=0)
    scheduler, facts = begun()
    scheduler.failed(0, 0, "agent", "")
    scheduler.settings = later
    scheduler.start()
    scheduler.failed(0, 1, "agent", "")
    assert facts[-1] == Dropped(0, "agent")
    assert replay(facts, PLAIN, later) is None
    assert replay(facts, PLAIN).seq == len(facts) - 1


def test_the_data_ends_once() -> None:
    """A batch of fewer groups says that no other group will come, in this life."""
    scheduler, facts = begun()
    finish(scheduler, 0)
    for group in (1, 2, 3):
        scheduler.drop(group, "cancelled")
    assert scheduler.next_batch(final=True, learning_rate=0.5).groups == (0,)
    ended = len(facts)
    scheduler.admit("task 4", 4)
    assert replay(facts[:ended], PLAIN) is None
    difference = replay(facts, PLAIN)
    assert (difference.seq, difference.decided) == (ended + 1, None)
    assert "the data had ended" in difference.reason
    assert replay([*facts[:ended], Started(1), facts[ended]], PLAIN) is None


def test_stale_groups_and_their_batch() -> None:
    settings = replace(PLAIN, max_staleness=0, batch_groups=1, last_version=9)
    facts: list[Fact] = []
    scheduler = Told(replace(settings, max_staleness=1), facts.append)  # so that old groups come about
    scheduler.start()
    for position in range(2):
        scheduler.admit("task", position)
        finish(scheduler, position)
    scheduler.trained(scheduler.next_batch(learning_rate=0.25).batch)
    scheduler.serving(1)
    scheduler.admit("task", 2)
    finish(scheduler, 2)
    scheduler.settings = settings
    scheduler.start()
    assert scheduler.next_batch(learning_rate=0.125).groups == (2,)
    assert facts[-2:] == [Dropped(1, "stale"), BatchFormed(1, 1, (2,), 1, 0, 0.125)]
    earlier = replace(settings, max_staleness=1)
    assert replay(facts, earlier, settings) is None
    assert replay([*facts[:-2], facts[-1]], earlier, settings).decided == Dropped(1, "stale")


@dataclass(frozen=True, slots=True)
class Vanished:
    group: int


def test_a_kind_of_fact_without_a_call_is_an_error_that_names_it() -> None:
    _, facts = begun()
    with pytest.raises(LedgerError, match=r"fact 6 is .*Vanished\(group=1\): replay does not know which call Vanished"):
        replay([*facts, Vanished(1)], PLAIN)
    assert set(replay_module._CALLS) == set(Fact.__args__)


# -- of a run folder


@pytest.fixture
async def folder(tmp_path: Path) -> RunFolder:
    settings = ["train.batch_groups=2", "group.size=2", "staleness.max=1", "train.steps=9"]
    config = Config.load([f"folder={tmp_path}/runs", *settings])
    folder = RunFolder.create(config)
    ledger = Ledger.create(folder.ledger)
    life = Life(random.Random(1), SchedulerSettings.from_config(config))
    for fact in life.run():
        ledger.append(fact)
    await ledger.close()
    return folder


async def test_a_run_folder(folder: RunFolder, tmp_path: Path) -> None:
    ledger = Ledger.open(folder.ledger)
    facts = list(ledger.facts())
    assert replay_run(folder) == (len(facts), None)  # while it is written
    ledger.append(Completed(0))
    await ledger.close()
    assert replay_run(RunFolder(tmp_path / "runs" / "latest"))[1].seq == len(facts) + 1
    folder.config_file.replace(folder.path / "config-0.toml")
    folder.config_file.write_text("[train]\nbatch_groups = 3\n")
    assert replay_run(folder)[1].seq == len(facts) + 1  # life 0 had the earlier settings
    with pytest.raises(ConfigError, match="is not the folder of a run: it has no config"):
        replay_run(RunFolder(tmp_path))


async def test_the_command(folder: RunFolder) -> None:
    def replays() -> tuple[int, str, str]:
        command = [sys.executable, "-m", "areal", "replay", str(folder.path)]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    count, _ = replay_run(folder)
    assert replays() == (0, f"{count} facts, no difference\n", "")
    ledger = Ledger.open(folder.ledger)
    ledger.append(Serving(77))
    await ledger.close()
    code, out, _ = replays()
    assert code == 1
    assert f"fact {count + 1} differs\n  recorded  Serving(version=77)\n  decided   nothing: version 77 does not" in out
    (folder.ledger / "ledger.db").unlink()
    code, out, error = replays()
    assert (code, out) == (1, "")
    assert error.startswith("LedgerError: ")
    assert "has no ledger" in error
