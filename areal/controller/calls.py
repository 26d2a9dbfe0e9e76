"""One call to the servers, however many pieces it takes.

Below a call of `generate` is a row of pieces, each a `/generate` of one server under its own rid: a piece that ends
early (new weights, a time-out, a lost server) leaves its tokens, and the next goes on from there on any open server. A
piece that waits for a server stands in line, for servers.request_timeout_s at most.

Invariants: a token's version comes from the server's answer (I6). Every wait has a deadline (I7). Cancelling the
caller releases it at once and posts the abort; the place counts as taken until the server has answered (I8). A call
whose pieces fail MAX_FAILURES times in a row is a ServerError, and never makes up a result (I9).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from areal.controller.router import Router
from areal.controller.server import Call, End, Server
from areal.errors import ArealError, ServerError, ServerLost, ServerRefused
from areal.types import Completion, Finish, Generation, Ints, Sampling

log = logging.getLogger("areal")

ABORT_GRACE_S = 0.5
"""Seconds an aborted request has to come back before its socket is closed. Halfway the abort is posted again: the
first one does nothing when it overtook its request."""
MAX_FAILURES = 3


def random_rids(seed: str) -> Callable[[], str]:
    """Request ids of 32 hexadecimal digits, so that none is a prefix of another. Give each life its own seed."""
    draw = random.Random(seed).getrandbits
    return lambda: f"{draw(128):032x}"


class Calls:
    """timeout_s: seconds that a piece may wait in line, and then on its server. fail(server, reason) declares a server
    dead. tasks: where requests run; set by whoever owns it, before the first call.

    requests: pieces posted; cached_tokens: prompt tokens found in a server's cache; failures: pieces that a server did
    not answer properly.
    """

    def __init__(
        self,
        router: Router,
        rids: Callable[[], str],
        *,
        timeout_s: float,
        stop_ids: Iterable[int],
        fail: Callable[[Server, str], None],
    ) -> None:
        self.tasks: asyncio.TaskGroup | None = None
        self.requests = self.tokens = self.cached_tokens = self.interruptions = self.failures = 0
        self._router = router
        self._rids = rids
        self._timeout_s = timeout_s
        self._stop_ids = np.array(sorted(stop_ids), np.int32)
        self._fail = fail
        self._said = ""

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
                self.failures += 1
                if (cause := str(piece)) != self._said:  # a server that breaks fails all of its requests alike
                    log.info("a request failed: %s", cause)
                    self._said = cause
                if failures == MAX_FAILURES:
                    raise ServerError(f"{failures} requests of one call failed, the last one: {piece}") from piece
                continue
            interruptions += 1
            self.interruptions += 1

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
        timeout = self._timeout_s
        server = self._router.place(call) or await self._router.wait(call, timeout)
        assert self.tasks
        call.answer = asyncio.get_running_loop().create_future()
        call.task = self.tasks.create_task(self._post(call, server, ids, sampling))
        call.task.add_done_callback(partial(self._answer, call))
        try:
            piece = await call.answer
        except asyncio.CancelledError:
            self.end_later([call], "cancel")
            raise
        url = server.client.url
        if piece is None:  # its socket was closed
            if call.end == "timeout" and server.answered < call.since:
                self._fail(server, f"{url} answered nothing for {timeout:g} s")
            return ServerLost(server.reason if server.state == "dead" else f"{url}: no answer, not even to an abort")
        if isinstance(piece, Generation):
            if not len(piece.output_ids) and call.end != "interrupt":
                why = f"within {timeout:g} s" if call.end else "but an abort that nobody asked for"
                return ServerLost(f"{url}: no tokens {why}")
            return piece
        if isinstance(piece, ServerError):
            return piece
        raise piece  # the prompt is to blame

    async def _post(self, call: Call, server: Server, ids: Ints, sampling: Sampling) -> Generation | ArealError:
        self.requests += 1
        try:
            piece = await server.client.generate(call.rid, ids, sampling)
            if not server.settled.is_set():
                await server.settled.wait()
            server.answered = asyncio.get_running_loop().time()
            self.tokens += len(piece.output_ids)
            self.cached_tokens += piece.cached_tokens
            return piece
        except ServerLost as error:
            server.doubtful = True
            server.check.set()
            return error
        except ServerRefused as error:
            server.answered = asyncio.get_running_loop().time()
            server.check.set()
            return error
        except ArealError as error:
            return error

    def _answer(self, call: Call, task: asyncio.Task[Generation | ArealError]) -> None:
        """As a callback: a task that is cancelled before its first step runs no `finally`."""
        self._router.leave(call)
        if call.answer and not call.answer.done():
            call.answer.set_result(None if task.cancelled() or task.exception() else task.result())

    async def time_out(self) -> None:
        """End each call that has been on its server for servers.request_timeout_s. One timer serves all: whoever gets
        a place while it runs is not due before its next turn."""
        loop = asyncio.get_running_loop()
        timeout = self._timeout_s
        while True:
            now = loop.time()
            calls = [
                call for server in self._router.servers for call in server.calls.values() if call.task and not call.end
            ]
            late = [call for call in calls if call.since + timeout <= now]
            if late:
                self.end_later(late, "timeout")
            first = min((call.since for call in calls if call.since + timeout > now), default=now)
            await asyncio.sleep(first + timeout - now)

    def end_later(self, calls: Sequence[Call], end: End) -> None:
        assert self.tasks
        self.tasks.create_task(self.end(calls, end))

    async def end(self, calls: Sequence[Call], end: End, everything: Server | None = None) -> None:
        """Abort; after ABORT_GRACE_S close the socket of what has not come back. `everything`: the server on which
        these are all the calls, so that one abort does for all; it has been answered before this returns, or is given
        up after as long, since one that comes late would abort calls that got their place afterwards."""
        assert self.tasks
        pending = {call.task: call for call in calls if call.task and not call.task.done()}
        for call in pending.values():  # one that has a place and is not there yet finds the gate closed
            call.end = call.end or end
        sweep: list[asyncio.Task[None]] = []
        for posting in range(2):
            if not pending and not sweep:
                return
            if everything and posting == 0:
                sweep = [self.tasks.create_task(self._abort(everything, ""))]
            else:
                for call in pending.values():
                    assert call.server
                    self.tasks.create_task(self._abort(call.server, call.rid))
            await asyncio.wait((*pending, *sweep), timeout=ABORT_GRACE_S / 2)
            pending = {task: call for task, call in pending.items() if not task.done()}
            sweep = [task for task in sweep if not task.done()]
        for task in (*pending, *sweep):
            task.cancel()
        if pending or sweep:
            await asyncio.wait((*pending, *sweep), timeout=ABORT_GRACE_S)

    async def _abort(self, server: Server, rid: str) -> None:
        with suppress(ServerError):  # the socket is closed next, or the server is found dead
            await server.client.abort(rid)


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
