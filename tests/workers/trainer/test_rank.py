"""A rank's HTTP server and its threads, with an engine that only waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest

from areal.errors import TrainerError
from areal.workers.trainer import wire
from areal.workers.trainer.rank import Rank

Post = Callable[[str], Awaitable[tuple[int, bytes]]]
TIMEOUT_S = 20.0


class Engine:
    attempt = version = 0

    def __init__(self) -> None:
        self.busy, self.free = threading.Event(), threading.Event()

    def specs(self) -> list[object]:
        self.busy.set()
        assert self.free.wait(TIMEOUT_S)
        return []

    def stage(self, folder: str) -> None:
        raise TrainerError("half a step")

    def write(self, folder: str) -> None:
        if folder == "full":
            raise TrainerError("no room")


@pytest.fixture
async def rank() -> AsyncIterator[tuple[Engine, Post]]:
    engine = Engine()
    rank = Rank(engine, None, "secret")  # type: ignore[arg-type]
    threading.Thread(target=rank.run, daemon=True).start()
    url = f"http://127.0.0.1:{rank.serve()}"
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as session:

        async def post(path: str) -> tuple[int, bytes]:
            name, _, folder = path.partition(" ")
            async with session.post(f"{url}/{name}", data=wire.pack({"folder": folder})) as response:
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
