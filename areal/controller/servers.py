"""Servers that join and leave while the run is in progress: `areal servers RUN count=3`, or a program's
`await controller.change_servers(count=3)`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from itertools import count, islice
from typing import Any

from areal.config import Config, to_text
from areal.controller.cluster import Cluster
from areal.controller.server import Server
from areal.errors import ArealError, ConfigError, ServerLost
from areal.workers.protocols import ServerClient

LEAVING = {"gone": 0, "dead": 0, "starting": 1, "waiting": 1}
"""State -> which servers are removed first when there are too many; after those, the one added last."""
ORIGIN = "areal servers"

log = logging.getLogger("areal")


class Membership:
    """Makes the changes one at a time, in a task of the run, so that a change continues when its caller is gone."""

    def __init__(self, config: Config, cluster: Cluster) -> None:
        self._key = "urls" if config.servers.urls else "count"
        self._config = config
        self._cluster = cluster
        self._asked: asyncio.Queue[tuple[Mapping[str, Any], asyncio.Future[None]]] = asyncio.Queue()
        self._current: asyncio.Future[None] | None = None
        self._over = False

    async def change(self, wanted: Mapping[str, Any]) -> None:
        """Have the servers of {"count": 3}, or those of {"urls": [...]}. Returns once new ones accept requests and the
        others are gone, whose calls continue elsewhere.

        Raises ConfigError for what cannot be, before anything changes. Raises ArealError when a server did not come up,
        or died before it accepted requests: that one is removed, those that did come up stay, and none leaves.
        """
        if self._over:
            raise ArealError("the run is over: its servers cannot be changed")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((wanted, done))
        await done

    async def run(self) -> None:
        """Make the changes, until cancelled."""
        while True:
            wanted, self._current = await self._asked.get()
            error: Exception | None = None
            try:
                await self._make(wanted)
            except ArealError as problem:
                error = problem
            except Exception as problem:  # a bug in a change must not end the run
                log.exception("the servers could not be changed")
                error = ArealError(f"the servers could not be changed: {type(problem).__name__}: {problem}")
            if not self._current.done():
                self._current.set_exception(error) if error else self._current.set_result(None)

    def close(self) -> None:
        """The end of the run: every caller that still waits gets an error."""
        self._over = True
        waiting = [self._current] if self._current else []
        while not self._asked.empty():
            waiting.append(self._asked.get_nowait()[1])
        for future in waiting:
            if not future.done():
                future.set_exception(ArealError("the run ended before its servers were changed"))

    async def _make(self, wanted: Mapping[str, Any]) -> None:
        if set(wanted) != {self._key} or wanted[self._key] == []:
            whose = "starts its servers itself" if self._key == "count" else "has external servers"
            example = "count=2" if self._key == "count" else 'urls=["http://127.0.0.1:30000"]'
            given = " and ".join(f"{key}={value!r}" for key, value in wanted.items()) or "nothing"
            raise ConfigError(f"{given} was given, and this run {whose}: give {example}, and nothing else")
        key = f"servers.{self._key}"
        # Whether there is room is checked when servers join: `placement.servers` may list more than are wanted.
        settings = self._config.changed({key: wanted[self._key], "placement.servers": []}, ORIGIN).servers
        log.info("servers.%s = %s from now on", self._key, to_text(wanted[self._key], key))
        for server in self._servers:
            if server.state == "gone":
                await self._leave(server)
        await (self._to_count(settings.count) if self._key == "count" else self._to_urls(settings.urls))

    async def _to_count(self, wanted: int) -> None:
        if new := self._unused(wanted - len(self._servers)):
            workers = self._cluster.workers
            places = max(*new, *(server.index for server in self._servers), 0) + 1
            if places > self._config.servers.count:
                grown = self._config.changed({"servers.count": places}, ORIGIN)
                await asyncio.to_thread(workers.grow, grown)
                self._config = grown
            await self._join({index: workers.start_server(index) for index in new})
        in_turn = sorted(reversed(self._servers), key=lambda server: LEAVING.get(server.state, 2))
        for server in in_turn[: max(0, len(in_turn) - wanted)]:
            await self._leave(server)

    async def _to_urls(self, wanted: Sequence[str]) -> None:
        urls = list(dict.fromkeys(url.rstrip("/") for url in wanted))
        here = {server.client.url for server in self._servers}
        new = [url for url in urls if url not in here]
        places = self._unused(len(new))
        await self._join({i: self._cluster.workers.connect(url) for i, url in zip(places, new, strict=True)})
        for server in self._servers:
            if server.client.url not in urls:
                await self._leave(server)

    @property
    def _servers(self) -> tuple[Server, ...]:
        return tuple(self._cluster.fleet.servers)

    def _unused(self, number: int) -> list[int]:
        taken = {server.index for server in self._servers}
        return list(islice((index for index in count() if index not in taken), max(0, number)))

    async def _join(self, starting: Mapping[int, Awaitable[ServerClient]]) -> None:
        joins = (self._join_one(index, start) for index, start in starting.items())
        failures = [r for r in await asyncio.gather(*joins, return_exceptions=True) if isinstance(r, BaseException)]
        for failure in failures[1:]:
            log.error("a server did not join: %s", failure)
        if failures:
            raise failures[0]

    async def _join_one(self, index: int, start: Awaitable[ServerClient]) -> None:
        """Start or connect to the server, and wait until it accepts requests, which means that it has the current
        weights. While a step is in flight that may be after the publication that follows it."""
        limit = self._config.trainer.timeout_s + self._config.weights.timeout_s
        server = None
        try:
            server = self._cluster.fleet.join(index, await start)
            async with asyncio.timeout(limit):
                state = await server.until("accepting", "dead", "gone")
            if state != "accepting":
                raise ServerLost(f"{server.client.url} died before it accepted requests: {server.reason}")
        except Exception as error:
            if server:
                await self._leave(server)
            else:
                await self._cluster.workers.stop_server(index)
            if isinstance(error, TimeoutError):
                raise ServerLost(f"server {index} did not get the current weights within {limit:g} s") from None
            raise
        log.info("server %d has joined: %s", index, server.client.url)

    async def _leave(self, server: Server) -> None:
        await self._cluster.weights.leave(server.index)
        await self._cluster.workers.stop_server(server.index)
        log.info("server %d has left: %s", server.index, server.client.url)
