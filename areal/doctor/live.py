"""Checks that need a running server and running ranks: log-probs, a publication, the agent."""

from __future__ import annotations

import asyncio
import signal
import sys
import sysconfig
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

import numpy as np

from areal.algorithms.batching import sft_request
from areal.checks.findings import Result
from areal.config import Config
from areal.controller.cluster import Cluster
from areal.controller.rollout import Agent, Failure, name_of, run_episode
from areal.controller.server import Server
from areal.controller.weights import BFLOAT16_TOLERANCE, FLOAT32_TOLERANCE, probe_ids
from areal.errors import ServerRefused
from areal.types import Floats, Ints, Sampling, Task

PROMPT_LENGTHS = (16, 64, 256)
SAMPLED = Sampling(16, ignore_eos=True)
STEP_RATE = 3e-3
"""Learning rate of the throw-away step. Adam moves each weight by about this much, so that every log-prob changes."""
LAG_S = 0.1
"""Longest time that an agent may block the event loop, which stops all episodes (I8)."""
TICK_S = 0.01


def one_server(config: Config) -> Config:
    """The same settings with one server to start."""
    if config.servers.urls:
        return config
    servers = config.servers.model_copy(update={"count": 1})
    placement = config.placement.model_copy(update={"servers": config.placement.servers[:1]})
    return config.model_copy(update={"servers": servers, "placement": placement})


def prompts(cluster: Cluster) -> list[Ints]:
    """Fixed prompts [L] that share no prefix with each other or with the probe of a publication, which is cached."""
    vocabulary = cluster.workers.vocab_size
    random = np.random.default_rng(0)
    made = []
    for number, length in enumerate(PROMPT_LENGTHS):
        length = max(2, min(length, cluster.workers.context_length - SAMPLED.max_new_tokens))
        ids = random.integers(0, vocabulary, length).astype(np.int32)
        ids[0] = (probe_ids(vocabulary)[0] + 1 + number) % vocabulary
        made.append(ids)
    return made


async def logprobs(config: Config, cluster: Cluster) -> list[Result]:
    """Whether each server agrees with the ranks on the log-probs of prompts and of what it samples after them."""
    results: list[Result] = []
    worst, gap_kind = 0.0, _kind(config)
    for server in cluster.fleet.servers:
        client = server.client
        for ids in prompts(cluster):
            scored = await client.score(ids)
            answer = await client.generate(uuid.uuid4().hex, ids, SAMPLED)
            by_ranks = (await cluster.ranks.client.logprobs([np.concatenate([ids, answer.output_ids])]))[0]
            by_server = np.concatenate([scored, answer.logprobs])
            gap = _gap(config, by_server, by_ranks)
            worst = max(worst, gap)
            if not gap <= _tolerance(config):
                message = (
                    f"{client.url} and the ranks differ by {gap:.3g} ({gap_kind}) on a prompt of {len(ids)} tokens, "
                    f"more than {_tolerance(config):g}: the loss would use wrong ratios"
                )
                why = "the server holds other weights than model.path, or computes differently"
                results.append(("problem", message, f"{why}: check model.dtype and servers.args"))
                break
    return results or [f"SGLang and Megatron agree to {worst:.1g} ({gap_kind})"]


