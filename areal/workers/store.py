"""Stores of torch.distributed, where processes find each other: in a file of the run, or on one address only.

A TCPStore asks nobody for a token, and torch opens it on every address of the machine, whatever its `host_name` says.
So processes that areal starts get a file, which the file system protects. The store of a weight group stays a TCPStore:
its servers may be anybody's, and when one end is lost the others learn it at once, from their connections.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from areal.errors import ProcessError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

STORE = "AREAL_STORE"
"""Environment variable with the file for the store of processes that start together."""
SUFFIX = ".store"


def new_store(folder: Path | str) -> dict[str, str]:
    """Make a file in `folder` that only this user can open. Returns the variable that names it to processes.

    Raises ProcessError when the disk refuses.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(SUFFIX, "torch-", dir=os.path.abspath(folder))
    except OSError as error:
        raise ProcessError(f"no file in {folder} for processes to find each other: {error.strerror}") from None
    os.close(descriptor)
    return {STORE: path}


def remove_stores(folder: Path) -> None:
    """Delete those that killed processes left; nobody may use one now."""
    with suppress(OSError):  # a disk that fails has failed the run already
        for path in folder.glob(f"*{SUFFIX}"):
            path.unlink(missing_ok=True)


def open_store(
    host: str, port: int, size: int, *, is_master: bool, timeout: timedelta, use_libuv: bool = True
) -> TCPStore:
    """As torch's rendezvous opens it; where `host` is a loopback address, the master listens on that one alone.

    Raises OSError when the port is taken, and torch's DistError when the master does not answer within `timeout`.
    """
    from torch.distributed import TCPStore

    listener: int | None = None
    if is_master and is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048).detach()  # the store closes it
    return TCPStore(
        host,
        port,
        size,
        is_master,
        timeout,
        multi_tenant=True,
        master_listen_fd=listener,
        use_libuv=use_libuv,
    )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
