"""Says what a run waits for when it makes no progress, and ends it in the end (I7).

Progress is a training step done or a group becoming trainable. The watchdog sleeps until the moment at which the
last progress is old enough. The event loop has a watch of its own, and the garbage collector is kept from stopping it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Self

from areal.controller.scheduler import Scheduler
from areal.errors import Stalled

FIRST_WORD_S = 45.0
"""Seconds without progress after which it is said what is waited for; then after twice as many, and so on."""

BEAT_S = 1.0
BLOCKED_S = 10.0
"""Seconds without a beat of the event loop after which it is said what blocks it."""
COLLECT_EVERY = 10_000
"""New objects after which Python looks for cycles among the youngest; 700 by default. A request makes 90 and its answer
some hundreds, and all of them go without a cycle."""

DESCRIBED_GROUPS = 8
"""Groups that `waits_of` names one by one."""

log = logging.getLogger("areal")


def waits_of(scheduler: Scheduler) -> list[str]:
    """What the run waits for, one line each, as far as its state says (I7)."""
    state, settings = scheduler.state, scheduler.settings
    lines = []
    if state.batch is not None:
        groups = state.batch.groups
        lines.append(f"training of batch {state.batch.batch} ({len(groups)} groups) from version {state.version}")
    if state.serving < state.version:
        lines.append(f"servers at version {state.serving}, trained is {state.version}")
    ready = sum(g.ready for g in state.open.values()) - (len(state.batch.groups) if state.batch else 0)
    lines.append(
        f"a batch needs {settings.batch_groups} groups: {ready} complete, {state.running} running, "
        f"another {'may' if scheduler.may_admit() else 'may not'} start"
    )
    waiting = [group for group in state.open.values() if not group.ready]
    for group in waiting[:DESCRIBED_GROUPS]:
        members = ", ".join(
            f"{m} (failed {group.failures[m]}x)" if m in group.failures else str(m) for m in group.pending
        )
        lines.append(f"group {group.number} (task {group.task_id!r}) waits for member {members}")
    if len(waiting) > DESCRIBED_GROUPS:
        lines.append(f"and {len(waiting) - DESCRIBED_GROUPS} more groups")
    return lines


class Watchdog:
    """describe: lines that name the episodes, servers and ranks that are waited for, longest first.
    idle: True while the run rightly waits for somebody outside, such as a service without questions. dump: the file
    that gets the stacks of all tasks and threads when the run is ended."""

    def __init__(
        self, timeout_s: float, describe: Callable[[], list[str]], idle: Callable[[], bool], dump: Path
    ) -> None:
        self._timeout_s = timeout_s
        self._describe = describe
        self._idle = idle
        self._dump = dump
        self._last = 0.0

    def progress(self) -> None:
        self._last = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Raises Stalled; never returns."""
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        word = FIRST_WORD_S
        while True:
            last = self._last
            due = min(word, self._timeout_s)
            await asyncio.sleep(min(last + due - loop.time(), FIRST_WORD_S))
            if self._idle():
                self._last = loop.time()
            if self._last > last:
                word = FIRST_WORD_S
            if loop.time() < self._last + due:
                continue
            waits = "\n  ".join(self._describe() or ["nothing is in flight"])
            if due == self._timeout_s:
                raise Stalled(
                    f"no step done and no group finished for watchdog_s={self._timeout_s:g}; waiting for:\n  {waits}\n"
                    f"the stacks of all tasks are in {self._write_stacks()}"
                )
            log.warning("no progress for %.0f s; waiting for:\n  %s", due, waits)
            word *= 2

    def _write_stacks(self) -> Path:
        with self._dump.open("w") as file:
            for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name()):
                print(f"\ntask {task.get_name()}", file=file)
                task.print_stack(file=file)
            print("\nthreads", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
        return self._dump


class LoopWatch:
    """Notices when the event loop itself is blocked, which nothing that runs on it can.

    Use as a context manager around `run()`, a coroutine that beats once a second. `lag_s()`: the longest lateness of a
    beat since it was last asked, in seconds. A thread listens: after BLOCKED_S without a beat, and then after twice as
    long, it logs the task that holds the loop and where that is.
    """

    def __init__(self) -> None:
        self._beat = math.inf  # until `run` runs
        self._lag = 0.0
        self._ended = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._thread = threading.Thread(target=self._listen, name="loop-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def lag_s(self) -> float:
        lag, self._lag = self._lag, 0.0
        return lag

    async def run(self) -> None:
        self._beat = time.monotonic()
        try:
            while True:
                due = self._loop.time() + BEAT_S
                await asyncio.sleep(BEAT_S)
                self._lag = max(self._lag, self._loop.time() - due)
                self._beat = time.monotonic()
        finally:
            self._beat = math.inf

    def _listen(self) -> None:
        limit = BLOCKED_S
        while not self._ended.wait(BEAT_S):
            blocked = time.monotonic() - self._beat
            if blocked < BLOCKED_S:
                limit = BLOCKED_S
            elif blocked > limit:
                limit *= 2
                task = asyncio.current_task(self._loop)
                stack = "".join(traceback.format_stack(sys._current_frames().get(self._thread_id))[-4:])
                log.warning(
                    "the event loop has been blocked for %.0f s by task %s; nothing else can run: await, or use "
                    "asyncio.to_thread\n%s",
                    blocked,
                    task.get_name() if task else "(none)",
                    stack.rstrip(),
                )


def spare_the_loop() -> None:
    """Have the garbage collector leave alone what is there by now, until gc.unfreeze(), and come less often.

    With PyTorch and transformers imported, a full collection walks 0.4 million objects: 0.2 s in which the event loop
    stands still, and I8 has 0.1.
    """
    youngest, *older = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(youngest and max(youngest, COLLECT_EVERY), *older)  # 0 is off, and stays so
