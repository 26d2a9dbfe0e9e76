"""The `ServerClient` of a simulated server, and the collectives of a weight group."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from areal.errors import ServerLost, ServerRefused
from areal.simulation.server import SimulatedServer
from areal.simulation.weights import Weights
from areal.types import Floats, Generation, Ints, Sampling, TensorSpec
from areal.workers.protocols import ServerInfo, WeightGroup
from areal.workers.sglang.client import ABORT_TIMEOUT_S, HEALTH_TIMEOUT_S

DISCONNECT_S = 1.0
"""Seconds after which a server notices that the client has closed the connection."""


class SimulatedClient:
    """See `ServerClient`. What the real client refuses as garbage is refused here by `Trouble`'s chance."""

    def __init__(self, server: SimulatedServer, groups: dict[str, Rendezvous], chance: random.Random, timeout_s: float):
        self.url = f"sim://{server.index}"
        self.server = server
        self.aborted: set[str] = set()
        self._groups = groups
        self._chance = chance
        self._timeout_s = timeout_s

    async def generate(self, rid: str, input_ids: Ints, sampling: Sampling) -> Generation:
        await self._reach(None)
        trouble = self.server.trouble
        if self._happens(trouble.refuse):
            raise ServerRefused(f"{self.url}/generate: HTTP 500")
        if self._happens(trouble.repeat):  # the request came twice; the other answer is not read
            self.server.submit(f"{rid}-again", input_ids, sampling)
        job = self.server.submit(rid, input_ids, sampling)
        try:
            answer = await job.answer
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(DISCONNECT_S, self._disconnected, rid)
            raise
        await asyncio.sleep(self.server.speed.latency_s)
        if self._happens(trouble.lose):
            raise ServerLost(f"{self.url}/generate: the connection broke")
        if self._happens(trouble.garbage):
            raise ServerRefused(f"{self.url}/generate: not an answer")
        return answer

    async def abort(self, rid: str) -> None:
        self.aborted.add(rid)
        await self._reach(ABORT_TIMEOUT_S)
        self.server.abort(rid)

    async def info(self) -> ServerInfo:
        await self._reach(self._timeout_s)
        return ServerInfo(self.server.label, "", 10**6)

    async def healthy(self) -> bool:
        try:
            await self._reach(HEALTH_TIMEOUT_S)
        except ServerLost:
            return False
        return True

    async def pause(self) -> None:
        await self._reach(self._timeout_s)
        self.server.pause()

    async def resume(self) -> None:
        await self._reach(self._timeout_s)
        self.server.resume()

    async def load_disk(self, folder: str, label: str, *, abort: bool = True) -> None:
        await self._within(self._load_disk(folder, label, abort))

    async def _load_disk(self, folder: str, label: str, abort: bool) -> None:
        await self._reach(None)
        self._maybe_refuse("/update_weights_from_disk")
        await self.server.load(Weights.read(Path(folder)), label, abort=abort)

    async def join_group(self, group: WeightGroup, rank: int) -> None:
        await self._reach(self._timeout_s)
        await self._within(self._groups.setdefault(group.name, Rendezvous(group.world_size)).meet("join"))

    async def load_group(self, group: str, specs: Sequence[TensorSpec], label: str) -> None:
        await self._within(self._load_group(group, label))

    async def _load_group(self, group: str, label: str) -> None:
        await self._reach(None)
        self._maybe_refuse("/update_weights_from_distributed")
        self.server.abort("")
        meeting = self._groups.get(group)
        if meeting is None:
            raise ServerRefused(f"{self.url}: no group {group}")
        await meeting.meet("send")
        assert meeting.sent is not None
        await self.server.load(meeting.sent, label)

    async def leave_group(self, group: str) -> None:
        await self._reach(self._timeout_s)
        if meeting := self._groups.pop(group, None):
            meeting.break_up()

    async def flush(self) -> None:
        await self._reach(self._timeout_s)
        while self.server.alive and self.server.jobs:  # a request that arrived after the abort
            self.server.abort("")
            await asyncio.sleep(0.05)

    async def score(self, ids: Ints) -> Floats:
        await self._reach(self._timeout_s)
        await self._within(self.server.running())
        return self.server.weights.score(len(ids))

    async def checksums(self) -> dict[str, str]:
        await self._reach(self._timeout_s)
        return {"weights": self.server.weights.digest}

    async def scramble(self) -> None:
        await self._reach(self._timeout_s)
        self.server.weights = self.server.weights.corrupted()

    async def close(self) -> None:
        pass

    async def _reach(self, timeout_s: float | None) -> None:
        """To the server and, for a short call, back."""
        await asyncio.sleep(self.server.speed.latency_s * (1 if timeout_s is None else 2))
        if self.server.trouble.hung and self.server.alive:
            waited = 0.0
            while self.server.trouble.hung and self.server.alive:
                await asyncio.sleep(1.0)
                waited += 1.0
                if timeout_s is not None and waited >= timeout_s:
                    raise ServerLost(f"{self.url}: no answer within {timeout_s:g} s")
        if not self.server.alive:
            raise ServerLost(f"{self.url}: connection refused")

    async def _within(self, work: object) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await work  # type: ignore[misc]
        except TimeoutError:
            raise ServerLost(f"{self.url}: no answer within {self._timeout_s:g} s") from None
        if not self.server.alive:
            raise ServerLost(f"{self.url}: the connection broke")

    def _maybe_refuse(self, path: str) -> None:
        if self._happens(self.server.trouble.refuse):
            raise ServerRefused(f"{self.url}{path}: HTTP 500")

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self._chance.random() < chance

    def _disconnected(self, rid: str) -> None:
        if self.server.alive and not self.server.trouble.hung:
            self.server.abort(rid)


class Rendezvous:
    """A collective of `size` members: each waits until all have come, as in torch.distributed."""

    def __init__(self, size: int) -> None:
        self.sent: Weights | None = None
        self._size = size
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    async def meet(self, what: str) -> None:
        future = asyncio.get_running_loop().create_future()
        here = self._waiting.setdefault(what, [])
        here.append(future)
        if len(here) == self._size:
            del self._waiting[what]
            for each in here:
                if not each.done():
                    each.set_result(None)
        try:
            await future
        except asyncio.CancelledError:
            if future in here:
                here.remove(future)
            raise

    def break_up(self) -> None:
        """All waiters get an error, as when a member closes its connections."""
        for here in self._waiting.values():
            for each in here:
                if not each.done():
                    each.set_exception(ServerRefused("the group was destroyed"))
        self._waiting.clear()
