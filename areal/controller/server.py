"""One server as the fleet sees it, from its start to its death; a restart makes a new Server with the same index.

    starting -> waiting -> accepting <-> suspect
                   |        |  ^
                   |        v  |
                   +--> draining, paused            any of them -> dead -> gone

A server is in exactly one state. `become` changes it, and `until` waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from areal.deadlines import DEADLINES, Deadlines
from areal.errors import ArealError, ServerError
from areal.types import Generation
from areal.workers.protocols import ServerClient

MISSES = 3
"""Failed health checks in a row after which a server is dead."""

State = Literal["starting", "waiting", "accepting", "suspect", "draining", "paused", "dead", "gone"]
"""starting: has not answered yet. waiting: for the current weights. accepting: takes requests. suspect: none until the
next health check, since one failed. draining: its requests were aborted for new weights. paused: it keeps its
requests while it loads new weights. dead: about to be restarted. gone: given up, or removed."""
UP: tuple[State, ...] = ("waiting", "accepting", "suspect", "draining", "paused", "dead", "gone")
"""Every state of a server that has answered, or never will."""
End = Literal["interrupt", "timeout", "cancel", "dead"]


@dataclass(slots=True, eq=False)
class Call:
    """One request: its place in the queue, then its slot on a server.

    answer: what its caller waits for; None when its socket was closed. end: why it was aborted, if it was.
    """

    key: Hashable
    rid: str
    since: float
    avoid: Server | None = None
    server: Server | None = None
    slot: asyncio.Future[None] | None = None
    task: asyncio.Task[Generation | ArealError] | None = None
    answer: asyncio.Future[Generation | ArealError | None] | None = None
    end: End | None = None


@dataclass(slots=True, eq=False)
class Server:
    """label: the name of its weights, None until it has said so; version: the same as a number, None if not ours.
    calls: the requests that have a slot here, by rid. answered: when it last answered one. reason: why it is dead."""

    index: int
    client: ServerClient
    deadlines: Deadlines = DEADLINES
    state: State = "starting"
    label: str | None = None
    version: int | None = None
    calls: dict[str, Call] = field(default_factory=dict)
    answered: float = 0.0
    reason: str = ""
    _waiters: list[tuple[tuple[State, ...], asyncio.Future[State]]] = field(default_factory=list)

    @property
    def is_dead(self) -> bool:
        return self.state in ("dead", "gone")

    @property
    def is_serving(self) -> bool:
        return self.state in ("accepting", "suspect")

    @property
    def is_loading(self) -> bool:
        return self.state in ("draining", "paused")

    def become(self, state: State, reason: str = "") -> None:
        self.state, self.reason = state, reason or self.reason
        for states, waiter in self._waiters:
            if state in states and not waiter.done():
                waiter.set_result(state)

    async def until(self, *states: State) -> State:
        """Wait for one of `states`, and return the first that the server is in, even if it has left it since."""
        if self.state in states:
            return self.state
        waiter = (states, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            return await waiter[1]
        finally:
            self._waiters.remove(waiter)

    def holds(self, label: str, version: int | None) -> None:
        """The server has the weights `label`."""
        self.label, self.version = label, version

    def heard(self) -> None:
        """It has just answered a request, well or badly."""
        self.answered = asyncio.get_running_loop().time()

    def suspect(self) -> None:
        """A request failed: no more of them before a health check, which follows at once."""
        if self.state == "accepting":
            self.become("suspect")

    async def failure(self, exited: Callable[[int], Awaitable[str]] | None, cleared: Callable[[], None]) -> str:
        """Why this server is dead, once it is: its process ended, it is not healthy, or it was declared dead.

        cleared() is called when a suspect server turned out to be well.
        """
        watches = [asyncio.create_task(self._declared()), asyncio.create_task(self._unhealthy(cleared))]
        if exited:
            watches.append(asyncio.create_task(_result(exited(self.index))))
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _declared(self) -> str:
        await self.until("dead", "gone")
        return self.reason

    async def _unhealthy(self, cleared: Callable[[], None]) -> str:
        misses = 0
        while misses < MISSES:
            if misses:
                await asyncio.sleep(self.deadlines.health_retry)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.deadlines.health):
                        await self.until("suspect")
            suspected = self.state == "suspect"
            try:
                well = await self.client.healthy()
                if well and suspected and (wrong := await self._wrong_label()):
                    return wrong
            except ServerError:  # a connection may break once, as the one that made it suspect did
                well = False
            misses = 0 if well else misses + 1
            if well and suspected and self.state == "suspect":
                self.become("accepting")
                cleared()
        return f"{self.client.url}/health failed {MISSES} times in a row"

    async def _wrong_label(self) -> str | None:
        """Another program may have restarted the server, or given it other weights."""
        expected = self.label
        info = await self.client.info()
        if self.state == "suspect" and self.label == expected != info.label:
            return f"{self.client.url} holds weights {info.label!r} instead of {expected!r}"
        return None


async def _result(awaitable: Awaitable[str]) -> str:
    return await awaitable
