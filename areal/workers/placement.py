"""Which devices each SGLang server and each trainer rank gets; decided before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from areal.config import Config
from areal.errors import ConfigError

SERVERS_A_CORE = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """`servers[i]` are the devices of server i (more than one: tensor parallel), `ranks[r]` is that of rank r.

    Devices are counted from 0 as this process sees them. On CPUs, `ranks` and all entries of `servers` are empty.
    """

    servers: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]


def place(config: Config, devices: int | None = None) -> Plan:
    """Place the servers that areal starts and all ranks on `devices` devices (0: CPUs; None: all visible GPUs).

    What `placement` leaves open is filled in device order: one device per rank, then one per server. Raises ConfigError
    if they do not fit.
    """
    if devices is None:
        devices = count_devices()
    count = 0 if config.servers.urls else config.servers.count
    servers, ranks = config.placement.servers, config.placement.ranks
    if absent := sorted(device for device in chain(ranks, *servers) if device >= devices):
        raise ConfigError(f"placement names device {absent[0]} (from 0), but this machine has {_counted(devices)}")
    if devices == 0:
        if count > (most := SERVERS_A_CORE * (os.cpu_count() or 1)):
            raise ConfigError(f"servers.count={count}: {os.cpu_count()} cores can run at most {most} servers")
        return Plan(((),) * count, ())
    free = [device for device in range(devices) if device not in chain(ranks, *servers)]
    wanted = (0 if ranks else config.trainer.ranks) + (0 if servers else count)
    if wanted > len(free):
        raise ConfigError(
            f"trainer.ranks={config.trainer.ranks} and servers.count={count} need {wanted} more devices than "
            f"`placement` names; {len(free)} of {_counted(devices)} are free"
        )
    if not ranks:
        ranks, free = free[: config.trainer.ranks], free[config.trainer.ranks :]
    if not servers:
        servers = [[device] for device in free[:count]]
    return Plan(tuple(map(tuple, servers)), tuple(ranks))


def count_devices() -> int:
    """Number of GPUs visible to this process."""
    import torch

    return torch.cuda.device_count()


def visible(devices: Sequence[int], environment: Mapping[str, str] = os.environ) -> str:
    """CUDA_VISIBLE_DEVICES of a child that gets `devices`, which are counted as this process sees them."""
    here = environment.get("CUDA_VISIBLE_DEVICES")
    names = here.split(",") if here else None
    return ",".join(names[device] if names else str(device) for device in devices)


def on_loopback(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that bind gloo's and NCCL's ports, which have no authentication, to the loopback interface. Values
    already set in the environment are kept."""
    return {name: environment.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}


def _counted(devices: int) -> str:
    return f"{devices} device{'' if devices == 1 else 's'}"
