"""Each planted fault is found, and what is healthy is not. Without a server: those are in tests/integration."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from areal.agents.episode import Episode
from areal.checks import before_run, machine, short, template
from areal.checks.findings import Finding, collect
from areal.cli import main
from areal.config import Config
from areal.controller.controller import Controller
from areal.doctor import doctor, live
from areal.doctor.agent import load_agent
from areal.errors import ConfigError
from areal.monitor import metrics
from areal.types import Completion, Ints, Sampling, Task
from areal.workers.models.architecture import Architecture
from areal.workers.process import free_port
from tests import models
from tests.agents import templates

GB = 10**9


def rows(count: int, **more: Any) -> list[Task]:
    return [{"id": f"t{i}", "question": f"where is person {i}", **more} for i in range(count)]


def write(path: Path, tasks: list[Task]) -> str:
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return str(path)


@pytest.fixture
def settings(tiny_qwen3: Path, tmp_path: Path) -> Callable[..., Config]:
    """Settings of a healthy run with 20 tasks, and whatever is to be different."""

    def make(**changes: Any) -> Config:
        base = {"model.path": str(tiny_qwen3), "folder": str(tmp_path / "runs"), "train.batch_groups": 4}
        return Config.load((), {**base, "data.train": write(tmp_path / "train.jsonl", rows(20)), **changes})

    return make


def bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


def the_only(findings: list[Finding]) -> Finding:
    """The one that is not ok; it says what to do."""
    (finding,) = bad(findings)
    assert finding.remedy or finding.check in ("data", "model", "placement", "template")
    assert "\n" not in str(finding)
    return finding


def test_a_healthy_run_has_one_ok_a_check_and_takes_no_time(settings: Callable[..., Config]) -> None:
    short(settings())  # transformers is imported by whoever is first
    start = time.process_time()
    findings = short(settings())
    assert time.process_time() - start < 1
    assert [f.check for f in findings] == [
        "placement", "ports", "open files", "disk", "memory", "template", "data",
    ]  # fmt: skip
    assert {f.level for f in findings} == {"ok"}
    assert str(findings[-1]) == "ok       data: 20 tasks to train on, 0 to evaluate on"


# -- template

CHANGES_EARLIER = models.CHATML_TEMPLATE.replace(
    "(message.content or '')", "(message.content or '') + ('' if loop.last else ' [old]')"
)
NUMBERS = models.CHATML_TEMPLATE.replace(
    "message.role + '\\n'", "message.role + (loop.index | string if message.role == 'user' else '') + '\\n'"
)
CANNOT_GO_ON = models.CHATML_TEMPLATE.replace(
    "{%- for message in messages %}",
    "{%- for message in messages %}{%- if message.role == 'assistant' %}{%- continue %}{%- endif %}",
)
REFUSES = (
    "{%- if messages | length > 2 %}{{ raise_exception('one question only') }}{%- endif %}" + models.CHATML_TEMPLATE
)


def template_findings(folder: Path, text: str, args: dict[str, Any] | None = None) -> list[Finding]:
    models.write_tokenizer(folder, text)
    return collect("template", template.template(AutoTokenizer.from_pretrained(folder), args))


@pytest.mark.parametrize("name", ["qwen3", "qwen3-without-thinking", "qwen2.5", "thinker"])
def test_templates_that_only_add_and_strip_thinking_are_healthy(tmp_path: Path, name: str) -> None:
    template, args = templates.ALL[name]
    assert [f.level for f in template_findings(tmp_path, template, args)] == ["ok"]


def test_a_template_that_changes_earlier_messages(tmp_path: Path) -> None:
    findings = bad(template_findings(tmp_path, CHANGES_EARLIER))
    assert {f.level for f in findings} == {"problem"}
    assert "changes earlier messages" in findings[0].message
    assert "[old]" in findings[0].message
    assert "forks" in findings[0].message


def test_a_template_that_counts_messages(tmp_path: Path) -> None:
    findings = bad(template_findings(tmp_path, NUMBERS))
    assert findings
    assert all("differ after recorded tokens" in f.message for f in findings)


@pytest.mark.parametrize("template", [CANNOT_GO_ON, REFUSES, ""])
def test_a_template_that_cannot_be_extended(tmp_path: Path, template: str) -> None:
    assert "problem" in {f.level for f in template_findings(tmp_path, template)}


def test_a_template_with_calls_that_areal_does_not_read(tmp_path: Path) -> None:
    tokenizer = templates.tokenizer(tmp_path, "llama3")
    finding = the_only(collect("template", template.template(tokenizer)))
    assert finding.level == "warning"
    assert '"parameters"' in finding.message


# -- data


def test_duplicate_ids(settings: Callable[..., Config], tmp_path: Path) -> None:
    file = write(tmp_path / "twice.jsonl", [*rows(5), rows(1)[0]])
    finding = the_only(short(settings(**{"data.train": file})))
    assert (finding.check, finding.level) == ("data", "problem")
    assert "line 1" in finding.message
    assert "line 6" in finding.message


def test_a_file_that_cannot_be_read(settings: Callable[..., Config], tmp_path: Path) -> None:
    finding = the_only(short(settings(**{"data.train": str(tmp_path / "none.jsonl")})))
    assert finding.level == "problem"
    assert "none.jsonl" in finding.message


@pytest.mark.parametrize("held_out", [False, True])
def test_an_evaluation_row_in_the_training_set(settings: Callable[..., Config], tmp_path: Path, held_out: bool) -> None:
    """Under another id, in a file of its own or among the rows held out."""
    if held_out:
        twins = [{"id": f"twin{row['id']}", "question": row["question"]} for row in rows(20)]
        changes: dict[str, Any] = {
            "data.train": write(tmp_path / "twins.jsonl", rows(20) + twins),
            "data.evaluation_size": 3,
        }
    else:
        copied = {"id": "other", "question": "where is person 7"}
        new = {"id": "new", "question": "where is nobody"}
        changes = {"data.evaluation": write(tmp_path / "evaluation.jsonl", [new, copied])}
    finding = the_only(short(settings(**changes)))
    assert "evaluation rows are among the training rows" in finding.message
    if not held_out:
        assert finding.message.startswith("1 evaluation rows")
        assert "'other' (training row 't7')" in finding.message


def test_rows_held_out_are_no_leak(settings: Callable[..., Config]) -> None:
    assert not bad(short(settings(**{"data.evaluation_size": 5})))


@pytest.mark.parametrize("short_ones", [0, 1])
def test_prompts_that_are_all_too_long_are_a_problem(settings: Callable[..., Config], short_ones: int) -> None:
    tasks = [{"id": f"{i}", "question": "? " * 5000} for i in range(100)] + rows(short_ones)
    finding = the_only(short(settings(), tasks))
    assert "at least 64 prompts leave no room" in finding.message
    assert finding.level == ("warning" if short_ones else "problem")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (
            [*rows(9), {"id": "x", "prompt": "?"}],
            "1 of 10 rows have unusual keys; for example 'x' differs in prompt, question",
        ),
        ([*rows(9), {"id": "x", "question": " "}], "1 rows have an empty prompt, such as 'x'"),
        ([*rows(9), {"id": "x", "question": "? " * 5000}], "1 prompts leave no room"),
        (rows(3), "3 tasks are fewer than a batch"),
    ],
)
def test_rows_that_are_odd(settings: Callable[..., Config], tmp_path: Path, tasks: list[Task], message: str) -> None:
    for findings in (short(settings(**{"data.train": write(tmp_path / "odd.jsonl", tasks)})), short(settings(), tasks)):
        finding = the_only(findings)
        assert finding.level == "warning"
        assert message in finding.message


def test_prompts_are_measured_in_tokens_not_in_characters(settings: Callable[..., Config], tmp_path: Path) -> None:
    """4,096 tokens are the context; 5,000 characters of known words are fewer, of unknown ones more."""
    for word, wrong in ((" Paris", []), ("qzxj#", ["data"])):
        file = write(tmp_path / "long.jsonl", [*rows(9), {"id": "x", "question": (word * 5000)[:5000]}])
        assert [f.check for f in bad(short(settings(**{"data.train": file})))] == wrong


# -- machine


def test_a_taken_port(settings: Callable[..., Config]) -> None:
    port = free_port()  # its neighbour is free as a rule; beside one of the kernel's choice there may be a connection
    with socket.create_server(("127.0.0.1", port)):
        finding = the_only(short(settings(**{"servers.port": port - 1, "servers.count": 2})))
    assert (finding.check, finding.level) == ("ports", "problem")
    assert str(port) in finding.message


def test_a_full_disk(settings: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints and weights of the tiny model take megabytes, the ledger between two checkpoints more."""
    free = 10**6
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    finding = the_only(short(settings()))
    assert (finding.check, finding.level) == ("disk", "problem")
    assert "3 checkpoints and two versions of the weights" in finding.message
    free = 10 * 10**6
    finding = the_only(short(settings()))
    assert (finding.check, finding.level) == ("disk", "warning")
    assert "ledger" in finding.message


