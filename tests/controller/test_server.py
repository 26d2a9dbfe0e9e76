"""How a server is found dead, with a client that answers what the test says."""

from __future__ import annotations

import asyncio

import pytest

from areal.controller import server as server_module
from areal.controller.server import MISSES, Server
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


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEALTH_S", 0.02)
    monkeypatch.setattr(server_module, "RETRY_S", 0.005)


def serving(client: Client) -> Server:
    return Server(0, client, "open", "run.0:3", 3)  # type: ignore[arg-type]


async def failure(server: Server, **options: object) -> str:
    async with asyncio.timeout(1):
        return await server.failure(options.get("exited"), lambda: None)  # type: ignore[arg-type]


async def test_missed_health_checks_in_a_row() -> None:
    client = Client(False, False, True, *[False] * MISSES)
    assert await failure(serving(client)) == f"http://s0/health failed {MISSES} times in a row"
    assert client.checks == 3 + MISSES


async def test_being_told() -> None:
    server = serving(Client())
    asyncio.get_running_loop().call_later(0.01, server.died.set)
    server.reason = "it did not take the new weights"
    assert await failure(server) == "it did not take the new weights"


async def test_the_end_of_its_process() -> None:
    async def exited(index: int) -> str:
        return f"server {index} ended with code -9"

    assert await failure(serving(Client()), exited=exited) == "server 0 ended with code -9"


async def test_a_lost_connection_is_looked_into_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEALTH_S", 60.0)
    server = serving(Client())
    cleared = asyncio.Event()
    watch = asyncio.create_task(server.failure(None, cleared.set))
    server.doubtful = True
    server.check.set()
    async with asyncio.timeout(1):
        await cleared.wait()
    assert not server.doubtful
    watch.cancel()
    await asyncio.wait([watch])


async def test_i6_other_weights_than_it_should_hold() -> None:
    client = Client()
    server = serving(client)
    server.check.set()
    client.label = "default"
    assert await failure(server) == "http://s0 holds weights 'default' instead of 'run.0:3'"


async def test_a_connection_that_breaks_once_more_is_no_death() -> None:
    client = Client()
    client.info_fails = 1
    server = serving(client)
    cleared = asyncio.Event()
    watch = asyncio.create_task(server.failure(None, cleared.set))
    server.doubtful = True
    server.check.set()
    async with asyncio.timeout(1):
        await cleared.wait()
    assert not watch.done()
    watch.cancel()
    await asyncio.wait([watch])


async def test_a_health_check_that_lies() -> None:
    client = Client()
    client.info_fails = 99
    server = serving(client)
    server.check.set()
    assert await failure(server) == f"http://s0/health failed {MISSES} times in a row"
