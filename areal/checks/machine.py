"""Whether the machine has what a run needs: ports, disk, memory, files, packages, devices. Sizes are lower bounds."""

from __future__ import annotations

import os
import resource
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from areal.checks.findings import Result
from areal.config import Config
from areal.errors import ConfigError
from areal.folder import KEPT_STEPS, RunFolder
from areal.monitor.metrics import check_sinks
from areal.workers.models.architecture import Architecture
from areal.workers.placement import Plan, place
from areal.workers.process import check_port
from areal.workers.sglang.launcher import kv_tokens

GB = 1e9
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
ADAM_BYTES = {"float32": 8, "bfloat16": 12}
"""Optimizer state of a parameter: two moments, and a float32 copy of a bfloat16 weight."""
GRADIENT_BYTES = 4
RANK_BYTES, SERVER_BYTES = 0.4e9, 0.8e9
"""Memory of a process without its model, on a CPU."""
TOKEN_BYTES = 13
"""Size of a token in the ledger: id, log-prob, version, mask."""
SPARE_FILES = 128
"""Open files other than connections: libraries, logs, the ledger."""


def placement(config: Config) -> Iterator[Result]:
    plan = place(config)
    servers = [list(devices) for devices in plan.servers]
    yield f"ranks on {list(plan.ranks)}, servers on {servers}" if plan.ranks else "CPU only"


def ports(config: Config) -> Iterator[Result]:
    first, count = config.servers.port, config.servers.count
    if not first or config.servers.urls:
        yield "free ports are picked automatically"
        return
    taken = 0
    for port in range(first, first + count):
        try:
            check_port(port)
        except ConfigError as error:
            taken += 1
            yield "problem", str(error).partition(";")[0], "set servers.port to another, or to 0 for a free one"
    if not taken:
        yield f"{first} to {first + count - 1} are free"


def open_files(config: Config) -> Iterator[Result]:
    """Each request in flight has one connection, and a second one while it is aborted."""
    episodes = (config.staleness.max + 1) * config.train.batch_groups * config.group.size
    calls = min(episodes, config.servers.max_running * max(config.servers.count, len(config.servers.urls)))
    need = 2 * calls + SPARE_FILES
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < need:
        yield (
            "problem",
            f"the limit is {limit} open files, but {calls} concurrent requests need {need}",
            f"`ulimit -n {need}`, or lower servers.max_running",
        )
    else:
        yield f"at most {need} are needed"


def sinks(config: Config) -> Iterator[Result]:
    check_sinks(config.metrics.sinks)
    if config.metrics.sinks:
        yield f"{' and '.join(config.metrics.sinks)} installed"


def parameters(model: Architecture) -> int:
    """Number of parameters, without biases."""
    heads = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    layer = model.hidden * (heads + 3 * model.ffn + 2)
    return model.layers * layer + model.vocab * model.hidden * (1 if model.tied else 2) + model.hidden


def disk(config: Config, model: Architecture) -> Iterator[Result]:
    """Space for checkpoint.keep + 1 checkpoints, the ledger between two of them, and two exports of weights."""
    size, dtype = parameters(model), config.model.dtype
    count = config.checkpoint.keep + 1
    if config.run:  # existing checkpoints will be deleted
        count -= min(len(RunFolder(config.run).checkpoints()), config.checkpoint.keep)
    checkpoints = count * size * (WEIGHT_BYTES[dtype] + ADAM_BYTES[dtype])
    exports = 2 * size * WEIGHT_BYTES[dtype] if config.weights.transport == "disk" else 0
    run = _existing(config.run or Path(config.folder))
    needs: dict[int, list[tuple[Path, float, str]]] = defaultdict(list)
    needs[run.stat().st_dev].append((run, checkpoints, f"{count} checkpoints"))
    if exports:
        weights = _existing(Path(config.weights.folder)) if config.weights.folder else run
        needs[weights.stat().st_dev].append((weights, exports, "two versions of the weights"))
    short = False
    for parts in needs.values():
        path, need = parts[0][0], sum(part[1] for part in parts)
        free = shutil.disk_usage(path).free
        if free < need:
            short = True
            yield (
                "problem",
                f"{path} has {free / GB:.1f} GB free, {' and '.join(part[2] for part in parts)} take "
                f"{need / GB:.1f} GB",
                "free some space, set folder and weights.folder to a larger disk, or lower checkpoint.keep",
            )
    room = shutil.disk_usage(run).free - sum(part[1] for part in needs[run.stat().st_dev])
    if not short and room < (ledger := _ledger_bytes(config)):
        short = True
        yield (
            "warning",
            f"{run} has {max(0.0, room) / GB:.1f} GB left for the ledger, which may take {ledger / GB:.1f} GB before "
            "a checkpoint",
            "free some space, or lower checkpoint.every",
        )
    if not short:
        yield f"checkpoints and weights take {(checkpoints + exports) / GB:.2f} GB, leaving {room / GB:.1f} GB"