async def publication(config: Config, cluster: Cluster) -> list[Result]:
    """Whether all weights changed by a step arrive, and nothing computed with the old ones remains."""
    results: list[Result] = []
    asked = prompts(cluster)[-1]
    trainer = cluster.ranks.client
    cached = 0
    for server in cluster.fleet.servers:  # the second request finds the prefix cached by the first
        for _ in range(2):
            cached += (await server.client.generate(uuid.uuid4().hex, asked, SAMPLED)).cached_tokens
    before = (await trainer.logprobs([asked]))[0]
    stats = await cluster.ranks.train(
        sft_request(
            [(ids, np.ones(len(ids), np.float32)) for ids in prompts(cluster)],
            life=0,
            from_version=0,
            batch_id=0,
            learning_rate=STEP_RATE,
            ranks=trainer.data_parallel,
            budget=config.train.microbatch_tokens,
        )
    )
    moved = _gap(config, before, (await trainer.logprobs([asked]))[0])
    published = await cluster.weights.publish(stats.version)
    if published.failed:
        return [("problem", f"new weights did not load: {'; '.join(published.failed)}", "check weights.transport")]
    for server in cluster.fleet.servers:
        url = server.client.url
        answer = await server.client.generate(uuid.uuid4().hex, asked, SAMPLED)
        by_ranks = (await trainer.logprobs([np.concatenate([asked, answer.output_ids])]))[0]
        old = _gap(config, answer.logprobs, by_ranks[len(asked) :])
        new = _gap(config, await server.client.score(asked), by_ranks[: len(asked)])
        if not new <= _tolerance(config):
            message = f"{url} has other weights than were published: log-probs differ by {new:.3g} ({_kind(config)})"
            results.append(("problem", message, "set weights.verify=true, and check the server's log"))
        elif answer.cached_tokens or not old <= _tolerance(config):
            message = (
                f"{url} still uses what the old weights computed: {answer.cached_tokens} tokens of a prompt came from "
                f"its KV cache, and log-probs after it differ by {old:.3g} ({_kind(config)})"
            )
            remedy = "use SGLang 0.5.23, which flushes it when it loads weights, or --disable-radix-cache"
            results.append(("problem", message, remedy))
    if results:
        return results
    ours = cluster.workers.can_restart
    for server in cluster.fleet.servers if ours else ():
        results += await _tensors(config, cluster, server)
    if not moved > 10 * _tolerance(config):
        results.append(
            ("warning", f"a step changed log-probs by only {moved:.2g}, too little to tell", "check model.dtype")
        )
    note = "" if cached else " (the server does not cache prefixes)"
    arrived = ", all tensors arrived" if ours else " and arrived"
    return results or [f"log-probs moved by {moved:.2g}{arrived}; no old KV is left{note}"]


async def _tensors(config: Config, cluster: Cluster, server: Server) -> list[Result]:
    """Whether a server has exactly the tensors that the trainer exports; log-probs of prompts do not depend on the
    embeddings of other ids. Compares the server's checksums with those after overwriting its weights with random
    numbers and loading again, so that a tensor that no load sets also differs. Not for external servers, whose weights
    this would destroy."""
    client = server.client
    try:
        published = await client.checksums()
        await client.scramble()
    except ServerRefused as error:
        message = f"only the log-probs of prompts were compared, not all tensors: {error}"
        return [("warning", message, "use SGLang 0.5.23, with free memory for a copy of its largest tensor")]
    await cluster.weights.reload(server)
    exported = await client.checksums()
    wrong = [name for name in exported if published.get(name) != exported[name]]
    if not wrong:
        return []
    some = f"{', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''}"
    message = (
        f"{client.url} holds {len(wrong)} of {len(exported)} tensors otherwise than the trainer exports them: {some}"
    )
    return [("problem", message, f"check the server's log, or change weights.transport={config.weights.transport}")]


def _gap(config: Config, a: Floats, b: Floats) -> float:
    """Maximum difference for float32, mean difference for bfloat16, where single tokens differ a lot."""
    difference = np.abs(a - b)
    return float(difference.max() if config.model.dtype == "float32" else difference.mean())


def _tolerance(config: Config) -> float:
    return FLOAT32_TOLERANCE if config.model.dtype == "float32" else BFLOAT16_TOLERANCE


def _kind(config: Config) -> str:
    return "maximum" if config.model.dtype == "float32" else "mean"


# -- the agent


