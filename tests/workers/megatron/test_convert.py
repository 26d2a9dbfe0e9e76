from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal.errors import ConfigError, TrainerError
from areal.workers.megatron import convert
from areal.workers.models.architecture import Architecture


@pytest.fixture
def architecture(tiny_qwen2: Path) -> Architecture:
    return Architecture.read(tiny_qwen2)


def test_query_key_value_of_a_head_lie_together(architecture: Architecture) -> None:
    """4 query heads and 2 key-value heads: group 0 has queries 0 and 1, group 1 has 2 and 3."""
    width = architecture.head_dim
    query, key, value = (
        (torch.arange(heads) + base).repeat_interleave(width)[:, None] * torch.ones(1, 3)
        for heads, base in ((4, 0), (2, 10), (2, 20))
    )
    merged = convert.merge([query, key, value], architecture)
    assert merged[::width, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert all(
        torch.equal(a, b) for a, b in zip(convert.split(merged, 3, architecture), (query, key, value), strict=True)
    )
    biases = [torch.randn(heads * width) for heads in (4, 2, 2)]
    assert all(
        torch.equal(a, b)
        for a, b in zip(convert.split(convert.merge(biases, architecture), 3, architecture), biases, strict=True)
    )


def test_gate_lies_over_up(architecture: Architecture) -> None:
    gate, up = torch.zeros(4, 2), torch.ones(4, 2)
    merged = convert.merge([gate, up], architecture)
    assert merged[:, 0].tolist() == [0] * 4 + [1] * 4
    assert all(torch.equal(a, b) for a, b in zip(convert.split(merged, 2, architecture), (gate, up), strict=True))


def test_unknown_parameter() -> None:
    assert convert.hf_names("decoder.layers.12.mlp.linear_fc2.weight") == ("model.layers.12.mlp.down_proj.weight",)
    with pytest.raises(KeyError):
        convert.hf_names("decoder.layers.0.mlp.router.weight")


class Tiny(torch.nn.Module):
    """As many parameters as `load` needs to see."""

    def __init__(self, rows: int = 512) -> None:
        super().__init__()
        self.embedding = torch.nn.Module()
        self.embedding.word_embeddings = torch.nn.Embedding(rows, 64)


def test_load_refuses_what_does_not_fit(tmp_path: Path, tiny_qwen2: Path, architecture: Architecture) -> None:
    with pytest.raises(ConfigError, match=r"unexpected tensor lm_head\.weight"):
        convert.load(Tiny(), tiny_qwen2, architecture)
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight merge to shape \(512, 64\).*\(600, 64\)"):
        convert.load(Tiny(rows=600), tiny_qwen2, architecture)
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        convert.load(Tiny(), tmp_path, architecture)


def test_large_models_are_written_in_several_files(
    tmp_path: Path, tiny_qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(tiny_qwen2 / "model.safetensors")
    monkeypatch.setattr(convert, "SHARD_BYTES", 100_000)
    convert.write_folder(tmp_path / "out", weights.items(), convert.companions(tiny_qwen2), "float32")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())

    # Again, into one file: no file of the first writing is left.
    monkeypatch.setattr(convert, "SHARD_BYTES", 1 << 30)
    convert.write_folder(tmp_path / "out", weights.items(), convert.companions(tiny_qwen2), "float32")
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_config_names_the_type_of_the_weights(tmp_path: Path) -> None:
    for key in ("torch_dtype", "dtype"):
        files = {"config.json": json.dumps({key: "float32"}).encode()}
        convert.write_folder(tmp_path / "out", [("a", torch.zeros(2))], files, "bfloat16")
        assert json.loads((tmp_path / "out" / "config.json").read_text()) == {key: "bfloat16"}


def test_a_writing_that_fails_leaves_the_old_folder(tmp_path: Path) -> None:
    convert.write_folder(tmp_path / "out", [("a", torch.ones(2))], {}, "float32")

    def tensors():
        yield "a", torch.zeros(2)
        raise OSError(28, "No space left on device")

    with pytest.raises(TrainerError, match=r"cannot write the weights to .*out: .*No space left.* MB are free"):
        convert.write_folder(tmp_path / "out", tensors(), {}, "float32")
    assert load_file(tmp_path / "out" / "model.safetensors")["a"].tolist() == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_tied_models_may_carry_the_output_layer(tmp_path: Path, architecture: Architecture) -> None:
    weights = {"model.embed_tokens.weight": torch.randn(512, 64), "lm_head.weight": torch.randn(512, 64)}
    convert.write_folder(tmp_path / "model", weights.items(), {}, "float32")
    model = Tiny()
    convert.load(model, tmp_path / "model", replace(architecture, tied=True))
    assert torch.equal(model.embedding.word_embeddings.weight, weights["model.embed_tokens.weight"])
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        convert.load(model, tmp_path / "model", architecture)
