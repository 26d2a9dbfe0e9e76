"""HttpTrainer against ranks that misbehave: real sockets, and real processes where one has to die."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from areal.errors import TrainerError, VersionConflict
from areal.types import FlatBatch, MiniBatch, TrainRequest, TrainStats
from areal.workers.megatron import wire
from areal.workers.megatron.client import HttpTrainer
from areal.workers.process import Child

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
STATS = TrainStats(1, *[0.5] * 8, 3, 2, 0.1)


@asynccontextmanager
async def ranks(*handlers: Handler, **options: Any) -> AsyncIterator[HttpTrainer]:
    runners, urls = [], []
    for handler in handlers:
        application = web.Application()
        application.router.add_post("/{name}", handler)
        runner = web.AppRunner(application, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    client = HttpTrainer(urls, "secret", **{"timeout_s": 5.0, "group_timeout_s": 5.0} | options)
    try:
        yield client
    finally:
        await client.close()
        for runner in runners:
            await runner.cleanup()


def request(count: int) -> TrainRequest:
    tokens = np.arange(2 * count)
    return TrainRequest(
        life=0,
        from_version=0,
        batch_id=0,
        kind="sft",
        batch=FlatBatch(
            ids=tokens.astype(np.int32),
            lengths=np.full(count, 2, np.int32),
            loss_weights=(tokens % 2).astype(np.float32),
            logprobs=np.zeros(2 * count, np.float32),
            versions=np.full(2 * count, -1, np.int32),
            advantages=np.zeros(count, np.float32),
        ),
        minibatches=(MiniBatch(tuple(((r,),) for r in range(count)), float(count)),),
        learning_rate=1e-3,
    )


async def good(http: web.Request) -> web.Response:
    return web.Response(body=wire.pack_stats(STATS))


def failing(status: int, kind: str, text: str, after_s: float = 0.0) -> Handler:
    async def handle(http: web.Request) -> web.Response:
        await asyncio.sleep(after_s)
        return web.Response(status=status, body=json.dumps({"kind": kind, "error": text, "traceback": ""}))

    return handle


async def hanging(http: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def dropping(http: web.Request) -> web.Response:
    http.transport.abort()
    return web.Response()


async def test_each_rank_gets_its_share_and_the_token() -> None:
    seen: dict[int, tuple[str, list[int]]] = {}

    async def remember(http: web.Request) -> web.Response:
        got = wire.unpack_request(await http.read())
        seen[int(got.batch.ids[0])] = (http.headers["Authorization"], got.batch.ids.tolist())
        return await good(http)

    async with ranks(remember, remember) as client:
        assert await client.train(request(2)) == STATS
    assert seen == {0: ("Bearer secret", [0, 1]), 2: ("Bearer secret", [2, 3])}


async def test_logprobs_come_back_in_order() -> None:
    async def double(http: web.Request) -> web.Response:
        got = wire.unpack_sequences(await http.read())
        return web.Response(body=wire.pack_sequences([2.0 * s for s in got], np.float32))

    given = [np.arange(n, dtype=np.int32) for n in (3, 1, 4, 2, 5)]
    async with ranks(double, double, double) as client:
        for count in (5, 2, 0):
            got = await client.logprobs(given[:count])
            assert [s.tolist() for s in got] == [(2.0 * s).tolist() for s in given[:count]]


async def test_a_checkpoint_is_the_first_ranks_work() -> None:
    seen: list[tuple[str, Any]] = []

    async def remember(http: web.Request) -> web.Response:
        seen.append((http.match_info["name"], wire.unpack(await http.read())[0]))
        return web.Response(body=wire.pack({}))

    async with ranks(remember, hanging) as client:
        await client.stage("a/step-1")
        await client.write()
    assert seen == [("stage", {"folder": "a/step-1"}), ("write", {"folder": "a/step-1"})]


@pytest.mark.parametrize(
    ("handler", "text"),
    [
        (failing(500, "TrainerError", "the gradient is nan"), "rank 1: train: the gradient is nan"),
        (failing(500, "KeyError", "'x'"), "rank 1: train: KeyError: 'x'"),
        (failing(503, "", ""), "rank 1: train"),
        (dropping, "rank 1: train"),
        (failing(200, "", ""), "rank 1: train: a body of"),
    ],
    ids=["error", "crash", "other", "dropped", "garbage"],
)
async def test_the_rank_that_failed_is_named_and_the_others_are_let_go(handler: Handler, text: str) -> None:
    let_go = asyncio.Event()

    async def waits(http: web.Request) -> web.Response:
        try:
            return await hanging(http)
        finally:
            let_go.set()

    async with ranks(waits, handler) as client:
        with pytest.raises(TrainerError, match=text):
            await client.train(request(2))
        await asyncio.wait_for(let_go.wait(), 2)


async def test_conflict_is_its_own_error() -> None:
    async with ranks(failing(409, "VersionConflict", "the rank is at version 3")) as client:
        with pytest.raises(VersionConflict, match="rank 0: train: the rank is at version 3"):
            await client.train(request(1))


async def test_the_cause_is_told_though_its_echo_comes_first() -> None:
    async with ranks(
        failing(500, "PeerFailed", "data-parallel rank 2 failed"),
        failing(500, "RuntimeError", "connection closed by peer"),
        failing(500, "TrainerError", "the cause", after_s=0.3),
    ) as client:
        with pytest.raises(TrainerError, match="rank 2: train: the cause"):
            await client.train(request(3))


async def test_time_out() -> None:
    async with ranks(hanging, timeout_s=-1.5, group_timeout_s=-1.5) as client:
        with pytest.raises(TrainerError, match="rank 0: train took more than"):
            await client.train(request(1))
        with pytest.raises(TrainerError, match="rank 0: broadcast took more than"):
            await client.broadcast("g")


async def test_a_rank_that_dies_ends_a_call_at_once(tmp_path: Path) -> None:
    children = [
        Child.start(f"trainer rank {n}", [sys.executable, "-c", code], log=tmp_path / f"{n}.log")
        for n, code in enumerate(["import time; time.sleep(60)", "print('out of memory'); import time; time.sleep(60)"])
    ]
    async with ranks(hanging, hanging, children=children) as client:
        step = asyncio.create_task(client.train(request(2)))
        async with asyncio.timeout(5):
            while "memory" not in children[1].tail():
                await asyncio.sleep(0.02)
        children[1].kill()
        started = time.monotonic()
        with pytest.raises(TrainerError, match=r"rank 1 ended with code 137; .*1\.log:\nout of memory"):
            await step
        assert time.monotonic() - started < 1
        with pytest.raises(TrainerError, match="rank 1 ended"):
            await client.specs()
    assert [child.returncode for child in children] == [143, 137]


async def test_cancelling_a_call_leaves_nothing_behind() -> None:
    async with ranks(hanging, hanging) as client:
        before = asyncio.all_tasks()
        step = asyncio.create_task(client.train(request(2)))
        await asyncio.sleep(0.1)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert {t for t in asyncio.all_tasks() - before if "post" in repr(t.get_coro())} == set()
