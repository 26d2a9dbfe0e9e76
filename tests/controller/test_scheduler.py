"""The scheduler alone, against hand-computed examples and an oracle that is written differently."""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import cycle

import hypothesis.strategies as st
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal.config import Config
from areal.controller import facts
from areal.controller.facts import BatchFormed, Completed, Dropped, Fact, Failed, Finished, GaveUp
from areal.controller.scheduler import SchedulerSettings
from areal.controller.watchdog import waits_of
from tests.controller.told import Told

PLAIN = SchedulerSettings(
    batch_groups=2,
    max_staleness=0,
    late="mask",
    group_size=2,
    min_members=2,
    uniform="train",
    retries=1,
    failures={"agent": 10, "infrastructure": 10, "reward": 10, "data": 10},
    last_version=100,
)


def make(**changes) -> tuple[Told, list[Fact]]:
    log: list[Fact] = []
    return Told(replace(PLAIN, **changes), log.append), log


def replayed(scheduler: Told, log: list[Fact]) -> Told:
    again = Told(scheduler.settings, log.append)
    for fact in [facts.decode(facts.encode(fact)) for fact in log]:
        again.state.apply(fact)
    return again


def admit_all(scheduler: Told) -> list[int]:
    numbers = []
    while scheduler.may_admit():
        numbers.append(scheduler.admit(f"task {scheduler.state.position}", scheduler.state.position))
    return numbers


def finish(scheduler: Told, group: int, versions=(0,), rewards=(1.0, 0.0)) -> type[Fact] | None:
    """Finish all members of a group, each with 10 tokens of every version."""
    for member, reward in enumerate(rewards):
        end = scheduler.finished(group, member, reward, dict.fromkeys(versions, 10))
    return end


def step(scheduler: Told) -> BatchFormed:
    batch = scheduler.next_batch()
    assert batch is not None
    scheduler.trained(batch.batch)
    return batch


# -- I1 by hand


def test_i1_eta_0_admits_exactly_one_batch_per_version():
    scheduler, _ = make(max_staleness=0, batch_groups=3)
    for version in range(4):
        numbers = admit_all(scheduler)
        assert numbers == [3 * version, 3 * version + 1, 3 * version + 2]
        for number in reversed(numbers):
            assert scheduler.next_batch() is None
            assert finish(scheduler, number, [version]) is Completed
        assert admit_all(scheduler) == []
        batch = scheduler.next_batch()
        assert batch == BatchFormed(version, version, tuple(numbers), version, 0)
        assert admit_all(scheduler) == []
        assert scheduler.trained(batch.batch) == version + 1
        assert admit_all(scheduler) == []  # trained, but no server has it
        scheduler.serving(version + 1)
    assert scheduler.state.staleness == {0: 4 * 3 * 2 * 10}


def test_i1_eta_2_admits_three_batches_ahead_of_the_slowest_server():
    scheduler, _ = make(max_staleness=2, batch_groups=2)
    assert admit_all(scheduler) == [0, 1, 2, 3, 4, 5]  # floor((N - 1) / 2) <= 0 + 2
    for number in range(4):
        finish(scheduler, number)
    step(scheduler)
    step(scheduler)
    assert admit_all(scheduler) == []  # version 2, served is 0
    scheduler.serving(1)
    assert admit_all(scheduler) == [6, 7]
    scheduler.serving(2)
    assert admit_all(scheduler) == [8, 9]
    scheduler.serving(1)  # a server came back with old weights
    scheduler.drop(9, "cancelled")
    scheduler.drop(8, "cancelled")
    assert admit_all(scheduler) == []
    scheduler.drop(7, "cancelled")  # a dropped group leaves the count
    assert admit_all(scheduler) == [10]


