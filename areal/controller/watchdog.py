"""Ends a run that makes no progress, and says what it waited for (I7).

Progress is a training step done or a group becoming trainable. The watchdog sleeps until the moment at which the
last progress is `timeout_s` old; it does not poll.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from areal.errors import Stalled


class Watchdog:
    """describe: lines that name the episodes, servers and ranks that are waited for, longest first.
    idle: True while the run rightly waits for somebody outside, such as a service without questions."""

    def __init__(self, timeout_s: float, describe: Callable[[], list[str]], idle: Callable[[], bool]) -> None:
        self._timeout_s = timeout_s
        self._describe = describe
        self._idle = idle
        self._last = 0.0

    def progress(self) -> None:
        self._last = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Raises Stalled; never returns."""
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        while True:
            await asyncio.sleep(self._last + self._timeout_s - loop.time())
            if self._idle():
                self._last = loop.time()
            elif loop.time() >= self._last + self._timeout_s:
                waits = self._describe() or ["nothing is in flight"]
                raise Stalled(
                    f"no step done and no group finished for watchdog_s={self._timeout_s:g}; waiting for:\n  "
                    + "\n  ".join(waits)
                )
