"""An aiohttp server that speaks SGLang's HTTP, samples by arithmetic, and fails on demand.

    async with FakeServer(label="run.0:0") as server:
        server.faults["/generate"] = ["500", "drop"]        # the next two requests

The next token is a function of the prefix and the version (`next_token`), its log-prob too (`logprob`, exact in
float32): so a test can say what a completion must be, token by token, whatever happened to it on the way.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from aiohttp import web

from areal.errors import TrainerError
from areal.types import Completion, Floats, Generation, Ints, TensorSpec
from areal.workers.protocols import WeightGroup

VOCAB = 101
EOS = 100
"""Never sampled by `next_token`; `FakeServer.eos_at` puts it at the end of an answer."""
ORIGIN = "run.0"


def next_token(prefix: Sequence[int], version: int) -> int:
    return (sum(prefix) * 5 + len(prefix) * 3 + version * 11 + 1) % EOS


def logprob(prefix: Sequence[int], token: int, version: int) -> float:
    return -((sum(prefix) + 3 * token + 7 * version) % 97 + 1) / 16


def score(ids: Sequence[int], version: int) -> Floats:
    return np.array([0.0, *(logprob(ids[:i], ids[i], version) for i in range(1, len(ids)))], np.float32)


def sampled(prompt: Sequence[int], versions: Sequence[int]) -> tuple[list[int], list[float]]:
    """The ids and log-probs that servers must have sampled after `prompt`, one token per entry of versions."""
    ids, logprobs = list(prompt), []
    for version in versions:
        token = next_token(ids, version)
        logprobs.append(logprob(ids, token, version))
        ids.append(token)
    return ids[len(prompt) :], logprobs


def write_version(folder: Path, version: int) -> str:
    """What an export is here."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "version").write_text(str(version))
    return str(folder)


def read_version(folder: str) -> int:
    return int(Path(folder, "version").read_text())


def check(piece: Completion | Generation, prompt: Sequence[int], count: int) -> list[int]:
    """Assert that every token and log-prob is what its own version samples; return the versions (I5, I6)."""
    versions = piece.versions.tolist()
    ids, logprobs = sampled(prompt, versions)
    assert piece.output_ids.tolist() == ids
    assert piece.logprobs.tolist() == logprobs
    assert len(ids) == count
    return versions


