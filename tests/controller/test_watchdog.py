"""I7: a run without progress ends, and names what it waited for."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal.controller import watchdog
from areal.controller.facts import Admitted, Completed, Fact, Trained
from areal.controller.watchdog import COLLECT_EVERY, LoopWatch, Progress, Wait, Watchdog, spare_the_loop
from areal.errors import Stalled
from areal.simulation import clock


async def test_i7_no_progress_ends_with_what_was_waited_for(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    waits = ["episode 3.1 (task q7) awaits tool search, for 12.0 s", "server http://127.0.0.1:1 is dead"]
    with pytest.raises(Stalled) as caught:
        await Watchdog(tmp_path / "stalled.txt").watch(Wait(lambda: waits, 0.2))
    assert 0.2 <= loop.time() - start < 1
    assert "watchdog_s=0.2" in str(caught.value)
    assert all(line in str(caught.value) for line in waits)


async def test_i7_works_with_nothing_in_flight(tmp_path: Path) -> None:
    with pytest.raises(Stalled, match="nothing is in flight"):
        await Watchdog(tmp_path / "stalled.txt").watch(Wait(list, 0.05))


async def test_progress_puts_the_end_off_and_the_time_counts_from_the_last_one(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    wait = Wait(list, 0.3)
    run = asyncio.create_task(Watchdog(tmp_path / "stalled.txt").watch(wait))
    for _ in range(4):
        await asyncio.sleep(0.15)
        wait.progress()
    last = loop.time()
    with pytest.raises(Stalled):
        await run
    assert 0.29 <= loop.time() - last < 1


async def test_waiting_for_somebody_outside_is_no_stall(tmp_path: Path) -> None:
    idle = True
    run = asyncio.create_task(Watchdog(tmp_path / "stalled.txt").watch(Wait(list, 0.1, lambda: idle)))
    await asyncio.sleep(0.35)
    assert not run.done()
    idle = False
    with pytest.raises(Stalled):
        await run


async def test_the_stacks_of_all_tasks_are_kept(tmp_path: Path) -> None:
    async def waits_for_a_tool() -> None:
        await asyncio.sleep(60)

    stuck = asyncio.create_task(waits_for_a_tool(), name="episode 3.1")
    with pytest.raises(Stalled, match=r"stalled\.txt"):
        await Watchdog(tmp_path / "stalled.txt").watch(Wait(list, 0.05))
    stuck.cancel()
    text = (tmp_path / "stalled.txt").read_text()
    assert "task episode 3.1" in text
    assert "in waits_for_a_tool" in text
    assert "most recent call first" in text


def test_it_says_within_a_minute_what_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On the virtual clock: at 45, 90, 180 ... seconds; progress begins anew."""
    said: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        describe: Callable[[], list[str]] = lambda: said.append(loop.time()) or ["a server"]  # type: ignore[func-returns-value]  # noqa: E731
        wait = Wait(describe, 900)
        loop.call_later(100, wait.progress)
        await Watchdog(tmp_path / "stalled.txt").watch(wait)

    with caplog.at_level(logging.WARNING), pytest.raises(Stalled):
        clock.run(main())
    assert said == pytest.approx([45, 90, 145, 190, 280, 460, 820, 1000])
    assert "no progress for 45 s; waiting for:\n  a server" in caplog.text


def test_what_has_deadlines_of_its_own_is_warned_of_and_never_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with Watchdog(tmp_path / "stalled.txt").warning(lambda: ["ranks to start"]):
            await asyncio.sleep(10_000)
        await asyncio.sleep(10_000)

    with caplog.at_level(logging.WARNING):
        clock.run(main())
    assert len(caplog.records) == 8  # after 45, 90, ... 5,760 s
    assert "no progress for 5760 s; waiting for:\n  ranks to start" in caplog.text


def test_groups_that_are_dropped_one_after_the_other_are_no_progress(tmp_path: Path) -> None:
    """A step is, and the first groups after it, and a task that comes after an idle time."""
    rollout = SimpleNamespace(woken=False)

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        wait = Wait(list)
        observe = Progress(wait, rollout, 2).observe  # type: ignore[arg-type]
        seen = []

        async def happens(*facts: Fact) -> None:
            for fact in facts:
                await asyncio.sleep(1)
                observe(fact)
            seen.append(loop.time() - wait.since)

        await happens(Completed(0), Completed(1), Completed(2), Completed(3))
        await happens(Trained(0, 1))
        await happens(Admitted(4, "t", 4, 2))
        rollout.woken = True
        await happens(Admitted(5, "t", 5, 2))
        return seen

    assert clock.run(main()) == [2.0, 0.0, 1.0, 0.0]


async def test_a_blocked_event_loop_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "BEAT_S", 0.05)
    monkeypatch.setattr(watchdog, "BLOCKED_S", 0.6)

    async def blocks() -> None:
        time.sleep(1.5)

    with LoopWatch() as watch:
        beats = asyncio.create_task(watch.run())
        await asyncio.sleep(0.2)
        assert not caplog.records
        assert watch.lag_s() < 0.6
        await asyncio.create_task(blocks(), name="agent 3/1")
        await asyncio.sleep(0.1)
        assert watch.lag_s() > 1
        beats.cancel()
        said = len(caplog.records)
        await asyncio.sleep(1)  # the end of a run: nobody beats
        assert len(caplog.records) == said
    assert "by task agent 3/1" in caplog.text
    assert "in blocks" in caplog.text


@pytest.mark.parametrize("youngest", [0, 700, 50_000])
def test_the_collector_leaves_alone_what_was_there_before_a_run(youngest: int) -> None:
    """0 is somebody who has switched it off."""
    before = gc.get_threshold()
    gc.set_threshold(youngest, *before[1:])
    try:
        for _ in range(2):  # two controllers
            spare_the_loop()
            assert gc.get_freeze_count() > 10_000
            assert len(gc.get_objects()) < 1000
            assert gc.get_threshold() == ({700: COLLECT_EVERY}.get(youngest, youngest), *before[1:])
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
