"""docs/security.md, claim by claim, on a real run: ports, keys, paths and secrets."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import stat
import struct
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import aiohttp
import psutil
import pytest

from areal import Config, Controller, Episode, Task
from areal.errors import TrainerError
from areal.workers.process import free_port
from areal.workers.store import open_store
from tests.integration.conftest import KEY, Server

SECRETS = {
    "WANDB_API_KEY": "planted-wandb-0123456789",
    "HF_TOKEN": "planted-hf-0123456789",
    "OPENAI_API_KEY": "planted-openai-0123456789",
    "AREAL_SERVER_KEY": "planted-server-0123456789",
}


def listeners() -> dict[tuple[str, int], str]:
    """(address, port) -> process, of this process and its descendants."""
    me = psutil.Process()
    found = {}
    for process in (me, *me.children(recursive=True)):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                found[connection.laddr.ip, connection.laddr.port] = f"{process.pid} {process.name()}"
    return found


def unix_sockets() -> list[Path]:
    """Those with a name in a folder that descendants of this process listen on."""
    named = {c.laddr for p in psutil.Process().children(recursive=True) for c in p.net_connections("unix")}
    return [Path(name) for name in named if name.startswith("/") and Path(name).is_socket()]


async def answers_http(port: int) -> bool:
    try:
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await reader.read(12)
            writer.close()
            return head.startswith(b"HTTP/1.1 ")
    except (OSError, TimeoutError):
        return False


async def answers_as_store(port: int) -> bool:
    """Whether a store of torch.distributed serves anybody there. Its own client would wait for ever on another port."""
    validate, magic, ping, nonce = 0, 0x3C85F7CE, 13, 77  # as in TCPStore's protocol of torch 2.13
    try:
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(struct.pack("<BIBI", validate, magic, ping, nonce))
            answer = await reader.read(4)
            writer.close()
            return answer == struct.pack("<I", nonce)
    except (OSError, TimeoutError):
        return False


async def test_a_store_is_known_by_its_answer() -> None:
    port = free_port()
    store = open_store("127.0.0.1", port, 1, is_master=True, timeout=timedelta(seconds=5))
    assert await answers_as_store(port)
    del store


@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", ["disk", "group"])
async def test_a_run_keeps_its_ports_and_its_secrets_to_itself(
    transport: str, tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    shared = tmp_path / "shared"
    settings = {
        "model.path": str(tiny_qwen3),
        "folder": str(tmp_path / "runs"),
        "model.context_length": 512,
        "train.steps": 2,
        "train.batch_groups": 2,
        "train.minibatches": 1,
        "group.size": 2,
        "sampling.max_new_tokens": 8,
        "trainer.ranks": 2,
        "weights.transport": transport,
        "view": "plain",
        **({"weights.folder": str(shared)} if transport == "disk" else {}),
    }
    failed: set[str] = set()
    seen: dict[tuple[str, int], str] = {}
    private: dict[Path, int] = {}

    async def indiscreet(episode: Episode, task: Task) -> float:
        """Its first try raises all secrets, for the ledger and the log."""
        seen.update(listeners())
        for path in [*shared.glob("*"), *unix_sockets()]:
            private[path] = path.stat().st_mode
        if not failed:
            failed.add(task["id"])
            raise ValueError(" ".join(SECRETS.values()))
        await episode.chat([{"role": "user", "content": task["text"]}])
        return float(episode.member)

    async with Controller(Config.load([], settings)) as controller:
        trainer = controller.cluster.ranks.client
        (server,) = controller.cluster.fleet.servers
        key = server.client._headers["Authorization"].partition(" ")[2]  # type: ignore[attr-defined]
        token = trainer._session.headers["Authorization"].partition(" ")[2]  # type: ignore[attr-defined]
        await controller.train(indiscreet, [{"id": str(i), "text": f"city {i}"} for i in range(8)])
        seen.update(listeners())
        words = [word for p in psutil.Process().children(recursive=True) for word in p.cmdline()]
        folder = controller.folder.path

        # Ports: on loopback, and those that speak HTTP want a key.
        assert [where for where in seen if not ipaddress.ip_address(where[0]).is_loopback] == [], seen
        ports = [port for _, port in seen]
        answers = await asyncio.gather(*map(answers_http, ports))
        speaking = [port for port, speaks in zip(ports, answers, strict=True) if speaks]
        assert len(speaking) >= 3  # a server, two ranks
        async with aiohttp.ClientSession() as stranger:
            for port in speaking:
                for path in ("/health", "/generate", "/no/such"):
                    async with stranger.get(f"http://127.0.0.1:{port}{path}") as response:
                        assert response.status == 401

        # Stores: only the one of a weight group is at a port, those of processes that start together are files.
        others = [port for port in ports if port not in speaking]
        assert sum(await asyncio.gather(*map(answers_as_store, others))) == (transport == "group"), seen
        files = list((folder / "logs").glob("*.store"))
        assert [file.stat().st_mode & 0o777 for file in files] == [0o600, 0o600]  # of the server, and of both ranks
        assert all(file.stat().st_size for file in files)

        # Paths: real ranks write where the run does, and nowhere else.
        (folder / "checkpoints" / "link").symlink_to(tmp_path)
        for target in (
            tmp_path / "out",
            folder / "checkpoints/../../out",
            folder / "checkpoints/link/out",
            folder / "out",
        ):
            with pytest.raises(TrainerError, match="is in none of"):
                await trainer.export(str(target))
        assert not (tmp_path / "out").exists()
        (folder / "checkpoints" / "link").unlink()

    assert list(folder.rglob("*.store")) == []

    # Only this user may enter the folders and connect to the sockets.
    assert any(stat.S_ISSOCK(mode) for mode in private.values())
    assert (transport == "disk") == any(stat.S_ISDIR(mode) for mode in private.values())
    assert {path: oct(mode) for path, mode in private.items() if mode & 0o077} == {}
    for name in (".", "logs", "ledger", "checkpoints"):
        assert (folder / name).stat().st_mode & 0o777 == 0o700
    assert {f.name: oct(f.stat().st_mode) for f in (folder / "ledger").iterdir() if f.stat().st_mode & 0o077} == {}

    # Secrets, and the keys of this very run, are in no file and on no command line.
    secrets = [*SECRETS.values(), key, token]
    assert len(set(secrets)) == len(secrets)
    assert all(len(secret) > 16 for secret in secrets)
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert {"config.toml", "ledger.db", "server-0.log", "trainer-1.log"} <= {file.name for file in files}
    assert failed
    for secret in secrets:
        assert [file for file in files if secret.encode() in file.read_bytes()] == []
        assert not any(secret in word for word in words)
    assert b"<HF_TOKEN>" in b"".join(file.read_bytes() for file in (folder / "ledger").iterdir())
    assert "'api_key': '***'" in (folder / "logs/server-0.log").read_text()


PATHS = [
    ("GET", "/health"),
    ("GET", "/health_generate"),
    ("GET", "/metrics"),
    ("GET", "/model_info"),
    ("GET", "/server_info"),
    ("GET", "/v1/models"),
    ("GET", "/docs"),
    ("OPTIONS", "/generate"),
    ("POST", "/generate"),
    ("POST", "/abort_request"),
    ("POST", "/flush_cache"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/update_weights_from_tensor"),
    ("POST", "/init_weights_update_group"),
    ("POST", "/pause_generation"),
]


async def test_a_real_server_refuses_whoever_has_no_key(sglang_server: Server) -> None:
    wrong = ["", "Bearer", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", f"bearer{KEY}", "Bearer schlüssel"]
    async with aiohttp.ClientSession(sglang_server.url) as session:
        for method, path in PATHS:
            for authorization in (None, *wrong):
                headers = {} if authorization is None else {"Authorization": authorization}
                async with session.request(method, path, headers=headers) as response:
                    assert response.status == 401, (method, path, authorization)
        async with session.get("/health", headers={"Authorization": f"Bearer {KEY}"}) as response:
            assert response.status == 200


def test_another_address_of_this_machine_is_closed(sglang_server: Server) -> None:
    port = int(sglang_server.url.rpartition(":")[2])
    others = [
        a.address for addresses in psutil.net_if_addrs().values() for a in addresses if a.family == socket.AF_INET
    ]
    for address in others:
        if not ipaddress.ip_address(address).is_loopback:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), timeout=5)


@pytest.mark.timeout(400)
def test_a_server_does_not_start_without_a_key(tiny_qwen3: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "AREAL_SERVER_KEY"}
    words = [sys.executable, "-m", "areal.workers.sglang.cpu_server", "--model-path", str(tiny_qwen3), "--port", "1"]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert "AREAL_SERVER_KEY is not set" in ended.stderr
