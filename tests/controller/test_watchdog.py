"""I7: a run without progress ends, and names what it waited for."""

from __future__ import annotations

import asyncio

import pytest

from areal.controller.watchdog import Watchdog
from areal.errors import Stalled


async def test_i7_no_progress_ends_with_what_was_waited_for() -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    waits = ["episode 3.1 (task q7) awaits tool search, for 12.0 s", "server http://127.0.0.1:1 is dead"]
    with pytest.raises(Stalled) as caught:
        await Watchdog(0.2, lambda: waits, lambda: False).run()
    assert 0.2 <= loop.time() - start < 1
    assert "watchdog_s=0.2" in str(caught.value)
    assert all(line in str(caught.value) for line in waits)


async def test_i7_works_with_nothing_in_flight() -> None:
    with pytest.raises(Stalled, match="nothing is in flight"):
        await Watchdog(0.05, list, lambda: False).run()


async def test_progress_puts_the_end_off_and_the_time_counts_from_the_last_one() -> None:
    loop = asyncio.get_running_loop()
    dog = Watchdog(0.3, list, lambda: False)
    run = asyncio.create_task(dog.run())
    for _ in range(4):
        await asyncio.sleep(0.15)
        dog.progress()
    last = loop.time()
    with pytest.raises(Stalled):
        await run
    assert 0.29 <= loop.time() - last < 1


async def test_waiting_for_somebody_outside_is_no_stall() -> None:
    idle = True
    run = asyncio.create_task(Watchdog(0.1, list, lambda: idle).run())
    await asyncio.sleep(0.35)
    assert not run.done()
    idle = False
    with pytest.raises(Stalled):
        await run
