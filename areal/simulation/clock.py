"""An event loop whose clock jumps to the next timer.

    result = run(main())        # virtual seconds cost nothing; two runs take the same steps in the same order

Nothing outside can wake it: there are no sockets and no threads (work for a thread is done in line). So a loop that
has no timer left waits for ever, which is an error here (I7).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Every task waits, and no timer will ever wake one."""


class OutOfTime(Exception):
    """The virtual clock passed its limit."""


class _Task(asyncio.Task[Any]):
    """Hashes by its number: sets of tasks, which asyncio iterates over, then have the same order in each process."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. limit_s: virtual seconds after which OutOfTime ends the loop.

    Timers of the same time fire in the order in which they were set; asyncio's own heap leaves that open.
    """

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self, limit_s: float = 1e9) -> None:
        super().__init__()
        self._now = 0.0
        self._limit_s = limit_s
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = count()
        numbers = count()
        self.set_task_factory(lambda loop, coroutine, **options: _Task(coroutine, next(numbers), loop=loop, **options))

    def time(self) -> float:
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _run_once(self) -> None:
        """One turn: what is ready by now; when nothing is, the clock goes to the next timer."""
        ready, timers = self._ready, self._timers
        while timers and timers[0][2].cancelled():
            heappop(timers)
        if not ready and not self._stopping:
            if not timers:
                raise Deadlock(f"at {self._now:.3f} s every task waits and no timer is set")
            self._now = max(self._now, timers[0][0])
            if self._now > self._limit_s:
                raise OutOfTime(f"the run has not ended after {self._limit_s:g} virtual seconds")
        while timers and timers[0][0] <= self._now:
            ready.append(heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays until its time has come."""

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Done at once, in line."""
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_soon(callback, *args, context=context)


def run(main: Coroutine[Any, Any, T], limit_s: float = 1e9) -> T:
    """Run `main` on a loop of its own. Raises Deadlock, OutOfTime, and what `main` raises."""
    loop = VirtualLoop(limit_s)
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        asyncio.set_event_loop(None)
        loop.close()
