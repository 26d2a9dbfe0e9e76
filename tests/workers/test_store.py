"""areal/workers/store.py: a store is in a private file, or listens where it is told to and nowhere else."""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from torch.distributed import FileStore, Store

from areal.errors import ProcessError
from areal.workers.process import free_port, free_ports
from areal.workers.sglang.server import close_store
from areal.workers.store import STORE, is_loopback, new_store, open_store, remove_stores

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


def test_a_store_in_a_file_is_of_those_that_start_together(tmp_path: Path) -> None:
    """Two starts that share a folder have two files, which nobody else can open; each is found again by its path."""
    first, second = (Path(new_store(tmp_path / "logs")[STORE]) for _ in range(2))
    assert first != second
    assert first.is_absolute()
    assert first.stat().st_mode & 0o777 == second.stat().st_mode & 0o777 == 0o600
    a, b = (FileStore(str(first), 2) for _ in range(2))
    a.set("a", "1")
    assert b.get("a") == b"1"
    assert not FileStore(str(second), 1).check(["a"])
    log = tmp_path / "logs" / "trainer-0.log"
    log.touch()
    remove_stores(tmp_path / "logs")
    assert list((tmp_path / "logs").iterdir()) == [log]
    del a, b  # they need no file to end


def test_a_disk_that_refuses_is_a_failed_start(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(ProcessError, match=r"cannot create a store .*logs: File exists"):
        new_store(tmp_path / "logs")


def test_a_relative_folder_is_found_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(new_store("logs")[STORE]).parent == tmp_path / "logs"


def test_the_first_store_of_a_server_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worlds of one server, at ports of their own, share the file and not what is in it; a weight group has a port."""
    module = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(module, "_create_c10d_store", None)
    close_store()

    def meet(port: int) -> Store:
        return next(module.rendezvous(f"tcp://127.0.0.1:{port}", 0, 1))[0]

    file = new_store(tmp_path)
    monkeypatch.setenv(STORE, file[STORE])
    port, other = free_ports(2)
    own = meet(port)
    assert listening(port) == []
    assert STORE not in os.environ
    group = meet(port)
    assert listening(port) == ["127.0.0.1"]
    monkeypatch.setenv(STORE, file[STORE])
    second = meet(other)
    own.set("a", "1")
    assert [store.check(["a"]) for store in (own, group, second)] == [True, False, False]

    opened = Mock()
    monkeypatch.setattr("areal.workers.store.open_store", opened)
    monkeypatch.setenv(STORE, file[STORE])
    close_store()
    assert next(module.rendezvous("tcp://10.0.0.7:5000", 0, 2))[0] is opened.return_value  # ranks elsewhere will come


def test_addresses() -> None:
    assert [h for h in ("127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost") if not is_loopback(h)] == []
    assert [h for h in ("0.0.0.0", "::", "10.0.0.7", "node-1") if is_loopback(h)] == []
