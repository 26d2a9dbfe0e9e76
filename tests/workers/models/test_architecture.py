from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal.errors import ConfigError, TrainerError
from areal.workers.models.architecture import TRAINER, Architecture, Rope, Saved

QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
}
"""As in the hub's Qwen3-0.6B, written by transformers 4."""


def read(folder: Path, values: dict[str, Any], *without: str) -> Architecture:
    kept = {key: value for key, value in values.items() if key not in without}
    (folder / "config.json").write_text(json.dumps(kept))
    return Architecture.read(folder)


def test_qwen3(tmp_path: Path) -> None:
    got = read(tmp_path, QWEN3)
    assert (got.layers, got.hidden, got.ffn, got.heads, got.kv_heads, got.head_dim) == (28, 1024, 3072, 16, 8, 128)
    assert (got.vocab, got.context, got.tied, got.qk_norm, got.qkv_bias) == (151936, 40960, True, True, False)
    assert got.rope == Rope(1000000)


def test_values_that_older_configs_leave_out(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN3, "head_dim").head_dim == 128
    qwen2 = QWEN3 | {"model_type": "qwen2"}
    got = read(tmp_path, qwen2, "head_dim", "tie_word_embeddings", "num_key_value_heads", "rope_theta")
    assert (got.head_dim, got.tied, got.kv_heads, got.rope.theta) == (64, False, 16, 10000.0)
    assert got.qkv_bias
    assert not got.qk_norm


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_llama3_rope(tmp_path: Path, key: str) -> None:
    rope = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    got = read(tmp_path, QWEN3 | {"model_type": "llama", "rope_theta": 500000.0, key: rope})
    assert got.rope == Rope(500000.0, 32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "mixtral"}, r"model_type='mixtral' is not supported; use llama, qwen2, qwen3"),
        ({"model_type": None}, "model_type=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "has no 'factor'"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read(tmp_path, QWEN3 | change)


def test_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no model folder.*No such file"):
        Architecture.read(tmp_path)
    with pytest.raises(ConfigError, match="has no 'vocab_size'"):
        read(tmp_path, QWEN3, "vocab_size")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        Architecture.read(tmp_path)


def test_what_a_checkpoint_was_made_from(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=rf"{tmp_path}/trainer/saved\.json: No such file .* model\.path={tmp_path}"):
        Saved.read(tmp_path)
    (tmp_path / TRAINER).mkdir()
    Saved(7, "bfloat16").write(tmp_path)
    assert Saved.read(tmp_path) == Saved(7, "bfloat16")
    for content in ("", "[]", '{"version": 7}'):
        (tmp_path / TRAINER / "saved.json").write_text(content)
        with pytest.raises(TrainerError, match=r"saved\.json is damaged"):
            Saved.read(tmp_path)