def test_weights_on_a_disk_of_their_own(settings: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    full = "/dev/shm"
    if os.stat(full).st_dev == os.stat(settings().folder.rpartition("/")[0]).st_dev:
        pytest.skip("one disk only")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0 if str(path) == full else 100 * GB))
    finding = the_only(short(settings(**{"weights.folder": f"{full}/areal"})))
    assert finding.message.startswith("/dev/shm has 0.0 GB free, two versions of the weights")


def test_no_memory(settings: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 1.0 * GB)
    finding = the_only(short(settings(**{"trainer.ranks": 2})))
    assert (finding.check, finding.level) == ("memory", "problem")
    assert "2 ranks need 0.8 GB and 1 servers 0.8 GB" in finding.message


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_parameters_are_counted(request: pytest.FixtureRequest, family: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = request.getfixturevalue(f"tiny_{family}")
    counted = machine.parameters(Architecture.read(folder))
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() == pytest.approx(counted, rel=0.01)


def test_available_memory_is_that_of_the_machine_or_of_the_group(tmp_path: Path) -> None:
    """What a group's files keep in memory can be had back."""
    free = machine.available_memory(tmp_path)
    assert 0 < free < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name, text in {"max": "1000\n", "current": "900\n", "stat": "active_file 50\ninactive_file 200\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert machine.available_memory(tmp_path) == 350
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_memory(tmp_path) == pytest.approx(free, rel=0.2)


def test_too_few_open_files(settings: Callable[..., Config]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        finding = the_only(short(settings(**{"servers.max_running": 512, "train.batch_groups": 19})))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (finding.check, finding.level) == ("open files", "problem")
    assert finding.remedy.startswith("`ulimit -n 1040`")


def test_a_device_that_is_not_there_and_a_model_that_is_none(settings: Callable[..., Config], tmp_path: Path) -> None:
    findings = short(settings(**{"placement.ranks": [99]}))
    assert [(f.check, f.level) for f in bad(findings)] == [("placement", "problem"), ("memory", "problem")]
    finding = the_only(short(settings(**{"model.path": str(tmp_path / "nothing")})))
    assert (finding.check, finding.level) == ("model", "problem")


# -- before a run


def test_warnings_are_logged_and_problems_raised(
    settings: Callable[..., Config], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        before_run(settings(**{"data.train": write(tmp_path / "few.jsonl", rows(3))}))
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == ["data"]
    file = write(tmp_path / "twice.jsonl", [*rows(5), rows(1)[0]])
    with pytest.raises(ConfigError, match=r"(?s)^data: .*same id"):
        before_run(settings(**{"data.train": file}))


async def test_a_run_with_a_problem_does_not_start(
    settings: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(ConfigError, match=r"disk: .* 0\.0 GB free"):
        async with Controller(settings()):
            pass
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("spec", [None, ModuleSpec("wandb", None, is_package=True)])
async def test_a_run_with_a_missing_sink_leaves_no_folder(
    settings: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spec: ModuleSpec | None
) -> None:
    """I10. A folder wandb/ in the current one, such as W&B writes, is no package."""
    monkeypatch.setattr(metrics, "find_spec", lambda name: spec)
    with pytest.raises(ConfigError, match=r'^metrics: .*wandb is not installed; pip install "areal\[wandb\]"'):
        async with Controller(settings(**{"metrics.sinks": ["wandb"]})):
            pass
    assert not (tmp_path / "runs").exists()


def test_the_command_prints_a_line_each_and_fails(
    settings: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "twice.jsonl", [*rows(5), rows(1)[0]])
    arguments = [f"model.path={settings().model.path}", f"data.train={file}", f"folder={tmp_path / 'runs'}"]
    assert main(["doctor", *arguments]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * 6 + ["problem", "warning"]
    assert lines[-1].startswith("warning  servers and ranks: not started")
    assert main(["doctor", "no.such=1"]) == 2


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("warning", 0), ("problem", 1)])
def test_the_exit_code(monkeypatch: pytest.MonkeyPatch, level: Any, code: int) -> None:
    async def found(config: Config, agent: None, *, tell: Callable[[Finding], object]) -> list[Finding]:
        return [Finding("data", "ok", "good"), Finding("ports", level, "so so")]

    monkeypatch.setattr("areal.doctor.doctor", found)
    assert main(["doctor"]) == code


async def test_an_agent_needs_tasks(settings: Callable[..., Config]) -> None:
    async def agent(episode: Episode, task: Task) -> float:
        return 1.0

    findings = await doctor(settings(**{"data.train": ""}), agent)
    assert [f.check for f in bad(findings)] == ["agent", "servers and ranks"]


# -- the agent that the command is given

PROGRAM = """
import functools
from helper import REWARD

async def agent(episode, task):
    return REWARD

async def one(task):
    return REWARD

def plain(episode, task):
    return REWARD

class Agent:
    async def __call__(self, episode, task):
        return REWARD

    run = __call__

def passes_on(function):
    @functools.wraps(function)
    def inner(*arguments):
        return function(*arguments)
    return inner

@passes_on
async def decorated(episode, task):
    return REWARD

made = Agent()
bound = functools.partial(Agent.__call__, None)

if __name__ == "__main__":
    raise SystemExit("the program ran")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program beside a module that it imports."""
    (tmp_path / "helper.py").write_text("REWARD = 0.25")
    file = tmp_path / "its_program.py"
    file.write_text(PROGRAM)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return file


@pytest.mark.parametrize("name", ["agent", "decorated", "made", "bound", "made.run"])
@pytest.mark.parametrize("as_module", [False, True])
async def test_an_agent_is_found_in_a_program(
    program: Path, monkeypatch: pytest.MonkeyPatch, name: str, as_module: bool
) -> None:
    """As a file from anywhere, as a module of the current folder; processes of its own can import it too."""
    if as_module:
        monkeypatch.chdir(program.parent)
    agent = load_agent(f"{program.stem if as_module else program}:{name}")
    assert await agent(None, {}) == 0.25  # type: ignore[arg-type]
    assert sys.modules[program.stem].REWARD == 0.25


async def test_a_program_with_the_name_of_another_module(program: Path) -> None:
    file = program.rename(program.with_name("json.py"))
    assert await load_agent(f"{file}:agent")(None, {}) == 0.25  # type: ignore[arg-type]
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("its_program.py", "give FILE.py:NAME or MODULE:NAME"),
        ("its_program.py:", "give FILE.py:NAME or MODULE:NAME"),
        ("none.py:agent", "there is no file /.*/none.py"),
        ("no.module:agent", "no module no;"),
        ("its_program.py:agnt", "has no agnt; its async functions are: agent, one"),
        ("helper.py:agent", "has no agent; it has no async function"),
        ("its_program.py:plain", r"plain is a function, not an async function; write `async def plain\("),
        ("its_program.py:REWARD", "REWARD is of type float, not an async function"),
        ("its_program.py:Agent", "Agent is a class, not an async function"),
        ("its_program.py:one", r"cannot be called as one\(episode, task\): too many positional arguments"),
        ("raises.py:agent", "importing raises.py raised ModuleNotFoundError: No module named 'not_there'"),
        ("raises:agent", "importing raises raised ModuleNotFoundError: No module named 'not_there'"),
        ("ends.py:agent", r"exited the program \(SystemExit: 3\); put the code that starts it under `if __name__"),
    ],
)
def test_an_agent_that_cannot_be_had(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str, message: str
) -> None:
    """Nothing is checked or started."""
    monkeypatch.chdir(program.parent)
    Path("raises.py").write_text("import not_there")
    Path("ends.py").write_text("import sys; sys.exit(3)")
    assert main(["doctor", f"--agent={where}"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert re.match(rf"ConfigError: --agent '{where}': .*{message}", err)
    assert ('ends.py", line 1' in err or 'raises.py", line 1' in err) == ("raised" in message)  # where it failed


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_command_hands_the_agent_over(program: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Wherever it stands among the settings."""
    given: list[Any] = []

    async def found(config: Config, agent: Any, *, tell: Callable[[Finding], object]) -> list[Finding]:
        given.extend((config.seed, config.train.steps, await agent(None, {})))
        return []

    monkeypatch.setattr("areal.doctor.doctor", found)
    arguments = ["seed=7", "train.steps=3"]
    arguments[place:place] = ["--agent", f"{program}:agent"]
    assert main(["doctor", *arguments]) == 0
    assert given == [7, 3, 0.25]


# -- the agent


class FakeCluster:
    """Gives episodes whose model answers at once."""

    def episode(self, group: int, member: int, task_id: str, sampling: Sampling, agent: str) -> Episode:
        async def generate(ids: Ints, sampling: Sampling, *, key: str) -> Completion:
            await asyncio.sleep(0)
            return Completion(ids, ids[:1], np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")

        return Episode(
            generate=generate, template=None, sampling=sampling, context_length=99, member=member, task_id=task_id
        )


async def tried(settings: Callable[..., Config], agent: Any, count: int = 10) -> list[Finding]:
    return collect("agent", await live.try_agent(settings(), FakeCluster(), agent, rows(count)))  # type: ignore[arg-type]


async def good(episode: Episode, task: Task) -> float:
    await episode.generate([1, 2, 3])
    return float(task["id"] == "t3")


async def test_a_good_agent(settings: Callable[..., Config]) -> None:
    (finding,) = await tried(settings, good)
    assert finding.level == "ok"
    assert finding.message == "10 tasks, mean reward 0.1"


def sleeps() -> None:
    time.sleep(0.25)


def computes() -> None:
    end = time.thread_time() + 0.25
    while time.thread_time() < end:
        sum(range(1000))


@pytest.mark.parametrize("block", [sleeps, computes])
async def test_an_agent_that_blocks_the_loop(settings: Callable[..., Config], block: Callable[[], None]) -> None:
    """The task and the line are named."""

    async def agent(episode: Episode, task: Task) -> float:
        if task["id"] == "t4":
            block()
        return await good(episode, task)

    finding = the_only(await tried(settings, agent))
    assert finding.level == "problem"
    name = block.__name__
    assert f"on task 't4' ({__file__}:" in finding.message
    assert f"in {name})" in finding.message


async def test_an_agent_that_blocks_the_first_time_only(settings: Callable[..., Config]) -> None:
    seen: set[str] = set()

    async def agent(episode: Episode, task: Task) -> float:
        if not seen:
            time.sleep(0.25)
        seen.add(task["id"])
        return await good(episode, task)

    finding = the_only(await tried(settings, agent))
    assert finding.level == "warning"
    assert f"on task 't0' ({__file__}:" in finding.message
    assert "the first time" in finding.message


async def test_an_agent_that_raises_on_task_3(settings: Callable[..., Config]) -> None:
    async def agent(episode: Episode, task: Task) -> float:
        if task["id"] == "t3":
            raise KeyError("answer")
        return float(task["id"] == "t1")

    finding = the_only(await tried(settings, agent))
    assert finding.level == "problem"
    assert finding.message == "fails on task 't3' (agent): KeyError: 'answer'"


@pytest.mark.parametrize("reward", [float("nan"), None, "1"])
async def test_a_reward_that_is_no_finite_number(settings: Callable[..., Config], reward: Any) -> None:
    async def agent(episode: Episode, task: Task) -> float:
        return reward if task["id"] == "t0" else float(task["id"] == "t1")

    finding = the_only(await tried(settings, agent))
    assert "return a finite number" in finding.message


async def test_rewards_that_are_all_equal(settings: Callable[..., Config]) -> None:
    async def agent(episode: Episode, task: Task) -> float:
        return 0.5

    finding = the_only(await tried(settings, agent))
    assert finding.level == "warning"
    assert "the rewards of 10 tasks are all 0.5" in finding.message


def on_alarm(number: int, frame: object) -> None:
    raise AssertionError


def by_alarm() -> None:
    """As math-verify does for its deadlines: everything is as before at the end."""
    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(5)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


real_signal = signal.signal


def by_handler() -> None:
    """With a function that was imported earlier."""
    real_signal(signal.SIGUSR1, on_alarm)


@pytest.fixture
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(("use", "names"), [(by_alarm, {"signal.signal", "signal.alarm"}), (by_handler, {"SIGUSR1"})])
@pytest.mark.usefixtures("handlers")
async def test_an_agent_that_uses_signals(settings: Callable[..., Config], use: Any, names: set[str]) -> None:
    async def agent(episode: Episode, task: Task) -> float:
        use()
        return await good(episode, task)

    findings = bad(await tried(settings, agent))
    assert {f.level for f in findings} == {"problem"}
    assert all(any(name in f.message for f in findings) for name in names)
    assert signal.signal is real_signal
