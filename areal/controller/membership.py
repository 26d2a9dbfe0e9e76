"""Servers that join and leave while the run goes on.

    runs/search-0001/servers.toml:   count = 3                               # or: urls = ["http://10.0.0.7:30000", ...]

The file says which servers the run is to have; it is looked at every PERIOD_S. `count` when areal starts them, `urls`
when somebody else does. What cannot be had is logged with its cause, and nobody leaves then. A program that holds a
Controller calls `change_servers`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
import threading
import tomllib
from collections.abc import Awaitable, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

from areal.config import Config, to_text
from areal.controller.cluster import Cluster
from areal.controller.server import Server
from areal.errors import ArealError, ConfigError, ServerLost
from areal.workers.protocols import ServerClient

PERIOD_S = 2.0
HEAD = f"""\
# The servers of this run. Change the line while the run goes on, and servers join or leave; it is read every
# {PERIOD_S:g} s. What came of it is in logs/controller.log. `areal resume` begins with what config.toml says.
"""
LONGEST = 65536
"""Bytes that the file may have."""
LEAVING = {"gone": 0, "dead": 0, "starting": 1, "waiting": 1}
"""Who leaves first when there are too many; of those that serve, or just take new weights, the one that came last."""

log = logging.getLogger("areal")


class Membership:
    """See the module. file: `servers.toml` of the run. `run` makes the changes, one at a time, for as long as the run
    lives: whoever asked for one may go away meanwhile."""

    def __init__(self, config: Config, cluster: Cluster, file: Path) -> None:
        self._key = "urls" if config.servers.urls else "count"
        self._config = config
        self._cluster = cluster
        self._file = file
        self._asked: asyncio.Queue[tuple[Mapping[str, Any], object, asyncio.Future[None]]] = asyncio.Queue()
        self._doing: asyncio.Future[None] | None = None
        self._over = False
        self._stamp: object = None
        """Of the file as it was last read or written."""
        self._made: object = None
        """Of the file whose change was made, or begun: while that is an older one, nothing is written over it."""
        self._access = threading.Lock()  # of the file and `_stamp`, which threads read and write

    async def begin(self) -> None:
        """Write the file; `run` and `watch` come next."""
        await self._say(self._config[f"servers.{self._key}"], anew=True)

    async def run(self) -> None:
        """Make the changes that `change` is asked for, until cancelled."""
        while True:
            wanted, stamp, self._doing = await self._asked.get()
            self._made = stamp or self._made
            try:
                await self._make(wanted)
                if not stamp:
                    await self._say(wanted[self._key])
            except Exception as error:  # nothing that somebody asks for here may end the run
                if not isinstance(error, ArealError):
                    log.exception("the servers could not be changed")
                    error = ArealError(f"the servers could not be changed: {type(error).__name__}: {error}")
                if not self._doing.done():
                    self._doing.set_exception(error)
            if not self._doing.done():
                self._doing.set_result(None)

    def close(self) -> None:
        """The end of the run, and an error for whoever waits."""
        self._over = True
        waiting = [self._doing] if self._doing else []
        while not self._asked.empty():
            waiting.append(self._asked.get_nowait()[-1])
        for future in waiting:
            if not future.done():
                future.set_exception(ArealError("the run ended before its servers were changed"))

    async def watch(self) -> None:
        """Ask for what the file says, each time it was written, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                if new := await asyncio.to_thread(self._read):
                    stamp, wanted = new
                    if isinstance(wanted, ConfigError):
                        self._made = stamp
                        raise wanted
                    await self.change(wanted, stamp)
            except ArealError as error:
                log.error("%s: %s; write the file again to try once more", self._file.name, error)

    async def change(self, wanted: Mapping[str, Any], stamp: object = None) -> None:
        """Have the servers of {"count": 3}, or those of {"urls": [...]}. Returns once the new ones serve and the others
        are gone; which calls these had, other servers go on with. stamp: of the file that asks; without it, the file is
        written.

        Raises ConfigError for what cannot be, before anything changes. Raises ArealError when a server did not come up,
        or died before it served: such a one is not there then, those that did come up are, and none leaves.
        """
        if self._over:
            raise ArealError("the run is over: its servers cannot be changed")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((wanted, stamp, done))
        await done

    async def _make(self, wanted: Mapping[str, Any]) -> None:
        if set(wanted) != {self._key} or wanted[self._key] == []:
            whose = "starts its servers itself" if self._key == "count" else "has servers that somebody else runs"
            example = "count = 2" if self._key == "count" else 'urls = ["http://127.0.0.1:30000"]'
            given = " and ".join(f"{key} = {value!r}" for key, value in wanted.items()) or "nothing"
            raise ConfigError(f"{given} is given, and this run {whose}; say {example}, and no more")
        key = f"servers.{self._key}"
        # Places are looked at when servers join: `placement.servers` may name more than there are to be.
        settings = self._config.changed({key: wanted[self._key], "placement.servers": []}, self._file.name).servers
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
                grown = self._config.changed({"servers.count": places}, self._file.name)
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
            log.error("%s: %s", self._file.name, failure)
        if failures:
            raise failures[0]

    async def _join_one(self, index: int, start: Awaitable[ServerClient]) -> None:
        """Get the server, and wait until it serves: by then it has the current weights. While a step runs that may be
        after the publication that follows it."""
        limit = self._config.trainer.timeout_s + self._config.weights.timeout_s
        server = None
        try:
            server = self._cluster.fleet.join(index, await start)
            async with asyncio.timeout(limit):
                state = await server.until("accepting", "dead", "gone")
            if state != "accepting":
                raise ServerLost(f"{server.client.url} died before it served: {server.reason}")
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

    async def _say(self, value: Any, *, anew: bool = False) -> None:
        """Write what the run has. That it cannot be written is no reason to end."""
        try:
            await asyncio.to_thread(self._write, f"{HEAD}{self._key} = {to_text(value, self._key)}\n", anew)
        except OSError as error:
            log.error("cannot write %s: %s", self._file, error.strerror)

    def _write(self, content: str, anew: bool) -> None:
        """Nothing when somebody has just written the file, unless it is written `anew`."""
        with self._access:
            if anew or _stamped(self._file) == self._stamp == self._made:
                new = self._file.with_name(f".{self._file.name}")
                new.write_text(content, encoding="utf-8")
                stamp = _stamped(new)
                new.replace(self._file)
                self._stamp = self._made = stamp

    def _read(self) -> tuple[object, dict[str, Any] | ConfigError] | None:
        """The file's stamp and what it says, or what is wrong with it; None when it is the one that was read before."""
        with self._access:
            if (stamp := _stamped(self._file)) == self._stamp:
                return None
            self._stamp = stamp
            try:
                return stamp, self._parsed()
            except ConfigError as error:
                return stamp, error

    def _parsed(self) -> dict[str, Any]:
        try:
            with open(self._file, "rb", opener=_opener) as file:
                content = file.read(LONGEST + 1)
            if len(content) > LONGEST:
                raise ConfigError(f"it is longer than {LONGEST} bytes")
            return tomllib.loads(content.decode())
        except OSError as error:
            raise ConfigError(f"it cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"it is not TOML: {error}") from None


def _opener(path: str, flags: int) -> int:
    """For regular files only: a pipe, or a device, could be read for ever."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor


def _stamped(file: Path) -> object:
    try:
        found = file.stat()
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_ino, found.st_size
