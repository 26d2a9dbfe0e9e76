"""Whatever is killed, the run goes on from there: every group trained once, none lost (I3, I4)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal.controller.facts import BatchFormed, Checkpointed, Fact, Finished, Started, Trained
from areal.controller.reader import LedgerReader
from tests.integration.kills import STEPS, Run

LONGEST_S = 1.0
"""Long enough for a kill to find agents between two turns."""


@pytest.fixture
def run(tiny_qwen3: Path, tmp_path: Path) -> Iterator[Run]:
    made = Run(tiny_qwen3, tmp_path, LONGEST_S)
    yield made
    made.close()


def trained(facts: list[Fact]) -> int:
    return sum(isinstance(fact, Trained) for fact in facts)


@pytest.mark.timeout(900)
def test_the_controller_is_killed_before_the_first_checkpoint_then_in_a_step_then_after_one(run: Run) -> None:
    """Three kills of one run. Step 1 is repeated from its recorded batch, and unfinished episodes go on from their
    recorded turns; the second kill is between BatchFormed and Trained; the last resume trains longer."""
    began = time.monotonic()
    run.start()
    assert run.wait(lambda facts: 1 in run.losses()), run.output()
    started = time.monotonic()
    assert {"sglang::scheduler", "sglang::detokenizer"} <= run.titles()
    run.kill("controller")
    assert time.monotonic() - started < max(5, (started - began) / 6), "SGLang's own processes outlived the controller"
    facts = run.facts()
    with LedgerReader.open(run.path / "ledger") as reader:
        ended = {(fact.group, fact.member) for fact in facts if isinstance(fact, Finished)}
        calls = [len(reader.calls(group, member)) for group in range(20) for member in range(3)]
        assert not [reader.calls(group, member) for group, member in ended if reader.calls(group, member)]
    assert any(calls), "no episode was in the middle"
    run.resume()

    def in_step(facts: list[Fact]) -> bool:
        steps = [fact for fact in facts if isinstance(fact, BatchFormed | Trained)]
        return trained(facts) >= 4 and isinstance(steps[-1], BatchFormed)

    assert run.wait(in_step), run.output()
    run.kill("controller")
    before = trained(run.facts())  # a step may have ended since
    run.resume()
    assert run.wait(lambda facts: trained(facts) > before), run.output()
    run.kill("controller")
    run.resume(f"train.steps={STEPS + 2}", "servers.max_running=32")
    assert run.end() == 0, run.output()
    assert run.losses()[1][1:], "the step after the start was not repeated"
    run.check(STEPS + 2)
    facts = run.facts()
    assert [fact.life for fact in facts if isinstance(fact, Started)] == [0, 1, 2, 3]
    assert sum(isinstance(fact, Checkpointed) for fact in facts) >= 3


@pytest.mark.timeout(900)
def test_i4_the_losses_of_a_killed_run_are_those_of_an_undisturbed_one(tiny_qwen3: Path, tmp_path: Path) -> None:
    """With eta = 0 and seeded sampling, step by step: repeated steps, recalled turns and all that is sampled later."""
    steps = 4
    seeded = f"train.steps={steps}", "staleness.max=0", 'servers.args=["--enable-deterministic-inference"]'
    runs = []
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
        runs.append(Run(tiny_qwen3, tmp_path / name, LONGEST_S))
    undisturbed, killed = runs
    try:
        undisturbed.start(*seeded)
        assert undisturbed.end() == 0, undisturbed.output()
        killed.start(*seeded)
        # In the middle of the episodes of step 4: a checkpoint covers two of the three steps before.
        assert killed.wait(lambda facts: trained(facts) == 3 and isinstance(facts[-1], Finished)), killed.output()
        killed.kill("controller")
        killed.resume()
        assert killed.end() == 0, killed.output()
        killed.check(steps)
    finally:
        for run in runs:
            run.close()
    expected, losses = undisturbed.losses(), killed.losses()
    assert len(set(map(tuple, expected.values()))) == steps, "losses that never change prove nothing"
    assert losses[3][1:], "step 3 was not repeated"
    for step in range(1, steps + 1):
        assert losses[step] == pytest.approx(expected[step] * len(losses[step]), abs=1e-5), f"step {step}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("transport", "server"), [("disk", "server"), ("group", "scheduler")])
def test_a_rank_and_a_server_are_killed(run: Run, transport: str, server: str) -> None:
    """Each is replaced while the run goes on, and the weight group formed again without the one that died."""
    run.start(f"weights.transport={transport}")
    assert run.wait(lambda facts: trained(facts) >= 1), run.output()
    assert run.kill(server)
    assert run.wait(lambda facts: trained(facts) >= 3), run.output()
    assert run.kill("rank")
    assert run.end() == 0, run.output()
    log = (run.path / "logs" / "controller.log").read_text()
    assert log.count("the ranks are restarted, 1 of 3: trainer rank 0 ended with code 137") == 1
    assert "the ranks are restarted, 2 of 3" not in log
    assert log.count(" is dead: ") == 1, "the killed server, and no other"
    run.check()
