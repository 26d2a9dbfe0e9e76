"""Metadata of a model folder: `Architecture` from config.json, `Saved` from a checkpoint's trainer state.

Imports neither torch nor transformers nor Megatron, so that the controller can check a folder before anything starts.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from areal.errors import ConfigError, TrainerError

FAMILIES = ("llama", "qwen2", "qwen3")
"""Supported values of `model_type`."""

TRAINER = "trainer"
"""Folder inside a checkpoint for what a model folder does not have: the optimizer state."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The step that a checkpoint covers, and the data type of the trained weights."""

    version: int
    dtype: str

    @classmethod
    def read(cls, folder: Path | str) -> Saved:
        """Read `folder`/trainer/saved.json. Raises TrainerError if the folder is not a checkpoint of the trainer."""
        path = Path(folder) / TRAINER / "saved.json"
        try:
            return cls(**json.loads(path.read_text()))
        except OSError as error:
            raise TrainerError(
                f"no training can go on from {folder}: {path}: {error.strerror}; use a checkpoint that the trainer "
                f"wrote, or start a new run from its weights with model.path={folder}"
            ) from None
        except (ValueError, TypeError) as error:
            raise TrainerError(f"{path} is damaged ({error}); use another checkpoint") from None

    def write(self, folder: Path) -> None:
        (folder / TRAINER / "saved.json").write_text(json.dumps(asdict(self)))


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. A `factor` above 1 means Llama 3's scaling, for which the other fields apply."""

    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class Architecture:
    """A dense decoder with RMSNorm, SwiGLU, rotary embedding and grouped-query attention.

    `hidden`, `ffn` and `head_dim` are widths; `kv_heads` divides `heads`; `tied`: the embedding is the output layer.
    """

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rope: Rope

    @classmethod
    def read(cls, folder: Path | str) -> Architecture:
        """Read `folder`/config.json. Raises ConfigError if it cannot be read, or the ranks cannot compute the model
        exactly."""
        path = Path(folder) / "config.json"
        try:
            values = json.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"model.path={str(folder)!r} is no model folder: {path}: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
        family = values.get("model_type")
        if family not in FAMILIES:
            raise ConfigError(f"{path}: model_type={family!r} is not supported; use {', '.join(FAMILIES)}")
        _refuse_variants(path, family, values)
        try:
            heads, hidden = values["num_attention_heads"], values["hidden_size"]
            return cls(
                family=family,
                layers=values["num_hidden_layers"],
                hidden=hidden,
                ffn=values["intermediate_size"],
                heads=heads,
                kv_heads=values.get("num_key_value_heads") or heads,
                head_dim=values.get("head_dim") or (128 if family == "qwen3" else hidden // heads),
                vocab=values["vocab_size"],
                context=values["max_position_embeddings"],
                norm_eps=values.get("rms_norm_eps", 1e-6),
                tied=values.get("tie_word_embeddings", False),
                qkv_bias=family == "qwen2",
                qk_norm=family == "qwen3",
                rope=_rope(path, values),
            )
        except KeyError as error:
            raise ConfigError(f"{path} has no {error}") from None


def _refuse_variants(path: Path, family: str, values: dict[str, Any]) -> None:
    """Refuse options of these families that change the computation and are not implemented."""
    allowed = {
        "hidden_act": ("silu",),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
        "partial_rotary_factor": (1.0,),
        "attention_bias": (False,) if family != "qwen2" else (False, True),
        "quantization_config": (),
    }
    for key, choices in allowed.items():
        value = values.get(key)
        if value is not None and value not in choices:
            raise ConfigError(f"{path}: {key}={value!r} is not supported by the trainer")


def _rope(path: Path, values: dict[str, Any]) -> Rope:
    """transformers 5 writes `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = given.get("rope_theta") or values.get("rope_theta") or 10000.0
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return Rope(theta)
    if kind == "llama3":
        return Rope(
            theta,
            given["factor"],
            given["low_freq_factor"],
            given["high_freq_factor"],
            given["original_max_position_embeddings"],
        )
    raise ConfigError(f"{path}: rope_type={kind!r} is not supported by the trainer; default and llama3 are")
