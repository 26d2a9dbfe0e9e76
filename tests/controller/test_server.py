"""How a server is found dead, with a client that answers what the test says."""

from __future__ import annotations

import asyncio

import pytest

from areal.controller.server import MISSES, Server
from areal.deadlines import Deadlines
from areal.errors import ServerLost
from areal.workers.protocols import ServerInfo


class Client:
    url = "http://s0"

    def __init__(self, *health: bool) -> None:
        self.health = list(health)
        self.label = "run.0:3"
        self.checks = 0
        self.info_fails = 0

    async def healthy(self) -> bool:
        self.checks += 1
        return self.health.pop(0) if self.health else True

    async def info(self) -> ServerInfo:
        if self.info_fails:
            self.info_fails -= 1
            raise ServerLost("http://s0/model_info: connection refused")
        return ServerInfo(self.label, "/model", 4096)


DEADLINES = Deadlines(health=0.02, health_retry=0.005)


def serving(client: Client, deadlines: Deadlines = DEADLINES) -> Server:
    return Server(0, client, deadlines, "accepting", "run.0:3", 3)  # type: ignore[arg-type]


async def failure(server: Server, **options: object) -> str:
    async with asyncio.timeout(5):
        return await server.failure(options.get("exited"), lambda: None)  # type: ignore[arg-type]


async def test_missed_health_checks_in_a_row() -> None:
    client = Client(False, False, True, *[False] * MISSES)
    assert await failure(serving(client)) == f"http://s0/health failed {MISSES} times in a row"
    assert client.checks == 3 + MISSES


async def test_being_declared_dead() -> None:
    server = serving(Client())
    asyncio.get_running_loop().call_later(0.01, server.become, "dead", "it did not take the new weights")
    assert await failure(server) == "it did not take the new weights"


async def test_the_end_of_its_process() -> None:
    async def exited(index: int) -> str:
        return f"server {index} ended with code -9"

    assert await failure(serving(Client()), exited=exited) == "server 0 ended with code -9"


@pytest.mark.parametrize("broken", [0, 1])
async def test_a_suspect_server_is_checked_at_once_and_accepts_again(broken: int) -> None:
    """Also when the connection of the check breaks once more."""
    client = Client()
    client.info_fails = broken
    server = serving(client, Deadlines(health=60.0, health_retry=0.005))
    cleared = asyncio.Event()
    watch = asyncio.create_task(server.failure(None, cleared.set))
    server.suspect()
    assert server.state == "suspect"
    async with asyncio.timeout(5):
        await cleared.wait()
    assert server.state == "accepting"
    assert not watch.done()
    watch.cancel()
    await asyncio.wait([watch])


async def test_i6_other_weights_than_it_should_hold() -> None:
    client = Client()
    server = serving(client)
    server.suspect()
    client.label = "default"
    assert await failure(server) == "http://s0 holds weights 'default' instead of 'run.0:3'"


async def test_a_health_check_that_lies() -> None:
    client = Client()
    client.info_fails = 99
    server = serving(client)
    server.suspect()
    assert await failure(server) == f"http://s0/health failed {MISSES} times in a row"


async def test_only_a_server_that_accepts_becomes_suspect() -> None:
    for state in ("starting", "waiting", "draining", "paused", "dead", "gone"):
        server = serving(Client())
        server.become(state)  # type: ignore[arg-type]
        server.suspect()
        assert server.state == state


async def test_a_wait_for_a_state_is_woken_by_a_state_that_has_passed() -> None:
    """The server is already somewhere else when the waiter runs."""
    server = serving(Client())
    waiter = asyncio.create_task(server.until("draining", "dead"))
    await asyncio.sleep(0)
    server.become("draining")
    server.become("accepting")
    server.become("dead", "why")
    assert await waiter == "draining"
    assert await server.until("dead") == "dead"
    assert server.reason == "why"


async def test_a_cancelled_wait_for_a_state_leaves_nothing_behind() -> None:
    server = serving(Client())
    waiter = asyncio.create_task(server.until("gone"))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.wait([waiter])
    assert not server._waiters
