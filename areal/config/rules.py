"""Combinations of settings that cannot be honoured (I10)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from areal.config.schema import SETTINGS, Tree, to_text
from areal.masking import secrets

SETTING_OF = {
    "--model-path": "model.path",  # --model is the same
    "--dtype": "model.dtype",
    "--context-length": "model.context_length",
    "--port": "servers.port",
    "--max-running-requests": "servers.max_running",
    "--max-total-tokens": "servers.max_total_tokens",
    "--tp-size": "placement.servers",
    "--tensor-parallel-size": "placement.servers",
}
"""SGLang flags that areal derives from a setting; in servers.args they would override it. SGLang also accepts their
abbreviations."""


def show_setting(config: Tree, key: str) -> str:
    origin = config.origins.get(key, "default")
    return f"{key}={to_text(config[key], key)}" + ("" if origin == "default" else f" ({origin})")


def conflicts(config: Tree) -> Iterator[str]:
    """One message per conflict (I10). A value equal to its default never has no effect."""

    def without_effect(keys: Sequence[str], because: str) -> Iterator[str]:
        for key in keys:
            if config[key] != SETTINGS[key].default:
                yield f"{show(key)} has no effect with {show(because)}; leave one of them out"

    c, show = config, partial(show_setting, config)
    if c.group.min_members > c.group.size:
        yield f"{show('group.min_members')} is more than {show('group.size')}"
    if c.group.size == 1 and c.group.uniform == "replace":
        yield f"{show('group.size')} makes every group uniform: {show('group.uniform')} would replace them all for ever"
    if c.train.minibatches > c.train.batch_groups * c.group.size:
        yield (
            f"{show('train.minibatches')} is more than the {c.train.batch_groups} x {c.group.size} episodes of a batch "
            "(train.batch_groups x group.size)"
        )
    if c.train.steps and c.optimizer.warmup_steps > c.train.steps:
        yield f"{show('optimizer.warmup_steps')} is more than {show('train.steps')}: the warm-up would never end"
    if c.optimizer.schedule == "constant":
        yield from without_effect(["optimizer.min_lr"], "optimizer.schedule")
    elif c.optimizer.min_lr > c.optimizer.lr:
        yield f"{show('optimizer.min_lr')} is more than {show('optimizer.lr')}"
    if c.model.context_length and c.sampling.max_new_tokens >= c.model.context_length:
        yield f"{show('sampling.max_new_tokens')} leaves no room for a prompt in {show('model.context_length')}"
    if c.data.evaluation:
        yield from without_effect(["data.evaluation_size"], "data.evaluation")
    if c.weights.transport == "group":
        yield from without_effect(["weights.folder"], "weights.transport")
        if c.weights.interrupt == "retract":
            yield f"{show('weights.interrupt')} needs weights.transport=disk"
    if "wandb" not in c.metrics.sinks:
        yield from without_effect(["metrics.project"], "metrics.sinks")
    yield from _secrets(config)
    for word in c.servers.args:
        flag = word.partition("=")[0]
        if setting := next((s for f, s in SETTING_OF.items() if len(flag) > 2 and f.startswith(flag)), None):
            yield f"servers.args: set {setting} instead of {flag}"
    if c.servers.urls:
        ours = ["servers.count", "servers.port", "servers.max_total_tokens", "servers.args", "servers.restarts"]
        yield from without_effect([*ours, "placement.servers"], "servers.urls")
    elif c.servers.port and c.servers.port + c.servers.count - 1 > 65535:
        yield f"{show('servers.port')} with {show('servers.count')} exceeds the last port, 65535"
    yield from _misplaced(config)
    for key in (key for key in SETTINGS if key.endswith("timeout_s") and key != "episode.tool_timeout_s"):
        if c.watchdog_s <= c[key]:
            yield f"{show('watchdog_s')} must be greater than {show(key)}: slow work would look like a hang"


def _secrets(config: Tree) -> Iterator[str]:
    """Settings must not hold secrets: they are written to the run folder and W&B, and `ps` shows server arguments."""
    known = secrets()
    for key in SETTINGS if known else ():
        if name := next((name for name, secret in known.items() if secret in str(config[key])), None):
            origin = config.origins.get(key, "default")
            yield f"{key} ({origin}) contains the secret in ${name}; keep it in the environment only"
    if any("@" in url for url in config.servers.urls):
        yield "servers.urls contains a user name; start the servers with an API key and set AREAL_SERVER_KEY to it"
    for word in config.servers.args:
        if (flag := word.partition("=")[0]) in ("--api-key", "--admin-api-key", "--ssl-keyfile-password"):
            yield f"servers.args: `ps` would show {flag}; areal generates a key for each server that it starts"


def _misplaced(config: Tree) -> Iterator[str]:
    """Placements that are wrong on any machine. Whether the devices exist is checked later."""
    show = partial(show_setting, config)
    servers, ranks = config.placement.servers, config.placement.ranks
    if servers and not config.servers.urls and len(servers) != config.servers.count:
        yield f"{show('placement.servers')} places {len(servers)} servers, {show('servers.count')}"
    if ranks and len(ranks) != config.trainer.ranks:
        yield f"{show('placement.ranks')} places {len(ranks)} ranks, {show('trainer.ranks')}"
    if any(not devices or min(devices) < 0 or len(set(devices)) < len(devices) for devices in servers):
        yield f"{show('placement.servers')}: each server needs one or more distinct device indices >= 0"
    if any(device < 0 for device in ranks) or len(set(ranks)) < len(ranks):
        yield f"{show('placement.ranks')}: each rank needs its own device index >= 0"
    if config.weights.transport == "group" and (shared := {d for devices in servers for d in devices} & set(ranks)):
        yield (
            f"{show('placement.servers')} and {show('placement.ranks')} share device {min(shared)}: "
            "a broadcast cannot send and receive on one device; use weights.transport=disk"
        )
