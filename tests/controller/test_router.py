"""Router alone: no server, no HTTP."""

from __future__ import annotations

import asyncio

import pytest

from areal.controller.router import HOMES, SLACK, Router
from areal.controller.server import Call, Server
from areal.deadlines import DEADLINES, Deadlines
from areal.errors import ServerError


class Client:
    def __init__(self, url: str) -> None:
        self.url = url


def servers(count: int, state: str = "accepting") -> list[Server]:
    return [Server(i, Client(f"http://s{i}"), state=state) for i in range(count)]  # type: ignore[arg-type]


class Calls:
    def __init__(self, router: Router) -> None:
        self.router = router
        self.count = 0

    def new(self, key: str = "", avoid: Server | None = None) -> Call:
        self.count += 1
        now = asyncio.get_running_loop().time()
        return Call(key or f"e{self.count}", f"r{self.count}", now, avoid)

    def place(self, key: str = "", avoid: Server | None = None) -> int | None:
        """The index of the server that a new call gets at once."""
        server = self.router.place(self.new(key, avoid))
        return None if server is None else server.index

    async def wait(self, timeout_s: float = 1.0) -> Server:
        return await self.router.wait(self.new(), timeout_s)


async def test_calls_of_a_closed_router_leave_the_loop_to_others() -> None:
    """A loop that catches everything would spin."""
    calls = Calls(Router(servers(1), Deadlines(refusal=0.02)))
    calls.router.close()
    refused = 0

    async def agent() -> None:
        nonlocal refused
        while True:
            try:
                await calls.wait()
            except ServerError:
                refused += 1

    task = asyncio.create_task(agent())
    await asyncio.sleep(0.1)
    task.cancel()
    assert 1 <= refused <= 5


async def test_the_least_loaded_server_the_first_among_equals() -> None:
    calls = Calls(Router(servers(3), DEADLINES))
    assert [calls.place() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


async def test_an_episode_stays_unless_its_server_is_much_busier() -> None:
    calls = Calls(Router(servers(2), DEADLINES))
    assert calls.place("home") == 0
    assert [calls.place("home") for _ in range(SLACK)] == [0] * SLACK
    assert calls.place("home") == 1
    assert calls.place("home") == 1  # that is where its latest prefix is


async def test_a_loaded_server_is_nobodys_home() -> None:
    router = Router(servers(2), DEADLINES)
    calls = Calls(router)
    assert (calls.place("e"), calls.place("e")) == (0, 0)
    router.forget(router.servers[0])
    assert calls.place("e") == 1


async def test_homes_are_bounded() -> None:
    router = Router(servers(2), DEADLINES)
    calls = Calls(router)
    for i in range(HOMES + 10):
        call = calls.new(f"e{i}")
        assert router.place(call)
        router.leave(call)
    assert len(router._homes) == HOMES
    assert "e0" not in router._homes


async def test_what_takes_no_calls() -> None:
    each = servers(4)
    each[0].state, each[1].state, each[2].state = "starting", "dead", "suspect"
    calls = Calls(Router(each, DEADLINES))
    assert [calls.place() for _ in range(3)] == [3, 3, 3]


async def test_a_failed_server_is_avoided_where_there_is_another() -> None:
    each = servers(2)
    calls = Calls(Router(each, DEADLINES))
    assert calls.place(avoid=each[0]) == 1
    each[1].state = "dead"
    assert calls.place(avoid=each[0]) == 0


async def test_an_accepting_server_takes_its_share_while_others_load() -> None:
    each = servers(4, "draining")
    router = Router(each, DEADLINES)
    calls = Calls(router)
    waits = [asyncio.create_task(calls.wait()) for _ in range(40)]
    await asyncio.sleep(0)
    for count, server in enumerate(each, 1):
        server.state = "accepting"
        router.dispatch()
        assert [len(s.calls) for s in each] == [10] * count + [0] * (4 - count)
    await asyncio.gather(*waits)


async def test_first_come_first_served() -> None:
    each = servers(1, "draining")
    router = Router(each, DEADLINES)
    calls = Calls(router)
    order: list[int] = []

    async def wait(index: int) -> None:
        await calls.wait()
        order.append(index)

    waits = [asyncio.create_task(wait(i)) for i in range(5)]
    await asyncio.sleep(0)
    assert calls.place() is None
    each[0].state = "accepting"
    router.dispatch()
    await asyncio.gather(*waits)
    assert order == [0, 1, 2, 3, 4]


async def test_i7_waiting_has_a_deadline() -> None:
    router = Router(servers(2, "starting"), DEADLINES)
    with pytest.raises(ServerError, match=r"no slot on a server for 0\.01 s: http://s0 is starting, http://s1 is sta"):
        await Calls(router).wait(0.01)
    assert not router.waiting


async def test_i8_a_cancelled_wait_leaves_no_trace() -> None:
    each = servers(1, "draining")
    router = Router(each, DEADLINES)
    calls = Calls(router)
    first, second = (asyncio.create_task(calls.wait()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    assert len(router.waiting) == 1
    each[0].state = "accepting"
    router.dispatch()
    second.cancel()  # after it was given its slot
    await asyncio.wait([first, second])
    assert (first.cancelled(), second.cancelled()) == (True, True)
    assert not each[0].calls
    assert not router.waiting


async def test_a_slot_on_a_server_that_stopped_accepting_meanwhile_is_given_back() -> None:
    each = servers(2, "draining")
    router = Router(each, DEADLINES)
    wait = asyncio.create_task(Calls(router).wait())
    await asyncio.sleep(0)
    each[0].state = "accepting"
    router.dispatch()
    each[0].state = "draining"
    await asyncio.sleep(0.01)
    assert not wait.done()
    assert not each[0].calls
    each[1].state = "accepting"
    router.dispatch()
    assert await wait is each[1]


async def test_close() -> None:
    router = Router(servers(1, "starting"), DEADLINES)
    calls = Calls(router)
    wait = asyncio.create_task(calls.wait())
    await asyncio.sleep(0)
    router.close()
    with pytest.raises(ServerError, match="the fleet is closed"):
        await wait
    assert calls.place() is None
    with pytest.raises(ServerError, match="the fleet is closed"):
        await calls.wait()
