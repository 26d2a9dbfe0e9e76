"""What is checked before a run: everything that needs no process to be started."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from areal.checks import data, machine, template
from areal.checks.findings import Finding, collect
from areal.config import Config
from areal.errors import ConfigError
from areal.types import Task
from areal.workers.local import load_tokenizer, model_folder
from areal.workers.models.architecture import Architecture
from areal.workers.placement import count_devices
from areal.workers.sglang.client import UNUSABLE_TOKENS
from areal.workers.sglang.launcher import check_model, context_of

log = logging.getLogger("areal")


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
        findings += collect("template", template.template(tokenizer, config.model.template_args))
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