def test_i1_no_group_is_admitted_that_no_step_is_left_for():
    scheduler, _ = make(max_staleness=5, batch_groups=2, last_version=2)
    assert admit_all(scheduler) == [0, 1, 2, 3]
    finish(scheduler, 0)
    finish(scheduler, 1)
    batch = scheduler.next_batch()
    assert admit_all(scheduler) == []
    scheduler.drop(2, "cancelled")
    assert admit_all(scheduler) == [4]
    scheduler.trained(batch.batch)
    assert admit_all(scheduler) == []
    finish(scheduler, 3)
    finish(scheduler, 4)
    step(scheduler)
    assert admit_all(scheduler) == []
    assert scheduler.state.version == 2
    assert make(last_version=0)[0].may_admit() is False


def test_no_batch_is_formed_past_the_last_version():
    scheduler, log = make(max_staleness=5, batch_groups=1)
    for number in admit_all(scheduler):
        finish(scheduler, number)
    step(scheduler)
    scheduler.settings = replace(scheduler.settings, last_version=2)  # resumed with fewer steps
    scheduler = replayed(scheduler, log)
    step(scheduler)
    assert scheduler.next_batch() is None
    assert len(scheduler.state.open) == 4


def test_i1_admitting_without_asking_is_refused():
    scheduler, _ = make(batch_groups=1)
    scheduler.admit("a", 0)
    with pytest.raises(ValueError, match="task 'b' may not start"):
        scheduler.admit("b", 1)


# -- I2 by hand


@pytest.mark.parametrize(("late", "staleness"), [("mask", {1: 40, 2: 40}), ("drop", None)])
def test_i2_a_token_one_step_too_old_is_masked_or_its_group_dropped(late, staleness):
    scheduler, log = make(max_staleness=2, batch_groups=1, group_size=2, late=late)
    for number in admit_all(scheduler):  # 0, 1, 2
        if number < 2:
            finish(scheduler, number)
            step(scheduler)
            scheduler.serving(scheduler.state.version)
    numbers = admit_all(scheduler)
    assert numbers == [3, 4]
    finish(scheduler, 3, [2])
    step(scheduler)
    assert scheduler.state.version == 3
    before = dict(scheduler.state.staleness)
    assert finish(scheduler, 2, [0, 1, 2]) is Completed  # at version 3: staleness 3, 2 and 1
    batch = scheduler.next_batch()
    if late == "drop":
        assert batch is None
        assert log[-1] == Dropped(2, "stale")
    else:
        assert batch == BatchFormed(3, 3, (2,), oldest_version=1, masked_tokens=20)
        scheduler.trained(3)
        after = scheduler.state.staleness
        assert {age: after[age] - before.get(age, 0) for age in after if after[age] != before.get(age, 0)} == {
            1: 20,
            2: 20,
        }
        assert scheduler.state.masked_tokens == 20
        assert scheduler.state.max_staleness == 2


def test_i2_late_wait_takes_the_oldest_open_groups_and_waits_for_them():
    scheduler, log = make(max_staleness=1, batch_groups=2, late="wait", last_version=9)
    assert admit_all(scheduler) == [0, 1, 2, 3]
    for number in (3, 2, 1):
        finish(scheduler, number)
        assert scheduler.next_batch() is None, "group 0 is waited for"
    finish(scheduler, 0)
    assert step(scheduler).groups == (0, 1)
    scheduler.serving(1)
    assert admit_all(scheduler) == [4, 5]
    assert step(scheduler).groups == (2, 3)
    scheduler.drop(4, "cancelled")
    assert scheduler.next_batch(final=True) is None, "group 5 is waited for, also at the end"
    finish(scheduler, 5, [1])
    assert scheduler.next_batch() is None
    last = scheduler.next_batch(final=True)
    assert last is not None, waits_of(scheduler.decide)
    assert last.groups == (5,)
    assert not [fact for fact in log if isinstance(fact, Dropped) and fact.reason == "stale"]


