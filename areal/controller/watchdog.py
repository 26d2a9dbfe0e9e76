"""Says what a run waits for when it makes no progress, and ends the run if that goes on for too long (I7).

Whatever takes long is a named wait: training, the start of the workers, an evaluation. The event loop has a watch of
its own, and the garbage collector is kept from stopping it.
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
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from areal.controller.facts import Admitted, Completed, Fact, Trained
from areal.controller.rollout import RolloutLoop
from areal.controller.scheduler import Scheduler
from areal.deadlines import DEADLINES, Deadlines
from areal.errors import Stalled

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


class Wait:
    """One thing that a run waits for.

    describe: lines that say what for, longest wait first. timeout_s: seconds without progress after which the run ends.
    idle: True while the wait is rightful, such as for the users of a service.
    """

    def __init__(
        self,
        describe: Callable[[], list[str]],
        timeout_s: float = math.inf,
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self.describe = describe
        self.timeout_s = timeout_s
        self.idle = idle
        self.progress()

    def progress(self) -> None:
        """Something came of it: the time counts from here."""
        self.since = asyncio.get_running_loop().time()


class Watchdog:
    """Watches what the run waits for. dump: the file that gets the stacks of all tasks and threads when a wait has
    timed out."""

    def __init__(self, dump: Path, deadlines: Deadlines = DEADLINES) -> None:
        self._dump = dump
        self._first_warning_s = deadlines.first_warning

    @asynccontextmanager
    async def warning(self, describe: Callable[[], list[str]]) -> AsyncIterator[Wait]:
        """Warn when what happens inside makes no progress. It has deadlines of its own, so that this never ends it."""
        wait = Wait(describe)
        watch = asyncio.create_task(self.watch(wait), name="watchdog")
        try:
            yield wait
        finally:
            watch.cancel()

    async def watch(self, wait: Wait) -> None:
        """Warn without progress, again after twice as long, and so on. Raises Stalled; never returns."""
        loop = asyncio.get_running_loop()
        warning_s = self._first_warning_s
        while True:
            since = wait.since
            due_s = min(warning_s, wait.timeout_s)
            await asyncio.sleep(min(since + due_s - loop.time(), self._first_warning_s))
            if wait.idle():
                wait.progress()
            if wait.since > since:
                warning_s = self._first_warning_s
            if loop.time() < wait.since + due_s:
                continue
            waits = "\n  ".join(wait.describe() or ["nothing is in flight"])
            if due_s == wait.timeout_s:
                raise Stalled(
                    f"no step done and no group finished for watchdog_s={due_s:g}; waiting for:\n  {waits}\n"
                    f"the stacks of all tasks are in {self._write_stacks()}"
                )
            log.warning("no progress for %.0f s; waiting for:\n  %s", due_s, waits)
            warning_s *= 2

    def _write_stacks(self) -> Path:
        with self._dump.open("w") as file:
            for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name()):
                print(f"\ntask {task.get_name()}", file=file)
                task.print_stack(file=file)
            print("\nthreads", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
        return self._dump


class Progress:
    """An observer of the log: what counts as progress of training. That is a step done, or a group that became
    trainable, but not group after group without a step, each of which was dropped as stale: that is a livelock."""

    def __init__(self, wait: Wait, rollout: RolloutLoop, groups_per_step: int) -> None:
        """groups_per_step: complete groups without a step above which there is no progress."""
        self._wait = wait
        self._rollout = rollout
        self._limit = groups_per_step
        self._completed = 0

    def observe(self, fact: Fact) -> None:
        if isinstance(fact, Completed | Trained):
            self._completed = 0 if isinstance(fact, Trained) else self._completed + 1
            if self._completed <= self._limit:
                self._wait.progress()
        elif isinstance(fact, Admitted) and self._rollout.woken:  # after an idle time a new wait begins
            self._wait.progress()


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
