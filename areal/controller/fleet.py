"""The servers as one: routing, interruption, restarts, and the version that each server holds.

    fleet = Fleet(config, clients, origin="search.0", stop_ids=eos_ids, restart=launcher.restart,
                  exited=launcher.exited, on_serving=scheduler.serving, rids=random_rids("0.0"))
    tasks.create_task(fleet.run())      # owns every task below; ends with close(), or when no server is left
    completion = await fleet.generate(input_ids, sampling, key=episode_id)
    fleet.waits()                       # lines for the watchdog
    await fleet.close()

`generate` is one call to its caller. Below it is a row of pieces, each a `/generate` of one server under its own rid:
a piece that ends early (new weights, a time-out, a lost server) leaves its tokens, and the next goes on from there on
any open server. A piece that waits for a server stands in line, for servers.request_timeout_s at most.

Invariants: a token's version comes from the server's answer (I6). Every wait has a deadline (I7). Cancelling the
caller releases it at once and posts the abort; the place counts as taken until the server has answered (I8). A call
whose pieces fail MAX_FAILURES times in a row is a ServerError, and never makes up a result (I9).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from areal.config import Config
from areal.controller.router import Router
from areal.controller.server import HEALTH_S, Call, End, Server
from areal.errors import ArealError, ProcessError, ServerError, ServerLost, ServerRefused
from areal.types import Completion, Finish, Generation, Ints, Sampling
from areal.workers.protocols import ServerClient
from areal.workers.rollout.client import version_of

ABORT_GRACE_S = 0.5
"""Seconds an aborted request has to come back before its socket is closed. Halfway the abort is posted again: the
first one does nothing when it overtook its request."""
MAX_FAILURES = 3
CLOSE_S = 5.0

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


def random_rids(seed: str) -> Callable[[], str]:
    """Request ids of 32 hexadecimal digits, so that none is a prefix of another. Give each attempt its own seed."""
    draw = random.Random(seed).getrandbits
    return lambda: f"{draw(128):032x}"


class Fleet:
    """See the module.

    origin: "<run>.<attempt>". stop_ids: the model's end tokens (an aborted answer that ends with one is whole).
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
        self.sync: Callable[[Server], Awaitable[None]] | None = None
        """Brings a server that came up to the current weights and opens it (`WeightSync` puts itself here)."""
        self._settings = config.servers
        self._origin = origin
        self._stop_ids = np.array(sorted(stop_ids), np.int32)
        self._restart = restart
        self._exited = exited
        self._on_serving = on_serving
        self._rids = rids or random_rids(origin)
        self._tasks: asyncio.TaskGroup | None = None
        self._started = asyncio.Event()
        self._closing = asyncio.Event()
        self._finished = asyncio.Event()
        self._router = Router(self.servers)
        self._lowest: int | None = None
        self._restarts: dict[int, int] = {}
        self._restarted = 0
        self._watchers: dict[int, asyncio.Task[None]] = {}
        self._still_since: dict[Server, float] = {}
        self._still_s = 0.0
        self._requests = self._tokens = self._cached = self._interruptions = self._failures = 0

    # -- a call

    async def generate(self, input_ids: Ints, sampling: Sampling, *, key: Hashable) -> Completion:
        """Sample from input_ids [P], across interruptions, as one completion.

        Calls with the same `key` go where their prefix is cached. Raises ServerError when MAX_FAILURES pieces in a
        row failed, or when no server could be had for servers.request_timeout_s; EpisodeError for a wrong prompt.
        """
        pieces: list[Generation] = []
        ids, left = input_ids, sampling.max_new_tokens
        interruptions = failures = 0
        avoid: Server | None = None
        while True:
            call = Call(key, self._rids(), asyncio.get_running_loop().time(), avoid)
            piece = await self._piece(call, ids, sampling if not pieces else replace(sampling, max_new_tokens=left))
            avoid = None if call.end == "interrupt" else call.server
            if isinstance(piece, Generation):
                finish: Finish = piece.finish
                if finish == "abort":
                    piece, finish = self._aborted(piece, sampling, left)
                if len(piece.output_ids):
                    failures = 0
                    pieces.append(piece)
                    left -= len(piece.output_ids)
                if finish != "abort":
                    return _stitch(input_ids, pieces, finish, interruptions)
                ids = np.concatenate((ids, piece.output_ids))
            elif call.end != "interrupt":
                failures += 1
                self._failures += 1
                if failures == MAX_FAILURES:
                    raise ServerError(f"{failures} requests of one call failed, the last one: {piece}") from piece
                continue
            interruptions += 1
            self._interruptions += 1

    def _aborted(self, piece: Generation, sampling: Sampling, left: int) -> tuple[Generation, Finish]:
        """How an aborted piece counts: SGLang looks for an abort before it looks for an end token or the length."""
        if not sampling.ignore_eos:
            ends = np.isin(piece.output_ids, (*self._stop_ids, *sampling.stop_token_ids))
            if ends.any():
                n = int(ends.argmax()) + 1
                kept = (piece.output_ids[:n], piece.logprobs[:n], piece.versions[:n])
                return Generation(*kept, "stop", piece.cached_tokens), "stop"
        return piece, "length" if len(piece.output_ids) >= left else "abort"

    async def _piece(self, call: Call, ids: Ints, sampling: Sampling) -> Generation | ServerError:
        """One /generate, from its place in line to its end. What a server did wrong is returned, not raised."""
        timeout = self._settings.request_timeout_s
        server = self._router.place(call) or await self._router.wait(call, timeout)
        assert self._tasks
        call.answer = asyncio.get_running_loop().create_future()
        call.task = self._tasks.create_task(self._post(call, server, ids, sampling))
        try:
            piece = await call.answer
        except asyncio.CancelledError:
            self._end_later([call], "cancel")
            raise
        url = server.client.url
        if piece is None:  # its socket was closed
            if call.end == "timeout" and server.answered < call.since:
                self.fail(server, f"{url} answered nothing for {timeout:g} s")
            return ServerLost(server.reason if server.state == "dead" else f"{url}: no answer, not even to an abort")
        if isinstance(piece, Generation):
            if not len(piece.output_ids) and call.end != "interrupt":
                why = f"within {timeout:g} s" if call.end else "but an abort that nobody asked for"
                return ServerLost(f"{url}: no tokens {why}")
            return piece
        if isinstance(piece, ServerError):
            return piece
        raise piece  # the prompt is to blame

    async def _post(self, call: Call, server: Server, ids: Ints, sampling: Sampling) -> None:
        self._requests += 1
        answer: Generation | ArealError | None = None
        try:
            piece = await server.client.generate(call.rid, ids, sampling)
            if not server.settled.is_set():
                await server.settled.wait()
            answer = piece
            server.answered = asyncio.get_running_loop().time()
            self._tokens += len(piece.output_ids)
            self._cached += piece.cached_tokens
        except ServerLost as error:
            answer = error
            server.doubtful = True
            server.check.set()
        except ServerRefused as error:
            answer = error
            server.answered = asyncio.get_running_loop().time()
            server.check.set()
        except ArealError as error:
            answer = error
        finally:
            self._router.leave(call)
            if call.answer and not call.answer.done():
                call.answer.set_result(answer)

    async def _time_out(self) -> None:
        """End each call that has been on its server for servers.request_timeout_s. One timer serves all: whoever gets
        a place while it runs is not due before its next turn."""
        loop = asyncio.get_running_loop()
        timeout = self._settings.request_timeout_s
        while True:
            now = loop.time()
            calls = [call for server in self.servers for call in server.calls.values() if not call.end]
            late = [call for call in calls if call.since + timeout <= now]
            if late:
                self._end_later(late, "timeout")
            first = min((call.since for call in calls if call.since + timeout > now), default=now)
            await asyncio.sleep(first + timeout - now)

    def _end_later(self, calls: Sequence[Call], end: End) -> None:
        assert self._tasks
        self._tasks.create_task(self._end(calls, end))

    async def _end(self, calls: Sequence[Call], end: End, everything: Server | None = None) -> None:
        """Abort; after ABORT_GRACE_S close the socket of what has not come back. `everything`: the server on which
        these are all the calls, so that one abort does for all."""
        assert self._tasks
        for call in calls:
            call.end = call.end or end
        pending = {call.task: call for call in calls if call.task and not call.task.done()}
        for attempt in range(2):
            if not pending:
                return
            if everything and attempt == 0:
                self._tasks.create_task(self._abort(everything, ""))
            else:
                for call in pending.values():
                    assert call.server
                    self._tasks.create_task(self._abort(call.server, call.rid))
            await asyncio.wait(pending, timeout=ABORT_GRACE_S / 2)
            pending = {task: call for task, call in pending.items() if not task.done()}
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=ABORT_GRACE_S)

    async def _abort(self, server: Server, rid: str) -> None:
        with suppress(ServerError):  # the socket is closed next, or the server is found dead
            await server.client.abort(rid)

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
        ending = self._end(list(server.calls.values()), "interrupt", server)
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
            self._still_s += asyncio.get_running_loop().time() - since

    # -- life

    async def run(self) -> None:
        """Watch the servers until close(). Raises ProcessError or ServerLost when no server is left."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._started.set()
                for server in self.servers:
                    self._begin_watch(server)
                time_outs = tasks.create_task(self._time_out(), name="time-outs")
                try:
                    await self._closing.wait()
                finally:
                    self._closing.set()
                    self._router.close()
                    for watcher in (time_outs, *self._watchers.values()):
                        watcher.cancel()
                await self._end([call for s in self.servers for call in s.calls.values()], "cancel")
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

    def join(self, index: int, client: ServerClient) -> None:
        """One more server, which is ready. It serves once it has the current weights."""
        server = Server(index, client)
        self.servers.append(server)
        self._begin_watch(server)

    def _begin_watch(self, server: Server) -> None:
        assert self._tasks
        self._watchers[server.index] = self._tasks.create_task(self._watch(server), name=f"server-{server.index}")

    async def leave(self, index: int) -> None:
        """Do without a server from now on; its calls keep their tokens and go on elsewhere. Its process is left to the
        caller, and that it takes no weights meanwhile (`WeightSync.leave`)."""
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
                if self.sync:
                    await self.sync(server)
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
            log.warning("server %d: restart %d of %d", server.index, restarts, limit)
            try:
                client = await self._restart(server.index)
            except (ProcessError, ServerError) as error:
                server.reason = str(error)
                continue
            if client is not server.client:
                await server.client.close()
            return client
        left = sum(s.state != "dead" or self._restarts.get(s.index, 0) < limit for s in self.servers)
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
            requests=self._requests,
            tokens=self._tokens,
            cached_tokens=self._cached,
            interruptions=self._interruptions,
            failures=self._failures,
            restarts=self._restarted,
            running=sum(len(s.calls) for s in self.servers),
            waiting=len(self._router.waiting),
            open=sum(s.state == "open" for s in self.servers),
            still_s=(self._still_s + sum(now - t for t in self._still_since.values())) / max(1, len(self.servers)),
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


def _stitch(input_ids: Ints, pieces: Sequence[Generation], finish: Finish, interruptions: int) -> Completion:
    first = pieces[0]
    if len(pieces) == 1:
        return Completion(
            input_ids, first.output_ids, first.logprobs, first.versions, finish, interruptions, first.cached_tokens
        )
    return Completion(
        input_ids,
        np.concatenate([piece.output_ids for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
        np.concatenate([piece.versions for piece in pieces]),
        finish,
        interruptions,
        first.cached_tokens,
    )