@dataclass(eq=False)
class Running:
    prompt: list[int]
    out: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class FakeServer:
    """token_s: seconds a token takes. faults[path]: for the next requests there, in order: "500", "garbage", "drop"
    (the connection), "hang", "ok"; for /generate also "short" (log-probs), "keys", "empty", "foreign" (label), and
    "wrong" (a log-prob of another token); for an abort "late"; for a load "not flushed", "refuse", "wrong" (other
    weights than said).
    register_s: time before a request is known to aborts. abort_s: time from an abort to its effect. key: what each
    request must have as its API key; "" asks for none.
    """

    def __init__(self, label: str = f"{ORIGIN}:0", *, token_s: float = 0.0, eos_at: int | None = None) -> None:
        self.label = self.scheduler_label = label
        self.version = int(label.rpartition(":")[2]) if ":" in label else 0
        self.token_s = token_s
        self.eos_at = eos_at
        self.register_s = 0.0
        self.abort_s = 0.0
        self.load_s = 0.0
        self.faults: dict[str, list[str]] = {}
        self.running: dict[str, Running] = {}
        self.count: Counter[str] = Counter()
        self.rids: list[str] = []
        self.aborts: list[tuple[float, str]] = []
        self.dirty = False
        self.in_session = False
        self.has_sessions = True
        self.groups: dict[str, WeightSource] = {}
        self.key = ""
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._hanging = asyncio.Event()
        self._changed = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """As if killed: connections break, running requests are lost."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        for connection in list(runner.server.connections):  # type: ignore[union-attr]
            if connection.transport:
                connection.transport.abort()
        self.running.clear()
        for source in self.groups.values():
            source.break_up()
        await runner.cleanup()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until condition() holds; it is looked at after each token and at the end of each request."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        self.count[path] += 1
        queue = self.faults.get(path)
        fault = queue.pop(0) if queue else "ok"
        if fault == "500":
            return web.json_response({"error": {"message": "out of order"}}, status=500)
        if fault == "garbage":
            return web.Response(body=b"\x00{not json")
        if fault == "drop":
            assert request.transport
            request.transport.abort()
            return web.Response()
        if fault == "hang":
            await self._hanging.wait()
        if path == "/generate":
            return await self._generate(request, fault)
        body = json.loads(await request.text() or "{}")
        handler = getattr(self, "_" + path.strip("/").replace("/", "_"), None)
        if handler is None:
            return web.Response(status=404)
        answer = await handler(body, fault)
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    async def _generate(self, request: web.Request, fault: str) -> web.Response:
        body = json.loads(await request.text())
        if "logprob_start_len" in body:
            ids = body["input_ids"]
            triples = [[None, ids[0], None]]
            triples += [[float(x), t, None] for x, t in zip(score(ids, self.version)[1:], ids[1:], strict=True)]
            return web.json_response({"output_ids": [1], "meta_info": {"input_token_logprobs": triples}})
        rid, settings = body["rid"], body["sampling_params"]
        self.rids.append(rid)
        run = Running(body["input_ids"])
        await asyncio.sleep(self.register_s)
        self.running[rid] = run
        limit = settings["max_new_tokens"]
        finish: dict[str, Any] = {"type": "length", "length": limit}
        try:
            while len(run.out) < limit:
                if fault == "half" and len(run.out) == limit // 2:
                    assert request.transport
                    request.transport.abort()
                    return web.Response()
                if self.token_s:
                    await asyncio.sleep(self.token_s)
                token = EOS if self.eos_at == len(run.out) else next_token(run.prompt + run.out, self.version)
                run.out.append(token)
                run.versions.append(self.version)
                await self._notify()
                if run.aborted.is_set():  # like SGLang: looked at before the end token
                    finish = {"type": "abort", "message": "Aborted"}
                    break
                if token == EOS and not settings["ignore_eos"]:
                    finish = {"type": "stop", "matched": EOS}
                    break
        finally:
            self.running.pop(rid, None)
            await self._notify()
        return web.json_response(self._answer(rid, run, finish, fault))

    def _answer(self, rid: str, run: Running, finish: dict[str, Any], fault: str) -> dict[str, Any]:
        triples, spans = [], []
        for i, (token, version) in enumerate(zip(run.out, run.versions, strict=True)):
            triples.append([logprob(run.prompt + run.out[:i], token, version), token, None])
            label = "other.0:3" if fault == "foreign" else f"{ORIGIN}:{version}"
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = i + 1
            else:
                spans.append({"version": label, "start": i, "end": i + 1})
        meta: dict[str, Any] = {"id": rid, "finish_reason": finish}
        if run.out:
            meta |= {"weight_versions": spans, "output_token_logprobs": triples, "cached_tokens": 3}
        if fault == "short":
            triples.pop()
        if fault == "wrong":
            triples[0][1] += 1
        if fault == "null":
            triples[0][0] = None
        if fault == "hole":
            spans[0]["start"] = 1
        if fault == "keys":
            del meta["weight_versions"]
        if fault == "empty":
            run.out, meta["output_token_logprobs"], meta["weight_versions"] = [], [], []
        return {"text": "", "output_ids": run.out, "meta_info": meta}

    async def _abort_request(self, body: dict[str, Any], fault: str) -> web.Response:
        if fault == "late":
            await asyncio.sleep(0.15)
        rid = body.get("rid", "")
        self.aborts.append((asyncio.get_running_loop().time(), rid or "all"))
        if rid in self.running or body.get("abort_all"):
            hit = [run for other, run in self.running.items() if body.get("abort_all") or other.startswith(rid)]
            if self.abort_s:
                asyncio.get_running_loop().call_later(self.abort_s, lambda: [run.aborted.set() for run in hit])
            else:
                for run in hit:
                    run.aborted.set()
        return web.Response()

    async def _health(self, body: dict[str, Any], fault: str) -> web.Response:
        return web.Response()

    async def _model_info(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        return {"model_path": "/model", "weight_version": self.label}

    async def _v1_models(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        return {"data": [{"id": "model", "max_model_len": 4096}]}

    async def _update_weights_from_disk(self, body: dict[str, Any], fault: str) -> web.Response:
        if fault == "refuse":
            return web.json_response({"success": False, "message": "Failed to get weights iterator"}, status=400)
        if body["abort_all_requests"]:
            await self._abort_request({"abort_all": True}, "")
        await self.until(lambda: not self.running)
        return await self._take(read_version(body["model_path"]), body["weight_version"], fault)

    async def _take(self, version: int, label: str, fault: str) -> web.Response:
        await asyncio.sleep(self.load_s)
        self.version = version + 1000 if fault == "wrong" else version
        self.scheduler_label = label
        if fault == "not flushed":
            self.dirty = True
            message = "Weights were updated, but the cache was not flushed because requests are still running"
            return web.json_response({"success": False, "message": message}, status=400)
        self.label = label
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def _flush_cache(self, body: dict[str, Any], fault: str) -> web.Response:
        if self.running or fault == "busy":
            return web.Response(text="Flush cache failed.", status=400)
        self.dirty = False
        return web.Response(text="Cache flushed.")

    async def _update_weight_version(self, body: dict[str, Any], fault: str) -> web.Response:
        assert body["abort_all_requests"] is False
        self.label = body["new_version"]
        return web.json_response({"success": True})

    async def _begin_weight_update(self, body: dict[str, Any], fault: str) -> web.Response:
        if not self.has_sessions:
            return web.Response(status=404)
        if self.in_session:
            message = "a weight-update session is already open; call end_weight_update() first"
            return web.json_response({"success": False, "message": message}, status=400)
        self.in_session = True
        return web.json_response({"success": True, "message": "Success"})

    async def _end_weight_update(self, body: dict[str, Any], fault: str) -> web.Response:
        success, self.in_session = self.in_session, False
        return web.json_response({"success": success, "message": "session"}, status=200 if success else 400)

    async def _init_weights_update_group(self, body: dict[str, Any], fault: str) -> web.Response:
        if fault == "refuse":
            return web.json_response({"success": False, "message": "no such interface"}, status=400)
        source = WeightSource.all[body["master_port"]]
        await source.join()
        self.groups[body["group_name"]] = source
        return web.json_response({"success": True, "message": "joined"})

    async def _destroy_weights_update_group(self, body: dict[str, Any], fault: str) -> web.Response:
        source = self.groups.pop(body["group_name"], None)
        if source:
            source.break_up()
        return web.json_response({"success": bool(source), "message": "group"}, status=200 if source else 400)

    async def _update_weights_from_distributed(self, body: dict[str, Any], fault: str) -> web.Response:
        if self.has_sessions and not self.in_session:
            return web.json_response({"success": False, "message": "must run between begin and end"}, status=400)
        source = self.groups[body["group_name"]]
        if fault == "refuse":  # like SGLang it stays in the group, and the others wait for it
            return web.json_response({"success": False, "message": "unknown dtype"}, status=400)
        try:
            version = await source.receive()
        except ConnectionError:
            message = "Failed to receive weights: connection closed by peer"
            return web.json_response({"success": False, "message": message}, status=400)
        return await self._take(version, body["weight_version"], fault)


class WeightSource:
    """A stand-in for a process group: it works while all of its members do."""

    all: dict[int, WeightSource] = {}  # noqa: RUF012

    def __init__(self, size: int) -> None:
        self._barrier = asyncio.Barrier(size)
        self._sent: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ready = asyncio.Barrier(size)

    async def join(self) -> None:
        async with asyncio.timeout(2):
            await self._barrier.wait()

    async def receive(self) -> int:
        await self._meet()
        return await self._sent

    async def send(self, version: int) -> None:
        self._sent = asyncio.get_running_loop().create_future()
        self._sent.set_result(version)
        await self._meet()

    async def _meet(self) -> None:
        try:
            await self._ready.wait()
        except asyncio.BrokenBarrierError:
            raise ConnectionError from None

    def break_up(self) -> None:
        task = asyncio.get_running_loop().create_task(self._ready.abort())
        self._breaking = task


class FakeTrainer:
    """A TrainerClient that holds a version number instead of weights."""

    data_parallel = 1

    def __init__(self) -> None:
        self.version = 0
        self.exports: list[str] = []
        self.groups: dict[str, WeightSource] = {}

    async def train(self, request: Any) -> Any:
        raise NotImplementedError

    async def logprobs(self, sequences: Sequence[Ints]) -> list[Floats]:
        return [score(ids.tolist(), self.version) for ids in sequences]

    async def export(self, folder: str) -> None:
        self.exports.append(Path(folder).name)
        write_version(Path(folder), self.version)

    async def stage(self, folder: str) -> None:
        raise NotImplementedError

    async def write(self) -> None:
        raise NotImplementedError

    async def specs(self) -> list[TensorSpec]:
        return [TensorSpec("model.embed_tokens.weight", "float32", (VOCAB, 4))]

    async def join_group(self, group: WeightGroup) -> None:
        for name in tuple(self.groups):  # real ranks are in one group at most
            await self.leave_group(name)
        source = WeightSource.all[group.port] = WeightSource(group.world_size)
        try:
            await source.join()
        except TimeoutError:
            raise TrainerError("the group was not formed") from None
        self.groups[group.name] = source

    async def broadcast(self, group: str) -> None:
        if group not in self.groups:
            raise TrainerError(f"weight group {group} is not joined")
        try:
            await self.groups[group].send(self.version)
        except ConnectionError:
            raise TrainerError("trainer rank 0: connection closed by peer") from None

    async def leave_group(self, group: str) -> None:
        if source := self.groups.pop(group, None):
            source.break_up()

    async def close(self) -> None:
        pass
