"""How long requests stand still for new weights, per transport, and what share of a training step that is.

    python -m benchmarks.weight_sync [--json FILE]

A real SGLang server and a real Megatron rank, on a GPU each where the machine has two, else on the CPU. 32 calls run
all the time; between them a step is trained and published, STEPS times. `pause_ms` is what an interrupted call waits:
from the moment its request is aborted until the server, loaded, flushed and verified, takes it again. `prepare_ms`
(export, or forming the group) passes while the server generates. Goal: share below 5 %.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import uvloop

from areal.algorithms.batching import sft_request
from areal.config import Config
from areal.controller.fleet import Fleet
from areal.controller.ranks import Ranks
from areal.controller.weights import WeightSync, probe_ids
from areal.types import Sampling
from areal.workers.megatron.launcher import start_trainer
from areal.workers.process import free_port
from areal.workers.protocols import Workers, make_label
from areal.workers.sglang.client import SGLangClient
from areal.workers.sglang.launcher import launch_server, wait_ready
from benchmarks.table import arguments, report
from tests import models

ORIGIN = "bench.0"
KEY = secrets.token_urlsafe(32)
CALLS = 32
STEPS = 5
SEQUENCES, LENGTH = 64, 256
"""Of one training step."""


async def measure(transport: str, model: Path, folder: Path) -> dict[str, Any]:
    config = Config.load([f"weights.transport={transport}", "servers.max_total_tokens=65536"])
    server_gpu, trainer_gpu = ([0], [1]) if torch.cuda.device_count() > 1 else ([], [])
    port = free_port()
    async with AsyncExitStack() as stack:
        child = await launch_server(
            config,
            0,
            key=KEY,
            model_path=model,
            label=make_label(ORIGIN, 0),
            log_folder=folder,
            port=port,
            devices=server_gpu,
        )
        stack.push_async_callback(child.stop, 5.0)
        client = SGLangClient(f"http://127.0.0.1:{port}", origin=ORIGIN, vocab_size=models.VOCAB_SIZE, key=KEY)
        await wait_ready(client, child, config.servers.start_timeout_s)
        trainer = await start_trainer(
            config, model_path=str(model), log_folder=folder, life=0, devices=trainer_gpu, roots=[folder]
        )
        stack.push_async_callback(trainer.close)
        fleet = Fleet(config, [client], origin=ORIGIN)
        weights = WeightSync(
            config,
            fleet,
            Ranks(cast(Workers, None), trainer, 0),
            folder / "weights",
            origin=ORIGIN,
            probe=probe_ids(models.VOCAB_SIZE),
            backend="nccl" if trainer_gpu else "gloo",
        )
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        tasks.create_task(fleet.run(weights.sync_server))
        stack.push_async_callback(fleet.close)
        stack.push_async_callback(weights.close)

        async def caller(index: int) -> None:
            while True:
                ids = np.random.default_rng(index).integers(10, 400, 32).astype(np.int32)
                await fleet.generate(ids, Sampling(1000, ignore_eos=True), key=str(index))

        callers = [tasks.create_task(caller(index)) for index in range(CALLS)]
        loop = asyncio.get_running_loop()
        steps, pauses, prepares = [], [], []
        for version in range(STEPS + 1):
            started = loop.time()
            draw = np.random.default_rng(version)
            rows = [draw.integers(10, 400, LENGTH).astype(np.int32) for _ in range(SEQUENCES)]
            request = sft_request(
                [(ids, np.ones(LENGTH, np.float32)) for ids in rows],
                life=0,
                from_version=version,
                batch_id=version,
                learning_rate=1e-5,
                ranks=1,
                budget=config.train.microbatch_tokens,
                minibatches=2,
            )
            await trainer.train(request)
            stats = await weights.publish(version + 1)
            if version:  # the first one warms up
                steps.append(loop.time() - started)
                pauses.append(stats.pause_s)
                prepares.append(stats.prepare_s)
        for task in callers:
            task.cancel()
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))  # noqa: ASYNC240
    return {
        "transport": transport,
        "weights_mb": size / 1e6,
        "prepare_ms": 1e3 * float(np.mean(prepares)),
        "pause_ms": 1e3 * float(np.mean(pauses)),
        "pause_max_ms": 1e3 * max(pauses),
        "step_s": float(np.mean(steps)),
        "share": sum(pauses) / sum(steps),
    }


def main() -> None:
    options = arguments()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        model = models.build(Path(name) / "model", "qwen3", hidden_size=256, layers=4)
        for transport in ("disk", "group"):
            rows.append(uvloop.run(measure(transport, model, Path(name) / transport)))
    report("Pause of a request for new weights", rows, options.json)


if __name__ == "__main__":
    main()
