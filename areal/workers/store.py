"""torch.distributed's store, on one address only.

A TCPStore asks nobody for a token, and torch opens it on every address of the machine, whatever its `host_name` says.
"""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta

from torch.distributed import TCPStore


def open_store(
    host: str, port: int, size: int, *, is_master: bool, timeout: timedelta, use_libuv: bool = True
) -> TCPStore:
    """As torch's rendezvous opens it; where `host` is a loopback address, the master listens on that one alone.

    Raises OSError when the port is taken, and torch's DistError when the master does not answer within `timeout`.
    """
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
