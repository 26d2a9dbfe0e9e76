"""What a check says."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from areal.errors import ArealError

log = logging.getLogger("areal")

Level = Literal["ok", "warning", "problem"]
Result = tuple[Level, str, str] | str
"""What a check yields: (level, message, remedy), or the message of an ok."""


@dataclass(frozen=True, slots=True)
class Finding:
    """level: `ok`, `warning` (a run works, worse than it could) or `problem` (it does not, or it does something else
    than it seems to). remedy: what to do about it."""

    check: str
    level: Level
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:8} {self.text}"

    @property
    def text(self) -> str:
        """Without the level."""
        return f"{self.check}: {self.message}" + (f"; {self.remedy}" if self.remedy else "")


def collect(check: str, results: Iterable[Result]) -> list[Finding]:
    """The findings of a check. What it raises becomes one: an ArealError, which names its own remedy, is a problem,
    anything else a warning: a fault of a check keeps no run from its start."""
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
