"""A simulated SGLang server, as a process.

Continuous batching is computed, not stepped through: n running requests decode at the same speed, so each ends when
the tokens that one request has decoded so far pass its own mark. What SGLang does at its borders is kept: an abort of a
request that has not arrived does nothing, a load aborts what runs and empties the cache, requests that arrive during
a load wait for its end, a full KV cache sends the youngest request back into the queue.

What is sampled can be checked: token i + 1 follows from token i (`follow`), and the log-prob names the weights.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from areal.errors import ServerLost
from areal.simulation.weights import Weights
from areal.types import Finish, Generation, Ints, Sampling
from areal.workers.protocols import version_of

SAMPLED = 1000
"""Sampled ids are SAMPLED to SAMPLED + CYCLE - 1; the ids of prompts and tools are below."""
CYCLE = 997
STEP = 10
VOCAB = SAMPLED + CYCLE


def follow(last: int, count: int) -> Ints:
    """The `count` ids that a server samples after the id `last`."""
    first = (last + 7) % CYCLE
    return (SAMPLED + (first + STEP * np.arange(count)) % CYCLE).astype(np.int32)


@dataclass(slots=True, eq=False)
class Job:
    """A request on a server. mark: where the decoding clock must come to for its end; spans: (weights, label,
    number of tokens) sampled so far, without those since `start`; sampled: their tokens."""

    rid: str
    ids: Ints
    limit: int
    length: int
    answer: asyncio.Future[Generation]
    spans: list[tuple[Weights, str, int]] = field(default_factory=list)
    start: float = 0.0
    prefill: float = 0.0
    mark: float = 0.0
    offset: float = 0.0
    sampled: int = 0


@dataclass(slots=True)
class Speed:
    """decode: tokens a second of a request that runs alone; half: running requests at which each is half as fast;
    prefill: prompt tokens that take as long as one decoded token; load_s, start_s: seconds of a load and a start;
    latency_s: one way to the server."""

    decode: float = 100.0
    half: float = 16.0
    prefill: float = 50.0
    load_s: float = 0.5
    start_s: float = 10.0
    latency_s: float = 0.001


@dataclass(slots=True)
class Trouble:
    """What is wrong with a server now. Shares are chances per request; wrong_weights is the next load's."""

    hung: bool = False
    slow: float = 1.0
    refuse: float = 0.0
    garbage: float = 0.0
    lose: float = 0.0
    repeat: float = 0.0
    wrong_weights: bool = False


