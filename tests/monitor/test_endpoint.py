"""The endpoint of a run: who may ask, what comes back, what a person is told when there is nobody to answer."""

from __future__ import annotations

import asyncio
import json
import stat
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from areal.errors import ArealError, ConfigError
from areal.monitor.endpoint import FILE, MAX_BODY_BYTES, Endpoint, ask


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    async def echo(body: Any) -> Any:
        return {"got": body}

    async def refuse(body: Any) -> Any:
        raise ConfigError("servers.count=0: must be 1 or more")

    async def fail(body: Any) -> Any:
        raise ArealError("the run is over")

    async with Endpoint(tmp_path, {"POST /echo": echo, "POST /refuse": refuse, "GET /fail": fail}):
        yield tmp_path
    assert not (tmp_path / FILE).exists()


async def test_an_answer_and_both_kinds_of_error(folder: Path) -> None:
    assert await asyncio.to_thread(ask, folder, "POST", "/echo", {"count": 3}) == {"got": {"count": 3}}
    assert await asyncio.to_thread(ask, folder, "POST", "/echo") == {"got": None}
    with pytest.raises(ConfigError, match="must be 1 or more"):
        await asyncio.to_thread(ask, folder, "POST", "/refuse", {})
    with pytest.raises(ArealError, match="the run is over") as caught:
        await asyncio.to_thread(ask, folder, "GET", "/fail")
    assert not isinstance(caught.value, ConfigError)


def status_of(folder: Path, path: str, token: str | None, body: bytes = b"") -> int:
    headers = {} if token is None else {"Authorization": token}
    request = urllib.request.Request(json.loads((folder / FILE).read_text())["url"] + path, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("path", ["/echo", "/nothing", "/"])
async def test_every_path_needs_the_token(folder: Path, path: str) -> None:
    token = json.loads((folder / FILE).read_text())["token"]
    for given in (None, "", "Bearer ", "Bearer wrong", token, f"Bearer {token[:-1]}", "Bearer \xff"):
        assert await asyncio.to_thread(status_of, folder, path, given) == 401
    assert await asyncio.to_thread(status_of, folder, path, f"Bearer {token}") == (200 if path == "/echo" else 404)


async def test_only_the_user_reads_the_token_and_each_start_has_its_own(folder: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o600
    first = json.loads((folder / FILE).read_text())["token"]
    async with Endpoint(folder, {}):
        assert json.loads((folder / FILE).read_text())["token"] != first


async def test_bodies_that_are_no_json_or_too_long_are_refused(folder: Path) -> None:
    token = f"Bearer {json.loads((folder / FILE).read_text())['token']}"
    assert await asyncio.to_thread(status_of, folder, "/echo", token, b"{") == 400
    assert await asyncio.to_thread(status_of, folder, "/echo", token, b"[" * (MAX_BODY_BYTES + 1)) == 413


async def test_a_run_that_is_over_or_was_killed_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(ArealError, match=r"is not a run in progress: it has no endpoint\.json"):
        ask(tmp_path, "GET", "/status")
    (tmp_path / FILE).write_text("[]")
    with pytest.raises(ArealError, match="is not a run in progress"):
        ask(tmp_path, "GET", "/status")
    async with Endpoint(tmp_path, {}):
        left = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(left)
    with pytest.raises(ArealError, match=r"does not answer at http://127\.0\.0\.1:\d+ .*killed; resume it with: areal"):
        ask(tmp_path, "GET", "/status")


async def test_the_end_does_not_wait_for_a_handler_that_hangs(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def hang(body: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    async with Endpoint(tmp_path, {"GET /hang": hang}):
        asked = asyncio.create_task(asyncio.to_thread(ask, tmp_path, "GET", "/hang", None, 60.0))
        await begun.wait()
        leaving = loop.time()
    assert loop.time() - leaving < 30
    with pytest.raises((ArealError, OSError)):
        await asked