@pytest.mark.parametrize(("end", "fate"), [("finished", "ready"), ("gave up", "dropped")])
def test_i3_what_a_crash_parted_is_put_together_at_the_next_start(end, fate):
    """The writer may have come as far as the end of the last member, and not to what follows from it."""
    scheduler, log = make(retries=0)
    scheduler.start()
    admit_all(scheduler)
    if end == "finished":
        finish(scheduler, 0)
        cut = log.index(Completed(0))
    else:
        scheduler.failed(0, 0, "agent", "why")
        cut = log.index(Dropped(0, "agent"))
    again = replayed(scheduler, log[:cut])
    again.start()
    if fate == "ready":
        assert again.state.open[0].ready
    else:
        assert 0 not in again.state.open
        assert again.state.dropped == {"lost": 1}


def test_failures_have_a_budget_of_their_own_each():
    budgets = {"agent": 1, "infrastructure": 2, "reward": 1, "data": 1}
    scheduler, _ = make(failures=budgets, retries=99)
    admit_all(scheduler)
    ends = [scheduler.failed(0, 0, kind, "") for kind in ("agent", "server", "timeout", "reward", "data")]
    assert set(ends) == {Failed}
    assert scheduler.decide.spent_budget() is None
    assert scheduler.failed(0, 0, "server", "") is Failed
    assert scheduler.decide.spent_budget() == "infrastructure", "with the time-out that is three"
    finish(scheduler, 1)
    assert scheduler.failed(0, 0, "agent", "") is Failed
    assert scheduler.decide.spent_budget() is None, "one that finished clears all"


def test_lengths_of_the_episodes_that_were_lost_and_kept():
    scheduler, _ = make(max_staleness=1, batch_groups=1, retries=0, min_members=1)
    admit_all(scheduler)
    scheduler.failed(0, 0, "timeout", "", tokens=500)
    scheduler.finished(0, 1, 1.0, {0: 30})
    step(scheduler)
    finish(scheduler, 1)
    scheduler.drop(1, "cancelled")
    state = scheduler.state
    assert (state.kept.episodes, state.kept.tokens) == (1, 30)
    assert (state.lost.episodes, state.lost.tokens) == (3, 520)


@pytest.mark.parametrize("late", ["mask", "drop"])
def test_i2_a_group_of_old_tokens_only_is_dropped(late):
    scheduler, log = make(max_staleness=1, batch_groups=1, late=late)
    admit_all(scheduler)  # 0, 1
    finish(scheduler, 0)
    step(scheduler)
    scheduler.serving(1)
    admit_all(scheduler)  # 2
    finish(scheduler, 2, [1])
    step(scheduler)
    finish(scheduler, 1, [0])
    assert scheduler.next_batch() is None
    assert log[-1] == Dropped(1, "stale")
    assert scheduler.state.dropped == {"stale": 1}


# -- the fate of a group


def test_batches_take_the_lowest_numbers_first():
    scheduler, _ = make(max_staleness=3, batch_groups=2)
    admit_all(scheduler)
    for number in (5, 3, 4, 1):
        finish(scheduler, number)
    assert scheduler.next_batch().groups == (1, 3)
    assert scheduler.next_batch() is None  # one batch is open
    scheduler.trained(0)
    assert scheduler.next_batch().groups == (4, 5)


def test_a_smaller_batch_only_at_the_end_of_the_data():
    scheduler, _ = make(batch_groups=3)
    admit_all(scheduler)
    finish(scheduler, 1)
    assert scheduler.next_batch() is None
    assert scheduler.next_batch(final=True).groups == (1,)
    assert make()[0].next_batch(final=True) is None


def test_i4_a_batch_is_trained_once():
    scheduler, _ = make(batch_groups=1)
    admit_all(scheduler)
    finish(scheduler, 0)
    with pytest.raises(ValueError, match="batch 0 is not the open one"):
        scheduler.trained(0)
    scheduler.next_batch()
    with pytest.raises(ValueError, match="can only be trained"):
        scheduler.drop(0, "cancelled")
    with pytest.raises(ValueError, match="batch 1 is not the open one"):
        scheduler.trained(1)
    scheduler.trained(0)
    with pytest.raises(ValueError, match="batch 0 is not the open one"):
        scheduler.trained(0)


