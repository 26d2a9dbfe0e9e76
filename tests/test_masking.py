"""areal/masking.py, and the places that use it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from areal import masking
from areal.config import Config
from areal.controller.rollout import Failure
from areal.errors import ConfigError
from areal.workers.process import Child

SECRET = "sk-0123456789abcdef"


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "AREAL_SERVER_KEY", "AREAL_TRAINER_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"],
)
def test_names_of_secrets(name: str) -> None:
    assert masking.is_secret(name)


@pytest.mark.parametrize("name", ["PATH", "TOKENIZERS_PARALLELISM", "NCCL_IB_PKEY", "CUDA_VISIBLE_DEVICES", "KEYS"])
def test_names_of_other_variables(name: str) -> None:
    assert not masking.is_secret(name)


def test_a_text_loses_secrets_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", SECRET)
    monkeypatch.setenv("B_TOKEN", SECRET + "-and-more")
    monkeypatch.setenv("C_TOKEN", "short")
    text = f"short {SECRET}-and-more, {SECRET}! {SECRET[:-1]}"
    assert masking.mask(text) == f"short <B_TOKEN>, <A_TOKEN>! {SECRET[:-1]}"


def test_log_lines_and_tracebacks_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    try:
        raise ValueError(SECRET)
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("areal", logging.ERROR, "", 0, "with %s", (SECRET,), info)
    text = masking.MaskingFormatter("%(message)s").format(record)
    assert SECRET not in text
    assert "with <HF_TOKEN>" in text
    assert "ValueError: <HF_TOKEN>" in text


def test_what_the_ledger_keeps_of_a_failure_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert Failure("agent", f"401 for {SECRET}", ValueError()).message == "401 for <HF_TOKEN>"


async def test_children_get_no_secrets_and_their_files_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are given to a child outright it gets; what it writes of ours is not repeated."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("HARMLESS", "yes")
    script = f'echo "[$HF_TOKEN] $HARMLESS $ITS_TOKEN"; echo {SECRET}; touch {tmp_path}/made'
    child = Child.start("child", ["sh", "-c", script], log=tmp_path / "log", env={"ITS_TOKEN": "its own token"})
    await child.wait()
    assert child.tail().splitlines() == ["[] yes its own token", "<HF_TOKEN>"]
    assert SECRET not in str(child.error("ended"))
    assert os.stat(tmp_path / "made").st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        (f"data.train={SECRET}", r"data\.train \(argument\) contains the secret in \$HF_TOKEN"),
        (f"model.template_args={{a = '{SECRET}'}}", r"model\.template_args .*\$HF_TOKEN"),
        (f"servers.args=['--x', '{SECRET}']", r"servers\.args .*\$HF_TOKEN"),
        ("servers.args=['--api-key', 'abc']", "would show --api-key"),
        ("servers.args=['--admin-api-key=abc']", "would show --admin-api-key"),
        ("servers.urls=['http://me:pass@host']", r"servers\.urls contains a user name.*AREAL_SERVER_KEY"),
    ],
)
def test_a_secret_in_a_setting_is_refused_and_not_shown(
    setting: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with pytest.raises(ConfigError, match=told) as failure:
        Config.load([setting])
    assert not any(secret in str(failure.value) for secret in (SECRET, "abc", "me:pass"))