class SimulatedServer:
    """length(): how many tokens the model's next answer has by itself. happened: counts requests that went back into
    the queue, by why."""

    def __init__(
        self,
        index: int,
        weights: Weights,
        label: str,
        *,
        speed: Speed,
        max_running: int,
        kv_tokens: int,
        length: random.Random,
        mean_length: float,
        happened: Counter[str],
    ) -> None:
        self.index = index
        self.weights = weights
        self.label = label
        self.speed = speed
        self.trouble = Trouble()
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._max_running = max_running
        self._kv_tokens = kv_tokens
        self._random = length
        self._mean_length = mean_length
        self._happened = happened
        self._running: dict[str, Job] = {}
        self._waiting: deque[Job] = deque()
        self._ends: list[tuple[float, int, Job]] = []
        self._count = 0
        self._decoded = self._offset = 0.0
        self._since = asyncio.get_running_loop().time()
        self._loading = self._paused = False
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._well = asyncio.Event()
        self._well.set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def alive(self) -> bool:
        return not self.exited.done()

    @property
    def jobs(self) -> list[Job]:
        return [*self._running.values(), *self._waiting]

    def submit(self, rid: str, ids: Ints, sampling: Sampling) -> Job:
        length = 1 + int(self._random.expovariate(1 / self._mean_length))
        answer = asyncio.get_running_loop().create_future()
        job = Job(rid, ids, sampling.max_new_tokens, length, answer)
        self._advance()
        self._waiting.append(job)
        self._schedule()
        return job

    def abort(self, rid: str) -> None:
        self._advance()
        for job in self.jobs:
            if job.rid.startswith(rid):
                self._finish(job, "abort")
        self._schedule()

    def crash(self, why: str) -> None:
        if self.alive:
            self.exited.set_result(why)
            if self._timer:
                self._timer.cancel()
            for job in self.jobs:
                if not job.answer.done():
                    job.answer.set_exception(ServerLost(f"server {self.index}: {why}"))
                    job.answer.exception()
            self._running.clear()
            self._waiting.clear()

    def hang(self, hung: bool) -> None:
        self._advance()
        self.trouble.hung = hung
        (self._well.clear if hung else self._well.set)()
        self._schedule()

    def slow(self, factor: float) -> None:
        self._advance()
        self.trouble.slow = factor
        self._schedule()

    def pause(self) -> None:
        """What runs goes back into the queue with the tokens it has."""
        self._advance()
        self._paused = True
        self._unpaused.clear()
        for job in list(reversed(self._running.values())):
            self._halt(job)
            self._waiting.appendleft(job)
            self._happened["requests held for weights"] += 1
        self._schedule()

    def resume(self) -> None:
        self._advance()
        self._paused = False
        self._unpaused.set()
        self._schedule()

    async def running(self) -> None:
        """Returns when it is not paused: requests that come in a pause are held."""
        await self._unpaused.wait()

    async def load(self, weights: Weights, label: str, *, abort: bool = True) -> None:
        """Abort everything, unless it is paused; load, take the label."""
        if abort:
            self.abort("")
        self._loading = True
        self._schedule()
        try:
            await asyncio.sleep(self.speed.load_s * self.trouble.slow)
            await self._well.wait()
            self.weights, self.label = weights, label
            if self.trouble.wrong_weights:
                self.trouble.wrong_weights = False
                self.weights = weights.corrupted()
        finally:
            self._advance()
            self._loading = False
            self._schedule()

    # -- the batch

    def _rate(self) -> float:
        """Tokens a second that each running request decodes."""
        if self._loading or self.trouble.hung or not self._running:
            return 0.0
        return self.speed.decode / (1 + len(self._running) / self.speed.half) / self.trouble.slow

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        self._decoded += (now - self._since) * self._rate()
        self._since = now

    def _tokens(self, job: Job) -> int:
        """Sampled since it (re)started."""
        done = int(self._decoded - job.start - job.prefill + 1e-6)
        return max(0, min(done, min(job.limit, job.length) - job.sampled))

    def _used(self) -> float:
        """Tokens in the KV cache. All running requests grow alike, so that a sum at their starts says it."""
        return self._offset + len(self._running) * self._decoded

    def _run(self, job: Job) -> None:
        self._running[job.rid] = job
        job.start = self._decoded
        job.prefill = (len(job.ids) + job.sampled) / self.speed.prefill
        job.mark = job.start + job.prefill + min(job.limit, job.length) - job.sampled
        job.offset = len(job.ids) + job.sampled - job.start - job.prefill
        self._offset += job.offset
        self._count += 1
        heapq.heappush(self._ends, (job.mark, self._count, job))

    def _halt(self, job: Job) -> None:
        """Out of the batch, with the tokens that it has."""
        self._keep(job)
        del self._running[job.rid]
        self._offset -= job.offset

    def _schedule(self) -> None:
        """Start what fits, then set the timer for the next end or the next full cache."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if not self.alive:
            return
        while self._waiting and len(self._running) < self._max_running and not (self._loading or self._paused):
            job = self._waiting[0]
            if self._running and self._used() + len(job.ids) + job.sampled + 1 > self._kv_tokens:
                break
            self._waiting.popleft()
            self._run(job)
        rate = self._rate()
        if not rate:
            return
        while self._ends and self._running.get(self._ends[0][2].rid) is not self._ends[0][2]:
            heapq.heappop(self._ends)
        left = self._ends[0][0] - self._decoded
        if len(self._running) > 1:
            left = min(left, max(0.0, self._kv_tokens - self._used() + 1) / len(self._running) + 0.01)
        self._timer = asyncio.get_running_loop().call_later(max(0.0, left) / rate, self._due)

    def _due(self) -> None:
        self._timer = None
        self._advance()
        while self._ends and self._ends[0][0] <= self._decoded + 1e-6:
            job = heapq.heappop(self._ends)[2]
            if self._running.get(job.rid) is job and job.mark <= self._decoded + 1e-6:
                self._finish(job, "length" if job.length >= job.limit else "stop")
        while len(self._running) > 1 and self._used() > self._kv_tokens:
            job = next(reversed(self._running.values()))
            self._halt(job)
            self._waiting.appendleft(job)
            self._happened["requests out of a full cache"] += 1
        self._schedule()

    def _keep(self, job: Job) -> None:
        if count := self._tokens(job):
            job.spans.append((self.weights, self.label, count))
            job.sampled += count

    def _finish(self, job: Job, finish: Finish) -> None:
        if self._running.get(job.rid) is job:
            self._halt(job)
        elif job in self._waiting:
            self._waiting.remove(job)
        if not job.answer.done():
            job.answer.set_result(_generation(job, finish))


def _generation(job: Job, finish: Finish) -> Generation:
    counts = [count for _, _, count in job.spans]
    versions = [version_of(label, label.rpartition(":")[0]) for _, label, _ in job.spans]
    return Generation(
        follow(int(job.ids[-1]), sum(counts)),
        np.repeat(np.array([weights.logprob for weights, _, _ in job.spans], np.float32), counts),
        np.repeat(np.array(versions, np.int32), counts),
        finish,
    )
