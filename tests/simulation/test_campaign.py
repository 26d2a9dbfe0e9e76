"""The fault campaign: a few hundred seeds, that it can find what it is for, and that a seed replays exactly."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from areal.agents.episode import Episode
from areal.controller import calls, codec, rollout
from areal.controller.facts import Admitted, Dropped, Fact
from areal.controller.ledger import Ledger
from areal.controller.reader import LedgerReader
from areal.controller.rollout import Agent, Failure, RolloutLoop
from areal.controller.scheduler import Scheduler
from areal.controller.signal import Signal
from areal.controller.train import TrainLoop
from areal.deadlines import Deadlines
from areal.simulation.campaign import campaign, quiet, simulate
from areal.simulation.case import draw
from areal.simulation.clock import VirtualLoop
from areal.simulation.workers import SERVER_FAULTS, TRAINER_FAULTS
from areal.types import Batch, EpisodeRecord, Task, TrainStats

SEEDS = 200
FIXED_SEEDS: dict[int, str] = {
    36: "weights of a killed controller were in the way of the next export",
    1326: "a server that left after all servers of its weight group had died ended the run",
    7093: "a server that ranks could not give its weights was never opened, and without it there was no step",
    8914: "a stop while ranks repeated their steps ended with an error of the scheduler",
    9506: "an export of the simulated ranks did not replace one of the same version, as that of the real ones does",
    9188: "a server that came up while restarted ranks repeated steps was never opened",
}
"""Seeds that find a fault, and what it was. (Drawing more, or another order of timers, changes what a seed stands for:
all but 9188 find what others had found.)"""
WITHOUT_STOPS = {9188}
"""Those that found it before stops were drawn."""


@pytest.fixture(autouse=True)
def noisy_again() -> Iterator[None]:
    """`campaign` silences logging and what the interpreter says of abandoned coroutines."""
    import logging

    hook = sys.unraisablehook
    yield
    sys.unraisablehook = hook
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(300)
def test_a_few_hundred_seeds() -> None:
    failed, happened = campaign(range(1000, 1000 + SEEDS))
    assert not failed, [(outcome.seed, outcome.violation) for outcome in failed]
    kinds = [*SERVER_FAULTS, *TRAINER_FAULTS, "controller killed", "agent failed", "agent hung", "call recalled"]
    kinds += ["servers joined", "servers left", "controller stopped", "data used up"]
    assert not [kind for kind in kinds if not happened[kind]], "a fault that never happened was not tested"
    assert happened["steps"] > 3 * SEEDS
    assert happened["requests out of a full cache"]
    assert happened["requests held for weights"]
    settings = [f"staleness.late={late}" for late in ("mask", "drop", "wait")]
    settings += ["weights.transport=disk", "weights.transport=group", "weights.rollout=all", "weights.rollout=rolling"]
    settings += ["weights.interrupt=abort", "weights.interrupt=retract"]
    assert not [setting for setting in settings if not happened[setting]]
    assert all(happened[f"dropped: {reason}"] for reason in ("stale", "uniform", "agent"))


@pytest.mark.parametrize("seed", FIXED_SEEDS)
def test_seeds_that_found_a_fault(seed: int) -> None:
    quiet()
    case = draw(seed)
    if seed in WITHOUT_STOPS:
        case = replace(case, stops=(0.0,) * len(case.stops))
    assert not simulate(case).violation


def test_nothing_of_a_killed_controller_runs_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coroutines are closed before the next life begins; the garbage collector would close them inside it."""
    quiet()
    close, states = VirtualLoop.close, Counter[str]()

    def counting(loop: VirtualLoop) -> None:
        states.update(inspect.getcoroutinestate(task.get_coro()) for task in asyncio.all_tasks(loop))  # type: ignore[arg-type]
        close(loop)

    monkeypatch.setattr(VirtualLoop, "close", counting)
    assert "killed" in simulate(168).ends
    assert set(states) == {inspect.CORO_CLOSED}


def _ledger(folder: Path) -> tuple[str, str]:
    """Digests of the facts and of the episodes of the run in `folder`."""
    (run,) = folder.glob("run-*")
    with LedgerReader.open(run / "ledger") as reader:
        facts = list(reader.facts())
        groups = [fact.group for fact in facts if isinstance(fact, Admitted)]
        records = [codec.encode(record) for group in groups for record in reader.episodes(group)]
    assert records
    return hashlib.sha256(repr(facts).encode()).hexdigest(), hashlib.sha256(b"".join(records)).hexdigest()


