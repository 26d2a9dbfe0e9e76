"""What it costs the event loop to put a finished episode into the ledger, and what the writer thread needs on top.

`loop_us` is CPU of the loop's thread, `total_us` of the process (with the writer), per append; `bytes` is what the
episode takes in its segment file. `call_us` is CPU of the loop's thread for a model call of as many tokens, which is on
record until its episode ends. Goal: loop_us below 100 for an episode of 256 tokens.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from functools import partial
from typing import Any

import numpy as np

from areal.agents.journal import Journal, model_key
from areal.controller import codec
from areal.controller.facts import Finished
from areal.controller.ledger import Ledger
from areal.types import Completion, EpisodeRecord, Sampling, Trajectory
from benchmarks.table import arguments, report


def episode(group: int, tokens: int) -> EpisodeRecord:
    ids = np.arange(tokens, dtype=np.int32)
    trajectory = Trajectory(ids, ids % 4 > 0, np.full(tokens, -0.5, np.float32), ids // (tokens // 2 + 1))
    return EpisodeRecord(group, 0, f"task {group}", 1.0, (trajectory,), turns=3, metrics={"calls": 2.0})


def completion(tokens: int) -> Completion:
    ids = np.arange(tokens, dtype=np.int32)
    return Completion(ids, ids, np.full(tokens, -0.5, np.float32), np.zeros(tokens, np.int32), "stop")


async def measure(tokens: int, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="areal-bench-") as folder:
        ledger = Ledger.create(folder)
        episodes = [episode(group, tokens) for group in range(count)]
        loop_s = 0.0
        total_s, wall_s = time.process_time(), time.perf_counter()
        for start in range(0, count, 50):
            began = time.thread_time()
            for record in episodes[start : start + 50]:
                ledger.append(Finished(record.group, 0, 1.0, ((0, tokens // 2), (1, tokens // 4))), record)
            loop_s += time.thread_time() - began
            await asyncio.sleep(0.005)
        await ledger.barrier()
        total_s, wall_s = time.process_time() - total_s, time.perf_counter() - wall_s
        call_s = 0.0
        completions = [completion(tokens) for _ in range(count)]
        for start in range(0, count, 50):
            began = time.thread_time()
            for index, answer in enumerate(completions[start : start + 50], count + start):
                key = model_key(answer.input_ids, Sampling(tokens))
                Journal(partial(ledger.append_call, index, 0)).keep(key, answer)
            call_s += time.thread_time() - began
            await asyncio.sleep(0.005)
        await ledger.close()
    return {
        "tokens": tokens,
        "loop_us": loop_s / count * 1e6,
        "call_us": call_s / count * 1e6,
        "total_us": total_s / count * 1e6,
        "bytes": len(codec.encode(episodes[0])),
        "episodes_per_s": count / wall_s,
    }


def main() -> None:
    options = arguments()
    asyncio.run(measure(256, 500))  # warm-up
    report("ledger", [asyncio.run(measure(tokens, 2000)) for tokens in (256, 4096)], options.json)


if __name__ == "__main__":
    main()
