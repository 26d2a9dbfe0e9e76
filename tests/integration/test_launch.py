"""The launcher and the guard with a real SGLang server."""

from __future__ import annotations

import time
import urllib.error
from pathlib import Path

import psutil
import pytest

from areal.config import Config
from areal.errors import ProcessError
from areal.workers.process import Child, free_port
from areal.workers.sglang.client import SGLangClient
from areal.workers.sglang.launcher import launch_server, wait_ready
from tests.integration.conftest import KEY, LABEL, ORIGIN, Server
from tests.models import SPECIAL_TOKENS, VOCAB_SIZE

END = SPECIAL_TOKENS.index("<|im_end|>")


def generate(server: Server, **sampling: object) -> dict:
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": {"temperature": 0, **sampling}, "return_logprob": True}
    return server.post("/generate", body)


def test_serves_what_the_launcher_was_told(sglang_server: Server) -> None:
    info = sglang_server.get("/model_info")
    assert info["weight_version"] == LABEL
    assert info["model_path"] == str(sglang_server.model)
    settings = sglang_server.get("/server_info")
    assert settings["dtype"] == "float32"
    assert settings["max_running_requests"] == 64
    assert settings["device"] == "cpu"


def test_stops_at_given_ids_and_at_the_models_own_end(sglang_server: Server) -> None:
    """The server has no tokenizer: both must be found by id."""
    free = generate(sglang_server, max_new_tokens=12, ignore_eos=True)
    assert free["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    ids = free["output_ids"]
    cut = ids.index(ids[4]) + 1
    stopped = generate(sglang_server, max_new_tokens=12, ignore_eos=False, stop_token_ids=[ids[4]])
    assert stopped["output_ids"] == ids[:cut]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[4]}
    hot = generate(sglang_server, max_new_tokens=4000, temperature=100.0)
    assert hot["meta_info"]["finish_reason"] == {"type": "stop", "matched": END}
    assert hot["output_ids"].index(END) == len(hot["output_ids"]) - 1


def test_a_prompt_longer_than_the_context_is_an_answer_not_an_end(sglang_server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        sglang_server.post("/generate", {"input_ids": [5] * 5000, "sampling_params": {"max_new_tokens": 1}})
    assert refused.value.code == 400
    assert sglang_server.child.returncode is None


def tree(root: int) -> list[psutil.Process]:
    top = psutil.Process(root)
    return [top, *top.children(recursive=True)]


def listener(server: Server) -> int:
    """The process that answers HTTP."""
    port = int(server.url.rpartition(":")[2])
    return next(c.pid for c in psutil.net_connections("tcp4") if c.status == "LISTEN" and c.laddr.port == port)


def gone(processes: list[psutil.Process], seconds: float) -> None:
    _, left = psutil.wait_procs(processes, timeout=seconds)
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE], f"{left} still run after {seconds} s"


def test_a_server_without_requests_leaves_the_cores_to_others(sglang_server: Server) -> None:
    """SGLang's scheduler polls without a pause unless it is told to sleep."""
    generate(sglang_server, max_new_tokens=1)
    time.sleep(1)
    (scheduler,) = (p for p in tree(listener(sglang_server)) if "scheduler" in p.name())

    def spent() -> float:
        return sum(scheduler.cpu_times()[:2])

    before = spent()
    time.sleep(3)
    assert spent() - before < 0.3


@pytest.mark.timeout(300)
async def test_a_server_that_cannot_start_shows_why(tiny_llama: Path, tmp_path: Path) -> None:
    config = Config.load(["servers.args=['--no-such-flag']"])
    port = free_port()
    child: Child = await launch_server(
        config, 0, key=KEY, model_path=tiny_llama, label=LABEL, log_folder=tmp_path, port=port
    )
    client = SGLangClient(f"http://127.0.0.1:{port}", origin=ORIGIN, vocab_size=VOCAB_SIZE)
    try:
        with pytest.raises(ProcessError, match=r"(?s)server 0 ended with code 2 .*--no-such-flag"):
            await wait_ready(client, child, 200)
    finally:
        await client.close()
        await child.stop()


def test_a_server_whose_scheduler_dies_ends(sglang_server: Server) -> None:
    processes = tree(listener(sglang_server))
    scheduler = next(p for p in processes if "scheduler" in p.name())
    limit = max(10, sglang_server.start_s / 2)
    scheduler.kill()
    gone(processes, limit)
    deadline = time.monotonic() + limit / 2
    while sglang_server.child.returncode is None:
        assert time.monotonic() < deadline, "the child's end is not seen"
        time.sleep(0.02)
    assert sglang_server.child.returncode != 0
