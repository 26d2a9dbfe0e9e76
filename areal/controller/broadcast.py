"""The torch.distributed group through which the trainer sends weights to servers (weights.transport `group`).

Rank 0 is the trainer's sender, the servers follow in order; the group is kept from one publication to the next. A
collective that loses one member fails for all of them. So when it breaks, the member that broke it is left out, the
group is destroyed, and the others receive again in a group without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from areal.controller.ranks import Ranks
from areal.controller.server import Server
from areal.deadlines import Deadlines
from areal.errors import ArealError, ServerLost, TrainerError
from areal.workers.process import free_port
from areal.workers.protocols import TrainerClient, WeightGroup

Fail = Callable[[Server, ArealError], None]


class Broadcast:
    """widths: tensor-parallel size of each server, each of which joins with all its ranks; 1 for those not listed."""

    def __init__(
        self,
        ranks: Ranks,
        origin: str,
        host: str,
        backend: str,
        timeout_s: float,
        widths: Sequence[int],
        deadlines: Deadlines,
    ) -> None:
        self._ranks = ranks
        self._origin = origin
        self._host = host
        self._backend = backend
        self._timeout_s = timeout_s
        self._widths = widths
        self._grace_s = deadlines.group
        self._count = 0
        self._group: WeightGroup | None = None
        self._members: list[Server] = []
        self._sender: TrainerClient | None = None
        """The ranks that are in the group together with all of `_members`, as far as is known."""

    async def prepare(self, servers: Sequence[Server], fail: Fail) -> list[Server]:
        """Form the group of these servers, unless it is there. Returns those that joined; the others were failed."""
        todo = list(servers)
        while todo and not (self._sender is self._ranks.client and self._members == todo):
            await self.leave()
            self._count += 1
            ranks, size = {}, 1
            for server in todo:
                ranks[server] = size
                size += self._widths[server.index] if server.index < len(self._widths) else 1
            port = free_port(self._host)
            name = f"{self._origin}-{port}-{self._count}"  # a server that runs on may know a dead run's group
            group = WeightGroup(name, self._host, port, size, self._backend)
            self._group, self._members = group, todo
            joins = [server.client.join_group(group, ranks[server]) for server in todo]
            trainer = self._ranks.client
            todo = await self._together(name, trainer.join_group(group), todo, joins, fail)
            self._sender = trainer if todo == self._members else None
        return todo

    async def send(
        self, servers: Sequence[Server], label: str, finish: Callable[[Server], Awaitable[None]], fail: Fail
    ) -> None:
        """Broadcast the trainer's weights to all; finish(server) follows as soon as that one has loaded."""
        done: set[Server] = set()

        async def receive(server: Server, group: str) -> None:
            await server.client.load_group(group, specs, label)
            await finish(server)
            done.add(server)

        trainer = self._ranks.client
        specs = await trainer.specs()
        todo = list(servers)
        while todo := await self.prepare(todo, fail):
            assert self._group
            name = self._group.name
            self._sender = None  # until all have come through
            left = await self._together(
                name, trainer.broadcast(name), todo, [receive(server, name) for server in todo], fail
            )
            todo = [server for server in left if server not in done]
            if todo:
                await self.leave()
            else:
                self._sender = trainer

    async def leave_with(self, index: int) -> None:
        """End the group if that server is in it: one that leaves the run is to forget it. The trainer, which may be in
        a step, leaves it on the way to the next."""
        if any(server.index == index for server in self._members):
            await self.leave(trainer=False)

    async def leave(self, *, trainer: bool = True) -> None:
        """Destroy the group, whatever state its members are in."""
        self._sender = None
        if self._group is None:
            return
        name, self._group = self._group.name, None
        leaves = [self._ranks.client.leave_group(name)] if trainer else []
        leaves += [server.client.leave_group(name) for server in self._members if not server.is_dead]
        tasks = [asyncio.create_task(_quietly(leave)) for leave in leaves]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=self._grace_s)
        finally:
            for task in tasks:
                task.cancel()

    async def _together(
        self,
        group: str,
        sender: Awaitable[None],
        servers: Sequence[Server],
        receivers: Sequence[Awaitable[None]],
        fail: Fail,
    ) -> list[Server]:
        """Run both sides of a collective. Returns the servers that may go on; the ones to blame were failed.

        To blame are servers that were lost, or are stuck in the collective. When there are none, it is the first that
        refused, unless the trainer failed before it: that is a TrainerError.
        """
        now = asyncio.get_running_loop().time
        send = asyncio.create_task(_run(sender))
        tasks: dict[asyncio.Task[None], Server | None] = {send: None}
        tasks |= {asyncio.create_task(_run(r)): server for server, r in zip(servers, receivers, strict=True)}
        failed: dict[Server | None, ArealError] = {}
        leaving: list[asyncio.Task[None]] = []
        pending = set(tasks)
        deadline = now() + self._timeout_s + self._grace_s  # each side has its own, and says more
        try:
            while pending and now() < deadline:
                done, pending = await asyncio.wait(
                    pending, timeout=deadline - now(), return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    try:
                        task.result()
                    except ArealError as error:
                        failed[tasks[task]] = error
                        if (refusing := tasks[task]) and send in pending:  # its closed connections free the others
                            leaving.append(asyncio.create_task(_quietly(refusing.client.leave_group(group))))
                if failed and send not in pending:
                    deadline = min(deadline, now() + self._grace_s)
        finally:
            for task in (*pending, *leaving):
                task.cancel()
            await asyncio.gather(*pending, *leaving, return_exceptions=True)
        for task in pending:
            if server := tasks[task]:
                failed[server] = ServerLost(f"{server.client.url}: no answer in the broadcast group")
        sent = send not in pending and None not in failed
        blamed = [s for s, error in failed.items() if s and (sent or isinstance(error, ServerLost))]
        if not blamed and (first := next(iter(failed), None)):
            blamed = [first]
        for server in blamed:
            fail(server, failed[server])
        if not blamed and not sent:
            raise failed.get(None) or TrainerError(f"weight group {group}: no answer within {self._timeout_s:g} s")
        return [server for server in servers if server not in blamed]


async def _run(awaitable: Awaitable[None]) -> None:
    await awaitable


async def _quietly(awaitable: Awaitable[None]) -> None:
    with suppress(ArealError):
        await awaitable
