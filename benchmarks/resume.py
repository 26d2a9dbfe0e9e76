"""How long a run with 100,000 groups in its ledger takes to go on: from Controller to the first request.

All but the start of servers and ranks, which are simulated ones: the ledger is read and folded, the checkpoint found,
the controller set up, the first group admitted. Goal: less than 10 s.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal.agents.episode import Episode
from areal.config import Config
from areal.controller.controller import Controller
from areal.controller.facts import (
    Admitted,
    BatchFormed,
    Checkpointed,
    Completed,
    Fact,
    Finished,
    Published,
    Serving,
    Started,
    Trained,
)
from areal.controller.ledger import Ledger
from areal.errors import TooManyFailures
from areal.folder import RunFolder
from areal.simulation.audit import groups_of
from areal.simulation.clock import run
from areal.simulation.server import Speed
from areal.simulation.weights import Weights
from areal.simulation.workers import World
from areal.types import Task
from benchmarks.table import arguments, report

BATCH = 16
MEMBERS = 8


def facts(groups: int) -> Sequence[Fact]:
    """Of a run whose steps are all covered by a checkpoint."""
    made: list[Fact] = [Started(0)]
    for version in range(groups // BATCH):
        numbers = tuple(range(version * BATCH, (version + 1) * BATCH))
        for number in numbers:
            made.append(Admitted(number, f"task {number}", number, MEMBERS))
            made += [Finished(number, member, member / 8, ((version, 250),)) for member in range(MEMBERS)]
            made.append(Completed(number))
        made += [
            BatchFormed(version, version, numbers, version, 0, 1e-6),
            Trained(version, version + 1),
            Published(version + 1),
            Serving(version + 1),
        ]
    return [*made, Checkpointed(groups // BATCH, f"step-{groups // BATCH}")]


async def record(folder: Path, rows: Sequence[Fact]) -> None:
    ledger = Ledger.create(folder)
    for fact in rows:
        ledger.append(fact)
    await ledger.close()


def measure(groups: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="areal-bench-") as name:
        settings = [f"folder={name}", "view=off", f"train.batch_groups={BATCH}", f"group.size={MEMBERS}"]
        settings += ["failures.agent=0", f"train.steps={groups // BATCH + 10}"]
        config = Config.load(settings)
        folder = RunFolder.create(config)
        rows = facts(groups)
        asyncio.run(record(folder.ledger, rows))
        steps = groups // BATCH
        Weights(logprobs=(-1.0,) * steps).write(folder.checkpoint(steps))
        world = World(0, Speed(start_s=0.0), 10**6, 10.0, 1e6, (), groups_of)

        reached = []

        async def agent(episode: Episode, task: Task) -> float:
            reached.append(episode)
            raise ValueError("this is where the first request would be")

        async def go_on() -> None:
            async with Controller(Config.resume(folder.path), world.workers) as controller:
                await controller.train(agent, [{"id": str(i)} for i in range(1000)])

        size = Path(folder.ledger, "ledger.db").stat().st_size
        started = time.perf_counter()
        with suppress(TooManyFailures):  # the agent fails where its first request would be
            run(go_on())
        seconds = time.perf_counter() - started
        assert reached, "the run ended before its first request"
        return {"groups": groups, "facts": len(rows), "ledger_mb": size / 1e6, "seconds": seconds}


def main() -> None:
    options = arguments()
    measure(1600)  # warm-up
    report("resume", [measure(10_000), measure(100_000)], options.json)


if __name__ == "__main__":
    main()
