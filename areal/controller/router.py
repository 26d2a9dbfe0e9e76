"""Which server a request goes to, and the queue of those that wait for a slot."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

from areal.controller.server import Call, Server
from areal.deadlines import Deadlines
from areal.errors import ServerError

SLACK = 8
"""Requests by which a server may be busier than the idlest one before an episode leaves its cached prefix."""
HOMES = 65536
"""Episodes whose last server is remembered."""


class Router:
    """Slots on `servers`, a list that its owner keeps up to date.

    A call takes a slot, at once (`place`) or in its turn (`wait`), and gives it back (`leave`); until then it is in
    the `calls` of its server. Call `dispatch` after anything else that frees slots. `waiting`: the queue, by rid.
    """

    def __init__(self, servers: list[Server], deadlines: Deadlines) -> None:
        self.waiting: dict[str, Call] = {}
        self.servers = servers
        self._deadlines = deadlines
        self._homes: dict[Hashable, Server] = {}
        self._closed = False

    def place(self, call: Call) -> Server | None:
        """A slot at once, when the queue is empty and a server has one."""
        server = None if self.waiting or self._closed else self._pick(call)
        if server:
            self._take(call, server)
        return server

    async def wait(self, call: Call, timeout_s: float) -> Server:
        """Queue for a slot. Raises ServerError after `timeout_s`, or when the router is closed."""
        loop = asyncio.get_running_loop()
        if self._closed:
            await asyncio.sleep(self._deadlines.refusal)
        deadline = call.since + timeout_s
        while True:
            self.waiting[call.rid] = call
            call.slot = loop.create_future()
            self.dispatch()
            try:
                if not self._closed:
                    await asyncio.wait((call.slot,), timeout=max(0.0, deadline - loop.time()))
            except asyncio.CancelledError:
                if not self.waiting.pop(call.rid, None):
                    self.leave(call)
                raise
            if self.waiting.pop(call.rid, None):
                why = "the fleet is closed" if self._closed else f"no slot on a server for {timeout_s:g} s"
                raise ServerError(f"{why}: {', '.join(f'{s.client.url} is {s.state}' for s in self.servers)}")
            server = call.server
            assert server
            if server.state == "accepting":
                call.since = loop.time()
                return server
            self.leave(call)  # it stopped accepting between the dispatch and this moment

    def leave(self, call: Call) -> None:
        """Give the slot back."""
        assert call.server
        del call.server.calls[call.rid]
        self.dispatch()

    def dispatch(self) -> None:
        """Give free slots to the queue, first come, first served."""
        while self.waiting and not self._closed:
            call = next(iter(self.waiting.values()))
            server = self._pick(call)
            if server is None:
                return
            del self.waiting[call.rid]
            self._take(call, server)
            assert call.slot
            call.slot.set_result(None)

    def forget(self, server: Server) -> None:
        """No episode has its prefix on this server any more."""
        for key in [key for key, home in self._homes.items() if home is server]:
            del self._homes[key]

    def close(self) -> None:
        """No more slots; everything in the queue gets an error."""
        self._closed = True
        for call in self.waiting.values():
            if call.slot and not call.slot.done():
                call.slot.set_result(None)

    def _pick(self, call: Call) -> Server | None:
        """The least loaded accepting server, or the one that has the prefix unless that is much busier.

        While some servers load weights, an accepting one takes no more than its share of all requests: otherwise the
        first to finish would get every interrupted request, and the others none.
        """
        if len(self.servers) == 1:  # the common case on one machine, and this is on the path of every request
            (only,) = self.servers
            return only if only.state == "accepting" else None
        servers = [s for s in self.servers if s.state == "accepting"]
        loading = sum(s.is_loading for s in self.servers)
        if loading and servers:
            calls = (call.rid not in self.waiting) + len(self.waiting) + sum(len(s.calls) for s in self.servers)
            share = calls / (len(servers) + loading)
            servers = [s for s in servers if len(s.calls) < share]
        if call.avoid and len(servers) > 1:
            servers = [s for s in servers if s is not call.avoid]
        if not servers:
            return None
        best = min(servers, key=lambda s: len(s.calls))
        home = self._homes.get(call.key)
        return home if home in servers and len(home.calls) <= len(best.calls) + SLACK else best

    def _take(self, call: Call, server: Server) -> None:
        call.server = server
        server.calls[call.rid] = call
        self._homes.pop(call.key, None)
        self._homes[call.key] = server
        if len(self._homes) > HOMES:
            del self._homes[next(iter(self._homes))]