def memory(config: Config, model: Architecture) -> Iterator[Result]:
    """Memory of ranks and servers without activations, a lower bound."""
    size, weight = parameters(model), WEIGHT_BYTES[config.model.dtype]
    rank = size * (weight + GRADIENT_BYTES + ADAM_BYTES[config.model.dtype])
    plan = place(config)
    if plan.ranks:
        yield from _device_memory(plan, rank, size * weight)
        return
    kv = 2 * model.layers * model.kv_heads * model.head_dim * weight * kv_tokens(config.servers, on_gpus=False)
    ranks = config.trainer.ranks * (rank + RANK_BYTES)
    servers = len(plan.servers) * (size * weight + kv + SERVER_BYTES)
    available = available_memory()
    if ranks + servers > available:
        yield (
            "problem",
            f"{available / GB:.1f} GB are available, but {config.trainer.ranks} ranks need {ranks / GB:.1f} GB and "
            f"{len(plan.servers)} servers {servers / GB:.1f} GB, for {size / 1e6:.4g} million parameters",
            "use a smaller model, fewer servers or ranks, a smaller servers.max_total_tokens, or model.dtype=bfloat16",
        )
    else:
        yield f"servers and ranks take at least {(ranks + servers) / GB:.1f} of {available / GB:.1f} GB"


def available_memory(groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes available to new processes: of the machine, and within this process's control group."""
    available = 1024 * _fields(Path("/proc/meminfo"))["MemAvailable"]
    for folder, limit, used in (
        (groups, "memory.max", "memory.current"),
        (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            statistics = _fields(folder / "memory.stat")
            taken = int((folder / used).read_text()) - statistics["inactive_file"] - statistics["active_file"]
            available = min(available, int((folder / limit).read_text()) - taken)
        except (OSError, ValueError):  # no such control group, or no limit ("max")
            continue
    return available


def _fields(path: Path) -> dict[str, int]:
    lines = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}


def _device_memory(plan: Plan, rank: float, weights: float) -> Iterator[Result]:
    import torch

    needs: dict[int, float] = defaultdict(float)
    for device in plan.ranks:
        needs[device] += rank
    for devices in plan.servers:
        for device in devices:
            needs[device] += weights / len(devices)
    short = False
    for device, need in sorted(needs.items()):
        if need > (total := torch.cuda.get_device_properties(device).total_memory):
            short = True
            yield (
                "problem",
                f"device {device} has {total / GB:.0f} GB, but its weights, gradients and optimizer state take "
                f"{need / GB:.0f} GB",
                "use a smaller model, model.dtype=bfloat16, or more devices by `placement`",
            )
    if not short:
        yield f"servers and ranks take at least {max(needs.values()) / GB:.1f} GB of a device"


def _ledger_bytes(config: Config) -> float:
    """Size of the ledger's answers, if all have the maximum length."""
    between = (config.checkpoint.every or config.train.steps) + KEPT_STEPS
    steps = min(between, config.train.steps) + config.staleness.max + 1
    episodes = steps * config.train.batch_groups * config.group.size
    return episodes * config.sampling.max_new_tokens * TOKEN_BYTES


def _existing(path: Path) -> Path:
    """The folder itself, or its closest existing ancestor."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if os.path.isdir(parent))
