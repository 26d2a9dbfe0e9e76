"""HTTP client of one SGLang server.

    client = SGLangClient(url, origin="search.0", vocab_size=151936)   # inside a running loop
    generation = await client.generate(rid, input_ids, Sampling(max_new_tokens=64))

An answer is checked before use: ids, log-probs and version spans must be present and agree in length (I5, I6), and
every span must carry a label of this run and life. Answers are parsed on the event loop: orjson holds the GIL, so a
thread would not help, and 4,096 tokens (160 kB) take about 1 ms.

The caller of `generate` sets its deadline. Other calls time out after `timeout_s`.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np
import orjson

from areal.errors import EpisodeError, ServerLost, ServerRefused
from areal.types import Floats, Generation, Ints, Sampling, TensorSpec
from areal.workers.protocols import ServerInfo, WeightGroup, version_of

CONNECT_TIMEOUT_S = 10.0
HEALTH_TIMEOUT_S = 10.0
ABORT_TIMEOUT_S = 10.0
KEEPALIVE_S = 3.0
"""SGLang closes an idle connection after 5 s; a request sent at that moment would be lost."""
FLUSH_WAIT_S = 1.0
"""How long the server waits to become idle in one /flush_cache call."""
FLUSH_PAUSE_S = 0.05
UNUSABLE_TOKENS = 6
"""Tokens of its context that SGLang reserves: it refuses a prompt that would use them."""


def open_session() -> aiohttp.ClientSession:
    """A session without a connection limit. Call it inside the running loop, and close it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=2**20,  # holds an answer of 4,096 tokens without pausing the transport
    )


