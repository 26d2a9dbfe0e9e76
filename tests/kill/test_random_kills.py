"""SIGKILL at random moments, to the controller, a server or a rank, one to three times a run: `make kill-test`.

The moments are drawn from the seed, the run's own timing is not: a failure names what was killed and when.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal.controller.facts import Fact, Trained
from tests.integration.kills import STEPS, Run

KILLS = int(os.environ.get("KILLS", "20"))


@pytest.fixture
def run(tiny_qwen3: Path, tmp_path: Path) -> Iterator[Run]:
    made = Run(tiny_qwen3, tmp_path)
    yield made
    made.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(KILLS))
def test_random_kills(run: Run, seed: int) -> None:
    chance = random.Random(seed)
    kills = [
        (chance.choice(["controller", "controller", "server", "rank"]), chance.randint(0, STEPS - 1)) for _ in "abc"
    ]
    run.start()
    for what, step in kills[: chance.randint(1, 3)]:

        def reached(facts: list[Fact], step: int = step) -> bool:
            return bool(facts) and sum(isinstance(fact, Trained) for fact in facts) >= step

        if run.wait(reached):
            time.sleep(chance.uniform(0, 2))
            run.kill(what)
            print(f"killed: {what} after step {step}")
        if what == "controller":
            run.resume()
    for _ in range(3):
        if run.end() == 0:
            break
        run.resume()  # what could not be healed ended the run with its cause
    assert run.end() == 0, run.output()
    run.check()
