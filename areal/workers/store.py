"""Rendezvous stores of torch.distributed: a file in the run folder, or a TCPStore on one address.

A TCPStore has no authentication, and torch opens it on every address of the machine, whatever `host_name` says.
Processes that areal starts therefore use a file, which the file system protects. Weight groups use a TCPStore, because
external servers can join it and a lost connection is noticed at once.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.errors import ProcessError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

STORE = "AREAL_STORE"
"""Environment variable with the store file of processes that start together."""
SUFFIX = ".store"


def new_store(folder: Path | str) -> dict[str, str]:
    """Create a file in `folder` that only this user can open. Returns the environment variable that names it.

    Raises ProcessError on a disk error.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(SUFFIX, "torch-", dir=os.path.abspath(folder))
    except OSError as error:
        raise ProcessError(f"cannot create a store of torch.distributed in {folder}: {error.strerror}") from None
    os.close(descriptor)
    return {STORE: path}


def remove_stores(folder: Path) -> None:
    """Delete those left by killed processes. None may be in use."""
    with suppress(OSError):  # a disk error has failed the run before this
        for path in folder.glob(f"*{SUFFIX}"):
            path.unlink(missing_ok=True)


def open_store(
    host: str, port: int, size: int, *, is_master: bool, timeout: timedelta, use_libuv: bool = True
) -> TCPStore:
    """Open a TCPStore like torch's rendezvous, but if `host` is a loopback address the master listens only there.

    Raises OSError if the port is taken, and torch's DistError if the master does not answer within `timeout`.
    """
    from torch.distributed import TCPStore

    listener: int | None = None
    if is_master and is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048).detach()  # the store closes it
    options: dict[str, Any] = {"multi_tenant": True, "master_listen_fd": listener, "use_libuv": use_libuv}
    return TCPStore(host, port, size, is_master, timeout, **options)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
