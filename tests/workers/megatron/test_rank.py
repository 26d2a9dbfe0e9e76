"""A rank's HTTP server and its threads, with an engine that only waits."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from areal.errors import TrainerError
from areal.workers.megatron import wire
from areal.workers.megatron.rank import Rank

Post = Callable[[str], Awaitable[tuple[int, bytes]]]
TIMEOUT_S = 20.0


class Engine:
    life = version = 0

    def __init__(self) -> None:
        self.busy, self.free = threading.Event(), threading.Event()
        self.exported: list[str] = []
        self.url = ""

    def specs(self) -> list[object]:
        self.busy.set()
        assert self.free.wait(TIMEOUT_S)
        return []

    def stage(self, folder: str) -> None:
        raise TrainerError("half a step")

    def write(self, folder: str) -> None:
        if folder.endswith("full"):
            raise TrainerError("no room")

    def export(self, folder: str) -> None:
        self.exported.append(folder)


@pytest.fixture
async def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Engine, Post]]:
    """It works in a folder inside of tmp_path, and may write in that only."""
    (tmp_path / "root").mkdir()
    monkeypatch.chdir(tmp_path / "root")
    engine = Engine()
    rank = Rank(engine, None, "secret", ["."])  # type: ignore[arg-type]
    threading.Thread(target=rank.run, daemon=True).start()
    url = engine.url = f"http://127.0.0.1:{rank.serve()}"
    headers = {"Authorization": "Bearer secret"}
    async with aiohttp.ClientSession(url, headers=headers) as session:

        async def post(path: str) -> tuple[int, bytes]:
            name, _, folder = path.partition(" ")
            async with session.post(f"/{name}", data=wire.pack({"folder": folder})) as response:
                return response.status, await response.read()

        yield engine, post
    engine.free.set()


async def test_a_checkpoint_is_written_while_the_main_thread_works(rank: tuple[Engine, Post]) -> None:
    engine, post = rank
    working = asyncio.create_task(post("specs"))
    assert await asyncio.to_thread(engine.busy.wait, TIMEOUT_S)
    async with asyncio.timeout(TIMEOUT_S / 2):
        assert (await post("write there"))[0] == 200
        status, answer = await post("write full")
        assert (status, b"no room" in answer) == (500, True)
        assert (await post("write there"))[0] == 200
    assert not working.done()
    engine.free.set()
    assert (await working)[0] == 200
    status, answer = await post("stage there")
    assert (status, b"half a step" in answer) == (500, True)
    assert (await post("specs"))[0] == 200


async def test_a_failure_is_answered_though_it_cannot_be_logged(
    rank: tuple[Engine, Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log may be on the disk that is full."""

    def full() -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("traceback.print_exc", full)
    _, post = rank
    async with asyncio.timeout(TIMEOUT_S):
        for path in ("write full", "stage there"):
            for _ in range(2):
                assert (await post(path))[0] == 500


@pytest.mark.parametrize("route", ["export", "stage"])
async def test_a_folder_outside_of_the_roots_is_refused(rank: tuple[Engine, Post], tmp_path: Path, route: str) -> None:
    """Outright, by `..`, by a symbolic link, and the root itself."""
    engine, post = rank
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    for folder in (
        "/tmp/elsewhere",
        "../elsewhere",
        "a/../../elsewhere",
        "link/elsewhere",
        "link",
        ".",
        f"{tmp_path}/root-2",
    ):
        status, answer = await post(f"{route} {folder}")
        assert status == 500
        assert json.loads(answer)["kind"] == "TrainerError"
        assert f"{folder!r} is in none of ['{tmp_path}/root']" in json.loads(answer)["error"]
    assert engine.exported == []
    assert (await post("export a/../b"))[0] == 200
    assert engine.exported == [str(tmp_path / "root" / "b")]


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer ", "Bearer secre", "Bearer secrets", "Bearer sécret"]
)
async def test_every_route_asks_for_the_token(rank: tuple[Engine, Post], authorization: str | None) -> None:
    engine, _ = rank
    application = Rank(engine, None, "secret", [])._application()  # type: ignore[arg-type]
    routes = {(route.method, route.resource.canonical) for route in application.router.routes() if route.resource}
    assert len(routes) >= 11
    headers = {} if authorization is None else {"Authorization": authorization}
    async with aiohttp.ClientSession(engine.url, headers=headers) as session:
        for method, path in [*routes, ("GET", "/nowhere"), ("POST", "/health")]:
            async with session.request(method, path, data=b"" if method == "POST" else None) as response:
                assert response.status == 401, path
    assert not engine.busy.is_set()
    assert engine.exported == []
