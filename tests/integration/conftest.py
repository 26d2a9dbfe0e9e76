"""One real SGLang server at a time, shared by the tests that only need one to talk to."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from areal.config import Config
from areal.workers.process import Child, free_port
from areal.workers.rollout.client import SGLangClient, make_label
from areal.workers.rollout.launcher import launch_server, wait_ready
from tests.models import VOCAB_SIZE

ORIGIN = "test.0"
LABEL = make_label(ORIGIN, 0)
START_TIMEOUT_S = 240.0
KEY = "the key of servers of tests"
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


@dataclass(frozen=True)
class Server:
    """A server that is ready. `model` is the folder whose weights it holds at the start of each test."""

    url: str
    child: Child
    model: Path

    def get(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers=HEADERS)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), HEADERS)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


class ServerSlot:
    """Holds at most one running server; asking for another model, or after a death, replaces it."""

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._started = 0
        self._server: Server | None = None

    def serve(self, model: Path) -> Server:
        """The running server of `model`, with its first weights and label; starts one where needed."""
        server = self._server
        if server is None or server.child.returncode is not None or server.model != model:
            self.stop()
            server = self._server = asyncio.run(self._start(model))
        elif server.get("/model_info")["weight_version"] != LABEL:
            body = {"model_path": str(model), "weight_version": LABEL, "abort_all_requests": True}
            assert server.post("/update_weights_from_disk", body)["success"]
        return server

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            asyncio.run(server.child.stop())

    async def _start(self, model: Path) -> Server:
        port = free_port()
        config = Config.load(["servers.max_total_tokens=16384"])
        child = await launch_server(
            config, self._started, key=KEY, model_path=model, label=LABEL, log_folder=self._log_folder, port=port
        )
        self._started += 1
        url = f"http://127.0.0.1:{port}"
        try:
            client = SGLangClient(url, origin=ORIGIN, vocab_size=VOCAB_SIZE, key=KEY)
            try:
                await wait_ready(client, child, START_TIMEOUT_S)
            finally:
                await client.close()
        except BaseException:
            await child.stop()
            raise
        return Server(url, child, model)


@pytest.fixture(scope="session")
def server_slot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSlot]:
    """For tests that need a server of a model of their own: `server_slot.serve(folder)`."""
    slot = ServerSlot(tmp_path_factory.mktemp("servers"))
    yield slot
    slot.stop()


@pytest.fixture
def sglang_server(server_slot: ServerSlot, tiny_qwen3: Path) -> Server:
    """A real SGLang server of the tiny Qwen3, ready, with its first weights. Fails where it cannot start."""
    return server_slot.serve(tiny_qwen3)
