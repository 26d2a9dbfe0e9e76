"""The servers as one: calls, gates, restarts, and the version that each server holds.

    fleet = Fleet(config, clients, origin="search.0", stop_ids=eos_ids, restart=launcher.restart,
                  exited=launcher.exited, on_serving=scheduler.serving, rids=random_rids("0.0"))
    tasks.create_task(fleet.run())      # owns every task below; ends with close(), or when no server is left
    completion = await fleet.generate(input_ids, sampling, key=episode_id)
    fleet.waits()                       # lines for the watchdog
    await fleet.close()

The way of one call, across interruptions and lost servers, is in `calls.py`; which server it goes to, in `router.py`.
Every wait has a deadline (I7).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from areal.config import Config
from areal.controller.calls import Calls, random_rids
from areal.controller.router import Router
from areal.controller.server import HEALTH_S, Server
from areal.errors import ConfigError, ProcessError, ServerError, ServerLost, ServerRefused
from areal.workers.protocols import ServerClient
from areal.workers.rollout.client import version_of

CLOSE_S = 5.0
RESTART_S, MAX_RESTART_S = 2.0, 15.0
"""Seconds before a server is started a second time, doubled each time after that, and the most: what ended it, such as
a device whose memory another process has, may need time. The first restart waits for nothing."""

log = logging.getLogger("areal")


@dataclass(frozen=True, slots=True)
class FleetStats:
    """Counts since the start, and what runs now.

    requests: pieces posted; cached_tokens: prompt tokens found in a server's cache; failures: pieces that a server
    did not answer properly; still_s: seconds that the average server stood still for weights.
    """

    requests: int
    tokens: int
    cached_tokens: int
    interruptions: int
    failures: int
    restarts: int
    running: int
    waiting: int
    open: int
    still_s: float


class Fleet:
    """See the module.

    origin: "<run>.<life>". stop_ids: the model's end tokens (an aborted answer that ends with one is whole).
    restart(index) ends what is left of server `index`, starts it again and returns its client once it is ready; None
    leaves dead servers to whoever runs them. exited(index) returns why, once the process of that server has ended.
    on_serving(version) is told each new `lowest_version()`.
    """

    def __init__(
        self,
        config: Config,
        clients: Sequence[ServerClient],
        *,
        origin: str,
        stop_ids: Iterable[int] = (),
        restart: Callable[[int], Awaitable[ServerClient]] | None = None,
        exited: Callable[[int], Awaitable[str]] | None = None,
        on_serving: Callable[[int], None] = lambda version: None,
        rids: Callable[[], str] | None = None,
    ) -> None:
        self.servers = [Server(index, client) for index, client in enumerate(clients)]
        self._settings = config.servers
        self._origin = origin
        self._restart = restart
        self._exited = exited
        self._on_serving = on_serving
        self._tasks: asyncio.TaskGroup | None = None
        self._sync: Callable[[Server], Awaitable[None]] | None = None
        self._started = asyncio.Event()
        self._closing = asyncio.Event()
        self._finished = asyncio.Event()
        self._router = Router(self.servers)
        self._calls = Calls(
            self._router,
            rids or random_rids(origin),
            timeout_s=config.servers.request_timeout_s,
            stop_ids=stop_ids,
            fail=self.fail,
        )
        self.generate = self._calls.generate
        self._lowest: int | None = None
        self._restarts: dict[int, int] = {}
        self._restarted = 0
        self._watchers: dict[int, asyncio.Task[None]] = {}
        self._still_since: dict[Server, float] = {}
        self._still_s = 0.0

    # -- weights

    async def ready(self) -> list[Server]:
        """The servers that can take weights now; waits for those that just came up."""
        await self._started.wait()
        for server in tuple(self.servers):
            await server.up.wait()
        return [server for server in self.servers if server.state != "dead"]

    def _shut(self, server: Server) -> None:
        if server.state == "open":
            server.state = "closed"
            self._still_since[server] = asyncio.get_running_loop().time()
            self._note_lowest()
        self._router.forget(server)  # loading empties the cache

    async def interrupt(self, server: Server) -> None:
        """Close the gate and abort what runs; the calls keep their tokens and go on where a server is open."""
        assert self._tasks
        self._shut(server)
        ending = self._calls.end(list(server.calls.values()), "interrupt", server)
        await asyncio.wait((self._tasks.create_task(ending),))

    async def hold(self, server: Server) -> None:
        """Close the gate and stop what runs; the calls stay there. One that comes back before the gate opens again
        waits for that: until then it is not known whether the weights were the right ones. Raises ServerError."""
        self._shut(server)
        server.settled.clear()
        await server.client.pause()

    def open(self, server: Server, label: str) -> None:
        """Open the gate of a server that holds the weights `label`; nothing when it has died meanwhile."""
        version = version_of(label, self._origin)
        if version is None:
            raise ServerRefused(f"{server.client.url} holds weights {label!r}, not of {self._origin}; publish to it")
        if server.state == "dead":
            return
        server.label, server.version, server.state = label, version, "open"
        server.served.set()
        server.settled.set()
        self._moves_again(server)
        self._note_lowest()
        self._router.dispatch()

    def fail(self, server: Server, reason: str) -> None:
        """Declare a server dead: its calls fail over now, then it is started again."""
        if server.state == "dead":
            return
        log.warning("server %d is dead: %s", server.index, reason)
        self._bury(server, reason)

    def _bury(self, server: Server, reason: str) -> None:
        server.state, server.reason = "dead", reason
        self._moves_again(server)
        for call in server.calls.values():
            if call.task:
                call.end = call.end or "dead"
                call.task.cancel()
        server.died.set()
        server.up.set()
        server.served.set()
        server.settled.set()
        self._note_lowest()
        self._router.dispatch()

    def lowest_version(self) -> int:
        """The lowest version of any server that takes requests (I1); while there is none, the last one (at first 0)."""
        return self._lowest or 0

    def _note_lowest(self) -> None:
        lowest = min((s.version for s in self.servers if s.state == "open" and s.version is not None), default=None)
        if lowest is not None and lowest != self._lowest:
            self._lowest = lowest
            self._on_serving(lowest)

    def _moves_again(self, server: Server) -> None:
        if (since := self._still_since.pop(server, None)) is not None:
            self._still_s += (asyncio.get_running_loop().time() - since) / len(self.servers)

    # -- life

    async def run(self, sync: Callable[[Server], Awaitable[None]] | None = None) -> None:
        """Watch the servers until close(). sync(server) brings a server that came up to the current weights and opens
        it; without it, the weights that it has will do. Raises ProcessError or ServerLost when no server is left."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = self._calls.tasks = tasks
                self._sync = sync
                self._started.set()
                for server in self.servers:
                    self._begin_watch(server)
                time_outs = tasks.create_task(self._calls.time_out(), name="time-outs")
                try:
                    await self._closing.wait()
                finally:
                    self._closing.set()
                    self._router.close()
                    for watcher in (time_outs, *self._watchers.values()):
                        watcher.cancel()
                await self._calls.end([call for s in self.servers for call in s.calls.values()], "cancel")
        finally:
            self._finished.set()

    async def close(self) -> None:
        """Abort what runs, end `run`, close the clients."""
        self._closing.set()
        self._router.close()
        if self._tasks:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._finished.wait()
        for server in self.servers:
            await server.client.close()

    def join(self, index: int, client: ServerClient) -> Server:
        """One more server, which is ready. It serves once it has the current weights."""
        server = Server(index, client)
        self.servers.append(server)
        self._begin_watch(server)
        return server

    def _begin_watch(self, server: Server) -> None:
        assert self._tasks
        self._watchers[server.index] = self._tasks.create_task(self._watch(server), name=f"server-{server.index}")

    async def leave(self, index: int) -> None:
        """Do without a server from now on; its calls keep their tokens and go on elsewhere. Its process is left to the
        caller, and so is that it takes no weights meanwhile (`WeightSync.leave`)."""
        watcher = self._watchers.pop(index)
        watcher.cancel()  # and a restart with it
        try:
            await asyncio.wait((watcher,))
            await self.interrupt(self._at(index))
        finally:
            server = self._at(index)
            self._bury(server, "it left")
            self.servers.remove(server)
            self._restarts.pop(index, None)
            self._router.dispatch()
        await server.client.close()

    def _at(self, index: int) -> Server:
        return next(server for server in self.servers if server.index == index)

    async def _watch(self, server: Server) -> None:
        """Server after server at one index: bring it up, wait for its death, get another."""
        while True:
            try:
                info = await server.client.info()
                server.label, server.version = info.label, version_of(info.label, self._origin)
                server.up.set()
                if self._sync:
                    await self._sync(server)
                else:
                    self.open(server, info.label)
                self.fail(server, await server.failure(self._exited, self._router.dispatch))
            except ServerError as error:
                self.fail(server, str(error))
            client = await self._revived(server)
            if client is None:
                return
            revived = Server(server.index, client)
            self.servers[self.servers.index(server)] = server = revived

    async def _revived(self, server: Server) -> ServerClient | None:
        """The client of a dead server that is back; None when it is given up."""
        if self._restart is None:
            await self._returned(server)
            return server.client
        limit = self._settings.restarts
        while (restarts := self._restarts.get(server.index, 0) + 1) <= limit:
            self._restarts[server.index] = restarts
            self._restarted += 1
            wait = min(RESTART_S * 2 ** min(restarts - 2, 10), MAX_RESTART_S) if restarts > 1 else 0.0
            log.warning("server %d: restart %d of %d, in %g s", server.index, restarts, limit, wait)
            await asyncio.sleep(wait)
            try:
                client = await self._restart(server.index)
            except (ConfigError, ProcessError, ServerError, OSError) as error:
                server.reason = str(error)
                continue
            if client is not server.client:
                await server.client.close()
            return client
        server.given_up = True
        left = sum(not s.given_up for s in self.servers)
        if not left:
            raise ProcessError(f"no server is left after servers.restarts={limit} restarts of each: {server.reason}")
        log.error("server %d is given up; the run goes on with %d of %d", server.index, left, len(self.servers))
        return None

    async def _returned(self, server: Server) -> None:
        """Wait until a server that somebody else runs answers again."""
        loop = asyncio.get_running_loop()
        timeout = self._settings.start_timeout_s
        deadline = loop.time() + timeout
        while True:
            await asyncio.sleep(HEALTH_S)
            if await server.client.healthy():
                return
            if any(s.state != "dead" for s in self.servers):
                deadline = loop.time() + timeout
            elif loop.time() > deadline:
                raise ServerLost(f"no server has answered for servers.start_timeout_s={timeout:g}: {server.reason}")

    # -- what a person sees

    def stats(self) -> FleetStats:
        """Counts since the start, and what runs now."""
        now = asyncio.get_running_loop().time()
        return FleetStats(
            requests=self._calls.requests,
            tokens=self._calls.tokens,
            cached_tokens=self._calls.cached_tokens,
            interruptions=self._calls.interruptions,
            failures=self._calls.failures,
            restarts=self._restarted,
            running=sum(len(s.calls) for s in self.servers),
            waiting=len(self._router.waiting),
            open=sum(s.state == "open" for s in self.servers),
            still_s=self._still_s + sum(now - t for t in self._still_since.values()) / max(1, len(self.servers)),
        )

    def where(self, key: Hashable) -> str:
        """Where the calls of `key` are, in words; "" when it has none."""
        urls = [
            call.server.client.url for s in self.servers for call in s.calls.values() if call.key == key and call.server
        ]
        in_line = any(call.key == key for call in self._router.waiting.values())
        return f", on {', '.join(urls)}" if urls else ", in line for a server" if in_line else ""

    def waits(self) -> list[str]:
        """Servers that do not serve, then the calls that wait, longest first (for the watchdog)."""
        now = asyncio.get_running_loop().time()
        lines = [f"server {s.client.url} is {s.state} {s.reason}".rstrip() for s in self.servers if s.state != "open"]
        calls = [*self._router.waiting.values(), *(call for s in self.servers for call in s.calls.values())]
        for call in sorted(calls, key=lambda call: call.since):
            where = f"on {call.server.client.url}" if call.server else "for a place on a server"
            lines.append(f"{call.key}: request {call.rid} has waited {now - call.since:.1f} s {where}")
        return lines