class SGLangClient:
    """One server (see `ServerClient`). Clients may share a `session`; by default each has its own.

    origin: "<run>.<life>", the prefix of this life's labels. vocab_size: rows of the embedding; an id outside of it
    would crash the server, so it raises EpisodeError here. key: the server's API key.
    """

    def __init__(
        self,
        url: str,
        *,
        origin: str,
        vocab_size: int,
        key: str = "",
        timeout_s: float = 120.0,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.origin = origin
        self.vocab_size = vocab_size
        self.timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._owned = session is None
        self._session = session or open_session()

    async def generate(self, rid: str, input_ids: Ints, sampling: Sampling) -> Generation:
        self._check_ids(input_ids)
        body = {
            "rid": rid,
            "input_ids": np.ascontiguousarray(input_ids),
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "stop_token_ids": sampling.stop_token_ids,
                "ignore_eos": sampling.ignore_eos,
                "sampling_seed": sampling.seed,  # only used with --enable-deterministic-inference
                # explicit, because generation_config.json may set values that the ranks could not reproduce
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            },
            "return_logprob": True,
        }
        status, answer = await self._send("/generate", body)
        if status != 200:
            raise self._refused("/generate", f"HTTP {status}: {_head(answer)}")
        return self._generation(answer)

    async def abort(self, rid: str) -> None:
        await self._ok("/abort_request", {"rid": rid} if rid else {"abort_all": True}, ABORT_TIMEOUT_S)

    async def info(self) -> ServerInfo:
        model = await self._get("/model_info")
        listed = await self._get("/v1/models")
        try:
            context = int(listed["data"][0]["max_model_len"])
            return ServerInfo(
                label=str(model["weight_version"]), model_path=str(model["model_path"]), context_length=context
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._refused("/model_info", f"not an answer of SGLang ({error!r})") from None

    async def healthy(self) -> bool:
        try:
            return (await self._within("/health", None, HEALTH_TIMEOUT_S))[0] == 200
        except ServerLost:
            return False

    async def pause(self) -> None:
        await self._ok("/pause_generation", {"mode": "retract"}, self.timeout_s)

    async def resume(self) -> None:
        await self._ok("/continue_generation", {}, self.timeout_s)

    async def load_disk(self, folder: str, label: str, *, abort: bool = True) -> None:
        body = {"model_path": folder, "weight_version": label, "load_format": "auto", "abort_all_requests": abort}
        try:
            await self._succeed("/update_weights_from_disk", body)
        except ServerRefused as error:
            if not _not_flushed(error):
                raise
            await self._finish_load(label)

    async def join_group(self, group: WeightGroup, rank: int) -> None:
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": rank,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._succeed("/init_weights_update_group", body)

    async def load_group(self, group: str, specs: Sequence[TensorSpec], label: str) -> None:
        await self.abort("")  # _begin waits for all running requests
        session = await self._begin()
        body = {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [spec.shape for spec in specs],
            "group_name": group,
            "weight_version": label,
            "abort_all_requests": True,
        }
        not_flushed = False
        try:
            await self._succeed("/update_weights_from_distributed", body)
        except ServerRefused as error:
            not_flushed = _not_flushed(error)
            if not not_flushed:
                if session:
                    await self._succeed("/end_weight_update", {})
                raise
        # If this is cancelled, the server may hang in the broadcast. The session stays open until the next `_begin`.
        if session:
            await self._succeed("/end_weight_update", {})
        if not_flushed:
            await self._finish_load(label)

    async def leave_group(self, group: str) -> None:
        await self._succeed("/destroy_weights_update_group", {"group_name": group})

    async def flush(self) -> None:
        path = f"/flush_cache?timeout={FLUSH_WAIT_S:g}"
        try:
            async with asyncio.timeout(self.timeout_s):
                while (await self._send(path, {}))[0] != 200:
                    await self.abort("")  # the server is not accepting requests, so only a lost abort can be running
                    await asyncio.sleep(FLUSH_PAUSE_S)  # some servers refuse at once
        except TimeoutError:
            raise self._refused(path, f"the KV cache was not emptied within {self.timeout_s:g} s") from None

    async def score(self, ids: Ints) -> Floats:
        self._check_ids(ids)
        body = {
            "input_ids": np.ascontiguousarray(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self._ok("/generate", body, self.timeout_s)
        try:
            triples = orjson.loads(answer)["meta_info"]["input_token_logprobs"]
            logprobs = np.frombuffer(array("f", [0.0, *(triple[0] for triple in triples[1:])]), np.float32)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._refused("/generate", f"no log-probs of the prompt ({error!r})") from None
        if len(logprobs) != len(ids):
            raise self._refused("/generate", f"{len(logprobs)} log-probs for a prompt of {len(ids)} tokens")
        return logprobs

    async def checksums(self) -> dict[str, str]:
        path = "/weights_checker"
        answer = self._json(path, await self._ok(path, {"action": "checksum", "selector": "target"}, self.timeout_s))
        try:
            ranks = [rank["checksums"] for rank in answer["ranks"]]
            return {
                f"{name} of rank {number}" if len(ranks) > 1 else name: str(checksum)
                for number, checksums in enumerate(ranks)
                for name, checksum in checksums.items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise self._refused(path, f"no checksums ({error!r})") from None

    async def scramble(self) -> None:
        await self._succeed("/weights_checker", {"action": "reset_tensors", "selector": "target"})

    async def close(self) -> None:
        if self._owned:
            await self._session.close()

    def _generation(self, answer: bytes) -> Generation:
        try:
            data = orjson.loads(answer)
            meta = data["meta_info"]
            ids = data["output_ids"]
            count = len(ids)
            finish = meta["finish_reason"]["type"]
            triples: list[Any] = meta["output_token_logprobs"] if count else []
            # array() refuses nulls and fractions, which numpy would convert
            logprobs = np.frombuffer(array("f", [triple[0] for triple in triples]), np.float32)
            spans = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]] if count else []
            output_ids = np.frombuffer(array("i", ids), np.int32)
            versions = np.empty(count, np.int32)
            end = 0
            for label, start, stop in spans:
                version = version_of(label, self.origin)
                if version is None:
                    raise self._refused("/generate", f"sampled by weights {label!r}, not by {self.origin}")
                if start != end or stop < start:
                    raise self._refused("/generate", f"version spans with a gap or an overlap: {spans}")
                versions[start:stop] = version
                end = stop
            cached = int(meta.get("cached_tokens", 0))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self._refused("/generate", f"{error!r} in the answer {_head(answer)}") from None
        if not len(triples) == end == count:
            raise self._refused("/generate", f"{count} tokens, {len(triples)} log-probs, versions of {end} tokens")
        if count and (triples[0][1] != ids[0] or triples[-1][1] != ids[-1]):
            raise self._refused("/generate", "the log-probs do not belong to the tokens")
        if count and np.maximum.reduce(output_ids.view(np.uint32)) >= self.vocab_size:  # negative ids become huge
            raise self._refused("/generate", f"a token outside the vocabulary of {self.vocab_size}")
        if finish not in ("stop", "length", "abort"):
            raise self._refused("/generate", f"unknown finish reason {finish!r}")
        if not count and finish != "abort":
            raise self._refused("/generate", f"no tokens, finish reason {finish!r}")
        return Generation(output_ids, logprobs, versions, finish, cached)

    def _check_ids(self, ids: Ints) -> None:
        if not len(ids):
            raise EpisodeError("the prompt has no tokens; it needs at least one")
        if np.maximum.reduce(ids.view(np.uint32)) >= self.vocab_size:  # negative ids become huge
            wrong = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise EpisodeError(
                f"token id {wrong} in the prompt is outside the vocabulary of {self.vocab_size}; "
                "does it come from another model's tokenizer?"
            )

    async def _begin(self) -> bool:
        """Open a weight-update session; False if this version of SGLang has none."""
        status, answer = await self._within("/begin_weight_update", {}, self.timeout_s)
        if status == 404:
            return False
        if status == 400 and b"already open" in answer:
            await self._succeed("/end_weight_update", {})
            status, answer = await self._within("/begin_weight_update", {}, self.timeout_s)
        if status != 200:
            raise self._refused("/begin_weight_update", f"HTTP {status}: {_head(answer)}")
        return True

    async def _finish_load(self, label: str) -> None:
        """Complete a load without flush: the KV cache is old, and part of the server reports the old label."""
        await self.flush()
        body = {"new_version": label, "abort_all_requests": False}
        await self._ok("/update_weight_version", body, self.timeout_s)

    async def _succeed(self, path: str, body: dict[str, Any]) -> None:
        data = self._json(path, await self._ok(path, body, self.timeout_s))
        if not (isinstance(data, dict) and data.get("success") is True):
            raise self._refused(path, f"no success: {str(data)[:300]}")

    async def _get(self, path: str) -> Any:
        return self._json(path, await self._ok(path, None, self.timeout_s))

    def _json(self, path: str, answer: bytes) -> Any:
        try:
            return orjson.loads(answer)
        except ValueError:
            raise self._refused(path, f"not JSON: {_head(answer)}") from None

    async def _ok(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> bytes:
        status, answer = await self._within(path, body, timeout_s)
        if status != 200:
            raise self._refused(path, f"HTTP {status}: {_head(answer)}")
        return answer

    async def _within(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._send(path, body)
        except TimeoutError:
            raise ServerLost(f"{self.url}{path}: no answer within {timeout_s:g} s") from None

    async def _send(self, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        """POST `body`, or GET if it is None: (status, answer)."""
        method, payload = "GET", None
        if body is not None:
            data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
            method, payload = "POST", aiohttp.BytesPayload(data, content_type="application/json")
        try:
            async with self._session.request(method, self.url + path, data=payload, headers=self._headers) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: invalid address
            raise ServerLost(f"{self.url}{path}: {str(error) or type(error).__name__}") from None

    def _refused(self, path: str, why: str) -> ServerRefused:
        return ServerRefused(f"{self.url}{path}: {why}")


def _not_flushed(error: ServerRefused) -> bool:
    """Whether the new weights are loaded but the KV cache is not flushed (SGLang answers 400)."""
    return "cache was not flushed" in str(error)


def _head(answer: bytes, size: int = 300) -> str:
    text = answer[:size].decode(errors="replace")
    return text + "..." if len(answer) > size else text
