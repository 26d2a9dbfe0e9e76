"""How fast the simulation is: the real controller on the virtual clock, without faults, and in the fault campaign.

`episodes_per_min`, `seeds_per_min`: of one core, by CPU time. Goals: 60,000 episodes, hundreds of seeds.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from areal.simulation.campaign import campaign, simulate
from areal.simulation.case import draw
from areal.simulation.server import Speed
from benchmarks.table import arguments, report

SEEDS = range(5000, 5100)


def episodes() -> dict[str, Any]:
    """40 steps of 16 groups of 8 episodes with two model calls each, on four servers."""
    settings = {
        "train.steps": 40,
        "train.batch_groups": 16,
        "train.minibatches": 1,
        "group.size": 8,
        "staleness.max": 2,
        "servers.count": 4,
        "sampling.max_new_tokens": 256,
        "checkpoint.every": 10,
        "view": "off",
    }
    case = replace(
        draw(0),
        settings=tuple(f"{key}={value}" for key, value in settings.items()),
        speed=Speed(),
        kv_tokens=10**6,
        mean_length=60.0,
        trained_tokens_per_s=50_000.0,
        turns=2,
        tool_s=0.5,
        agent_fails=0.0,
        agent_hangs=0.0,
        tasks=0,
        faults=((),),
        kills=(0.0,),
    )
    started = time.process_time()
    outcome = simulate(case)
    seconds = time.process_time() - started
    assert outcome.steps == 40, outcome.violation
    return {"what": "a run without faults", "episodes": outcome.episodes, "cpu_s": seconds} | {
        "episodes_per_min": outcome.episodes / seconds * 60
    }


def seeds() -> dict[str, Any]:
    started = time.process_time()
    failed, happened = campaign(SEEDS)
    seconds = time.process_time() - started
    assert not failed, failed
    return {"what": f"{len(SEEDS)} seeds of the campaign", "episodes": happened["episodes"], "cpu_s": seconds} | {
        "seeds_per_min": len(SEEDS) / seconds * 60
    }


def main() -> None:
    options = arguments()
    campaign(range(4990, 5000))  # warm-up
    report("simulation", [episodes(), seeds()], options.json)


if __name__ == "__main__":
    main()
