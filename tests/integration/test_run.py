"""A whole run on real SGLang and real Megatron ranks: asynchronous, interrupted, accounted for to the last group."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal import Config, Controller, Episode, Task
from areal.controller.facts import Admitted, BatchFormed, Dropped, Finished, Serving, Trained
from areal.controller.ledger import Ledger
from areal.errors import Stopped, TooManyFailures
from tests.integration.conftest import Server
from tests.integration.kills import MARK, descendants

SETTINGS = {
    "train.steps": 10,
    "train.batch_groups": 4,
    "train.minibatches": 2,
    "group.size": 4,
    "sampling.max_new_tokens": 24,
    "staleness.max": 2,
    "optimizer.lr": 1e-3,
    "checkpoint.every": 4,
    "checkpoint.keep": 2,
    "view": "plain",
    "model.context_length": 512,
}


def config(model: Path, folder: Path, **more: object) -> Config:
    return Config.load([], {**SETTINGS, "model.path": str(model), "folder": str(folder), **more})


async def two_turns(episode: Episode, task: Task) -> float:
    """Two model calls with a pause between them, so that versions mix; the reward wants few different letters."""
    messages = [{"role": "user", "content": task["text"]}]
    messages.append(await episode.chat(messages))
    await asyncio.sleep(episode.rng.uniform(0, 0.3))
    messages.append({"role": "user", "content": "again"})
    reply = await episode.chat(messages)
    return 1.0 - len(set(reply["content"])) / 24


def tasks(n: int) -> list[Task]:
    return [{"id": f"task-{i}", "text": f"the city of person {i}"} for i in range(n)]


@pytest.mark.timeout(400)
async def test_ten_asynchronous_steps_on_a_given_server_account_for_every_group(
    tiny_qwen3: Path, tmp_path: Path, sglang_server: Server, given_server: dict[str, Any]
) -> None:
    """I1, I2, I3, I4, I6 in the ledger of a real run, which starts no server: it trains on one of servers.urls."""
    settings = config(tiny_qwen3, tmp_path, **given_server)
    async with Controller(settings) as controller:
        before = await controller.evaluate(two_turns, tasks(16), label="success_before")
        await controller.train(two_turns, tasks(40))
        assert gc.get_freeze_count() > 100_000, "a full collection would stop the loop for 0.2 s (I8)"
        state = controller.scheduler.state
        folder = controller.folder
        assert [server.client.url for server in controller.cluster.fleet.servers] == [sglang_server.url]
    assert sglang_server.get("/model_info")["weight_version"] == "run-0001.0:10"
    assert len(before.rewards) == 16
    assert before.failed == 0
    summary = json.loads(folder.summary_file.read_text())
    assert summary["steps"] == summary["version"] == 10
    assert summary["success_before"] == before.success
    assert summary["max_staleness_trained"] > 0
    assert summary["tokens_generated"] > summary["tokens_trained"] / 10 > 0
    assert summary["logprob_gap_max"] < 1e-3
    assert 0 < summary["weights_pause_share"] < 1
    groups = summary["groups"]
    assert groups["trained"] == 40
    assert groups["admitted"] == groups["trained"] + sum(groups["dropped"].values()) + groups["open"]

    ledger = Ledger.open(folder.ledger)
    facts = list(ledger.facts())
    await ledger.close()
    fate: dict[int, str] = {}
    tokens_of: dict[int, dict[int, int]] = {}
    staleness: dict[int, int] = {}
    version = serving = 0
    for fact in facts:
        match fact:
            case Admitted(group=group):
                taken = sum(end == "trained" for end in fate.values()) + sum(end == "open" for end in fate.values())
                assert taken // 4 <= serving + 2, "I1"
                assert group not in fate
                fate[group] = "open"
            case Serving(version=serving):
                assert serving <= version
            case Dropped(group=group):
                assert fate[group] == "open", "I3"
                fate[group] = "dropped"
            case BatchFormed(groups=numbers, from_version=at, oldest_version=oldest, masked_tokens=masked):
                assert at == version
                batch = numbers
                ages = [(at - v, count) for number in numbers for v, count in tokens_of[number].items()]
                assert masked == sum(count for age, count in ages if age > 2), "I2"
                assert all(age <= 2 for age, _ in ages if at - age >= oldest), "I2"
                for age, count in ages:
                    staleness[age] = staleness.get(age, 0) + count
            case Trained(version=version):
                for number in batch:
                    assert fate[number] == "open", "I4"
                    fate[number] = "trained"
            case Finished(group=group, tokens=tokens):
                assert all(0 <= v <= version for v, _ in tokens), "I6"
                for v, count in tokens:
                    of = tokens_of.setdefault(group, {})
                    of[v] = of.get(v, 0) + count
    assert version == 10
    assert summary["max_staleness_trained"] == max(age for age in staleness if age <= 2)
    assert {age: count for age, count in staleness.items() if age <= 2} == state.staleness
    assert sum(end == "open" for end in fate.values()) == groups["open"]
    assert any(len(fact.tokens) > 1 for fact in facts if isinstance(fact, Finished)), "no episode spans versions"
    assert state.version == 10

    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 11))
    assert (folder.path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (folder.path / "checkpoints").iterdir()) == ["step-10", "step-8"]
    assert (folder.path / "config.toml").exists()
    logs = {path.name for path in folder.logs.iterdir()}
    assert "trainer-0.log" in logs
    assert not [name for name in logs if name.startswith("server-")], "it started a server of its own"


@pytest.mark.timeout(400)
async def test_a_run_starts_from_a_checkpoint_with_two_ranks_and_the_group_transport(
    tiny_qwen3: Path, tmp_path: Path, given_server: dict[str, Any]
) -> None:
    changes = {"train.steps": 1, "trainer.ranks": 2, "weights.transport": "group"}
    first = config(tiny_qwen3, tmp_path, **given_server, **changes)
    async with Controller(first) as controller:
        await controller.train(two_turns, tasks(20))
        checkpoint = controller.folder.checkpoint(1)
    again = config(checkpoint, tmp_path, **given_server, **{"train.steps": 1})
    async with Controller(again) as controller:
        await controller.train(two_turns, tasks(20))
        assert controller.scheduler.state.version == 1


@pytest.mark.timeout(400)
async def test_an_agent_that_always_raises_ends_the_run_and_leaves_its_summary(
    tiny_qwen3: Path, tmp_path: Path, given_server: dict[str, Any]
) -> None:
    """I9 through the whole controller: the traceback of the agent, no reward of 0."""

    async def broken(episode: Episode, task: Task) -> float:
        return task["answer"]

    controller = Controller(config(tiny_qwen3, tmp_path, **given_server, **{"failures.agent": 6}))
    with pytest.raises(TooManyFailures, match="KeyError: 'answer'"):
        async with controller:
            await controller.train(broken, tasks(20))
    summary = json.loads(controller.folder.summary_file.read_text())
    assert summary["steps"] == 0
    assert summary["groups"]["trained"] == 0


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("interrupt", "transport"), [("retract", "disk"), ("abort", "disk"), ("abort", "group")])
async def test_two_servers_take_versions_one_after_the_other(
    tiny_qwen3: Path, tmp_path: Path, given_servers: dict[str, Any], interrupt: str, transport: str
) -> None:
    """rolling, with late=wait; retracted requests stay in their server and carry the span of each version (I6)."""
    changes = {"weights.rollout": "rolling", "weights.interrupt": interrupt, "staleness.late": "wait"}
    changes |= {
        "weights.transport": transport,
        "train.steps": 5,
        "sampling.max_new_tokens": 48,
        "checkpoint.every": 0,
    }
    async with Controller(config(tiny_qwen3, tmp_path, **given_servers, **changes)) as controller:
        await controller.train(two_turns, tasks(40))
        stats = controller.cluster.fleet.stats()
        state, folder = controller.scheduler.state, controller.folder
    assert state.version == 5
    assert state.dropped == {}
    assert state.masked_tokens == 0, "late=wait lets nothing become too old"
    assert stats.failures == stats.restarts == 0
    if interrupt == "retract":
        assert stats.interruptions == 0, "retracted requests do not come back early"
    ledger = Ledger.open(folder.ledger)
    facts = list(ledger.facts())
    await ledger.close()
    assert any(len(fact.tokens) > 1 for fact in facts if isinstance(fact, Finished)), "no episode spans versions"
    batches = [fact.groups for fact in facts if isinstance(fact, BatchFormed)]
    assert batches == [tuple(range(4 * i, 4 * i + 4)) for i in range(5)], "the oldest open groups, in order"
    summary = json.loads(folder.summary_file.read_text())
    assert summary["logprob_gap_max"] < 1e-3


@pytest.mark.timeout(400)
async def test_servers_join_and_leave_by_the_command(tiny_qwen3: Path, tmp_path: Path) -> None:
    """A second real SGLang joins, at the current version; then one leaves, and its process with it. Then the run is
    stopped by the command, too."""
    changes = {"train.steps": 1000, "checkpoint.every": 0}
    with pytest.raises(Stopped, match="resume with: areal resume"):  # noqa: PT012
        async with Controller(config(tiny_qwen3, tmp_path, **changes)) as controller:
            train = asyncio.create_task(controller.train(two_turns, tasks(8)))
            fleet = controller.cluster.fleet

            async def areal(command: str, *words: str) -> str:
                line = [sys.executable, "-m", "areal", command, str(controller.folder.path), *words]
                ended = await asyncio.to_thread(subprocess.run, line, capture_output=True, text=True, check=True)
                return ended.stdout

            async def until_open(urls: set[str], tokens: int) -> None:
                """Exactly these serve, and have given that many more tokens."""
                tokens += fleet.stats().tokens
                async with asyncio.timeout(120):
                    while {
                        s.client.url for s in fleet.servers if s.state == "accepting"
                    } != urls or fleet.stats().tokens < tokens:
                        assert not train.done()
                        await asyncio.sleep(0.05)

            (first,) = fleet.servers
            began = time.monotonic()
            screen = await areal("servers", "count=2")
            start_s = time.monotonic() - began
            second = fleet.servers[1]
            await until_open({first.client.url, second.client.url}, 1000)
            assert second.version is not None
            assert second.version > 0, "it began at version 0 of the model's folder"
            child = controller.cluster.workers._children[1]
            assert f"1 {second.client.url} accepting, version" in screen
            assert "1 " + second.client.url not in await areal("servers", "count=1")
            await until_open({first.client.url}, 1000)
            async with asyncio.timeout(max(10, start_s / 2)):
                assert await child.wait() is not None
            stats, state = fleet.stats(), controller.scheduler.state
            step = re.search(r"step     (\d+) of 1000", await areal("status"))
            assert step
            assert 1 < int(step[1]) <= controller.version
            with pytest.raises(subprocess.CalledProcessError) as refused:
                await areal("servers", "count=0")
            assert refused.value.returncode == 2
            assert "servers.count=0" in refused.value.stderr
            assert "resume with: areal resume" in await areal("stop")
            await train
    assert stats.failures == stats.restarts == 0
    assert state.dropped == {}
    assert state.trained >= 4 * 4


@pytest.mark.timeout(500)
async def test_a_server_that_is_killed_or_hangs_is_replaced_and_no_episode_is_lost(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    """SIGKILL to the real SGLang while agents wait on it, later SIGSTOP to all processes of its successor: each time
    it is restarted at the current version, and the calls continue with the tokens that they had."""
    changes = {"train.steps": 7, "servers.request_timeout_s": 60, "weights.timeout_s": 20}
    others = set(psutil.Process().children(recursive=True))  # such as the server that tests share
    async with Controller(config(tiny_qwen3, tmp_path, **changes)) as controller:
        train = asyncio.create_task(controller.train(two_turns, tasks(40)))
        state, fleet = controller.scheduler.state, controller.cluster.fleet

        async def until(version: int) -> None:
            while state.version < version and not train.done():
                await asyncio.sleep(0.05)

        await until(2)
        while not fleet.servers[0].calls:
            await asyncio.sleep(0.01)
        controller.cluster.workers._children[0].kill()
        while not fleet.stats().restarts or fleet.servers[0].state != "accepting":
            assert not train.done()
            await asyncio.sleep(0.05)
        assert fleet.stats().restarts == 1
        await until(state.version + 1)
        assert state.version < 7, "nothing is left to do for the server that hangs"
        for process in set(psutil.Process().children(recursive=True)) - others:
            words = [process.name(), *process.cmdline()]
            if any("sglang" in word or "cpu_server" in word for word in words) and "guard.py" not in " ".join(words):
                process.suspend()
        await train
        state, stats = controller.scheduler.state, fleet.stats()
    assert state.version == 7
    assert stats.restarts == 2
    assert state.dropped == {}
    assert state.trained == 28


SCRIPT = """
    import asyncio
    from areal import Controller, launch

    async def agent(episode, task):
        await episode.generate([5, 6, 7])
        await asyncio.sleep(0.05)
        return float(episode.member)

    async def main(config):
        async with Controller(config) as controller:
            await controller.train(agent, [{"id": str(i)} for i in range(100)])

    if __name__ == "__main__":
        launch(main)
