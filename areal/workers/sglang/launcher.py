"""Starts an SGLang server as a child process and waits until it is ready."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from areal.config import Config
from areal.config.schema import Servers
from areal.errors import ConfigError
from areal.workers.models.architecture import Architecture
from areal.workers.placement import on_loopback, visible
from areal.workers.process import Child, check_port
from areal.workers.protocols import ServerClient
from areal.workers.sglang.server import SERVER_KEY
from areal.workers.store import new_store

HOST = "127.0.0.1"
CPU_KV_TOKENS = 32768
"""Default KV cache on a CPU, where SGLang's own default would take most of the memory."""
POLL_S = 0.1


async def launch_server(
    config: Config,
    index: int,
    *,
    key: str,
    model_path: Path | str,
    label: str,
    log_folder: Path | str,
    port: int,
    devices: Sequence[int] = (),
) -> Child:
    """Start server `index` with the weights in `model_path`, labelled `label`; call `wait_ready` next.

    It listens on `port` of the loopback address, requires `key`, and logs to `server-<index>.log`. `devices`: its GPUs
    (more than one: tensor parallel), none for a CPU. Raises ConfigError for an unusable model or port, and ProcessError
    if the process cannot be started.
    """
    check_model(model_path, config.model.context_length)
    check_port(port, HOST)
    return Child.start(
        f"server {index}",
        command(config, model_path=model_path, label=label, port=port, devices=devices),
        log=Path(log_folder) / f"server-{index}.log",
        env={**environment(devices), **new_store(log_folder), SERVER_KEY: key},
    )


async def wait_ready(client: ServerClient, child: Child, timeout_s: float) -> None:
    """Return when the server answers its health check.

    Raises ProcessError, with the last lines of the log, if the process ends first or `timeout_s` passes. The caller
    must stop a process that timed out.
    """
    ended = asyncio.ensure_future(child.wait())
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            while not await client.healthy():
                if (await asyncio.wait({ended}, timeout=POLL_S))[0]:
                    raise child.error(f"ended with code {ended.result()} before it was ready")
    except TimeoutError:
        if not deadline.expired():
            raise
        raise child.error(f"was not ready within servers.start_timeout_s={timeout_s:g} s") from None
    finally:
        ended.cancel()


def kv_tokens(servers: Servers, on_gpus: bool) -> int:
    """KV cache size in tokens of a server that areal starts; 0 if SGLang decides, or the server is external."""
    if servers.urls:
        return 0
    return servers.max_total_tokens or (0 if on_gpus else CPU_KV_TOKENS)


def context_of(config: Config, model: Architecture, on_gpus: bool) -> int:
    """The maximum sequence length in tokens, at most the KV cache, since SGLang refuses longer prompts. Raises
    ConfigError if an explicit model.context_length is larger."""
    wanted, held = config.model.context_length, kv_tokens(config.servers, on_gpus)
    if held and wanted > held:
        raise ConfigError(
            f"model.context_length={wanted} is more than a server's KV cache, servers.max_total_tokens={held}; raise "
            "the latter or lower the former"
        )
    return wanted or (min(model.context, held) if held else model.context)


def command(config: Config, *, model_path: Path | str, label: str, port: int, devices: Sequence[int] = ()) -> list[str]:
    """The command line of a server. SGLang takes the last of repeated flags, so servers.args can override."""
    servers = config.servers
    module = "areal.workers.sglang.server" if devices else "areal.workers.sglang.cpu_server"
    flags: dict[str, object] = {
        "--model-path": model_path,
        "--host": HOST,
        "--port": port,
        "--dtype": config.model.dtype,
        "--weight-version": label,
        "--max-running-requests": servers.max_running,
        "--log-level-http": "warning",
    }
    if devices:
        flags["--tp-size"] = len(devices)
    if tokens := kv_tokens(servers, bool(devices)):
        flags["--max-total-tokens"] = tokens
    if config.model.context_length:
        flags["--context-length"] = config.model.context_length
    return [
        sys.executable,
        "-m",
        module,
        *(str(part) for flag in flags.items() for part in flag),
        "--skip-tokenizer-init",  # requests and answers are token ids
        "--skip-server-warmup",
        "--sleep-on-idle",  # else an idle server keeps a core busy
        *servers.args,
    ]


def environment(devices: Sequence[int] = ()) -> dict[str, str]:
    """Variables added to the environment of a server."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else each health check waits a second for a token
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",  # seconds until a closed connection is noticed (default 4)
        **on_loopback(),
    }
    if devices:
        variables["CUDA_VISIBLE_DEVICES"] = visible(devices)
    else:
        # With more threads than free cores, small models decode 5 to 30 times slower.
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return variables


def check_model(path: Path | str, context_length: int = 0) -> None:
    """Raise ConfigError unless the folder holds a model that servers and ranks can load: a config.json of a known
    family, all safetensors files, and positions for `context_length` tokens."""
    folder = Path(path)
    positions = Architecture.read(folder).context
    if context_length > positions:
        raise ConfigError(f"model.context_length={context_length} is more than the {positions} positions of {folder}")
    if (folder / "model.safetensors").is_file():
        return
    index = folder / "model.safetensors.index.json"
    try:
        files = set(json.loads(index.read_text())["weight_map"].values())
    except FileNotFoundError:
        raise ConfigError(f"model.path={str(folder)!r} has no weights: model.safetensors is missing") from None
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{index}: {error!r}; copy the model again") from None
    if missing := sorted(file for file in files if not (folder / file).is_file()):
        raise ConfigError(f"{folder}: {missing[0]} is missing, which {index.name} names; copy the model again")
