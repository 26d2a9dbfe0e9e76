"""The virtual loop: time, order, and what a loop without timers means."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from areal.simulation.clock import Deadlock, OutOfTime, run


def test_time_jumps_and_order_is_that_of_the_timers() -> None:
    order: list[str] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append(name)

    async def main() -> float:
        async with asyncio.TaskGroup() as tasks:
            for name, seconds in (("c", 3e6), ("a", 1e-6), ("b", 2.0)):
                tasks.create_task(sleeper(name, seconds))
        return asyncio.get_running_loop().time()

    started = time.perf_counter()
    assert run(main()) == pytest.approx(3e6)
    assert time.perf_counter() - started < 5
    assert order == ["a", "b", "c"]


def test_timers_of_the_same_time_fire_in_the_order_they_were_set_in() -> None:
    order: list[int] = []

    async def main() -> float:
        loop = asyncio.get_running_loop()
        timers = [loop.call_at(3.0, order.append, i) for i in range(100)]
        loop.call_at(2.0, order.append, -1)
        for timer in timers[::3]:
            timer.cancel()
        await asyncio.sleep(3.0)
        return loop.time()

    assert run(main()) == 3.0
    assert order == [-1, *(i for i in range(100) if i % 3)]


def test_work_for_a_thread_is_done_in_line() -> None:
    async def main() -> tuple[int, int]:
        import threading

        return threading.get_ident(), await asyncio.to_thread(threading.get_ident)

    here, there = run(main())
    assert here == there


def test_an_error_of_the_thread_work_is_raised() -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)

    run(main())


def test_waiting_for_ever_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="no timer"):
        run(main())


def test_the_limit_of_time() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(10)

    with pytest.raises(OutOfTime, match="100 virtual seconds"):
        run(main(), limit_s=100)


ORDER = """
import asyncio
from areal.simulation.clock import run

async def main():
    ends = []
    async def one(i):
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            ends.append(i)
            raise
    try:
        async with asyncio.TaskGroup() as tasks:
            for i in range(50):
                tasks.create_task(one(i))
            await asyncio.sleep(1)
            raise KeyError
    except* KeyError:
        pass
    done, _ = await asyncio.wait([asyncio.create_task(asyncio.sleep(0, i)) for i in range(50)])
    return ends, [task.result() for task in done]

print(run(main()))
"""


def test_a_task_group_cancels_in_the_same_order_in_two_processes() -> None:
    first, second = (
        subprocess.run([sys.executable, "-c", ORDER], capture_output=True, text=True, check=True).stdout for _ in "ab"
    )
    assert first == second
    assert sorted(eval(first)[0]) == list(range(50))
