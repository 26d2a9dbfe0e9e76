"""Servers that join and leave while the run goes on.

    runs/search-0001/servers.toml:   count = 3                               # or: urls = ["http://10.0.0.7:30000", ...]

The file says which servers the run is to have; it is looked at every PERIOD_S. `count` when areal starts them, `urls`
when somebody else does. What cannot be had is logged with its cause, and the servers stay as they are. A program that
holds a Controller calls `change_servers`.
"""

from __future__ import annotations

import asyncio
import logging
import tomllib
from collections.abc import Awaitable, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

from areal.config import Config, to_text
from areal.controller.cluster import Cluster
from areal.controller.server import Server
from areal.errors import ArealError, ConfigError
from areal.workers.protocols import ServerClient

PERIOD_S = 2.0
HEAD = f"""\
# The servers of this run. Change the line while the run goes on, and servers join or leave; it is read every
# {PERIOD_S:g} s. What came of it is in logs/controller.log. `areal resume` begins with what config.toml says.
"""

log = logging.getLogger("areal")


class Membership:
    """See the module. file: `servers.toml` of the run; written here, then watched by `run`."""

    def __init__(self, config: Config, cluster: Cluster, file: Path) -> None:
        self._key = "urls" if config.servers.urls else "count"
        self._config = config
        self._cluster = cluster
        self._file = file
        self._lock = asyncio.Lock()
        self._stamp: object = None

    def write(self) -> None:
        """Write what the run begins with. Blocks."""
        value = to_text(self._config[f"servers.{self._key}"], self._key)
        self._file.write_text(f"{HEAD}{self._key} = {value}\n", encoding="utf-8")
        self._stamp = self._stamped()

    async def run(self) -> None:
        """Watch the file until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                if (wanted := await asyncio.to_thread(self._read)) is not None:
                    await self.change(wanted)
            except ArealError as error:
                log.error("%s: %s; write the file again to try once more", self._file.name, error)

    async def change(self, wanted: Mapping[str, Any]) -> None:
        """Have the servers of {"count": 3}, or those of {"urls": [...]}. Returns once the new ones are ready and the
        others are gone; which calls these had, other servers go on with.

        Raises ConfigError for what cannot be, before anything changes; ConfigError or ProcessError for a server that
        did not come up: those that did stay, and none leaves.
        """
        async with self._lock:
            if set(wanted) != {self._key} or wanted[self._key] == []:
                whose = "starts its servers itself" if self._key == "count" else "has servers that somebody else runs"
                example = "count = 2" if self._key == "count" else 'urls = ["http://127.0.0.1:30000"]'
                given = " and ".join(f"{key} = {value!r}" for key, value in wanted.items()) or "nothing"
                raise ConfigError(f"{given} is given, and this run {whose}; say {example}, and no more")
            key = f"servers.{self._key}"
            # Places are looked at when servers join: `placement.servers` may name more than there are to be.
            config = self._config.changed({key: wanted[self._key], "placement.servers": []}, self._file.name)
            await (self._to_count(config.servers.count) if self._key == "count" else self._to_urls(config.servers.urls))

    async def _to_count(self, wanted: int) -> None:
        fleet, workers = self._cluster.fleet, self._cluster.workers
        if new := self._unused(wanted - len(fleet.servers)):
            places = max(*new, *(server.index for server in fleet.servers)) + 1
            if places > self._config.servers.count:
                self._config = self._config.changed({"servers.count": places}, self._file.name)
                await asyncio.to_thread(workers.grow, self._config)
            await self._join({index: workers.start_server(index) for index in new})
        dead_first = sorted(fleet.servers, key=lambda server: (server.state != "dead", -server.index))
        await self._leave(dead_first[: max(0, len(dead_first) - wanted)])

    async def _to_urls(self, wanted: Sequence[str]) -> None:
        servers = self._cluster.fleet.servers
        here = {server.client.url for server in servers}
        new = [url for url in dict.fromkeys(url.rstrip("/") for url in wanted) if url not in here]
        await self._join(
            {i: self._cluster.workers.connect(u) for i, u in zip(self._unused(len(new)), new, strict=True)}
        )
        kept = {url.rstrip("/") for url in wanted}
        await self._leave([server for server in servers if server.client.url not in kept])

    def _unused(self, number: int) -> list[int]:
        taken = {server.index for server in self._cluster.fleet.servers}
        return list(islice((index for index in count() if index not in taken), max(0, number)))

    async def _join(self, starting: Mapping[int, Awaitable[ServerClient]]) -> None:
        async def one(index: int, start: Awaitable[ServerClient]) -> None:
            try:
                client = await start
            except ArealError:
                await self._cluster.workers.stop_server(index)
                raise
            self._cluster.fleet.join(index, client)
            log.info("server %d joins: %s", index, client.url)

        joins = (one(index, start) for index, start in starting.items())
        for result in await asyncio.gather(*joins, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _leave(self, servers: Sequence[Server]) -> None:
        for server in servers:
            await self._cluster.weights.leave(server.index)
            await self._cluster.workers.stop_server(server.index)
            log.info("server %d has left: %s", server.index, server.client.url)

    def _stamped(self) -> object:
        try:
            stat = self._file.stat()
        except OSError as error:
            return error.errno
        return stat.st_mtime_ns, stat.st_ino, stat.st_size

    def _read(self) -> dict[str, Any] | None:
        """What the file says, None when it is the one that was read before. Raises ConfigError."""
        stamp = self._stamped()
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            return tomllib.loads(self._file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"it cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"it is not TOML: {error}") from None
