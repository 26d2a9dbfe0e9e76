"""The servers as one: model calls, restarts, and the version that each server holds.

    fleet = Fleet(config, clients, origin="search.0", stop_ids=eos_ids, restart=workers.start_server)
    tasks.create_task(fleet.run(weights.sync_server))      # ends with close(), or when no server is left
    completion = await fleet.generate(input_ids, sampling, key=episode_id)
    await fleet.close()

How one call survives interruptions and lost servers is in `calls.py`; which server it goes to, in `router.py`.
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
from areal.controller.server import UP, Server, State
from areal.deadlines import DEADLINES, Deadlines
from areal.errors import ConfigError, ProcessError, ServerError, ServerLost, ServerRefused
from areal.workers.protocols import ServerClient, version_of

log = logging.getLogger("areal")


@dataclass(frozen=True, slots=True)
class FleetStats:
    """Counts since the start, and what runs now.

    requests: posted to servers; cached_tokens: prompt tokens found in a server's cache; failures: requests that a
    server did not answer properly; accepting: servers that take requests; paused_s: seconds that the average server
    did not generate because of new weights.
    """

    requests: int
    tokens: int
    cached_tokens: int
    interruptions: int
    failures: int
    restarts: int
    running: int
    waiting: int
    accepting: int
    paused_s: float


class Fleet:
    """See the module.

    origin: "<run>.<life>". stop_ids: the model's end tokens (an aborted answer that ends with one is whole).
    restart(index) ends what is left of server `index`, starts it and returns its client once it is ready; None for
    external servers, which are waited for instead. exited(index) returns why, once the process of that server has
    ended. on_serving(version) is called with each new `lowest_version()`.
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
        deadlines: Deadlines = DEADLINES,
    ) -> None:
        self.servers = [Server(index, client, deadlines) for index, client in enumerate(clients)]
        self._deadlines = deadlines
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
        self._router = Router(self.servers, deadlines)
        self._calls = Calls(
            self._router,
            rids or random_rids(origin),
            timeout_s=config.servers.request_timeout_s,
            stop_ids=stop_ids,
            fail=self.fail,
            deadlines=deadlines,
        )
        self.generate = self._calls.generate
        self._lowest: int | None = None
        self._restarts: dict[int, int] = {}
        self._restarted = 0
        self._watchers: dict[int, asyncio.Task[None]] = {}
        self._paused_since: dict[Server, float] = {}
        self._paused_s = 0.0

    # -- weights

    async def ready(self) -> list[Server]:
        """The servers that can take weights now; waits for those that just came up."""
        await self._started.wait()
        for server in tuple(self.servers):
            await server.until(*UP)
        return [server for server in self.servers if not server.is_dead]

    def _stop_accepting(self, server: Server, state: State) -> None:
        if server.is_serving:
            self._paused_since[server] = asyncio.get_running_loop().time()
        server.become(state)
        self._note_lowest()
        self._router.forget(server)  # loading empties the cache

    async def interrupt(self, server: Server) -> None:
        """Abort the requests of a server that is about to load weights; the calls continue on those that accept."""
        self._stop_accepting(server, "draining" if server.is_serving else server.state)
        await asyncio.wait((self._calls.end_later(list(server.calls.values()), "interrupt", server),))

    async def pause(self, server: Server) -> None:
        """Stop generating on a server that is about to load weights; its requests stay there. Raises ServerError."""
        self._stop_accepting(server, server.state if server.is_dead else "paused")
        await server.client.pause()

    def accept(self, server: Server, label: str) -> None:
        """The server holds the weights `label`: it takes requests from now on, unless it has died meanwhile."""
        version = version_of(label, self._origin)
        if version is None:
            raise ServerRefused(f"{server.client.url} holds weights {label!r}, not of {self._origin}; publish to it")
        if server.is_dead:
            return
        server.holds(label, version)
        server.become("accepting")
        self._count_pause(server)
        self._note_lowest()
        self._router.dispatch()

    def fail(self, server: Server, reason: str) -> None:
        """Declare a server dead: its calls fail over now, then it is restarted."""
        if server.is_dead:
            return
        log.warning("server %d is dead: %s", server.index, reason)
        self._end(server, "dead", reason)

    def _end(self, server: Server, state: State, reason: str) -> None:
        server.become(state, reason)
        self._count_pause(server)
        for call in server.calls.values():
            if call.task:
                call.end = call.end or "dead"
                call.task.cancel()
        self._note_lowest()
        self._router.dispatch()

    def lowest_version(self) -> int:
        """The lowest version of any server that accepts requests (I1); while none does, the last one (at first 0)."""
        return self._lowest or 0

    def _note_lowest(self) -> None:
        lowest = min((s.version for s in self.servers if s.is_serving and s.version is not None), default=None)
        if lowest is not None and lowest != self._lowest:
            self._lowest = lowest
            self._on_serving(lowest)

    def _count_pause(self, server: Server) -> None:
        if (since := self._paused_since.pop(server, None)) is not None:
            self._paused_s += (asyncio.get_running_loop().time() - since) / len(self.servers)

    # -- life

    async def run(self, sync: Callable[[Server], Awaitable[None]] | None = None) -> None:
        """Watch the servers until close(). sync(server) brings a server that came up to the current weights; without
        it, the weights that it has will do. Raises ProcessError or ServerLost when no server is left."""
        try:
            async with self._calls, asyncio.TaskGroup() as tasks:
                self._tasks, self._sync = tasks, sync
                self._started.set()
                for server in self.servers:
                    self._begin_watch(server)
                try:
                    await self._closing.wait()
                finally:
                    self._closing.set()
                    self._router.close()
                    for watcher in self._watchers.values():
                        watcher.cancel()
        finally:
            self._finished.set()

    async def close(self) -> None:
        """Abort what is in flight, end `run`, close the clients."""
        self._closing.set()
        self._router.close()
        if self._tasks:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._deadlines.close):
                    await self._finished.wait()
        for server in self.servers:
            await server.client.close()

    def join(self, index: int, client: ServerClient) -> Server:
        """One more server, which is ready. It accepts requests once it has the current weights."""
        server = Server(index, client, self._deadlines)
        self.servers.append(server)
        self._begin_watch(server)
        return server

    def _begin_watch(self, server: Server) -> None:
        assert self._tasks
        self._watchers[server.index] = self._tasks.create_task(self._watch(server), name=f"server-{server.index}")

    async def leave(self, index: int) -> None:
        """Remove a server; its calls keep their tokens and continue elsewhere. Ending its process is up to the caller,
        and so is that it loads no weights meanwhile (`WeightSync.leave`)."""
        watcher = self._watchers.pop(index)
        watcher.cancel()  # and a restart with it
        try:
            await asyncio.wait((watcher,))
            await self.interrupt(self._at(index))
        finally:
            server = self._at(index)
            self._end(server, "gone", "it left")
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
                server.holds(info.label, version_of(info.label, self._origin))
                server.become("waiting")
                if self._sync:
                    await self._sync(server)
                else:
                    self.accept(server, info.label)
                self.fail(server, await server.failure(self._exited, self._router.dispatch))
            except ServerError as error:
                self.fail(server, str(error))
            client = await self._revived(server)
            if client is None:
                return
            revived = Server(server.index, client, self._deadlines)
            self.servers[self.servers.index(server)] = server = revived

    async def _revived(self, server: Server) -> ServerClient | None:
        """The client of a dead server that is back; None when it is not restarted any more."""
        if self._restart is None:
            await self._returned(server)
            return server.client
        limit = self._settings.restarts
        while (restarts := self._restarts.get(server.index, 0) + 1) <= limit:
            self._restarts[server.index] = restarts
            self._restarted += 1
            times = self._deadlines
            wait = min(times.restart * 2 ** min(restarts - 2, 10), times.longest_restart) if restarts > 1 else 0.0
            log.warning("server %d: restart %d of %d, in %g s", server.index, restarts, limit, wait)
            await asyncio.sleep(wait)
            try:
                client = await self._restart(server.index)
            except (ConfigError, ProcessError, ServerError, OSError) as error:
                server.become("dead", str(error))
                continue
            if client is not server.client:
                await server.client.close()
            return client
        server.become("gone")
        left = sum(s.state != "gone" for s in self.servers)
        if not left:
            raise ProcessError(f"no server is left after servers.restarts={limit} restarts of each: {server.reason}")
        log.error("server %d is given up; the run continues with %d of %d", server.index, left, len(self.servers))
        return None

    async def _returned(self, server: Server) -> None:
        """Wait until an external server answers again."""
        loop = asyncio.get_running_loop()
        timeout = self._settings.start_timeout_s
        deadline = loop.time() + timeout
        while True:
            await asyncio.sleep(self._deadlines.health)
            if await server.client.healthy():
                return
            if not all(s.is_dead for s in self.servers):
                deadline = loop.time() + timeout
            elif loop.time() > deadline:
                raise ServerLost(f"no server has answered for servers.start_timeout_s={timeout:g}: {server.reason}")

    # -- what a person sees

    def stats(self) -> FleetStats:
        """Counts since the start, and what is in flight now."""
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
            accepting=sum(s.is_serving for s in self.servers),
            paused_s=self._paused_s + sum(now - t for t in self._paused_since.values()) / max(1, len(self.servers)),
        )

    def describe(self) -> list[dict[str, object]]:
        """Each server, as numbers and texts."""
        return [
            {
                "index": server.index,
                "url": server.client.url,
                "state": server.state,
                "version": server.version,
                "requests": len(server.calls),
                "reason": server.reason,
            }
            for server in self.servers
        ]

    def where(self, key: Hashable) -> str:
        """Where the requests of `key` are, in words; "" when it has none."""
        urls = [
            call.server.client.url for s in self.servers for call in s.calls.values() if call.key == key and call.server
        ]
        queued = any(call.key == key for call in self._router.waiting.values())
        return f", on {', '.join(urls)}" if urls else ", queued for a server" if queued else ""

    def waits(self) -> list[str]:
        """Servers that accept no requests, then the requests that wait, longest first (for the watchdog)."""
        now = asyncio.get_running_loop().time()
        lines = [
            f"server {s.client.url} is {s.state} {s.reason}".rstrip() for s in self.servers if s.state != "accepting"
        ]
        calls = [*self._router.waiting.values(), *(call for s in self.servers for call in s.calls.values())]
        for call in sorted(calls, key=lambda call: call.since):
            where = f"on {call.server.client.url}" if call.server else "for a slot on a server"
            lines.append(f"{call.key}: request {call.rid} has waited {now - call.since:.1f} s {where}")
        return lines
