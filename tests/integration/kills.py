"""Kills for real: a program on real SGLang and Megatron ranks, what is killed and when, and what must be true after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from areal.config import Config
from areal.controller.facts import Fact
from areal.controller.reader import LedgerReader
from areal.simulation.audit import Audit

STEPS = 6
SETTINGS = {
    "train.steps": STEPS,
    "train.batch_groups": 3,
    "train.minibatches": 2,
    "group.size": 3,
    "group.uniform": "train",
    "sampling.max_new_tokens": 16,
    "staleness.max": 1,
    "optimizer.lr": 1e-3,
    "optimizer.schedule": "linear",
    "checkpoint.every": 2,
    "view": "plain",
    "model.context_length": 512,
    "name": "kill",
}
PROGRAM = """
    import asyncio
    from areal import Controller, launch, tool

    @tool
    async def look(place: str) -> str:
        "Look there. place: where."
        await asyncio.sleep(0.2)
        return "nothing"

    async def agent(episode, task):
        messages = [{"role": "user", "content": task["text"]}]
        for turn in range(3):
            messages.append(await episode.chat(messages, tools=[look]))
            messages += [{"role": "user", "content": "again"}]
            await asyncio.sleep(episode.rng.choice([0.1, 0.2, LONGEST]))
        return 1.5 - len(set(messages[-2]["content"])) / 24

    async def main(config):
        async with Controller(config) as controller:
            await controller.train(agent, [{"id": str(i), "text": f"the city of person {i}"} for i in range(500)])

    if __name__ == "__main__":
        launch(main)
"""
END_S = 300.0
MARK = "AREAL_TEST_MARK"


def descendants(folder: Path) -> list[int]:
    """Processes that have `folder` in their environment, such as in MARK, which children inherit; our own excepted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(folder) in (entry / "environ").read_text(errors="replace"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


class Run:
    """One run of PROGRAM, over all its processes. `facts` is what its ledger has on disk. longest: the seconds of the
    longest pause that an agent makes between two turns."""

    def __init__(self, model: Path, folder: Path, longest: float = 3.0) -> None:
        self.program = folder / "program.py"
        self.program.write_text(textwrap.dedent(PROGRAM).replace("LONGEST", str(longest)))
        self._folder = folder
        self.process: subprocess.Popen[str] | None = None
        settings = {**SETTINGS, "model.path": model, "folder": folder / "runs"}
        self._first = [sys.executable, str(self.program), *(f"{key}={value}" for key, value in settings.items())]

    @property
    def path(self) -> Path:
        return self._folder / "runs" / "kill-0001"

    def start(self, *changes: str) -> None:
        self._start([*self._first, *changes])

    def resume(self, *changes: str) -> None:
        self._start([sys.executable, "-m", "areal", "resume", str(self.path), *changes])

    def _start(self, command: list[str]) -> None:
        log = (self._folder / "output.log").open("a")
        marked = {**os.environ, MARK: str(self._folder)}
        self.process = subprocess.Popen(command, stdout=log, stderr=log, text=True, cwd=self._folder, env=marked)

    def facts(self) -> list[Fact]:
        try:
            with LedgerReader.open(self.path / "ledger") as reader:
                return list(reader.facts())
        except Exception:  # it is not there yet, or the run went on meanwhile
            return []

    def wait(self, until: Callable[[list[Fact]], bool]) -> bool:
        """Until the facts say so (True), or the program has ended."""
        assert self.process
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            if until(self.facts()):
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(0.05)
        raise AssertionError(f"not within {END_S:g} s; {self.output()}")

    def end(self) -> int:
        assert self.process
        return self.process.wait(END_S)

    def titles(self) -> set[str]:
        """What the run's processes call themselves."""
        assert self.process
        return {child.name() for child in psutil.Process(self.process.pid).children(recursive=True)}

    def kill(self, what: str) -> bool:
        """SIGKILL to the "controller", a "server", its "scheduler" or a "rank". False when there was none just then."""
        assert self.process
        if what == "controller":
            children = psutil.Process(self.process.pid).children(recursive=True)
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
            deadline = time.monotonic() + 15
            _, left = psutil.wait_procs(children, timeout=15)
            assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE], "orphans"
            while found := descendants(self._folder):
                assert time.monotonic() < deadline, f"{found} have left the tree, and run"
                time.sleep(0.05)
            return True
        mark = {"server": "cpu_server", "scheduler": "sglang::scheduler", "rank": "megatron.rank"}[what]
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                words = child.cmdline()
                if any(mark in word for word in words) and not any(word.endswith("guard.py") for word in words):
                    child.kill()
                    return True
            except psutil.Error:
                continue
        return False

    def close(self) -> None:
        if self.process and self.process.poll() is None:
            self.kill("controller")

    def output(self) -> str:
        return (self._folder / "output.log").read_text()[-3000:]

    def losses(self) -> dict[int, list[float]]:
        """Step -> the losses of each time that it was taken."""
        found: dict[int, list[float]] = {}
        file = self.path / "metrics.jsonl"
        for line in file.read_text().splitlines() if file.exists() else []:
            row = json.loads(line)
            found.setdefault(row["step"], []).append(row["train"]["loss"])
        return found

    def check(self, steps: int = STEPS) -> None:
        """I1 to I4 over all lives, and every step taken once for the final weights: repeats had the same loss."""
        config = Config.load([str(self.path / "config.toml")])
        audit = Audit(config.train.batch_groups, config.staleness.max, config.staleness.late, config.group.size)
        audit.least_reward = 0.0
        audit.follow(self.facts())
        assert audit.version == steps
        assert audit.covered == steps
        assert len(audit.trained) == steps * config.train.batch_groups
        losses = self.losses()
        assert sorted(losses) == list(range(1, steps + 1))
        for step, values in losses.items():
            assert max(values) - min(values) < 1e-5, f"step {step} had the losses {values}"
