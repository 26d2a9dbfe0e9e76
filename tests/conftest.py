"""Fixtures for all tests: folders of tiny models, built once per test run."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

from tests import models

hypothesis.settings.register_profile("areal", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("areal")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3, tied embeddings, Qwen3's own chat template."""
    return models.build(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2 (biases in attention), embeddings not tied, plain ChatML."""
    return models.build(
        tmp_path_factory.mktemp("models") / "qwen2", "qwen2", tied=False, template=models.CHATML_TEMPLATE
    )


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama, tied embeddings, plain ChatML."""
    return models.build(tmp_path_factory.mktemp("models") / "llama", "llama", template=models.CHATML_TEMPLATE)
