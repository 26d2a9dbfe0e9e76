"""The doctor on a real server and a real rank: a healthy run, and planted faults that only they show."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal.agents.episode import Episode
from areal.checks import template
from areal.checks.findings import Finding, collect
from areal.cli import main
from areal.config import Config
from areal.doctor import doctor, live
from areal.types import Task
from areal.workers.local import LocalWorkers
from areal.workers.protocols import ServerClient
from areal.workers.sglang.client import SGLangClient
from tests import models

TASKS = [{"id": f"t{i}", "question": f"the city of person {i}"} for i in range(12)]


def settings(model: Path, tmp_path: Path, **changes: Any) -> Config:
    base = {
        "model.path": str(model),
        "folder": str(tmp_path / "runs"),
        "train.batch_groups": 4,
        "sampling.max_new_tokens": 16,
        "servers.max_total_tokens": 16384,
    }
    return Config.load((), {**base, **changes})


async def agent(episode: Episode, task: Task) -> float:
    reply = await episode.chat([{"role": "user", "content": task["question"]}])
    return len(reply["content"]) / 100


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the event loop may be late; what the doctor says of that is tested without servers."""
    monkeypatch.setattr(live, "LAG_S", 5.0)


@pytest.mark.timeout(300)
async def test_a_healthy_run_passes_every_check(tiny_qwen3: Path, tmp_path: Path) -> None:
    told: list[Finding] = []
    config = settings(tiny_qwen3, tmp_path, **{"servers.count": 2, "weights.transport": "group"})
    findings = await doctor(config, agent, TASKS, tell=told.append)
    assert told == findings
    assert {f.level for f in findings} == {"ok"}, findings
    assert [f.check for f in findings][-4:] == ["tool parser", "log-probs", "agent", "publication"]
    assert findings[-1].message.endswith("all tensors arrived; no old KV is left")
    assert not list((tmp_path / "runs").iterdir())


class OtherWeights(LocalWorkers):
    """Its servers hold the weights of another model of the same shape."""

    other: Path

    async def start_server(self, index: int) -> ServerClient:
        self._weights = self.other
        return await super().start_server(index)


@pytest.mark.timeout(300)
async def test_a_server_with_other_weights_and_an_old_kv_cache(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two faults in one run: the weights before the publication, and the cache after it."""
    monkeypatch.setattr(OtherWeights, "other", models.build(tmp_path / "other", seed=7), raising=False)
    succeed = SGLangClient._succeed

    async def without_flush(self: SGLangClient, path: str, body: dict[str, Any]) -> None:
        await succeed(self, path, body | ({"flush_cache": False} if path == "/update_weights_from_disk" else {}))

    async def nothing(self: SGLangClient) -> None: ...

    monkeypatch.setattr(SGLangClient, "_succeed", without_flush)
    monkeypatch.setattr(SGLangClient, "flush", nothing)
    findings = await doctor(settings(tiny_qwen3, tmp_path), workers=OtherWeights)
    found = levels(findings)
    assert found["log-probs"] == found["publication"] == "problem", findings
    by_check = {finding.check: finding for finding in findings}
    assert "the server holds other weights than model.path" in by_check["log-probs"].remedy
    assert "still uses what the old weights computed" in by_check["publication"].message


PROGRAM = """
async def agent(episode, task):
    reply = await episode.chat([{"role": "user", "content": task["question"]}])
    return len(reply["content"]) / 100
"""


@pytest.mark.timeout(300)
def test_the_command_tries_an_agent_and_finds_one_wrong_number(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a published tensor, the smallest step from what the trainer has: no log-prob shows it, its checksum does."""
    load = SGLangClient.load_disk
    wrong = tmp_path / "wrong"

    async def load_wrong(self: SGLangClient, folder: str, label: str, *, abort: bool = True) -> None:
        if label.endswith(":1") and not wrong.exists():
            shutil.copytree(folder, wrong)
            tensors = load_file(wrong / "model.safetensors")
            last = tensors["model.embed_tokens.weight"][-1]
            last[0] = torch.nextafter(last[0], torch.tensor(9.0))
            save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
            folder = str(wrong)
        await load(self, folder, label, abort=abort)

    monkeypatch.setattr(SGLangClient, "load_disk", load_wrong)
    monkeypatch.setattr(sys, "path", list(sys.path))
    program, rows = tmp_path / "an_agent.py", tmp_path / "rows.jsonl"
    program.write_text(PROGRAM)
    rows.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    config = settings(tiny_qwen3, tmp_path, **{"data.train": str(rows)})
    file = tmp_path / "run.toml"
    file.write_text(config.to_toml())
    assert main(["doctor", str(file), "--agent", f"{program}:agent"]) == 1
    *good, agents, publication = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in good} == {"ok"}
    assert agents.startswith("ok       agent: 10 tasks, mean reward 0.")
    assert publication.startswith("problem  publication: http://127.0.0.1:")
    assert "holds 1 of 18 tensors otherwise than the trainer exports them: model.embed_tokens.weight" in publication


@pytest.mark.timeout(300)
async def test_a_server_that_does_not_come_up_is_a_finding(tiny_qwen3: Path, tmp_path: Path) -> None:
    findings = await doctor(settings(tiny_qwen3, tmp_path, **{"servers.args": ["--no-such-flag"]}))
    assert findings[-1].check == "servers and ranks"
    assert findings[-1].level == "problem"
    assert "--no-such-flag" in findings[-1].message


def test_a_parser_that_disagrees() -> None:
    """That of Llama 3 reads another form; no parser is refused; a changed areal would be noticed."""
    assert [f.level for f in collect("tool parser", template.parser("qwen25"))] == ["ok"]
    (finding,) = collect("tool parser", template.parser("llama3"))
    assert finding.level == "problem"
    assert "<tool_call>" in finding.message
    (finding,) = collect("tool parser", template.parser("none"))
    assert finding.level == "problem"
    arguments = ["servers.args=['--tool-call-parser=llama3']"]
    assert template.parser_of(Config.load(arguments)) == "llama3"
    assert template.parser_of(Config.load()) == "qwen25"


def test_a_parser_of_ours_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes the first closing tag, though it is inside a string."""
    real = template.parse_calls
    monkeypatch.setattr(template, "parse_calls", lambda text, tools: real(text.replace('</tool_call>\\" b', ""), tools))
    (finding,) = collect("tool parser", template.parser("qwen25"))
    assert finding.level == "problem"
    assert finding.message.startswith("SGLang's parser 'qwen25' and areal disagree on 1 of 12 texts")
