"""A condition that tasks of one event loop wait for."""

from __future__ import annotations

import asyncio


class Signal:
    """Wakes every waiter each time something changed: `while not condition(): await signal.wait()`."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}  # woken in the order in which they began to wait

    def notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)