"""


def start_script(model: Path, folder: Path) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    settings += [f"model.path={model}", f"folder={folder}", "train.steps=1000", "checkpoint.every=0"]
    return subprocess.Popen(
        [sys.executable, "-u", str(script), *settings], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for_step(process: subprocess.Popen[str]) -> None:
    assert process.stdout
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step 2/"):
            return
    pytest.fail("no step was reported:\n" + "".join(seen))


@pytest.mark.timeout(400)
def test_a_run_that_goes_on_is_not_resumed_and_ctrl_c_stops_it_within_ten_seconds(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how to go on, and leaves a checkpoint of its last step; what would change the run is refused then."""
    monkeypatch.setenv(MARK, str(tmp_path))
    run = tmp_path / "run-0001"

    def resume(*changes: str) -> tuple[int, str]:
        words = [sys.executable, "-m", "areal", "resume", str(run), *changes]
        ended = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return ended.returncode, ended.stdout

    began = time.monotonic()
    process = start_script(tiny_qwen3, tmp_path)
    wait_for_step(process)
    start_s = time.monotonic() - began
    code, output = resume()
    assert code == 1
    assert "is written by another run: end that one first" in output
    assert len(descendants(tmp_path)) >= 4  # the script, SGLang's three processes, the rank
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=max(10, start_s / 2))
    assert process.returncode == 130
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert f"areal resume {run}" in output
    assert "Traceback" not in output
    summary = json.loads((run / "summary.json").read_text())
    assert checkpoint.name == f"step-{summary['version']}", "a step that the ranks finished after the stop (I4)"
    assert descendants(tmp_path) == []
    code, output = resume("seed=7")
    assert code == 2
    assert "seed=7: the run in" in output
