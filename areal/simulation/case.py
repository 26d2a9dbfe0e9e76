"""What a seed of the fault campaign stands for: a workload, and the faults that strike it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from areal.simulation.server import Speed
from areal.simulation.workers import PLACES, SERVER_FAULTS, TRAINER_FAULTS, Fault

LIVES = 8
"""Times that a run is begun; the last one has no faults."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a seed stands for. kills, stops: seconds of each life after which the controller is killed, or told to
    stop; 0 lets it be. resizes: (seconds after the controller is up, servers it is to have from then on), in each
    life with faults."""

    seed: int
    settings: tuple[str, ...]
    speed: Speed
    kv_tokens: int
    mean_length: float
    trained_tokens_per_s: float
    turns: int
    tool_s: float
    agent_fails: float
    agent_hangs: float
    tasks: int
    faults: tuple[tuple[Fault, ...], ...]
    kills: tuple[float, ...]
    resizes: tuple[tuple[float, int], ...] = ()
    stops: tuple[float, ...] = (0.0,) * (LIVES - 1)


def _settings(chance: random.Random, seed: int, steps: int, groups: int, size: int, servers: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train.steps": steps,
        "train.batch_groups": groups,
        "train.minibatches": 1,
        "group.size": size,
        "group.min_members": chance.choice([0, 0, 1, 2]),
        "group.uniform": chance.choice(["train", "train", "replace"]),
        "staleness.max": chance.choice([0, 1, 2, 4]),
        "staleness.late": chance.choice(["mask", "drop", "wait"]),
        "weights.transport": chance.choice(["disk", "disk", "group"]),
        "weights.rollout": chance.choice(["all", "all", "rolling"]),
        "weights.timeout_s": 30,
        "servers.count": servers,
        "servers.max_running": chance.choice([2, 8, 64]),
        "servers.start_timeout_s": 60,
        "servers.restarts": 5,
        "episode.tool_timeout_s": 30,
        "episode.retries": chance.randint(0, 3),
        "sampling.max_new_tokens": chance.choice([16, 64, 256]),
        "checkpoint.every": chance.choice([0, 1, 2, 3]),
        "trainer.start_timeout_s": 60,
        "trainer.timeout_s": 120,
        "data.epochs": random.Random(f"{seed} epochs").choice([0, 0, 1]),
        "failures.agent": 40,
        "failures.infrastructure": 40,
        "seed": seed % 1000,
        "view": "off",
    }
    settings["weights.interrupt"] = chance.choice(
        ["abort", "retract" if settings["weights.transport"] == "disk" else "abort"]
    )
    return settings


def draw(seed: int) -> Case:
    """The case of a seed."""
    chance = random.Random(seed)
    steps, groups, size, servers = (chance.randint(*r) for r in ((2, 7), (1, 4), (2, 4), (1, 4)))
    settings = _settings(chance, seed, steps, groups, size, servers)
    speed = Speed(
        decode=chance.choice([20.0, 100.0]),
        load_s=chance.choice([0.05, 0.5, 3.0]),
        start_s=chance.choice([1.0, 10.0]),
        latency_s=chance.choice([0.0001, 0.001, 0.02]),
    )
    mean_length, turns, tool_s = chance.choice([5.0, 30.0, 120.0]), chance.randint(1, 3), chance.choice([0.0, 0.5, 5.0])
    # Deadlines that a healthy run keeps: else it could rightly end with too many failures.
    episodes = groups * size * (settings["staleness.max"] + 1) / servers
    waves = 1 + episodes / settings["servers.max_running"]
    answer_s = min(settings["sampling.max_new_tokens"], 5 * mean_length) * (1 + episodes / speed.half) / speed.decode
    settings["servers.request_timeout_s"] = round(60 + 2 * waves * answer_s)
    settings["episode.timeout_s"] = round(60 + turns * (2 * waves * answer_s + 5 * tool_s))
    settings["watchdog_s"] = 600 + 2 * settings["episode.timeout_s"] * (settings["episode.retries"] + 1)
    faulty = chance.random() < 0.9
    span = chance.choice([10.0, 30.0, 100.0])
    stop = random.Random(f"{seed} stops")
    return Case(
        seed=seed,
        settings=tuple(f"{key}={value}" for key, value in settings.items()),
        speed=speed,
        kv_tokens=chance.choice([400, 2000, 10**6]),
        mean_length=mean_length,
        trained_tokens_per_s=chance.choice([500.0, 5000.0]),
        turns=turns,
        tool_s=tool_s,
        agent_fails=chance.choice([0.0, 0.0, 0.05, 0.3]) if faulty else 0.0,
        agent_hangs=chance.choice([0.0, 0.0, 0.02]) if faulty else 0.0,
        tasks=chance.choice([0, 0, steps * groups, steps * groups + 1]),
        faults=tuple(_faults(chance, servers, span) if faulty else () for _ in range(LIVES - 1)),
        kills=tuple(
            chance.uniform(0.5, 2 * span) if faulty and chance.random() < 0.4 else 0.0 for _ in range(LIVES - 1)
        ),
        resizes=_resizes(random.Random(f"{seed} resizes"), span) if faulty else (),
        stops=tuple(stop.uniform(0.5, 2 * span) if stop.random() < 0.2 else 0.0 for _ in range(LIVES - 1)),
    )


def _resizes(chance: random.Random, span: float) -> tuple[tuple[float, int], ...]:
    if chance.random() < 0.6:
        return ()
    times = sorted(chance.uniform(0, span) for _ in range(chance.randint(1, 4)))
    return tuple((at, chance.randint(1, PLACES + 1)) for at in times)


def _faults(chance: random.Random, servers: int, span: float) -> tuple[Fault, ...]:
    kinds = [*SERVER_FAULTS, *SERVER_FAULTS, *TRAINER_FAULTS]
    return tuple(
        Fault(
            kind=chance.choice(kinds),
            at=chance.uniform(0, span),
            server=chance.randrange(servers),
            lasts=chance.choice([0.2, 3.0, 40.0, 300.0]),
            strength=chance.uniform(0.05, 0.9),
        )
        for _ in range(chance.choice([0, 1, 1, 2, 3, 5]))
    )