def test_i3_a_uniform_group_counts_as_trained_or_is_replaced():
    scheduler, _ = make(uniform="train", batch_groups=1)
    admit_all(scheduler)
    assert finish(scheduler, 0, rewards=(0.5, 0.5)) is Completed
    step(scheduler)
    assert scheduler.state.trained == 1

    scheduler, log = make(uniform="replace", batch_groups=1)
    admit_all(scheduler)
    assert finish(scheduler, 0, rewards=(0.5, 0.5)) is Dropped
    assert log[-1] == Dropped(0, "uniform")
    assert admit_all(scheduler) == [1]
    assert finish(scheduler, 1, rewards=(0.5, 1)) is Completed


def test_a_group_without_a_loss_token_is_dropped():
    scheduler, log = make()
    scheduler.admit("a", 0)
    assert scheduler.finished(0, 0, 1.0, {}) is Finished
    assert scheduler.finished(0, 1, 0.0, {0: 0}) is Dropped
    assert log[-1] == Dropped(0, "empty")


def test_i9_a_failure_is_retried_then_given_up_and_never_a_reward():
    scheduler, log = make(group_size=3, min_members=2, retries=1)
    scheduler.admit("a", 0)
    assert scheduler.failed(0, 1, "server", "gone") is Failed
    assert scheduler.finished(0, 0, 1.0, {0: 5}) is Finished
    assert scheduler.failed(0, 1, "agent", "boom") is GaveUp
    assert log[-2:] == [Failed(0, 1, "agent", "boom"), GaveUp(0, 1)]
    assert scheduler.state.open[0].pending == [2]
    assert scheduler.finished(0, 2, 0.0, {0: 5}) is Completed
    assert scheduler.state.open[0].rewards == {0: 1.0, 2: 0.0}
    assert scheduler.state.failures == {"server": 1, "agent": 1}


def test_giving_up_the_last_member_out_completes_the_group():
    scheduler, _ = make(group_size=2, min_members=1, retries=0)
    scheduler.admit("a", 0)
    scheduler.finished(0, 0, 1.0, {0: 5})
    assert scheduler.failed(0, 1, "timeout", "") is Completed


def test_i8_a_group_that_cannot_reach_min_members_is_dropped_and_late_ends_of_it_ignored():
    scheduler, log = make(group_size=3, min_members=2, retries=0)
    scheduler.admit("a", 0)
    assert scheduler.failed(0, 0, "agent", "") is GaveUp
    assert scheduler.failed(0, 2, "timeout", "") is Dropped
    assert log[-1] == Dropped(0, "timeout")
    count = len(log)
    assert scheduler.finished(0, 1, 1.0, {0: 5}) is None
    assert scheduler.failed(0, 1, "agent", "") is None
    scheduler.drop(0, "cancelled")
    assert len(log) == count
    assert scheduler.state.dropped == {"timeout": 1}


def test_i9_failures_without_a_finished_episode_end_the_run_and_a_new_life_begins_at_zero():
    scheduler, log = make(failures={"agent": 2, "infrastructure": 2, "reward": 2, "data": 2}, retries=9)
    assert scheduler.start() == 0
    scheduler.admit("a", 0)
    assert scheduler.failed(0, 0, "agent", "1") is Failed
    assert scheduler.failed(0, 0, "agent", "2") is Failed
    scheduler.finished(0, 1, 1.0, {0: 5})
    assert scheduler.failed(0, 0, "agent", "3") is Failed
    assert scheduler.failed(0, 0, "agent", "4") is Failed
    assert scheduler.decide.spent_budget() is None
    assert scheduler.failed(0, 0, "agent", "5") is Failed
    assert scheduler.decide.spent_budget() == "agent"
    assert scheduler.state.open[0].pending == [0]

    again = replayed(scheduler, log)
    assert again.start() == 1
    assert again.failed(0, 0, "agent", "6") is Failed
    assert again.decide.spent_budget() is None


