"""Real SGLang servers and real Megatron ranks, each started once and shared by the tests that leave them whole."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from areal.config import Config
from areal.workers.megatron.client import HttpTrainer
from areal.workers.megatron.launcher import start_trainer
from areal.workers.process import Child, free_port
from areal.workers.protocols import make_label
from areal.workers.sglang.client import SGLangClient
from areal.workers.sglang.launcher import launch_server, wait_ready
from areal.workers.sglang.server import SERVER_KEY
from tests.models import VOCAB_SIZE

ORIGIN = "test.0"
LABEL = make_label(ORIGIN, 0)
START_TIMEOUT_S = 240.0
KEY = "the key of servers of tests"
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
MODULES = (
    "test_logprobs",  # the servers of other models come first, for the others to share one that stays
    "test_weights",
    "test_fleet",
    "test_kill",
    "test_run",
    "test_security",
    "test_doctor",
    "test_checkpoint",
    "test_trainer",
    "test_embedded_service",
    "test_launch",  # its last test kills the shared server
)
"""Long tests first, so that at the end no process waits for another's."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that share something run in one process of pytest-xdist, and all in the order of MODULES.

    pytest-xdist tells groups by the end of a test's name. Its own mark, xdist_group, has no effect in version 3.8: it
    sets an attribute that pytest 9.2 does not read.
    """
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    if hasattr(config, "workerinput"):
        for item in ours:
            if group := next((name for name in ("server_slot", "rank_slot") if name in item.fixturenames), None):
                item._id = type(item._id).parse(f"{item.nodeid}@{group}")
    ours.sort(key=lambda item: MODULES.index(item.path.stem))
    items[:] = [item for item in items if item not in set(ours)] + ours


@dataclass(frozen=True)
class Server:
    """A server that is ready. `model` is the folder whose weights it holds at the start of each test."""

    url: str
    child: Child
    model: Path
    start_s: float
    """How long its start took, a measure of this machine and of what else runs on it."""

    def get(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers=HEADERS)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), HEADERS)
        with urllib.request.urlopen(request, timeout=120) as answer:
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
        began = time.monotonic()
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
        return Server(url, child, model, time.monotonic() - began)


@pytest.fixture(scope="session")
def server_slot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSlot]:
    """For tests that need a server of a model of their own: `server_slot.serve(folder)`."""
    slot = ServerSlot(tmp_path_factory.mktemp("servers"))
    yield slot
    slot.stop()


@pytest.fixture(scope="session")
def second_slot(tmp_path_factory: pytest.TempPathFactory, server_slot: ServerSlot) -> Iterator[ServerSlot]:
    """For tests that need two servers."""
    slot = ServerSlot(tmp_path_factory.mktemp("servers"))
    yield slot
    slot.stop()


@pytest.fixture
def sglang_server(server_slot: ServerSlot, tiny_qwen3: Path) -> Server:
    """A real SGLang server of the tiny Qwen3, ready, with its first weights. Fails where it cannot start."""
    return server_slot.serve(tiny_qwen3)


@pytest.fixture
def given_server(sglang_server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings of a run on the shared server, which holds that run's weights afterwards."""
    monkeypatch.setenv(SERVER_KEY, KEY)
    return {"servers.urls": [sglang_server.url]}


@pytest.fixture
def given_servers(given_server: dict[str, Any], second_slot: ServerSlot, tiny_qwen3: Path) -> dict[str, Any]:
    """The same for two servers."""
    return {"servers.urls": [*given_server["servers.urls"], second_slot.serve(tiny_qwen3).url]}


@dataclass
class Ranks:
    """Running ranks between two tests."""

    urls: list[str]
    token: str
    children: list[Child]
    first_version: int


class RankSlot:
    """Keeps ranks running from test to test, one set for each model and settings, and replaces those that are not as
    a test needs them."""

    def __init__(self, base: Path, log_folder: Path) -> None:
        self._base = base
        self._log_folder = log_folder
        self._started = 0
        self._sets: dict[tuple[object, ...], Ranks] = {}

    @asynccontextmanager
    async def lend(self, model: Path, *settings: str, version: int | None = None) -> AsyncIterator[HttpTrainer]:
        """Ranks of life 0. version: they have the weights of `model` under this number; None: any weights and number,
        see `version_of`. A test that harms them calls `spoil`."""
        config = Config.load(settings)
        key = (model, *settings)
        ranks = self._sets.get(key)
        client: HttpTrainer | None = None
        if ranks is not None:
            client = HttpTrainer(
                ranks.urls,
                ranks.token,
                timeout_s=config.trainer.timeout_s,
                group_timeout_s=config.weights.timeout_s,
                children=ranks.children,
            )
            whole = all(child.returncode is None for child in ranks.children)
            if not whole or (version is not None and {version} != {ranks.first_version, await version_of(client)}):
                await client.close()
                client = None
        if client is None:
            first = version or 0
            logs = self._log_folder / str(self._started)
            self._started += 1
            roots = [self._base, "/proc"]
            client = await start_trainer(
                config, model_path=str(model), log_folder=logs, life=0, version=first, roots=roots
            )
            token = client._session.headers["Authorization"].split()[1]
            self._sets[key] = Ranks(client._urls, token, list(client._children), first)
        try:
            yield client
        finally:
            client._children = []  # they run on
            await client.close()

    async def spoil(self, client: HttpTrainer) -> None:
        """End ranks that no other test could use."""
        self._sets = {key: ranks for key, ranks in self._sets.items() if ranks.urls != client._urls}
        await client.close()

    def stop(self) -> None:
        for ranks in self._sets.values():
            for child in ranks.children:
                asyncio.run(child.stop())


async def version_of(client: HttpTrainer) -> int:
    """The version that the ranks hold."""
    async with client._session.get(f"{client._urls[0]}/health") as response:
        return (await response.json())["version"]


@pytest.fixture(scope="session")
def rank_slot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankSlot]:
    """For tests that leave their ranks whole: `async with rank_slot.lend(folder, ...) as client`."""
    slot = RankSlot(tmp_path_factory.getbasetemp(), tmp_path_factory.mktemp("ranks"))
    yield slot
    slot.stop()
