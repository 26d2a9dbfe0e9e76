"""Start trainer ranks on this machine: `start_trainer`."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from areal.config import Config
from areal.errors import ConfigError, TrainerError
from areal.workers.megatron.client import HttpTrainer
from areal.workers.megatron.rank import HOST, to_json
from areal.workers.megatron.wire import TOKEN, RankSettings
from areal.workers.models.architecture import Architecture, Saved
from areal.workers.placement import on_loopback, visible
from areal.workers.process import Child
from areal.workers.store import new_store

REGISTER_TIMEOUT_S = 10.0
"""Time limit for a connection to register as a rank."""


async def start_trainer(
    config: Config,
    *,
    model_path: str,
    log_folder: Path | str,
    life: int,
    devices: Sequence[int] = (),
    version: int = 0,
    checkpoint: str = "",
    roots: Sequence[Path | str] = (),
) -> HttpTrainer:
    """Start `config.trainer.ranks` processes at `version`, with the weights in the folder `model_path`.

    checkpoint: if set, resume bit for bit from this checkpoint instead, which any number of ranks may have written.
    devices: the GPU of each rank; empty on a machine without GPUs. roots: the folders that they may write to. Output
    goes to `log_folder`/trainer-<rank>.log. Before anything starts, raises ConfigError for a model that cannot be
    trained and TrainerError for an invalid checkpoint or one of another version or dtype. Then raises TrainerError,
    with the last lines of its log, for a rank that ends or is not ready within `trainer.start_timeout_s`, and
    ProcessError for a process that cannot be started.
    """
    ranks = config.trainer.ranks
    if devices and len(devices) != ranks:
        raise ConfigError(f"placement.ranks={list(devices)} names {len(devices)} devices for trainer.ranks={ranks}")
    if checkpoint:
        await asyncio.to_thread(_check, checkpoint, Saved(version, config.model.dtype))
    await asyncio.to_thread(Architecture.read, checkpoint or model_path)
    token = secrets.token_urlsafe(32)
    store = new_store(log_folder)
    addresses: list[asyncio.Future[str]] = [asyncio.get_running_loop().create_future() for _ in range(ranks)]
    registry = await asyncio.start_server(_registrar(token, addresses), HOST, 0)
    settings = _settings(
        config,
        model_path=str(model_path),
        checkpoint=str(checkpoint),
        life=life,
        version=version,
        roots=[str(root) for root in roots],
        register="{}:{}".format(*registry.sockets[0].getsockname()[:2]),
    )
    children: list[Child] = []
    command = [sys.executable, "-m", "areal.workers.megatron.rank", to_json(settings)]
    try:
        for rank in range(ranks):
            gpu = visible([devices[rank]]) if devices else ""
            env = {**_environment(token, ranks), **store, "RANK": str(rank), "CUDA_VISIBLE_DEVICES": gpu}
            log = Path(log_folder) / f"trainer-{rank}.log"
            children.append(Child.start(f"trainer rank {rank}", command, log=log, env=env))
        await _ready(addresses, children, config.trainer.start_timeout_s)
    except BaseException:
        await asyncio.gather(*(child.stop(grace_s=1.0) for child in children))
        raise
    finally:
        registry.close()
    return HttpTrainer(
        [address.result() for address in addresses],
        token,
        timeout_s=config.trainer.timeout_s,
        group_timeout_s=config.weights.timeout_s,
        children=children,
    )


def _settings(config: Config, **rest: Any) -> RankSettings:
    optimizer = config.optimizer
    return RankSettings(
        dtype=config.model.dtype,
        microbatch_tokens=config.train.microbatch_tokens,
        timeout_s=config.trainer.timeout_s,
        group_timeout_s=config.weights.timeout_s,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        clip_grad=optimizer.clip_grad,
        **rest,
    )


def _environment(token: str, ranks: int) -> dict[str, str]:
    return {
        TOKEN: token,
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",  # each rank sees its own device only
        # One thread per rank is fastest when servers share the cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **on_loopback(),
    }


def _check(checkpoint: str, wanted: Saved) -> None:
    saved = Saved.read(checkpoint)
    if saved.version != wanted.version:
        raise TrainerError(f"{checkpoint} is of version {saved.version}; version {wanted.version} is needed")
    if saved.dtype != wanted.dtype:
        raise TrainerError(
            f"{checkpoint} was trained in {saved.dtype} and cannot be resumed exactly with model.dtype={wanted.dtype}; "
            f"set model.dtype={saved.dtype}, or start a new run with model.path={checkpoint}"
        )


def _registrar(
    token: str, addresses: Sequence[asyncio.Future[str]]
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def register(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT_S):
                message = json.loads(await reader.readline())
            if hmac.compare_digest(message["token"].encode(), token.encode()):
                address = addresses[message["rank"]]
                if not address.done():
                    address.set_result(message["url"])
        except (TimeoutError, OSError, ValueError, LookupError, TypeError, AttributeError):
            pass  # not one of our ranks
        finally:
            writer.close()

    return register


async def _ready(addresses: Sequence[asyncio.Future[str]], children: Sequence[Child], timeout_s: float) -> None:
    """Return when all ranks have registered. Raises TrainerError if one ends before, or at the deadline."""
    ends = [asyncio.create_task(child.wait()) for child in children]
    everyone = asyncio.gather(*addresses)
    try:
        waited: list[asyncio.Future[Any]] = [everyone, *ends]
        await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if everyone.done():
            return
        late = next((c for c in children if c.returncode is not None), None)
        if late is not None:
            raise TrainerError(str(late.error(f"ended with code {late.returncode} before it was ready")))
        late = children[next(i for i, address in enumerate(addresses) if not address.done())]
        raise TrainerError(str(late.error(f"was not ready after trainer.start_timeout_s={timeout_s:g} s")))
    finally:
        everyone.cancel()
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, everyone, return_exceptions=True)