def test_two_processes_write_the_same_ledger(tmp_path: Path) -> None:
    """Of a seed whose controller is killed twice and resumed."""
    quiet()
    seed = next(seed for seed in range(100) if simulate(seed).ends.count("killed") >= 2)
    digests = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, "-m", "areal.simulation.campaign", "--seed", str(seed), "--keep", str(folder)]
        end = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "killed, " in end.stdout
        assert end.stdout.splitlines()[-1] == "1 seeds, 0 violations"
        digests.append(_ledger(folder))
    assert digests[0] == digests[1]


def _find(what: str, seeds: range) -> None:
    """One of the seeds must see a violation of `what`."""
    for seed in seeds:
        failed, _ = campaign([seed])
        if failed and failed[0].violation.startswith(what):
            return
    pytest.fail(f"no violation of {what} in {seeds}")


def test_it_finds_admission_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "may_admit", lambda self: len(self.state.open) < 40)
    _find("I1", range(10))


def test_it_finds_stale_tokens_in_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_is_stale", lambda *_: False)
    _find("I2", range(100))


def test_it_finds_a_group_that_is_dropped_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that no fact in the ledger tells of."""
    append = Ledger.append

    def silent(self: Ledger, fact: Fact, episode: EpisodeRecord | None = None) -> None:
        if not isinstance(fact, Dropped):
            append(self, fact, episode)

    monkeypatch.setattr(Ledger, "append", silent)
    _find("I3: trained, dropped, open", range(30))


def test_it_finds_groups_left_over_at_the_end_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few for a batch."""
    next_batch = Scheduler.next_batch
    monkeypatch.setattr(Scheduler, "next_batch", lambda self, final, **rest: next_batch(self, **rest))
    _find("I3: the run ended", range(30))


def test_it_finds_a_run_that_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    next_batch = TrainLoop.next_batch

    async def short(self: TrainLoop):  # type: ignore[no-untyped-def]
        return None if self.scheduler.state.version == 2 else await next_batch(self)

    monkeypatch.setattr(TrainLoop, "next_batch", short)
    _find("I3: the run ended", range(30))


def test_it_finds_steps_that_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that start again are behind the run then."""

    async def nothing(self: TrainLoop) -> None:
        self.cluster.ranks.version = self.scheduler.state.version

    monkeypatch.setattr(TrainLoop, "_repeat", nothing)
    _find("I4: the ranks", range(30))


def test_it_finds_a_group_that_is_trained_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch but the first has the groups of the one before it."""
    train, before = TrainLoop.train, {}

    async def again(self: TrainLoop, batch: Batch) -> TrainStats:
        groups = before.get(self, batch.groups)
        before[self] = batch.groups
        return await train(self, replace(batch, groups=groups))

    monkeypatch.setattr(TrainLoop, "train", again)
    _find("I4: groups", range(30))


def test_it_finds_a_failure_that_became_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    run_episode = rollout.run_episode

    async def rewarded(
        agent: Agent, episode: Episode, task: Task, timeout_s: float, deadlines: Deadlines
    ) -> EpisodeRecord | Failure:
        outcome = await run_episode(agent, episode, task, timeout_s, deadlines)
        failed = isinstance(outcome, Failure) and outcome.kind in ("timeout", "server")
        return episode.finish(0.0, timeout_s) if failed else outcome

    monkeypatch.setattr(rollout, "run_episode", rewarded)
    _find("I9", range(60))


def test_it_finds_a_token_lost_between_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    stitch = calls._stitch

    def torn(ids, pieces, finish, interruptions):  # type: ignore[no-untyped-def]
        whole = stitch(ids, pieces, finish, interruptions)
        if len(pieces) > 1:
            object.__setattr__(whole, "output_ids", np.roll(whole.output_ids, 1))
        return whole

    monkeypatch.setattr(calls, "_stitch", torn)
    _find("I5", range(30))


def test_it_finds_a_wrong_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal.simulation.server.version_of", lambda label, origin: 0)
    _find("I6", range(1, 10))


def test_it_finds_a_wait_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Signal, "notify", lambda self: None)
    _find("I7", range(5))


def test_it_finds_requests_that_nobody_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls.Calls, "end_later", lambda *_: None)
    _find("I8", range(60))


def test_it_finds_an_episode_that_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed controller that starts every member again, those that finished too."""
    start = RolloutLoop._start
    monkeypatch.setattr(
        RolloutLoop, "_start", lambda self, g, a, n, t, m: start(self, g, a, n, t, range(self._members))
    )
    _find("I7", range(60))


def test_a_seed_is_a_case() -> None:
    assert draw(5) == draw(5)
    assert draw(5) != draw(6)
    assert simulate(5) == simulate(5)
