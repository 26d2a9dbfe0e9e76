"""The simulated workers of a run, and the faults that befall them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from areal.agents.template import Template
from areal.config import Config
from areal.errors import ConfigError, ProcessError
from areal.simulation.audit import Violation
from areal.simulation.client import Rendezvous, SimulatedClient
from areal.simulation.server import VOCAB, SimulatedServer, Speed
from areal.simulation.trainer import SimulatedTrainer
from areal.simulation.weights import Weights
from areal.types import FlatBatch, TrainRequest
from areal.workers.protocols import ServerClient, TrainerClient

ServerFault = Literal["crash", "hang", "slow", "refuse", "garbage", "lose", "repeat", "wrong_weights", "no_restart"]
TrainerFault = Literal["trainer_dead", "trainer_slow", "disk_full", "answer_lost"]
FaultKind = ServerFault | TrainerFault
PLACES = 5
"""Servers that fit on the simulated machine."""
SERVER_FAULTS: tuple[ServerFault, ...] = get_args(ServerFault)
TRAINER_FAULTS: tuple[TrainerFault, ...] = get_args(TrainerFault)


@dataclass(frozen=True, slots=True)
class Fault:
    """at: seconds after the workers are up. lasts: of those that pass. strength: chance or factor."""

    kind: FaultKind
    at: float
    server: int = 0
    lasts: float = 10.0
    strength: float = 0.5


@dataclass(slots=True)
class World:
    """What outlives a controller: the random numbers, the faults, what the trainer saw. One seed fixes all of it.

    check(request, weights): told of each training step before it is taken.
    """

    seed: int
    speed: Speed
    kv_tokens: int
    mean_length: float
    trained_tokens_per_s: float
    faults: Sequence[Fault]
    groups_of: Callable[[FlatBatch], tuple[int, ...]]
    check: Callable[[TrainRequest, Weights], None] = lambda request, weights: None
    happened: Counter[str] = field(default_factory=Counter)
    clients: dict[int, SimulatedClient] = field(default_factory=dict)
    trainer: SimulatedTrainer | None = None

    def workers(self, config: Config) -> SimulatedWorkers:
        return SimulatedWorkers(config, self)


class SimulatedWorkers:
    """See `Workers`."""

    inline = True
    can_restart = True
    group_backend = "gloo"
    vocab_size = VOCAB
    context_length = 10**6
    template: Template | None = None

    def __init__(self, config: Config, world: World) -> None:
        self.stop_ids: set[int] = set()
        self._config = config
        self._world = world
        self._groups: dict[str, Rendezvous] = {}
        self._fate: asyncio.Task[None] | None = None
        self._no_restart = 0

    def check(self) -> None:
        pass

    async def start(
        self, folder: Path, life: int, version: int, checkpoint: Path | None
    ) -> tuple[TrainerClient, list[ServerClient]]:
        world = self._world
        self._random = random.Random(f"{world.seed} {life}")
        self._label = f"{folder.name}.{life}:{version}"
        self._weights = Weights.read(checkpoint) if checkpoint else Weights()
        self._timeout_s = self._config.weights.timeout_s
        self._life = life
        world.clients = {}
        await asyncio.sleep(world.speed.start_s)
        trainer = self._trainer(version, self._weights)
        for index in range(self._config.servers.count):
            self._new_server(index)
        self._fate = asyncio.create_task(self._suffer(), name="faults")
        return trainer, list(world.clients.values())

    def _trainer(self, version: int, weights: Weights) -> SimulatedTrainer:
        if len(weights.logprobs) != version:  # real ranks refuse it
            raise Violation(f"I4: a checkpoint of version {version} has the weights of {len(weights.logprobs)}")
        world = self._world
        world.trainer = SimulatedTrainer(
            weights,
            life=self._life,
            version=version,
            tokens_per_s=world.trained_tokens_per_s,
            groups=self._groups,
            check=world.check,
            groups_of=world.groups_of,
            timeout_s=self._timeout_s,
        )
        return world.trainer

    async def restart_trainer(self, version: int, checkpoint: Path | None) -> TrainerClient:
        self._world.happened["ranks restarted"] += 1
        await asyncio.sleep(self._world.speed.start_s)
        return self._trainer(version, Weights.read(checkpoint) if checkpoint else Weights())

    def grow(self, config: Config) -> None:
        if config.servers.count > PLACES:
            raise ConfigError(f"servers.count={config.servers.count}: there are {PLACES} places")

    async def start_server(self, index: int) -> ServerClient:
        world = self._world
        if client := world.clients.get(index):
            client.server.crash("it was ended")
        await asyncio.sleep(world.speed.start_s)
        if self._no_restart:
            self._no_restart -= 1
            raise ProcessError(f"server {index} did not start")
        return self._new_server(index)

    async def connect(self, url: str) -> ServerClient:
        raise ConfigError(f"{url}: a simulated run has no external servers")

    async def stop_server(self, index: int) -> None:
        if client := self._world.clients.pop(index, None):
            client.server.crash("it was ended")

    async def server_exited(self, index: int) -> str:
        return await asyncio.shield(self._world.clients[index].server.exited)

    async def close(self) -> None:
        if self._fate:
            self._fate.cancel()
            await asyncio.wait([self._fate])
        for client in self._world.clients.values():
            client.server.crash("the run is over")

    def _new_server(self, index: int) -> SimulatedClient:
        world = self._world
        server = SimulatedServer(
            index,
            self._weights,
            self._label,
            speed=world.speed,
            max_running=self._config.servers.max_running,
            kv_tokens=world.kv_tokens,
            length=self._random,
            mean_length=world.mean_length,
            happened=world.happened,
        )
        client = world.clients[index] = SimulatedClient(server, self._groups, self._random, self._timeout_s)
        return client

    async def _suffer(self) -> None:
        start = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as faults:
            for fault in self._world.faults:
                faults.create_task(self._one(fault, start + fault.at))

    async def _one(self, fault: Fault, when: float) -> None:
        await asyncio.sleep(max(0.0, when - asyncio.get_running_loop().time()))
        world, kind = self._world, fault.kind
        world.happened[kind] += 1
        if not world.clients:
            return
        server = list(world.clients.values())[fault.server % len(world.clients)].server
        assert world.trainer
        trouble = world.trainer.trouble
        match kind:
            case "crash":
                server.crash("signal 9")
            case "no_restart":
                self._no_restart += 1
                server.crash("signal 9")
            case "hang":
                server.hang(True)
                await asyncio.sleep(fault.lasts)
                server.hang(False)
            case "slow":
                server.slow(1 + 20 * fault.strength)
                await asyncio.sleep(fault.lasts)
                server.slow(1.0)
            case "wrong_weights":
                server.trouble.wrong_weights = True
            case "refuse" | "garbage" | "lose" | "repeat":
                setattr(server.trouble, kind, fault.strength)
                await asyncio.sleep(fault.lasts)
                setattr(server.trouble, kind, 0.0)
            case "trainer_dead":
                trouble.dead = True
            case "trainer_slow":
                trouble.slow = 1 + 10 * fault.strength
                await asyncio.sleep(fault.lasts)
                trouble.slow = 1.0
            case "disk_full":
                trouble.disk_full = True
            case "answer_lost":
                trouble.lose = True
