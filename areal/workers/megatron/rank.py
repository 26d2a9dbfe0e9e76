"""One trainer rank: `python -m areal.workers.megatron.rank SETTINGS`, where SETTINGS are RankSettings as JSON.

An HTTP server on a thread receives requests from the controller; the main thread processes them one by one, and a third
thread writes checkpoints. Expects torchrun's RANK and WORLD_SIZE, the rendezvous file of the ranks in AREAL_STORE, and
the token in AREAL_TRAINER_TOKEN. Once the model is loaded, the rank sends its address to `settings.register`.

    POST /train /logprobs /export /stage /write /specs /join_group /broadcast /leave_group    GET /health

Errors have status 409 (VersionConflict), 401 (wrong token), 400 (malformed body) or 500, and JSON with `error` (the
message), `kind` (the class) and `traceback`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import queue
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from aiohttp import web

from areal.errors import TrainerError, VersionConflict
from areal.workers.guard import die_with_guard
from areal.workers.megatron import wire
from areal.workers.protocols import WeightGroup

if TYPE_CHECKING:
    from areal.workers.megatron.engine import Engine
    from areal.workers.megatron.sender import Sender

HOST = "127.0.0.1"
Job = tuple[Callable[[], bytes], "Future[bytes]"]
Action = Callable[[bytes], bytes | None]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Rank:
    """Turns HTTP requests into jobs for the main thread. roots: the only folders that it may write to."""

    def __init__(self, engine: Engine, sender: Sender, token: str, roots: Sequence[Path | str]) -> None:
        self._engine, self._sender, self._token = engine, sender, token
        self._roots = [Path(root).resolve() for root in roots]
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Job] = queue.SimpleQueue()

    def run(self) -> None:
        """Process jobs for ever. Call it from the main thread."""
        threading.Thread(target=self._work, args=(self._writes,), name="write", daemon=True).start()
        self._work(self._jobs)

    def _work(self, jobs: queue.SimpleQueue[Job]) -> None:
        while True:
            _do(*jobs.get())

    def serve(self) -> int:
        """Start the HTTP server on its own thread; returns its port."""
        port: Future[int] = Future()
        threading.Thread(target=self._serve, args=(port,), name="http", daemon=True).start()
        return port.result()

    def _serve(self, port: Future[int]) -> None:
        async def main() -> None:
            try:
                runner = web.AppRunner(self._application(), handler_cancellation=True, access_log=None)
                await runner.setup()
                site = web.TCPSite(runner, HOST, 0)
                await site.start()
            except BaseException as error:
                port.set_exception(error)
                raise
            port.set_result(runner.addresses[0][1])
            await asyncio.Event().wait()

        asyncio.run(main())

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._authorise], client_max_size=0)
        application.router.add_get("/health", self._health)
        for name, action in self._actions().items():
            jobs = self._writes if name == "write" else self._jobs
            application.router.add_post(f"/{name}", self._handler(action, jobs))
        return application

    def _actions(self) -> dict[str, Action]:
        engine, sender = self._engine, self._sender

        def meta(body: bytes) -> dict[str, Any]:
            return wire.unpack(body)[0]

        return {
            "train": lambda body: wire.pack_stats(engine.train(wire.unpack_request(body))),
            "logprobs": lambda body: wire.pack_sequences(engine.logprobs(wire.unpack_sequences(body)), np.float32),
            "export": lambda body: engine.export(self._inside(meta(body)["folder"])),
            "stage": lambda body: engine.stage(self._inside(meta(body)["folder"])),
            "write": lambda body: engine.write(str(Path(meta(body)["folder"]).resolve())),  # `stage` has checked it
            "specs": lambda _: wire.pack_specs(engine.specs()),
            "join_group": lambda body: sender.join(WeightGroup(**meta(body))),
            "broadcast": lambda body: sender.broadcast(meta(body)["group"], engine.tensors()),
            "leave_group": lambda body: sender.leave(meta(body)["group"]),
        }

    @web.middleware
    async def _authorise(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return _failure(401, TrainerError("wrong token"))
        return await handler(request)

    def _handler(self, action: Action, jobs: queue.SimpleQueue[Job]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            body = await request.read()
            future: Future[bytes] = Future()
            jobs.put((lambda: action(body) or wire.pack({}), future))
            try:
                return web.Response(body=await asyncio.wrap_future(future))
            except VersionConflict as error:
                return _failure(409, error)
            except wire.WireError as error:
                return _failure(400, error)
            except Exception as error:
                return _failure(500, error)

        return handle

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"pid": os.getpid(), "life": self._engine.life, "version": self._engine.version})

    def _inside(self, given: str) -> str:
        """The folder `given`, without links and `..`. Raises TrainerError if it is not inside a root."""
        folder = Path(given).resolve()
        if not any(root in folder.parents for root in self._roots):
            raise TrainerError(f"{given!r} is in none of {[str(root) for root in self._roots]}, where ranks may write")
        return str(folder)


def _do(job: Callable[[], bytes], future: Future[bytes]) -> None:
    if not future.set_running_or_notify_cancel():  # the client has disconnected
        return
    try:
        future.set_result(job())
    except Exception as error:
        future.set_exception(error)
        with contextlib.suppress(OSError):  # the disk of the log may be full
            traceback.print_exc()


def _failure(status: int, error: Exception) -> web.Response:
    body: dict[str, Any] = {
        "error": str(error),
        "kind": type(error).__name__,
        "traceback": "".join(traceback.format_exception(error)),
    }
    return web.json_response(body, status=status)


def main(settings: wire.RankSettings) -> None:
    die_with_guard()
    token = os.environ.pop(wire.TOKEN)
    warnings.filterwarnings("ignore", module="megatron")  # about missing optional packages
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a checkpoint is saved by one rank
    from areal.workers.megatron import cpu

    on_cpu = cpu.install()
    cpu.fix_adam_state()
    import torch
    import torch.distributed as dist

    from areal.workers.megatron.engine import Engine
    from areal.workers.megatron.sender import Sender
    from areal.workers.store import STORE

    if not on_cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=settings.timeout_s)
    store = dist.FileStore(os.environ[STORE], size)
    store.set_timeout(timeout)
    dist.init_process_group("gloo" if on_cpu else "nccl", store=store, rank=number, world_size=size, timeout=timeout)
    rank = Rank(Engine(settings), Sender(settings.group_timeout_s), token, settings.roots)
    port = rank.serve()
    register(settings.register, {"token": token, "rank": dist.get_rank(), "url": f"http://{HOST}:{port}"})
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} is ready at port {port}", flush=True)
    rank.run()


def register(address: str, message: dict[str, Any]) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(json.dumps(message).encode() + b"\n")


def to_json(settings: wire.RankSettings) -> str:
    return json.dumps(asdict(settings))


if __name__ == "__main__":
    main(wire.RankSettings(**json.loads(sys.argv[1])))
