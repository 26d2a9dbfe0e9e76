"""areal/workers/store.py: the store listens where it is told to, and nowhere else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest

from areal.workers.process import free_port
from areal.workers.store import is_loopback, open_store

TIMEOUT = timedelta(seconds=5)


def listening(port: int) -> list[str]:
    connections = psutil.Process().net_connections("tcp")
    return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port]


def test_a_store_on_loopback_listens_there_only() -> None:
    port = free_port()
    for _ in range(2):  # the port is free again once the store is gone
        with ThreadPoolExecutor() as pool:  # each waits for the other
            stores = [
                pool.submit(open_store, "127.0.0.1", port, 2, is_master=m, timeout=TIMEOUT) for m in (True, False)
            ]
            master, client = (store.result() for store in stores)
        del stores
        assert listening(port) == ["127.0.0.1"]
        client.set("a", "1")
        assert master.get("a") == b"1"
        del client, master
        assert listening(port) == []


def test_a_taken_port_is_an_error() -> None:
    port = free_port()
    master = open_store("127.0.0.1", port, 1, is_master=True, timeout=TIMEOUT)
    with pytest.raises(OSError, match="in use"):
        open_store("127.0.0.1", port, 1, is_master=True, timeout=TIMEOUT)
    del master


def test_addresses() -> None:
    assert [h for h in ("127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost") if not is_loopback(h)] == []
    assert [h for h in ("0.0.0.0", "::", "10.0.0.7", "node-1") if is_loopback(h)] == []
