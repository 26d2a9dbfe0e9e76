"""CPU that the controller spends per request, against the least that such a request can cost.

    python -m benchmarks.controller_overhead [--json FILE]

A stub in a process of its own answers `/generate` with 256 or 4,096 tokens. `ms` is the CPU time of this process per
request of the whole path, from Episode through Fleet and SGLangClient to the finished trajectory; `bare_ms` that of a
loop that posts the same request with aiohttp and parses the same answer into the same arrays with orjson. Beside it
`chat_ms`, that of `episode.chat`, which renders and tokenises too, and `kept_ms`, that of a call which goes on record,
as in training, with what the ledger's writer thread takes. Goal: ratio <= 1.5.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import uvloop
from aiohttp import web

from areal.agents.episode import Episode
from areal.agents.journal import Journal
from areal.agents.template import Template
from areal.config import Config
from areal.controller.calls import random_rids
from areal.controller.fleet import Fleet
from areal.controller.ledger import Ledger
from areal.controller.watchdog import spare_the_loop
from areal.types import Ints, Sampling
from areal.workers.process import Child, free_port
from areal.workers.sglang.client import SGLangClient, open_session
from areal.workers.sglang.launcher import wait_ready
from benchmarks.idle_episodes import byte_tokenizer
from benchmarks.table import arguments, report

CONCURRENCY = 256, 2048
ROUNDS = {256: 21, 4096: 3}
"""Each way is measured in turn, for a second or so, and the round with the median ratio counts: how fast a shared
machine is changes from one second to the next, so that a single ratio of short answers can be 1.0 or 2.0."""
PROMPT = 512
VOCAB = 512
ORIGIN = "bench.0"


def answer(count: int) -> bytes:
    """What SGLang 0.5.23 answers to a /generate that sampled `count` tokens."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 256, count).tolist()  # the bench's tokenizer has a token per byte
    logprobs = (-draw.exponential(1.0, count)).tolist()
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "length", "length": count},
        "prompt_tokens": PROMPT,
        "weight_version": f"{ORIGIN}:0",
        "weight_versions": [{"version": f"{ORIGIN}:0", "start": 0, "end": count}],
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)],
        "output_token_logprobs_length": count,
        "completion_tokens": count,
        "cached_tokens": PROMPT - 1,
        "cached_tokens_details": {"device": PROMPT - 1, "host": 0},
        "reasoning_tokens": 0,
        "dp_rank": None,
        "e2e_latency": 0.1234,
        "response_sent_to_client_ts": 1764400000.123,
    }
    return orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})


def serve(port: int, count: int) -> None:
    """The stub: one prepared answer to every /generate."""
    prepared = answer(count)
    info = orjson.dumps({"model_path": "", "weight_version": f"{ORIGIN}:0", "data": [{"max_model_len": 10**6}]})

    async def handle(request: web.Request) -> web.Response:
        await request.read()
        body = prepared if request.path == "/generate" else info
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    web.run_app(app, host="127.0.0.1", port=port, print=None, backlog=4096, access_log=None)


@contextmanager
def stub(count: int) -> Iterator[tuple[str, Child]]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.controller_overhead", "--stub", str(port), str(count)]
    with tempfile.TemporaryDirectory() as folder:
        child = Child.start(
            "stub", command, log=Path(folder, "stub.log"), env={"PYTHONPATH": os.pathsep.join(sys.path)}
        )
        try:
            yield f"http://127.0.0.1:{port}", child
        finally:
            child.kill()


async def cpu_ms(request: Callable[[int], Awaitable[None]], concurrency: int, requests: int) -> float:
    """CPU milliseconds of this process per request, with `concurrency` of them at a time."""

    async def worker(first: int) -> None:
        for index in range(first, requests, concurrency):
            await request(index)

    gc.collect()
    start = time.process_time()
    async with asyncio.TaskGroup() as workers:
        for first in range(concurrency):
            workers.create_task(worker(first))
    return (time.process_time() - start) / requests * 1e3


async def bare(session: aiohttp.ClientSession, url: str, ids: Ints, count: int) -> None:
    body = {
        "rid": "0" * 32,
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": count, "temperature": 1.0, "ignore_eos": False},
        "return_logprob": True,
    }
    data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    async with session.post(url + "/generate", data=data, headers={"content-type": "application/json"}) as response:
        parsed = orjson.loads(await response.read())
    meta = parsed["meta_info"]
    output_ids = np.array(parsed["output_ids"], np.int32)
    logprobs = np.array([triple[0] for triple in meta["output_token_logprobs"]], np.float32)
    versions = np.empty(count, np.int32)
    for span in meta["weight_versions"]:
        versions[span["start"] : span["end"]] = int(span["version"].rpartition(":")[2])
    assert len(output_ids) == len(logprobs) == count


async def measure(count: int, concurrency: int, template: Template) -> dict[str, Any]:
    settings = ["servers.request_timeout_s=600", f"servers.max_running={concurrency}"]
    config = Config.load(settings)
    prompt = np.arange(PROMPT, dtype=np.int32) % VOCAB
    messages = [{"role": "user", "content": "Where does Alice live? " * 20}]
    sampling = Sampling(count)
    requests = max(2048, concurrency * 512 // count)
    rounds: list[dict[str, float]] = []
    with stub(count) as (url, child), tempfile.TemporaryDirectory(prefix="areal-bench-") as folder:
        ledger = Ledger.create(folder)
        async with open_session() as session:
            client = SGLangClient(url, origin=ORIGIN, vocab_size=VOCAB, session=session)
            await wait_ready(client, child, 60.0)
            fleet = Fleet(config, [client], origin=ORIGIN, stop_ids=[0], rids=random_rids("0"))
            running = asyncio.create_task(fleet.run())

            def episode(index: int, journal: Journal | None = None) -> Episode:
                return Episode(
                    generate=fleet.generate,
                    template=template,
                    sampling=sampling,
                    context_length=10**6,
                    group=index,
                    journal=journal,
                )

            async def by_generate(index: int, journal: Journal | None = None) -> None:
                each = episode(index, journal)
                await each.generate(prompt)
                (trajectory,) = each.finish(1.0, 0.0).trajectories
                assert len(trajectory.ids) == PROMPT + count

            async def by_chat(index: int) -> None:
                each = episode(index)
                await each.chat(messages)
                each.finish(1.0, 0.0)

            ways: dict[str, Callable[[int], Awaitable[None]]] = {
                "bare": lambda index: bare(session, url, prompt, count),
                "generate": by_generate,
                "chat": by_chat,
                "kept": lambda index: by_generate(index, Journal(partial(ledger.append_call, index, 0))),
            }
            await cpu_ms(ways["bare"], concurrency, concurrency)  # opens the connections
            spare_the_loop()  # as in a run
            for _ in range(ROUNDS[count]):
                rounds.append({name: await cpu_ms(way, concurrency, requests) for name, way in ways.items()})
                await ledger.barrier()
            await fleet.close()
            await running
        await ledger.close()
    middle = sorted(rounds, key=lambda each: each["generate"] / each["bare"])[len(rounds) // 2]
    return {
        "tokens": count,
        "concurrency": concurrency,
        "ms": middle["generate"],
        "bare_ms": middle["bare"],
        "ratio": middle["generate"] / middle["bare"],
        "chat_ms": middle["chat"],
        "kept_ms": middle["kept"],
    }


def main() -> None:
    options = arguments()
    template = Template(byte_tokenizer())
    rows = [uvloop.run(measure(count, concurrency, template)) for count in ROUNDS for concurrency in CONCURRENCY]
    report("CPU of the controller per request, ms", rows, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--stub"]:
        serve(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
