"""One server as the fleet sees it, from its start to its death; a restart is a new Server at the same index."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from areal.errors import ArealError, ServerError
from areal.types import Generation
from areal.workers.protocols import ServerClient

HEALTH_S = 5.0
"""Seconds between health checks."""
RETRY_S = 1.0
"""Seconds from a failed health check to the next; MISSES failed ones in a row mean that the server is dead."""
MISSES = 3

State = Literal["starting", "open", "closed", "dead"]
End = Literal["interrupt", "timeout", "cancel", "dead"]


@dataclass(slots=True, eq=False)
class Call:
    """One `/generate`: its place in line, then on a server.

    answer: what its caller waits for; None when its socket was closed. end: why it was aborted, if it was.
    """

    key: Hashable
    rid: str
    since: float
    avoid: Server | None = None
    server: Server | None = None
    place: asyncio.Future[None] | None = None
    task: asyncio.Task[Generation | ArealError] | None = None
    answer: asyncio.Future[Generation | ArealError | None] | None = None
    end: End | None = None


@dataclass(slots=True, eq=False)
class Server:
    """state: `starting` until it first serves, `closed` while it takes new weights, `dead` for good.

    label: the name of its weights, None until it has said so; version: the same as a number, None if not ours.
    up: set once it has said what it holds, or died. served: set once it has served, or died. died: set when it is dead,
    for the reason `reason`. given_up: dead, and not started again. settled: clear while it holds calls for new weights.
    doubtful: a connection to it broke, so it gets no call until the next health check, which `check` asks for.
    """

    index: int
    client: ServerClient
    state: State = "starting"
    label: str | None = None
    version: int | None = None
    calls: dict[str, Call] = field(default_factory=dict)
    answered: float = 0.0
    doubtful: bool = False
    up: asyncio.Event = field(default_factory=asyncio.Event)
    check: asyncio.Event = field(default_factory=asyncio.Event)
    served: asyncio.Event = field(default_factory=asyncio.Event)
    died: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""
    given_up: bool = False

    def __post_init__(self) -> None:
        self.settled.set()

    async def failure(self, exited: Callable[[int], Awaitable[str]] | None, cleared: Callable[[], None]) -> str:
        """Why this server is dead, once it is: its process ended, it is not healthy, or `died` was set.

        cleared() is called when a doubtful server turned out to be well.
        """
        watches = [asyncio.create_task(self._told()), asyncio.create_task(self._unhealthy(cleared))]
        if exited:
            watches.append(asyncio.create_task(_result(exited(self.index))))
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _told(self) -> str:
        await self.died.wait()
        return self.reason

    async def _unhealthy(self, cleared: Callable[[], None]) -> str:
        misses = 0
        while misses < MISSES:
            if misses:
                await asyncio.sleep(RETRY_S)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEALTH_S):
                        await self.check.wait()
            asked = self.check.is_set()
            self.check.clear()
            try:
                well = await self.client.healthy()
                if well and asked and (wrong := await self._wrong_label()):
                    return wrong
            except ServerError:  # a connection may break once, as the one that made it doubtful did
                well = False
            if not well:
                misses += 1
                if asked:
                    self.check.set()
                continue
            misses = 0
            if asked and self.doubtful:
                self.doubtful = False
                cleared()
        return f"{self.client.url}/health failed {MISSES} times in a row"

    async def _wrong_label(self) -> str | None:
        """Somebody else may have started the server again, or given it other weights."""
        if self.state != "open":
            return None
        expected = self.label
        info = await self.client.info()
        if self.state == "open" and self.label == expected != info.label:
            return f"{self.client.url} holds weights {info.label!r} instead of {expected!r}"
        return None


async def _result(awaitable: Awaitable[str]) -> str:
    return await awaitable
