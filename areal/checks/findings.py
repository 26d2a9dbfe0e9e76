"""Findings: the results of checks."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from areal.errors import ArealError

log = logging.getLogger("areal")

Level = Literal["ok", "warning", "problem"]
Result = tuple[Level, str, str] | str
"""A check yields (level, message, remedy), or just the message for level `ok`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """level: `ok`, `warning` (a run works, but not as well as it could) or `problem` (a run fails, or is not correct).
    remedy: what to do about it."""

    check: str
    level: Level
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:8} {self.text}"

    @property
    def text(self) -> str:
        """The finding without its level."""
        return f"{self.check}: {self.message}" + (f"; {self.remedy}" if self.remedy else "")


def collect(check: str, results: Iterable[Result]) -> list[Finding]:
    """The findings of a check. If it raises an ArealError, that is a problem; any other exception is only a warning,
    because a bug in a check must not block the run."""
    findings: list[Finding] = []
    try:
        for result in results:
            findings.append(Finding(check, "ok", result) if isinstance(result, str) else Finding(check, *result))
    except ArealError as error:
        findings.append(Finding(check, "problem", str(error)))
    except Exception as error:
        log.debug("check %r failed", check, exc_info=True)
        findings.append(Finding(check, "warning", f"could not be checked ({type(error).__name__}: {error})"))
    return findings
