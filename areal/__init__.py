"""Asynchronous reinforcement learning for LLM agents."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal.agents.episode import Episode
    from areal.agents.tools import tool
    from areal.cli import launch
    from areal.config import Config
    from areal.controller.controller import Controller, Evaluation
    from areal.errors import ArealError, ConfigError, EpisodeError
    from areal.finetune import sft
    from areal.types import Completion, EpisodeRecord, Message, Task

_HOMES = {
    "ArealError": "errors",
    "Completion": "types",
    "Config": "config",
    "ConfigError": "errors",
    "Controller": "controller.controller",
    "Episode": "agents.episode",
    "EpisodeError": "errors",
    "EpisodeRecord": "types",
    "Evaluation": "controller.controller",
    "Message": "types",
    "Task": "types",
    "launch": "cli",
    "sft": "finetune",
    "tool": "agents.tools",
}

__all__ = [
    "ArealError",
    "Completion",
    "Config",
    "ConfigError",
    "Controller",
    "Episode",
    "EpisodeError",
    "EpisodeRecord",
    "Evaluation",
    "Message",
    "Task",
    "launch",
    "sft",
    "tool",
]


def __getattr__(name: str) -> object:
    """Import a public name on first use: a trainer rank or `--help` needs few of them."""
    if name not in _HOMES:
        raise AttributeError(f"module 'areal' has no attribute {name!r}")
    return getattr(importlib.import_module(f"areal.{_HOMES[name]}"), name)
