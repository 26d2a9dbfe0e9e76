"""Secrets in the environment: which variables hold one, and how to keep them out of child processes and texts."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping

_NAMES = re.compile(r"(PASSWORD|PASSWD|APIKEY|(^|_)(KEY|TOKEN|SECRET|CREDENTIALS?))$", re.IGNORECASE)
_SHORTEST = 8
"""Shorter values are not masked: they would match unrelated text."""


def is_secret(name: str) -> bool:
    """Whether a variable of that name holds a secret: WANDB_API_KEY, HF_TOKEN, PGPASSWORD, ..."""
    return _NAMES.search(name) is not None


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not is_secret(name)}


def mask(text: str) -> str:
    """`text` with each secret of this process's environment replaced by `<NAME>`."""
    for name, value in secrets().items():
        text = text.replace(value, f"<{name}>")
    return text


def secrets() -> dict[str, str]:
    """Name -> value of those in this process's environment, longest first, because one may contain another."""
    found = {n: v for n, v in os.environ.items() if len(v) >= _SHORTEST and is_secret(n)}
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


class MaskingFormatter(logging.Formatter):
    """Masks messages and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return mask(super().format(record))
