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

from areal.checks import short, template
from areal.checks.findings import Finding, Result, collect
from areal.config import Config
from areal.controller.cluster import Cluster
from areal.controller.rollout import Agent
from areal.data import check, read
from areal.doctor import live
from areal.errors import ArealError, ConfigError, root_cause
from areal.types import Task
from areal.workers.local import LocalWorkers
from areal.workers.protocols import Workers

__all__ = ["Finding", "doctor"]

log = logging.getLogger("areal")

TRIED_TASKS = 10
"""Number of tasks on which the agent is tried."""


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
    found(await asyncio.to_thread(collect, "tool parser", template.parser(template.parser_of(config))))
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
