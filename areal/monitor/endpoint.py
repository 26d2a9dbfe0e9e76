"""The HTTP endpoint of a running run, by which `areal status`, `areal servers` and `areal stop` reach it.

It listens on loopback. Its address and its token are in `endpoint.json` in the run folder, which only the user who
started the run can read; every request needs the token.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web

from areal.errors import ArealError, ConfigError

FILE = "endpoint.json"
HOST = "127.0.0.1"
MAX_BODY_BYTES = 1 << 20
Handler = Callable[[Any], Awaitable[Any]]
"""Gets the JSON of the request's body (None without one), returns the JSON of the answer."""


class Endpoint:
    """Use as `async with`. routes: "METHOD /path" -> handler. An ArealError of a handler becomes the answer's error."""

    def __init__(self, folder: Path, routes: Mapping[str, Handler]) -> None:
        self._file = folder / FILE
        self._routes = routes
        self._token = secrets.token_urlsafe(32)

    async def __aenter__(self) -> Self:
        """Raises OSError when no port can be had, or the file cannot be written."""
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._authorized])
        for route, handler in self._routes.items():
            method, path = route.split()
            application.router.add_route(method, path, _answering(handler))
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, HOST, 0)
            await site.start()
            address = self._runner.addresses[0]
            known = {"url": f"http://{HOST}:{address[1]}", "token": self._token}
            await asyncio.to_thread(self._write, orjson.dumps(known))
        except BaseException:
            await self._runner.cleanup()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._file.unlink(missing_ok=True)
        await self._runner.cleanup()

    def _write(self, content: bytes) -> None:
        temporary = self._file.with_name(f".{FILE}")
        temporary.unlink(missing_ok=True)  # its mode could be another
        with open(temporary, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(content)
        temporary.replace(self._file)

    @web.middleware
    async def _authorized(self, request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return web.json_response({"error": f"the token of {FILE} is needed"}, status=401)
        return await handler(request)


def _answering(handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        body = await request.read()
        try:
            result = await handler(orjson.loads(body) if body else None)
        except orjson.JSONDecodeError as error:
            return web.json_response({"error": f"the body is not JSON: {error}"}, status=400)
        except ArealError as error:
            return web.json_response({"error": str(error)}, status=400 if isinstance(error, ConfigError) else 409)
        return web.Response(body=orjson.dumps(result), content_type="application/json")

    return answer


def ask(folder: Path, method: str, path: str, body: Any = None, timeout_s: float | None = 10.0) -> Any:
    """Send one request to the run in `folder`, and return the JSON of its answer. Blocks.

    timeout_s: between two signs of life; None waits as long as a change takes.

    Raises ArealError when the run is not in progress, and ConfigError or ArealError with what the run refused.
    """
    try:
        known = orjson.loads((folder / FILE).read_bytes())
        url, headers = known["url"], {"Authorization": f"Bearer {known['token']}"}
    except (OSError, ValueError, LookupError, TypeError):
        raise ArealError(f"{folder} is not a run in progress: it has no {FILE}; look into runs/") from None
    data = None if body is None else orjson.dumps(body)
    request = urllib.request.Request(url + path, data, headers, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback needs no proxy
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return orjson.loads(answer.read())
    except urllib.error.HTTPError as error:
        text = error.read()
        with suppress(ValueError, LookupError, TypeError):
            text = orjson.loads(text)["error"]
        raise (ConfigError if error.code == 400 else ArealError)(str(text)) from None
    except OSError as error:
        raise ArealError(
            f"the run in {folder} does not answer at {url} ({error}): it was killed; resume it with: "
            f"areal resume {folder}"
        ) from None
