"""`HttpTrainer`: the controller's client of the trainer ranks, over HTTP.

A step is posted to all ranks at once, each with its own sequences. The death of a rank is noticed through its process;
errors of other ranks about lost connections are consequences of it and are not reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import aiohttp
import numpy as np

from areal.errors import TrainerError, VersionConflict
from areal.types import Floats, Ints, TensorSpec, TrainRequest, TrainStats
from areal.workers.megatron import wire
from areal.workers.process import Child
from areal.workers.protocols import WeightGroup

T = TypeVar("T")
GRACE_S = 2.0
"""Seconds by which the cause of a failure may arrive after its consequences, and by which our deadlines exceed those of
the ranks."""


class HttpTrainer:
    """See `TrainerClient`. `urls` are the first ranks of the data-parallel groups, in order; `children` are the
    processes to stop in `close`, if areal started them. group_timeout_s applies to weight groups, timeout_s to the
    rest. Use it in one event loop.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str,
        *,
        timeout_s: float,
        group_timeout_s: float,
        children: Sequence[Child] = (),
    ) -> None:
        self.data_parallel = len(urls)
        self._urls = list(urls)
        self._timeout_s, self._group_timeout_s = timeout_s, group_timeout_s
        self._children = list(children)
        self._staged = ""
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"}, timeout=aiohttp.ClientTimeout(total=None)
        )
        self._dead = asyncio.get_running_loop().create_future()
        self._watches = [asyncio.create_task(self._watch(rank, child)) for rank, child in enumerate(self._children)]

    @property
    def lost(self) -> str:
        return self._dead.result() if self._dead.done() else ""

    async def train(self, request: TrainRequest) -> TrainStats:
        """Also raises ValueError if the request is planned for another number of ranks."""
        bodies = await asyncio.to_thread(lambda: [wire.pack_request(r) for r in wire.split(request, len(self._urls))])
        answers = await self._together(
            [self._post(rank, "train", body, wire.unpack_stats, self._timeout_s) for rank, body in enumerate(bodies)]
        )
        return answers[0]

    async def logprobs(self, sequences: Sequence[Ints]) -> list[Floats]:
        ranks = len(self._urls)
        bodies = [wire.pack_sequences(sequences[rank::ranks], np.int32) for rank in range(min(ranks, len(sequences)))]
        answers = await self._together(
            [
                self._post(rank, "logprobs", body, wire.unpack_sequences, self._timeout_s)
                for rank, body in enumerate(bodies)
            ]
        )
        results: list[Floats] = [np.zeros(0, np.float32)] * len(sequences)
        for rank, answer in enumerate(answers):
            results[rank::ranks] = answer
        return results

    async def export(self, folder: str) -> None:
        await self._first("export", {"folder": folder}, self._timeout_s)

    async def stage(self, folder: str) -> None:
        self._staged = folder
        await self._first("stage", {"folder": folder}, self._timeout_s)

    async def write(self) -> None:
        await self._first("write", {"folder": self._staged}, self._timeout_s)

    async def specs(self) -> list[TensorSpec]:
        return wire.unpack_specs(await self._first("specs", {}, self._timeout_s))

    async def join_group(self, group: WeightGroup) -> None:
        await self._first("join_group", asdict(group), self._group_timeout_s)

    async def broadcast(self, group: str) -> None:
        await self._first("broadcast", {"group": group}, self._group_timeout_s)

    async def leave_group(self, group: str) -> None:
        await self._first("leave_group", {"group": group}, self._group_timeout_s)

    async def close(self) -> None:
        """Stop the ranks that areal started. May be repeated."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await self._session.close()
        for ended in await asyncio.gather(*(child.stop() for child in self._children), return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended

    async def _first(self, name: str, meta: dict[str, Any], timeout_s: float) -> bytes:
        answer, *_ = await self._together([self._post(0, name, wire.pack(meta), bytes, timeout_s)])
        return answer

    async def _post(self, rank: int, name: str, body: bytes, unpack: Callable[[bytes], T], timeout_s: float) -> T:
        where = f"trainer rank {rank}: {name}"
        try:
            async with (
                asyncio.timeout(timeout_s + GRACE_S),
                self._session.post(f"{self._urls[rank]}/{name}", data=body) as response,
            ):
                answer = await response.read()
                if response.status == 200:
                    return unpack(answer)
        except TimeoutError:
            raise TrainerError(f"{where} took more than {timeout_s:g} s") from None
        except wire.WireError as error:
            raise TrainerError(f"{where}: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Echo(f"{where}: {error or type(error).__name__}") from error
        raise _remote(where, response.status, answer)

    async def _together(self, posts: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """All answers, or the error that explains the others, after which the remaining posts are cancelled."""
        tasks = [asyncio.create_task(post) for post in posts]
        try:
            while not self._dead.done() and not _failures(tasks):
                pending = [task for task in tasks if not task.done()]
                if not pending:
                    return [task.result() for task in tasks]
                await self._first_completed(pending)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    while not self._dead.done() and isinstance(_failures(tasks)[0], _Unexplained):
                        await self._first_completed([task for task in tasks if not task.done()])
            if self._dead.done():
                raise TrainerError(self._dead.result())
            raise _failures(tasks)[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _first_completed(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        await asyncio.wait([self._dead, *tasks], return_when=asyncio.FIRST_COMPLETED)

    async def _watch(self, rank: int, child: Child) -> None:
        code = await child.wait()
        if not self._dead.done():
            self._dead.set_result(
                f"trainer rank {rank} ended with code {code}; the last lines of {child.log}:\n{child.tail()}"
            )


class _Unexplained(TrainerError):
    """A failure that a dead rank, or another rank's error, may explain."""


class _Echo(_Unexplained):
    """A failure whose cause is certainly elsewhere."""


def _remote(where: str, status: int, answer: bytes) -> TrainerError:
    """The error that a rank returned."""
    try:
        failure = json.loads(answer)
        kind, text = failure["kind"], failure["error"]
    except (ValueError, KeyError, TypeError):
        return TrainerError(f"{where}: status {status}: {answer[:200]!r}")
    if status == 409:
        return VersionConflict(f"{where}: {text}")
    if kind == TrainerError.__name__:
        return TrainerError(f"{where}: {text}")
    return (_Echo if kind == "PeerFailed" else _Unexplained)(f"{where}: {kind}: {text}")


def _failures(tasks: Sequence[asyncio.Task[Any]]) -> list[BaseException]:
    """The errors so far, most likely cause first."""
    errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
    return sorted(errors, key=lambda error: (isinstance(error, _Unexplained), isinstance(error, _Echo)))