async def try_agent(config: Config, cluster: Cluster, agent: Agent, tasks: Sequence[Task]) -> list[Result]:
    """Run one episode per task, sequentially, so that a finding can be attributed to its task."""
    results: list[Result] = []
    rewards: list[float] = []
    sampling = Sampling(config.sampling.max_new_tokens, config.sampling.temperature)

    async def run(number: int, task: Task) -> tuple[Any, LoopWatch]:
        episode = cluster.episode(0, number, task["id"], sampling, name_of(agent))
        with LoopWatch() as watch:
            return await run_episode(agent, episode, task, config.episode.timeout_s), watch

    with signals_watched() as used:
        for number, task in enumerate(tasks):
            outcome, watch = await run(number, task)
            if isinstance(outcome, Failure):
                message = f"fails on task {task['id']!r} ({outcome.kind}): {outcome.summary}"
                results.append(("problem", message, "fix the agent"))
                continue
            rewards.append(outcome.reward)
            if watch.lag_s > LAG_S:
                # Retry: an import, or the machine, may have been slow.
                again = (await run(number, task))[1]
                often = again.lag_s > LAG_S
                message = (
                    f"blocks the event loop for {1000 * (again if often else watch).lag_s:.0f} ms on task "
                    f"{task['id']!r}{watch.where or again.where}{'' if often else ', the first time'}, which stops all "
                    "other episodes"
                )
                remedy = "await it, or run it in `asyncio.to_thread` or a process"
                results.append(("problem" if often else "warning", message, remedy))
    for name in used:
        message = f"uses {name}, which only works in the main thread and replaces the program's handlers"
        results.append(("problem", message, "use `asyncio.timeout`, or run it in a process"))
    if len(rewards) > 1 and len(set(rewards)) == 1:
        message = f"the rewards of {len(rewards)} tasks are all {rewards[0]:g}: equal rewards give no gradient"
        results.append(("warning", message, "choose tasks that the model solves sometimes, or a finer reward"))
    return results or [f"{len(tasks)} tasks, mean reward {np.mean(rewards):.3g}"]


class LoopWatch:
    """Measures how long tasks block the event loop within the `with` block; a thread finds out where.

    Delays on a busy machine do not count: then no task is running in the loop and it uses no CPU time.
    """

    lag_s = 0.0
    where = ""
    _seen = False

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._ended = threading.Event()
        self._beat, self._cpu = time.monotonic(), time.thread_time()
        self._handle = self._loop.call_later(TICK_S, self._tick)
        self._thread = threading.Thread(target=self._look, args=(threading.get_ident(),), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._note()
        self._handle.cancel()
        self._ended.set()
        self._thread.join()

    def _tick(self) -> None:
        self._note()
        self._handle = self._loop.call_later(TICK_S, self._tick)

    def _note(self) -> None:
        now, cpu = time.monotonic(), time.thread_time()
        late = now - self._beat - TICK_S
        if self._seen or cpu - self._cpu > late / 2:  # CPU time, since the thread cannot run while C code holds the GIL
            self.lag_s = max(self.lag_s, late)
        self._beat, self._cpu, self._seen = now, cpu, False

    def _look(self, thread: int) -> None:
        while not self._ended.wait(TICK_S):
            if time.monotonic() - self._beat > LAG_S + TICK_S and asyncio.current_task(self._loop):
                self.where = self.where or f" ({_place(sys._current_frames()[thread])})"
                self._seen = True


def _place(frame: FrameType) -> str:
    """The innermost frame outside of the standard library and installed packages."""
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    stack = traceback.extract_stack(frame)
    own = [place for place in stack if not place.filename.startswith((*installed, "<"))] or stack
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}"


@contextmanager
def signals_watched() -> Iterator[list[str]]:
    """Which functions of the module `signal` were used within the block, and where; also handlers that changed."""
    used: list[str] = []
    functions = {name: getattr(signal, name) for name in ("signal", "alarm", "setitimer")}
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def watched(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            text = f"signal.{name} ({_place(sys._getframe(1))})"
            if text not in used:
                used.append(text)
            return functions[name](*args, **kwargs)

        return call

    for name in functions:
        setattr(signal, name, watched(name))
    try:
        yield used
    finally:
        for name, function in functions.items():
            setattr(signal, name, function)
        changed = [n for n, handler in handlers.items() if signal.getsignal(n) is not handler]
        if changed and not used:
            used += [f"a handler of its own for {signal.Signals(number).name}" for number in changed]