def test_impossible_reports_are_refused():
    scheduler, log = make(group_size=2)
    scheduler.admit("a", 0)
    count = len(log)
    for report, message in [
        (lambda: scheduler.finished(1, 0, 1.0, {0: 5}), "group 1 was never admitted"),
        (lambda: scheduler.failed(-1, 0, "agent", ""), "group -1 was never admitted"),
        (lambda: scheduler.drop(1, "data"), "group 1 was never admitted"),
        (lambda: scheduler.finished(0, 2, 1.0, {0: 5}), "member 2 of group 0 is not running"),
        (lambda: scheduler.finished(0, 0, float("nan"), {0: 5}), "reward nan of group 0, member 0"),
        (lambda: scheduler.finished(0, 0, 1.0, {0: 5, 1: 1}), "tokens of versions 0 to 1, but the run has 0 to 0"),
        (lambda: scheduler.finished(0, 0, 1.0, {-1: 1}), "tokens of versions -1"),
        (lambda: scheduler.serving(1), "version 1 does not exist"),
        (lambda: scheduler.published(1), "version 1 does not exist"),
        (lambda: scheduler.checkpointed(1, "here"), "version 1 does not exist"),
    ]:
        with pytest.raises(ValueError, match=message):
            report()
    assert len(log) == count
    scheduler.finished(0, 0, 1.0, {0: 5})
    with pytest.raises(ValueError, match=r"member 0 of group 0 is not running; pending: \[1\]"):
        scheduler.finished(0, 0, 1.0, {0: 5})


def test_the_watchdog_learns_what_is_waited_for():
    scheduler, _ = make(max_staleness=9, batch_groups=2)
    admit_all(scheduler)
    scheduler.failed(2, 1, "agent", "")
    finish(scheduler, 0)
    finish(scheduler, 1)
    assert "a batch needs 2 groups: 2 complete, 18 running, another may not start" in waits_of(scheduler.decide)
    step(scheduler)
    finish(scheduler, 3, [1])
    finish(scheduler, 4, [1])
    scheduler.next_batch()
    assert waits_of(scheduler.decide)[:4] == [
        "training of batch 1 (2 groups) from version 1",
        "servers at version 0, trained is 1",
        "a batch needs 2 groups: 0 complete, 16 running, another may not start",
        "group 2 (task 'task 2') waits for member 0, 1 (failed 1x)",
    ]
    assert waits_of(scheduler.decide)[-1] == "and 8 more groups"


def test_memory_holds_open_groups_only():
    scheduler, _ = make(max_staleness=1, batch_groups=2, uniform="replace")
    sizes = []
    for _ in range(50):
        for number in admit_all(scheduler):
            finish(scheduler, number, [scheduler.state.version], (1.0, float(number % 5 == 0)))
        if batch := scheduler.next_batch():
            scheduler.trained(batch.batch)
            scheduler.serving(scheduler.state.version)
            scheduler.checkpointed(scheduler.state.version, "here")  # until then its batch may have to be repeated
        sizes.append(len(str(scheduler.state)))
    assert scheduler.state.trained > 50
    assert max(sizes[25:]) < max(sizes[:25]) + 100  # a few more digits


def test_settings_from_config():
    config = Config.load(["train.batch_groups=4", "train.steps=7", "group.size=5", "staleness.late=drop"])
    settings = SchedulerSettings.from_config(config, start_version=3)
    assert (settings.batch_groups, settings.last_version, settings.min_members, settings.late) == (4, 10, 5, "drop")
    assert SchedulerSettings.from_config(Config.load(["group.min_members=2"])).min_members == 2


# -- I1, I2, I3, I4 and replay by an oracle


