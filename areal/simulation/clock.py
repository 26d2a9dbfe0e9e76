"""An event loop whose clock jumps to the next timer.

    result = run(main())        # virtual seconds cost nothing; two runs take the same steps in the same order

Nothing outside can wake it: there are no sockets and no threads (work for a thread is done in line). So a loop that
has no timer left waits for ever, which is an error here (I7).
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Every task waits, and no timer will ever wake one."""


class OutOfTime(Exception):
    """The virtual clock passed its limit."""


class _Selector(selectors.BaseSelector):
    """Waits for nothing but the clock."""

    def __init__(self, limit_s: float) -> None:
        self.now = 0.0
        self._limit_s = limit_s

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock(f"at {self.now:.3f} s every task waits and no timer is set")
        if timeout > 0:
            self.now += timeout
            if self.now > self._limit_s:
                raise OutOfTime(f"the run has not ended after {self._limit_s:g} virtual seconds")
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        raise NotImplementedError("the simulation has no sockets")

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        raise NotImplementedError("the simulation has no sockets")

    def get_map(self) -> dict[Any, Any]:
        return {}


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
    """See the module. limit_s: virtual seconds after which OutOfTime ends the loop."""

    def __init__(self, limit_s: float = 1e9) -> None:
        super().__init__()
        self._selector = _Selector(limit_s)
        self._clock_resolution = 1e-9
        numbers = count()
        self.set_task_factory(lambda loop, coroutine, **options: _Task(coroutine, next(numbers), loop=loop, **options))

    def time(self) -> float:
        return self._selector.now

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

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def run(main: Coroutine[Any, Any, T], limit_s: float = 1e9) -> T:
    """Run `main` on a loop of its own. Raises Deadlock, OutOfTime, and what `main` raises."""
    loop = VirtualLoop(limit_s)
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        asyncio.set_event_loop(None)
        loop.close()
