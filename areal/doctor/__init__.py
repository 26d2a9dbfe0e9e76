"""Checks a configuration before a run: `areal doctor CONFIG.toml --agent FILE.py:NAME`, or in a program

    findings = await doctor(config, agent, tasks)

`short` is the part that starts no process; every run starts with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from areal.config import Config
from areal.controller.cluster import Cluster
from areal.controller.rollout import Agent
from areal.data import check, read
from areal.doctor import chat, data, live, machine
from areal.doctor.findings import Finding, Result, collect
from areal.errors import ArealError, ConfigError, root_cause
from areal.types import Task
from areal.workers.local import LocalWorkers, load_tokenizer, model_folder
from areal.workers.placement import count_devices
from areal.workers.protocols import Workers
from areal.workers.rollout.client import UNUSABLE_TOKENS
from areal.workers.rollout.launcher import check_model, context_of
from areal.workers.trainer.architecture import Architecture

__all__ = ["Finding", "before_run", "doctor", "short"]

log = logging.getLogger("areal")

TRIED_TASKS = 10
"""Number of tasks on which the agent is tried."""


def short(config: Config, tasks: Sequence[Task] | None = None) -> list[Finding]:
    """The checks that start no process. tasks: those that the program passes; None takes `data.train`.

    Blocks while reading data and tokenizer: under an event loop, call it in a thread.
    """
    findings = collect("placement", machine.placement(config))
    findings += collect("ports", machine.ports(config))
    findings += collect("open files", machine.open_files(config))
    findings += collect("metrics", machine.sinks(config))
    tokenizer, room = None, config.model.context_length - UNUSABLE_TOKENS
    try:
        folder = model_folder(config.model.path)
        check_model(folder, config.model.context_length)
        architecture = Architecture.read(folder)
        findings += collect("disk", machine.disk(config, architecture))
        findings += collect("memory", machine.memory(config, architecture))
        room = context_of(config, architecture, count_devices() > 0) - UNUSABLE_TOKENS
        tokenizer = load_tokenizer(folder)
        findings += collect("template", chat.template(tokenizer, config.model.template_args))
    except ConfigError as error:
        findings.append(Finding("model", "problem", str(error)))
    return findings + collect("data", data.rows(config, tasks, tokenizer, room))


def before_run(config: Config) -> None:
    """`short` at the start of a run: log warnings, and raise ConfigError with all problems. Blocks."""
    findings = short(config)
    for finding in findings:
        if finding.level == "warning":
            log.warning("%s", finding.text)
    if problems := [finding.text for finding in findings if finding.level == "problem"]:
        raise ConfigError("\n".join(problems))


async def doctor(
    config: Config,
    agent: Agent | None = None,
    tasks: Iterable[Task] | None = None,
    *,
    workers: Callable[[Config], Workers] = LocalWorkers,
    tell: Callable[[Finding], object] = lambda finding: None,
) -> list[Finding]:
    """All checks. If `short` finds no problem, starts one server and the ranks, tries `agent` on the first ten tasks,
    and trains and publishes one throw-away step, which replaces the weights of the servers in servers.urls.

    tasks: those of the program; None takes `data.train`. tell: called with each finding as it comes.
    """
    findings: list[Finding] = []

    def found(new: Iterable[Finding]) -> None:
        for finding in new:
            findings.append(finding)
            tell(finding)

    rows: Sequence[Task] | None = None
    try:
        if tasks is not None:
            whole = hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__")
            rows = check(tasks if whole else list(islice(tasks, TRIED_TASKS)))
        elif agent and config.data.train:
            rows = await asyncio.to_thread(read, config.data.train)
    except ConfigError as error:
        found([Finding("data", "problem", str(error))])
    known = bool(findings)
    rest = await asyncio.to_thread(short, config, rows if tasks is not None else None)
    found(finding for finding in rest if not known or finding.check != "data")
    if agent and not rows and not known:
        found([Finding("agent", "problem", "there are no tasks to try it on", "set data.train, or pass tasks")])
    if any(finding.level == "problem" for finding in findings):
        found([Finding("servers and ranks", "warning", "not started", "fix the problems above first")])
        return findings
    found(await asyncio.to_thread(collect, "tool parser", chat.parser(chat.parser_of(config))))
    try:
        await asyncio.to_thread(os.makedirs, config.folder, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="doctor-", dir=config.folder) as folder:
            one = live.one_server(config)
            team = workers(one)
            await asyncio.to_thread(team.check)
            async with Cluster(one, team, Path(folder), life=0) as cluster:
                found(await _findings("log-probs", live.logprobs(one, cluster)))
                if agent and rows:
                    found(await _findings("agent", live.try_agent(one, cluster, agent, rows[:TRIED_TASKS])))
                found(await _findings("publication", live.publication(one, cluster)))
    except OSError as error:
        found([Finding("servers and ranks", "problem", f"folder={config.folder!r}: {error}", "choose another folder")])
    except (ArealError, ExceptionGroup) as error:
        cause = root_cause(error)
        if not isinstance(cause, ArealError):
            raise
        found([Finding("servers and ranks", "problem", str(cause))])
    return findings


async def _findings(check: str, results: Coroutine[Any, Any, list[Result]]) -> list[Finding]:
    try:
        return collect(check, await results)
    except ArealError as error:
        return [Finding(check, "problem", str(error))]
