"""SGLangClient against a server that fails on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal.errors import EpisodeError, ServerLost, ServerRefused
from areal.types import Sampling, TensorSpec
from areal.workers.protocols import ServerInfo, WeightGroup, make_label, version_of
from areal.workers.sglang.client import SGLangClient, open_session
from tests.fake_server import EOS, ORIGIN, VOCAB, FakeServer, WeightSource, check, score, write_version

PROMPT = [5, 17, 42]
RID = f"{7:032x}"
SPECS = [TensorSpec("model.embed_tokens.weight", "float32", (VOCAB, 4))]


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with FakeServer() as server:
        yield server


@pytest.fixture
async def client(server: FakeServer) -> AsyncIterator[SGLangClient]:
    client = SGLangClient(server.url, origin=ORIGIN, vocab_size=VOCAB, timeout_s=0.5)
    yield client
    await client.close()


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


async def test_an_answer_becomes_arrays(client: SGLangClient) -> None:
    generation = await client.generate(RID, ids(PROMPT), Sampling(5))
    assert check(generation, PROMPT, 5) == [0] * 5
    assert (generation.finish, generation.cached_tokens) == ("length", 3)
    assert [a.dtype for a in (generation.output_ids, generation.logprobs, generation.versions)] == [
        np.int32,
        np.float32,
        np.int32,
    ]


async def test_an_end_token_is_part_of_the_answer(server: FakeServer, client: SGLangClient) -> None:
    server.eos_at = 2
    generation = await client.generate(RID, ids(PROMPT), Sampling(5))
    assert generation.finish == "stop"
    assert generation.output_ids[-1] == EOS


async def test_i6_versions_follow_the_spans(server: FakeServer, client: SGLangClient) -> None:
    server.token_s = 0.01
    task = asyncio.create_task(client.generate(RID, ids(PROMPT), Sampling(6)))
    await server.until(lambda: any(len(run.out) == 2 for run in server.running.values()))
    server.version = 12
    versions = check(await task, PROMPT, 6)
    assert versions == sorted(versions)
    assert set(versions) == {0, 12}


async def test_an_aborted_answer_keeps_its_tokens(server: FakeServer, client: SGLangClient) -> None:
    server.token_s = 0.005
    task = asyncio.create_task(client.generate(RID, ids(PROMPT), Sampling(1000)))
    await asyncio.sleep(0.05)
    await client.abort(RID)
    generation = await task
    assert generation.finish == "abort"
    assert 1 <= len(check(generation, PROMPT, len(generation.output_ids))) < 1000


async def test_an_answer_aborted_in_the_queue_has_no_optional_keys(server: FakeServer, client: SGLangClient) -> None:
    answer = (
        b'{"text":"","output_ids":[],"meta_info":{"id":"r","finish_reason":{"type":"abort","message":"Abort in wa"}}}'
    )
    generation = client._generation(answer)
    assert (generation.finish, len(generation.output_ids), generation.cached_tokens) == ("abort", 0, 0)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("500", "HTTP 500.*out of order"),
        ("garbage", "JSONDecodeError"),
        ("short", "5 tokens, 4 log-probs"),
        ("wrong", "do not belong to the tokens"),
        ("null", "TypeError.*not NoneType"),
        ("keys", "weight_versions"),
        ("hole", "gap"),
        ("empty", "no tokens, finish reason 'length'"),
        ("foreign", "sampled by weights 'other.0:3', not by run.0"),
    ],
)
async def test_what_is_no_answer_is_refused(server: FakeServer, client: SGLangClient, fault: str, why: str) -> None:
    """I5, I6: nothing is guessed; the error names the server and what was wrong."""
    server.faults["/generate"] = [fault]
    with pytest.raises(ServerRefused, match=why) as error:
        await client.generate(RID, ids(PROMPT), Sampling(5))
    assert f"{server.url}/generate" in str(error.value)


@pytest.mark.parametrize("fault", ["drop", "half"])
async def test_a_broken_connection_is_a_lost_server(server: FakeServer, client: SGLangClient, fault: str) -> None:
    server.faults["/generate"] = [fault]
    with pytest.raises(ServerLost, match=f"{server.url}/generate"):
        await client.generate(RID, ids(PROMPT), Sampling(4))


async def test_nobody_listens(server: FakeServer, client: SGLangClient) -> None:
    assert await client.healthy()
    await server.stop()
    assert not await client.healthy()
    with pytest.raises(ServerLost, match=r"/model_info"):
        await client.info()


@pytest.mark.parametrize("token", [-1, VOCAB])
async def test_a_token_outside_the_vocabulary_never_leaves(
    server: FakeServer, client: SGLangClient, token: int
) -> None:
    """It would kill the whole server."""
    with pytest.raises(EpisodeError, match=f"token id {token} .* vocabulary of {VOCAB}"):
        await client.generate(RID, ids([1, token, 2]), Sampling(5))
    with pytest.raises(EpisodeError, match="at least one"):
        await client.generate(RID, ids([]), Sampling(5))
    assert server.count["/generate"] == 0


async def test_sampling_is_said_outright(client: SGLangClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """I10: a model's generation_config must not bring in top_p or top_k."""
    sent = {}

    async def send(path: str, body: dict) -> tuple[int, bytes]:
        sent.update(body)
        return 500, b""

    monkeypatch.setattr(client, "_send", send)
    with pytest.raises(ServerRefused):
        await client.generate(RID, ids(PROMPT)[::2], Sampling(5, 0.7, (3, 4), True, seed=9))
    assert sent["input_ids"].tolist() == [5, 42]
    assert sent["sampling_params"] == {
        "max_new_tokens": 5,
        "temperature": 0.7,
        "stop_token_ids": (3, 4),
        "ignore_eos": True,
        "sampling_seed": 9,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


async def test_info(client: SGLangClient) -> None:
    assert await client.info() == ServerInfo(label="run.0:0", model_path="/model", context_length=4096)


async def test_score(client: SGLangClient) -> None:
    assert (await client.score(ids(PROMPT))).tolist() == score(PROMPT, 0).tolist()


async def test_checksums(client: SGLangClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of a server has its share of a tensor."""
    with pytest.raises(ServerRefused, match="/weights_checker: HTTP 404"):  # an SGLang that has none
        await client.checksums()
    answer: dict[str, Any] = {"success": True, "ranks": [{"checksums": {"w": "a1"}}, {"checksums": {"w": "b2"}}]}

    async def respond(path: str, body: dict[str, Any], timeout_s: float) -> tuple[int, bytes]:
        return 200, json.dumps(answer).encode()

    monkeypatch.setattr(client, "_within", respond)
    assert await client.checksums() == {"w of rank 0": "a1", "w of rank 1": "b2"}
    del answer["ranks"][1]
    assert await client.checksums() == {"w": "a1"}
    del answer["ranks"]
    with pytest.raises(ServerRefused, match="no checksums"):
        await client.checksums()


async def test_load_disk(server: FakeServer, client: SGLangClient, tmp_path: Path) -> None:
    await client.load_disk(write_version(tmp_path, 3), "run.0:3")
    assert (server.version, server.label) == (3, "run.0:3")
    server.faults["/update_weights_from_disk"] = ["refuse"]
    with pytest.raises(ServerRefused, match="Failed to get weights iterator"):
        await client.load_disk("/nowhere", "run.0:4")


async def test_new_weights_with_old_kv_are_flushed(server: FakeServer, client: SGLangClient, tmp_path: Path) -> None:
    """SGLang says 400, but the weights are new: then the cache is flushed and the label put right."""
    server.faults |= {"/update_weights_from_disk": ["not flushed"], "/flush_cache": ["busy", "ok"]}
    await client.load_disk(write_version(tmp_path, 3), "run.0:3")
    assert (server.version, server.label, server.dirty) == (3, "run.0:3", False)


async def test_flush_ends_what_still_runs(server: FakeServer, client: SGLangClient) -> None:
    """A request whose abort was lost would keep the cache from being emptied."""
    server.token_s = 0.01
    task = asyncio.create_task(client.generate(RID, ids(PROMPT), Sampling(10_000)))
    await server.until(lambda: bool(server.running))
    await client.flush()
    assert (await task).finish == "abort"
    assert [rid for _, rid in server.aborts] == ["all"]


async def test_flush_has_a_deadline(server: FakeServer, client: SGLangClient) -> None:
    server.faults["/flush_cache"] = ["busy"] * 100
    with pytest.raises(ServerRefused, match=r"was not emptied within 0\.5 s"):
        await client.flush()


async def test_a_load_that_hangs_is_a_lost_server(server: FakeServer, client: SGLangClient) -> None:
    server.faults["/update_weights_from_disk"] = ["hang"]
    with pytest.raises(ServerLost, match=r"no answer within 0\.5 s"):
        await client.load_disk("/folder", "run.0:3")


@pytest.mark.parametrize("sessions", [True, False])
async def test_load_group(server: FakeServer, client: SGLangClient, sessions: bool) -> None:
    """An SGLang without weight-update sessions answers 404 and needs none; one left open is closed first."""
    server.has_sessions, server.in_session = sessions, sessions
    source = server.groups["g"] = WeightSource(2)
    _, _ = await asyncio.gather(client.load_group("g", SPECS, "run.0:5"), source.send(5))
    assert (server.version, server.label, server.in_session) == (5, "run.0:5", False)
    await client.leave_group("g")
    assert not server.groups


async def test_a_refused_group_load_closes_its_session(server: FakeServer, client: SGLangClient) -> None:
    server.groups["g"] = WeightSource(2)
    server.faults["/update_weights_from_distributed"] = ["refuse"]
    with pytest.raises(ServerRefused, match="unknown dtype"):
        await client.load_group("g", SPECS, "run.0:5")
    assert not server.in_session


async def test_a_shared_session_stays_open(server: FakeServer) -> None:
    async with open_session() as session:
        client = SGLangClient(server.url, origin=ORIGIN, vocab_size=VOCAB, session=session)
        assert await client.healthy()
        await client.close()
        assert not session.closed


def test_labels() -> None:
    assert make_label("run-1.2", 7) == "run-1.2:7"
    assert version_of("run-1.2:7", "run-1.2") == 7
    assert [version_of(label, "run-1.2") for label in ("run-1.1:7", "default", "run-1.2:", "run-1.2:x7")] == [None] * 4


async def test_every_call_has_the_key(server: FakeServer, tmp_path: Path) -> None:
    server.key = "k" * 43
    group = WeightGroup("g", "127.0.0.1", 1, 2, "gloo")
    folder = write_version(tmp_path / "v", 1)

    def calls(client: SGLangClient) -> dict[str, Coroutine[Any, Any, Any]]:
        return {
            "/generate": client.generate(RID, ids(PROMPT), Sampling(2)),
            "/abort_request": client.abort(RID),
            "/model_info": client.info(),
            "/flush_cache": client.flush(),
            "/update_weights_from_disk": client.load_disk(folder, f"{ORIGIN}:1"),
            "/init_weights_update_group": client.join_group(group, 1),
            "/begin_weight_update": client.load_group("g", SPECS, f"{ORIGIN}:2"),
            "/destroy_weights_update_group": client.leave_group("g"),
        }

    for key in ("", "j" * 43):
        stranger = SGLangClient(server.url, origin=ORIGIN, vocab_size=VOCAB, timeout_s=0.5, key=key)
        assert not await stranger.healthy()
        for call in calls(stranger).values():
            with pytest.raises(ServerRefused):
                await call
        await stranger.close()
    assert not server.count
    client = SGLangClient(server.url, origin=ORIGIN, vocab_size=VOCAB, timeout_s=0.5, key=server.key)
    assert await client.healthy()
    for path, call in calls(client).items():
        with suppress(ServerRefused):  # there is no such group
            await call
        assert server.count[path] > 0, path
    await client.close()
