"""Who is to blame when a broadcast group breaks, with clients that answer what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from areal.controller.broadcast import Broadcast
from areal.controller.server import Server
from areal.deadlines import Deadlines
from areal.errors import ArealError, ServerLost, ServerRefused, TrainerError
from areal.types import TensorSpec
from areal.workers.protocols import WeightGroup

SPECS = [TensorSpec("w", "float32", (2,))]


class Client:
    """loads: what the next loads do: an error after some seconds, None for success, "hang"."""

    def __init__(self, index: int, *loads: tuple[float, ArealError] | str | None) -> None:
        self.url = f"http://s{index}"
        self.loads = list(loads)
        self.joined: list[tuple[int, int]] = []
        self.left = 0

    async def join_group(self, group: WeightGroup, rank: int) -> None:
        self.joined.append((rank, group.world_size))

    async def leave_group(self, group: str) -> None:
        self.left += 1

    async def load_group(self, group: str, specs: Sequence[TensorSpec], label: str) -> None:
        outcome = self.loads.pop(0) if self.loads else None
        if outcome == "hang":
            await asyncio.Event().wait()
        if isinstance(outcome, tuple):
            await asyncio.sleep(outcome[0])
            raise outcome[1]


class Trainer:
    def __init__(self, *sends: tuple[float, TrainerError] | None) -> None:
        self.sends = list(sends)
        self.joined = 0

    async def specs(self) -> list[TensorSpec]:
        return SPECS

    async def join_group(self, group: WeightGroup) -> None:
        self.joined += 1

    async def leave_group(self, group: str) -> None:
        pass

    async def broadcast(self, group: str) -> None:
        outcome = self.sends.pop(0) if self.sends else None
        if outcome:
            await asyncio.sleep(outcome[0])
            raise outcome[1]


async def send(trainer: Trainer, *clients: Client, widths: Sequence[int] = ()) -> tuple[set[str], dict[str, str]]:
    """(servers that finished, reasons of those that were failed)"""
    ranks, deadlines = SimpleNamespace(client=trainer), Deadlines(group=0.6)
    broadcast = Broadcast(ranks, "run.0", "127.0.0.1", "gloo", 1.0, widths, deadlines)  # type: ignore[arg-type]
    servers = [Server(i, client, state="draining") for i, client in enumerate(clients)]  # type: ignore[arg-type]
    finished: set[str] = set()
    failed: dict[str, str] = {}

    def fail(server: Server, error: ArealError) -> None:
        failed[server.client.url] = str(error)
        server.become("dead")

    async def finish(server: Server) -> None:
        finished.add(server.client.url)

    async with asyncio.timeout(3):
        await broadcast.send(servers, "run.0:1", finish, fail)
    return finished, failed


BROKEN = 0.2, TrainerError("connection closed by peer")
ECHO = 0.25, ServerRefused("Failed to receive weights: connection closed by peer")


async def test_all_is_well() -> None:
    clients = Client(0), Client(1)
    assert await send(Trainer(), *clients) == ({"http://s0", "http://s1"}, {})
    assert [client.joined for client in clients] == [[(1, 3)], [(2, 3)]]


async def test_tensor_parallel_servers_join_with_all_their_ranks() -> None:
    clients = Client(0), Client(1)
    await send(Trainer(), *clients, widths=[2, 4])
    assert [client.joined for client in clients] == [[(1, 7)], [(3, 7)]]


async def test_a_lost_server_is_to_blame_for_the_echo_of_the_others() -> None:
    """Though the echo came first. The others receive again, without it."""
    clients = Client(0, ECHO), Client(1, (0.4, ServerLost("it died")))
    trainer = Trainer(BROKEN)
    assert await send(trainer, *clients) == ({"http://s0"}, {"http://s1": "it died"})
    assert clients[0].joined == [(1, 3), (1, 2)]
    assert trainer.joined == 2


async def test_the_first_to_refuse_is_to_blame_when_nobody_was_lost() -> None:
    clients = Client(0, ECHO), Client(1, (0.0, ServerRefused("unknown dtype")))
    assert await send(Trainer(BROKEN), *clients) == ({"http://s0"}, {"http://s1": "unknown dtype"})
    assert clients[1].left >= 1


async def test_a_server_that_hangs_is_to_blame() -> None:
    clients = Client(0, ECHO), Client(1, "hang")
    finished, failed = await send(Trainer((0.2, TrainerError("w was not received"))), *clients)
    assert finished == {"http://s0"}
    assert failed == {"http://s1": "http://s1: no answer in the broadcast group"}


async def test_after_a_complete_send_everyone_answers_for_itself() -> None:
    refuse = 0.01, ServerRefused("no memory")
    clients = Client(0, refuse), Client(1), Client(2, refuse)
    finished, failed = await send(Trainer(), *clients)
    assert (finished, sorted(failed)) == ({"http://s1"}, ["http://s0", "http://s2"])


async def test_a_trainer_that_fails_by_itself_blames_no_server() -> None:
    with pytest.raises(TrainerError, match="rank 0 died"):
        await send(Trainer((0.01, TrainerError("rank 0 died"))), Client(0, ECHO), Client(1, ECHO))
