"""One model call, as a chain of requests.

Each request goes to one server under its own rid. One that ends early (new weights, a time-out, a lost server) keeps
its tokens, and the next continues from there on any server that accepts requests. A request waits in the queue for
servers.request_timeout_s at most.

Invariants: a token's version comes from the server's answer (I6). Every wait has a deadline (I7). Cancelling the
caller releases it at once and posts the abort; the slot counts as taken until the server has answered (I8). A call
whose requests fail MAX_FAILURES times in a row is a ServerError; a result is never made up (I9).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np

from areal.controller.router import Router
from areal.controller.server import Call, End, Server
from areal.deadlines import Deadlines
from areal.errors import ArealError, ServerError, ServerLost, ServerRefused
from areal.types import Completion, Finish, Generation, Ints, Sampling

log = logging.getLogger("areal")

MAX_FAILURES = 3


def random_rids(seed: str) -> Callable[[], str]:
    """Request ids of 32 hexadecimal digits, so that none is a prefix of another. Each life needs its own seed."""
    draw = random.Random(seed).getrandbits
    return lambda: f"{draw(128):032x}"


class Calls:
    """Use as `async with`: requests in flight end with it.

    timeout_s: seconds that a request may wait in the queue, and then on its server. fail(server, reason) declares a
    server dead. requests: posted so far; cached_tokens: prompt tokens found in a server's cache; failures: requests
    that a server did not answer properly.
    """

    def __init__(
        self,
        router: Router,
        rids: Callable[[], str],
        *,
        timeout_s: float,
        stop_ids: Iterable[int],
        fail: Callable[[Server, str], None],
        deadlines: Deadlines,
    ) -> None:
        self.requests = self.tokens = self.cached_tokens = self.interruptions = self.failures = 0
        self._router = router
        self._rids = rids
        self._timeout_s = timeout_s
        self._stop_ids = np.array(sorted(stop_ids), np.int32)
        self._fail = fail
        self._deadlines = deadlines
        self._last_failure = ""
        self._tasks = asyncio.TaskGroup()
        self._time_outs: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._time_outs = self._tasks.create_task(self._time_out(), name="time-outs")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort what is in flight."""
        if self._time_outs:
            self._time_outs.cancel()
        if kind is None:
            await self.end([call for server in self._router.servers for call in server.calls.values()], "cancel")
        await self._tasks.__aexit__(kind, error, trace)

    async def generate(self, input_ids: Ints, sampling: Sampling, *, key: Hashable) -> Completion:
        """Sample from input_ids [P], across interruptions, as one completion.

        Calls with the same `key` go where their prefix is cached. Raises ServerError when MAX_FAILURES requests in a
        row failed, or when no server had a slot within servers.request_timeout_s; EpisodeError for a wrong prompt.
        """
        parts: list[Generation] = []
        ids, left = input_ids, sampling.max_new_tokens
        interruptions = failures = 0
        avoid: Server | None = None
        while True:
            call = Call(key, self._rids(), asyncio.get_running_loop().time(), avoid)
            part = await self._request(call, ids, sampling if not parts else replace(sampling, max_new_tokens=left))
            avoid = None if call.end == "interrupt" else call.server
            if isinstance(part, Generation):
                finish: Finish = part.finish
                if finish == "abort":
                    part, finish = self._aborted(part, sampling, left)
                if len(part.output_ids):
                    failures = 0
                    parts.append(part)
                    left -= len(part.output_ids)
                if finish != "abort":
                    return _stitch(input_ids, parts, finish, interruptions)
                ids = np.concatenate((ids, part.output_ids))
            elif call.end != "interrupt":
                failures += 1
                self.failures += 1
                if (cause := str(part)) != self._last_failure:  # a server that breaks fails all its requests alike
                    log.info("a request failed: %s", cause)
                    self._last_failure = cause
                if failures == MAX_FAILURES:
                    raise ServerError(f"{failures} requests of one call failed, the last one: {part}") from part
                continue
            interruptions += 1
            self.interruptions += 1

    def _aborted(self, part: Generation, sampling: Sampling, left: int) -> tuple[Generation, Finish]:
        """How an aborted request counts: a server looks for an abort before it looks for an end token or the length."""
        if not sampling.ignore_eos:
            ends = np.isin(part.output_ids, (*self._stop_ids, *sampling.stop_token_ids))
            if ends.any():
                n = int(ends.argmax()) + 1
                kept = (part.output_ids[:n], part.logprobs[:n], part.versions[:n])
                return Generation(*kept, "stop", part.cached_tokens), "stop"
        return part, "length" if len(part.output_ids) >= left else "abort"

    async def _request(self, call: Call, ids: Ints, sampling: Sampling) -> Generation | ServerError:
        """One request, from the queue to its end. What a server did wrong is returned, not raised."""
        timeout = self._timeout_s
        server = self._router.place(call) or await self._router.wait(call, timeout)
        call.answer = asyncio.get_running_loop().create_future()
        call.task = self._tasks.create_task(self._post(call, server, ids, sampling))
        call.task.add_done_callback(partial(self._answer, call))
        try:
            part = await call.answer
        except asyncio.CancelledError:
            self.end_later([call], "cancel")
            raise
        url = server.client.url
        if part is None:  # its socket was closed
            if call.end == "timeout" and server.answered < call.since:
                self._fail(server, f"{url} answered nothing for {timeout:g} s")
            return ServerLost(server.reason if server.is_dead else f"{url}: no answer, not even to an abort")
        if isinstance(part, Generation):
            if not len(part.output_ids) and call.end != "interrupt":
                why = f"within {timeout:g} s" if call.end else "but an unrequested abort"
                return ServerLost(f"{url}: no tokens {why}")
            return part
        if isinstance(part, ServerError):
            return part
        raise part  # the prompt is to blame

    async def _post(self, call: Call, server: Server, ids: Ints, sampling: Sampling) -> Generation | ArealError:
        self.requests += 1
        try:
            part = await server.client.generate(call.rid, ids, sampling)
            if server.state == "paused":  # until it accepts, it is not known whether the weights were the right ones
                await server.until("accepting", "dead", "gone")
            server.heard()
            self.tokens += len(part.output_ids)
            self.cached_tokens += part.cached_tokens
            return part
        except ServerLost as error:
            server.suspect()
            return error
        except ServerRefused as error:
            server.heard()
            server.suspect()
            return error
        except ArealError as error:
            return error

    def _answer(self, call: Call, task: asyncio.Task[Generation | ArealError]) -> None:
        """As a callback: a task that is cancelled before its first step runs no `finally`."""
        self._router.leave(call)
        if call.answer and not call.answer.done():
            call.answer.set_result(None if task.cancelled() or task.exception() else task.result())

    async def _time_out(self) -> None:
        """End each request that has been on its server for servers.request_timeout_s. One timer serves all: a request
        that gets a slot meanwhile is not due before the next turn."""
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

    def end_later(self, calls: Sequence[Call], end: End, everything: Server | None = None) -> asyncio.Task[None]:
        return self._tasks.create_task(self.end(calls, end, everything))

    async def end(self, calls: Sequence[Call], end: End, everything: Server | None = None) -> None:
        """Abort; close the socket of what has not come back in time. `everything`: the server whose only requests these
        are, so that one abort ends them all. This returns once that abort was answered or has timed out: one that
        arrives later would abort requests that got their slot afterwards."""
        grace = self._deadlines.abort
        pending = {call.task: call for call in calls if call.task and not call.task.done()}
        for call in pending.values():  # one that has a slot and was not posted yet finds it closed
            call.end = call.end or end
        sweep: list[asyncio.Task[None]] = []
        for posting in range(2):
            if not pending and not sweep:
                return
            if everything and posting == 0:
                sweep = [self._tasks.create_task(self._abort(everything, ""))]
            else:
                for call in pending.values():
                    assert call.server
                    self._tasks.create_task(self._abort(call.server, call.rid))
            await asyncio.wait((*pending, *sweep), timeout=grace / 2)
            pending = {task: call for task, call in pending.items() if not task.done()}
            sweep = [task for task in sweep if not task.done()]
        for task in (*pending, *sweep):
            task.cancel()
        if pending or sweep:
            await asyncio.wait((*pending, *sweep), timeout=grace)

    async def _abort(self, server: Server, rid: str) -> None:
        with suppress(ServerError):  # the socket is closed next, or the server is found dead
            await server.client.abort(rid)


def _stitch(input_ids: Ints, parts: Sequence[Generation], finish: Finish, interruptions: int) -> Completion:
    first = parts[0]
    if len(parts) == 1:
        return Completion(
            input_ids, first.output_ids, first.logprobs, first.versions, finish, interruptions, first.cached_tokens
        )
    return Completion(
        input_ids,
        np.concatenate([part.output_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.versions for part in parts]),
        finish,
        interruptions,
        first.cached_tokens,
    )