@dataclass
class Story:
    """What the oracle knows of one group."""

    ends: dict[int, tuple[float, dict[int, int]]] = field(default_factory=dict)
    """Member -> reward and tokens."""
    tries: Counter[int] = field(default_factory=Counter)
    lost: set[int] = field(default_factory=set)
    fate: str = "running"
    """running, ready, batch, trained, or "dropped <reason>"."""
    batches: int = 0

    def tokens(self) -> list[int]:
        """The version of each loss token, one by one."""
        return [v for _, counts in self.ends.values() for v, count in counts.items() for _ in range(count)]


class SchedulerMachine(RuleBasedStateMachine):
    """The random life of a run. The oracle keeps every group for ever and recomputes each answer from all of them."""

    @initialize(
        batch_groups=st.integers(1, 4),
        max_staleness=st.integers(0, 3),
        late=st.sampled_from(["mask", "drop"]),
        size=st.integers(1, 3),
        shortfall=st.integers(0, 2),
        uniform=st.sampled_from(["train", "replace"]),
        retries=st.integers(0, 2),
        failures=st.fixed_dictionaries(
            {budget: st.sampled_from([0, 3, 100]) for budget in ("agent", "infrastructure", "reward", "data")}
        ),
        last_version=st.sampled_from([0, 3, 5, 100]),
        steps=st.integers(0, 4),
        data=st.data(),
    )
    def begin(self, size, shortfall, steps, data, **rest):
        self.settings = SchedulerSettings(group_size=size, min_members=max(1, size - shortfall), **rest)
        self.log: list[Fact] = []
        self.scheduler = Told(self.settings, self.log.append)
        self.follower = Told(self.settings, self.log.append)
        self.followed = 0
        self.stories: list[Story] = []
        self.version = self.serving = self.life = 0
        self.failures_in_a_row: Counter[str] = Counter()
        self.batch: BatchFormed | None = None
        self.ages: Counter[int] = Counter()
        assert self.scheduler.start() == 0
        for _ in range(steps):
            self.step(data, final=False, serve=True)

    def numbers(self, fate: str) -> list[int]:
        return [number for number, story in enumerate(self.stories) if story.fate == fate]

    def out(self, number: int) -> list[int]:
        story = self.stories[number]
        return [m for m in range(self.settings.group_size) if m not in story.ends and m not in story.lost]

    def age(self, version: int) -> int:
        return self.version - version

    def may_admit(self) -> bool:
        """I1, by laying the groups out in batches."""
        size = self.settings.batch_groups
        lineup = [story for story in self.stories if not story.fate.startswith("dropped")] + [Story()]
        batches = [lineup[start : start + size] for start in range(0, len(lineup), size)]
        ahead = len(batches) - 1 - self.serving
        steps = range(self.version + (1 if self.batch else 0), self.settings.last_version)
        places = [place for _ in steps for place in range(size)]
        untrained = len(self.numbers("running")) + len(self.numbers("ready"))
        return ahead <= self.settings.max_staleness and untrained + 1 <= len(places)

    def judge(self, number: int, failure: str | None = None) -> type[Fact] | None:
        """The fate of a group after a member ended."""
        story = self.stories[number]
        rewards = [reward for reward, _ in story.ends.values()]
        if failure and self.settings.group_size - len(story.lost) < self.settings.min_members:
            story.fate = f"dropped {failure}"
        elif self.out(number):
            return GaveUp if failure else Finished
        elif not story.tokens():
            story.fate = "dropped empty"
        elif self.settings.uniform == "replace" and min(rewards) == max(rewards):
            story.fate = "dropped uniform"
        else:
            story.fate = "ready"
            return Completed
        return Dropped

    # Rules: what can happen

    @precondition(lambda self: self.may_admit())
    @rule(fill=st.booleans())
    def admit(self, fill):
        while self.may_admit():
            position = len(self.stories)
            assert self.scheduler.admit(f"task {position}", position) == position
            self.stories.append(Story())
            if not fill:
                break

    @precondition(lambda self: self.numbers("running"))
    @rule(data=st.data(), how_many=st.sampled_from(["member", "group", "all"]))
    def finish(self, data, how_many):
        numbers = self.numbers("running")
        if how_many != "all":
            numbers = [data.draw(st.sampled_from(numbers))]
        ends = [(number, member) for number in numbers for member in self.out(number)]
        if how_many == "member":
            ends = [data.draw(st.sampled_from(ends))]
        versions = st.integers(max(0, self.version - 5), self.version)
        tokens_of = st.dictionaries(versions, st.integers(0, 3), min_size=1, max_size=3)
        results = data.draw(st.lists(st.tuples(st.sampled_from([0.0, 1.0]), tokens_of), min_size=2, max_size=4))
        for (number, member), (reward, tokens) in zip(ends, cycle(results), strict=False):
            end = self.scheduler.finished(number, member, reward, tokens)
            self.stories[number].ends[member] = (reward, tokens)
            self.failures_in_a_row.clear()
            assert end is self.judge(number)

    @precondition(lambda self: self.numbers("running"))
    @rule(
        data=st.data(), kind=st.sampled_from(["agent", "timeout", "server", "data", "reward"]), times=st.integers(1, 4)
    )
    def fail(self, data, kind, times):
        number = data.draw(st.sampled_from(self.numbers("running")))
        member = data.draw(st.sampled_from(self.out(number)))
        story = self.stories[number]
        for _ in range(times):
            end = self.scheduler.failed(number, member, kind, "text")
            story.tries[member] += 1
            budget = "infrastructure" if kind in ("timeout", "server") else kind
            self.failures_in_a_row[budget] += 1
            spent = self.failures_in_a_row[budget] == self.settings.failures[budget] + 1
            assert self.scheduler.decide.spent_budget() == (budget if spent else None)
            if spent:
                assert end is Failed
                self.restart(self.settings)
                break
            if story.tries[member] >= self.settings.retries + 1:
                story.lost.add(member)
                assert end is self.judge(number, kind)
                break
            assert end is Failed

    @precondition(lambda self: self.numbers("running") + self.numbers("ready"))
    @rule(data=st.data(), reason=st.sampled_from(["cancelled", "data"]))
    def drop(self, data, reason):
        number = data.draw(st.sampled_from(self.numbers("running") + self.numbers("ready")))
        self.scheduler.drop(number, reason)
        self.stories[number].fate = f"dropped {reason}"

    @precondition(lambda self: any(story.fate.startswith("dropped") for story in self.stories))
    @rule(data=st.data())
    def report_on_a_dropped_group(self, data):
        dropped = [number for number, story in enumerate(self.stories) if story.fate.startswith("dropped")]
        number = data.draw(st.sampled_from(dropped))
        count = len(self.log)
        assert self.scheduler.finished(number, 0, 1.0, {0: 1}) is None
        assert self.scheduler.failed(number, 0, "agent", "") is None
        self.scheduler.drop(number, "cancelled")
        assert len(self.log) == count

    @rule(final=st.booleans())
    def form(self, final):
        batch = self.scheduler.next_batch(final=final)
        if self.batch or self.version >= self.settings.last_version:
            assert batch is None
            return
        size, eta = self.settings.batch_groups, self.settings.max_staleness
        enough = any if self.settings.late == "mask" else all
        ready = self.numbers("ready")
        usable = [n for n in ready if enough(self.age(v) <= eta for v in self.stories[n].tokens())]
        chosen = usable[:size]
        for number in ready:
            if number not in usable and (len(chosen) < size or number < chosen[-1]):
                self.stories[number].fate = "dropped stale"
        if not chosen or (len(chosen) < size and not final):
            assert batch is None
            return
        assert batch is not None
        assert batch.groups == tuple(chosen)
        assert batch.from_version == self.version
        tokens = [version for number in chosen for version in self.stories[number].tokens()]
        kept = [version for version in tokens if version >= batch.oldest_version]
        assert sorted(kept) == sorted(v for v in tokens if self.age(v) <= eta)  # I2, and nothing is masked for nothing
        assert batch.masked_tokens == len(tokens) - len(kept)
        assert batch.masked_tokens == 0 or self.settings.late == "mask"
        for number in chosen:
            self.stories[number].fate = "batch"
            self.stories[number].batches += 1
        self.batch = batch

    @precondition(lambda self: self.batch)
    @rule(serve=st.booleans())
    def train(self, serve):
        for number in self.batch.groups:
            self.stories[number].fate = "trained"
            self.ages.update(self.age(v) for v in self.stories[number].tokens() if v >= self.batch.oldest_version)
        self.version += 1
        assert self.scheduler.trained(self.batch.batch) == self.version
        self.batch = None
        if serve:
            self.scheduler.published(self.version)
            self.scheduler.serving(self.version)
            self.serving = self.version

    @rule(data=st.data(), final=st.booleans(), serve=st.booleans())
    def step(self, data, final, serve):
        """All of a step at once, so that runs get long."""
        self.admit(True)
        if self.numbers("running"):
            self.finish(data, "all")
        self.form(final)
        if self.batch:
            self.train(serve)
        self.admit(True)

    @rule(data=st.data())
    def serve(self, data):
        self.serving = data.draw(st.integers(max(0, self.version - 2), self.version))
        self.scheduler.serving(self.serving)

    @rule()
    def checkpoint(self):
        self.scheduler.checkpointed(self.version, f"step {self.version}")

    @rule(steps=st.sampled_from([0, 1, 3, 100]), eta=st.integers(0, 3), late=st.sampled_from(["mask", "drop"]))
    def restart_with_other_settings(self, steps, eta, late):
        self.restart(
            replace(self.settings, last_version=self.version + steps, max_staleness=eta, late=late),
        )

    def restart(self, settings):
        """The controller is killed; another one replays the ledger."""
        self.settings = self.scheduler.settings = settings
        self.scheduler = replayed(self.scheduler, self.log)
        self.life += 1
        assert self.scheduler.start() == self.life
        self.failures_in_a_row.clear()

    # Invariants: what holds after each of them

    @invariant()
    def i1_admission(self):
        assert self.scheduler.may_admit() == self.may_admit()

    @invariant()
    def i2_age(self):
        assert self.scheduler.state.staleness == self.ages
        assert self.scheduler.state.max_staleness == max(self.ages, default=0)

    @invariant()
    def i3_fate(self):
        state = self.scheduler.state
        fates = Counter(story.fate for story in self.stories)
        assert state.admitted == len(self.stories)
        assert state.trained == fates.pop("trained", 0)
        assert list(state.open) == [
            n for n, story in enumerate(self.stories) if story.fate in ("running", "ready", "batch")
        ]
        assert state.running == fates.pop("running", 0)
        assert [n for n, g in state.open.items() if g.ready] == sorted(self.numbers("ready") + self.numbers("batch"))
        assert {n: g.pending for n, g in state.open.items()} == {n: self.out(n) for n in state.open}
        del fates["ready"], fates["batch"]
        assert {f"dropped {reason}": count for reason, count in state.dropped.items()} == fates
        assert state.admitted == state.trained + sum(state.dropped.values()) + len(state.open)

    @invariant()
    def i4_once(self):
        assert all(story.batches == (story.fate in ("batch", "trained")) for story in self.stories)
        assert self.scheduler.state.batch == self.batch

    @invariant()
    def replay_is_the_live_state(self):
        for fact in self.log[self.followed :]:
            again = facts.decode(facts.encode(fact))
            assert again == fact
            self.follower.state.apply(again)
        self.followed = len(self.log)
        assert self.follower.state == self.scheduler.state


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = hypothesis_settings(max_examples=150, stateful_step_count=40, deadline=None)
