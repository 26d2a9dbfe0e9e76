"""areal/workers/sglang/launcher.py: I7 (no endless wait for a server), I10; what can be refused starts nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from areal.config import Config
from areal.errors import ConfigError, ProcessError
from areal.workers.process import Child, free_port
from areal.workers.sglang.client import SGLangClient
from areal.workers.sglang.launcher import check_model, command, environment, launch_server, wait_ready
from tests.models import VOCAB_SIZE

SLOW_TO_BIND = """
import sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if time.monotonic() < ready else 200)
        self.end_headers()

time.sleep(0.2)
server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
ready = time.monotonic() + 0.3
server.serve_forever()
"""
"""Refuses connections, then answers 503, then is ready: what SGLang does, only sooner."""


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
async def client(port: int) -> AsyncIterator[SGLangClient]:
    client = SGLangClient(f"http://127.0.0.1:{port}", origin="test.0", vocab_size=VOCAB_SIZE)
    yield client
    await client.close()


def child(tmp_path: Path, *words: str) -> Child:
    return Child.start("server 0", words, log=tmp_path / "server-0.log")


async def test_ready_when_the_health_check_says_so(tmp_path: Path, client: SGLangClient, port: int) -> None:
    server = child(tmp_path, sys.executable, "-c", SLOW_TO_BIND, str(port))
    began = time.monotonic()
    await wait_ready(client, server, 20)
    assert time.monotonic() - began >= 0.5
    assert server.returncode is None
    await server.stop()


async def test_a_server_that_ends_is_noticed_at_once(tmp_path: Path, client: SGLangClient) -> None:
    server = child(tmp_path, "sh", "-c", "echo CUDA out of luck; exit 9")
    began = time.monotonic()
    with pytest.raises(ProcessError, match=r"(?s)server 0 ended with code 9 before it was ready.*CUDA out of luck$"):
        await wait_ready(client, server, 60)
    assert time.monotonic() - began < 5


async def test_a_server_that_never_becomes_ready(tmp_path: Path, client: SGLangClient) -> None:
    """I7."""
    server = child(tmp_path, "sh", "-c", "echo loading shard 1; sleep 300")
    with pytest.raises(
        ProcessError, match=r"(?s)server 0 was not ready within servers.start_timeout_s=0\.4 s.*loading shard 1$"
    ):
        await wait_ready(client, server, 0.4)
    assert server.returncode is None, "ending it is the caller's"
    await server.stop()


async def test_a_health_check_that_hangs_ends_at_the_deadline(tmp_path: Path, client: SGLangClient, port: int) -> None:
    """I7. Something accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", port)):
        server = child(tmp_path, "sleep", "300")
        with pytest.raises(ProcessError, match="was not ready within"):
            await asyncio.wait_for(wait_ready(client, server, 0.4), 5)
        await server.stop()


async def launch(model: Path, folder: Path, port: int, *settings: str) -> Child:
    return await launch_server(
        Config.load(settings), 0, key="k", model_path=model, label="test.0:0", log_folder=folder, port=port
    )


async def test_a_taken_port_starts_nothing(tiny_qwen3: Path, tmp_path: Path, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError, match=f"port {port}"):
        await launch(tiny_qwen3, tmp_path, port)
    assert not list(tmp_path.iterdir())


async def test_a_missing_model_starts_nothing(tmp_path: Path, port: int) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*No such file"):
        await launch(tmp_path / "nowhere", tmp_path, port)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", ["tiny_qwen2", "tiny_qwen3", "tiny_llama"])
def test_models_of_all_families_pass(model: str, request: pytest.FixtureRequest) -> None:
    check_model(request.getfixturevalue(model), 4096)


def test_a_context_longer_than_the_models(tiny_qwen3: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.context_length=4097 is more than the 4096 positions"):
        check_model(tiny_qwen3, 4097)


@pytest.fixture
def copy(tiny_qwen3: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_qwen3, tmp_path / "copy"))


def test_another_family(copy: Path) -> None:
    (copy / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ConfigError, match="model_type='mamba'"):
        check_model(copy)


def test_weights_that_are_missing(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "part-1.safetensors")
    with pytest.raises(ConfigError, match=r"has no weights: model\.safetensors is missing"):
        check_model(copy)
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}))
    with pytest.raises(ConfigError, match=r"part-2.safetensors is missing, which model.safetensors.index.json names"):
        check_model(copy)
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors"}}))
    check_model(copy)
    index.write_text("<html>")
    with pytest.raises(ConfigError, match=r"index.json: JSONDecodeError.*copy the model again"):
        check_model(copy)


def flags(words: list[str]) -> dict[str, str]:
    return {a: b for a, b in zip(words, [*words[1:], "--"], strict=True) if a.startswith("--")}


def test_every_setting_reaches_the_command_line() -> None:
    """I10."""
    config = Config.load(
        [
            "model.dtype=bfloat16",
            "model.context_length=2048",
            "servers.max_running=7",
            "servers.max_total_tokens=9999",
            "servers.args=['--chunked-prefill-size', '512']",
        ]
    )
    words = command(config, model_path=Path("/m"), label="run.1:5", port=1234)
    assert words[:3] == [sys.executable, "-m", "areal.workers.sglang.cpu_server"]
    assert words[-2:] == ["--chunked-prefill-size", "512"]
    expected = {
        "--model-path": "/m",
        "--host": "127.0.0.1",
        "--port": "1234",
        "--dtype": "bfloat16",
        "--weight-version": "run.1:5",
        "--max-running-requests": "7",
        "--max-total-tokens": "9999",
        "--context-length": "2048",
    }
    assert flags(words).items() >= expected.items()


def test_the_stock_launcher_serves_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words = command(Config(), model_path="/m", label="a.0:0", port=1, devices=(2, 3))
    assert words[2] == "areal.workers.sglang.server"
    assert flags(words)["--tp-size"] == "2"
    assert "--max-total-tokens" not in words, "SGLang knows the size of the device"
    assert "--context-length" not in words
    assert environment((2, 3))["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_a_cpu_server_has_one_thread_and_a_bounded_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    words = command(Config(), model_path="/m", label="a.0:0", port=1)
    assert flags(words)["--max-total-tokens"] == "32768"
    assert environment()["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert environment()["OMP_NUM_THREADS"] == "4"
