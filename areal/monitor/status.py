"""What a run does now, on one screen: `areal status RUN`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def screen(status: Mapping[str, Any]) -> str:
    """The text for a person. status: what `Controller.status` returns."""
    servers, ranks, groups = status["servers"], status["ranks"], status["groups"]
    reward = status["reward"]
    step = f"{status['step']} of {status['steps']}" + ("" if reward is None else f", mean reward {reward:.3f}")
    held = "a step is in flight" if ranks["version"] is None else f"version {ranks['version']}"
    dropped = ", ".join(f"{reason} {count}" for reason, count in groups["dropped"].items()) or "none"
    lines = [
        f"run      {status['run']}, life {status['life']}, up for {status['seconds']:.0f} s",
        f"step     {step}",
        f"groups   {groups['open']} open, {groups['trained']} trained; dropped: {dropped}",
        f"episodes {status['episodes']} in progress",
        f"ranks    {ranks['count']}, {held}, restarts {ranks['restarts']}",
        f"servers  {len(servers)}, requests queued {status['queued']}",
    ]
    for server in servers:
        version = "" if server["version"] is None else f", version {server['version']}"
        reason = f": {server['reason']}" if server["reason"] else ""
        in_flight = f", {server['requests']} requests in flight"
        lines.append(f"  {server['index']} {server['url']} {server['state']}{version}{in_flight}{reason}")
    return "\n".join([*lines, "waiting for", *(f"  {line}" for line in status["waits"] or ["nothing"])])
