"""Bit-exact conversion of weights between Hugging Face and Megatron-core, and model folders on disk.

Megatron stores query, key and value of each key-value head in one matrix, and gate and up projections in another. The
whole model must be on this rank (no tensor or pipeline parallelism yet).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from areal.errors import ConfigError, TrainerError
from areal.types import TensorSpec
from areal.workers.models.architecture import Architecture

SHARD_BYTES = 4 << 30
"""Size after which a new weight file is started."""
COMPANIONS = (".json", ".jinja", ".txt", ".model", ".tiktoken")
"""Suffixes of a model folder's other files: config, tokenizer, chat template."""

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{x}_proj.bias" for x in "qkv"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}


def hf_names(name: str) -> tuple[str, ...]:
    """Names of the Hugging Face tensors in Megatron's parameter `name`."""
    if name in _TOP:
        return (_TOP[name],)
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None or match[2] not in _LAYER:
        raise KeyError(name)
    return tuple(f"model.layers.{match[1]}.{part}" for part in _LAYER[match[2]])


def merge(parts: list[Tensor], architecture: Architecture) -> Tensor:
    """Merge Hugging Face tensors, in the order of `hf_names`, into one Megatron parameter."""
    if len(parts) < 3:
        return torch.cat(parts)
    heads, tail = architecture.kv_heads, parts[0].shape[1:]
    return torch.cat([part.view(heads, -1, *tail) for part in parts], 1).reshape(-1, *tail)


def split(parameter: Tensor, parts: int, architecture: Architecture) -> tuple[Tensor, ...]:
    """The inverse of `merge`."""
    if parts < 3:
        return parameter.chunk(parts)
    heads, tail = architecture.kv_heads, parameter.shape[1:]
    queries = architecture.heads // heads
    widths = [width * architecture.head_dim for width in (queries, 1, 1)]
    return tuple(x.reshape(-1, *tail) for x in parameter.view(heads, -1, *tail).split(widths, 1))


@torch.no_grad()
def load(model: torch.nn.Module, folder: Path | str, architecture: Architecture) -> None:
    """Set all parameters from the safetensors files of `folder`. Raises ConfigError for a tensor that is missing,
    unexpected, or of the wrong shape."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no .safetensors file")
    with ExitStack() as stack:
        source = {}
        for path in files:
            file = stack.enter_context(safe_open(path, framework="pt"))
            source.update(dict.fromkeys(file.keys(), file))
        unused = set(source)
        for name, parameter in model.named_parameters():
            names = hf_names(name)
            if missing := [n for n in names if n not in source]:
                raise ConfigError(f"{folder} has no tensor {missing[0]}, which its config.json requires")
            value = merge([source[n].get_tensor(n) for n in names], architecture)
            if value.shape != parameter.shape:
                raise ConfigError(
                    f"{folder}: {', '.join(names)} merge to shape {tuple(value.shape)}, but its config.json requires "
                    f"{tuple(parameter.shape)}"
                )
            parameter.copy_(value)
            unused.difference_update(names)
    if architecture.tied:
        unused.discard("lm_head.weight")
    if strange := sorted(n for n in unused if not n.endswith("rotary_emb.inv_freq")):
        raise ConfigError(f"{folder}: unexpected tensor {strange[0]} for a {architecture.family} model")


def export(model: torch.nn.Module, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor), always in the same order. Tensors are views where possible."""
    for name, parameter in model.named_parameters():
        names = hf_names(name)
        yield from zip(names, split(parameter.detach(), len(names), architecture), strict=True)


def specs(model: torch.nn.Module, architecture: Architecture) -> list[TensorSpec]:
    """The specs of the tensors that `export` yields, in the same order."""
    return [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in export(model, architecture)
    ]


def companions(folder: Path | str) -> dict[str, bytes]:
    """The files beside the weights: config, tokenizer, chat template."""
    return {
        path.name: path.read_bytes()
        for path in sorted(Path(folder).iterdir())
        if path.suffix in COMPANIONS and path.is_file() and not path.name.endswith(".index.json")
    }


def write_folder(
    folder: Path | str, tensors: Iterable[tuple[str, Tensor]], files: dict[str, bytes], dtype: str
) -> None:
    """Write a model folder atomically, see `whole`. files: from `companions`; `dtype` is written into config.json."""
    with whole(folder, "weights") as partial:
        fill(partial, tensors, files, dtype)


@contextmanager
def whole(folder: Path | str, what: str) -> Iterator[Path]:
    """Yield an empty folder for the block to fill, then flush it to disk and atomically rename it to `folder`,
    replacing an existing one.

    Turns an OSError or SafetensorError, also of the block, into a TrainerError that says that `what` could not be
    written. A failure leaves nothing behind.
    """
    folder = Path(folder)
    partial, old = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.old")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        partial.rename(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError) as error:
        free = ""
        with suppress(OSError):
            free = f"; {shutil.disk_usage(folder.parent).free / 1e6:,.0f} MB are free"
        raise TrainerError(f"cannot write the {what} to {folder}: {error}{free}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def fill(folder: Path, tensors: Iterable[tuple[str, Tensor]], files: dict[str, bytes], dtype: str) -> None:
    """Write weights and companions into an existing folder. Raises OSError or SafetensorError."""
    for name, content in files.items():
        (folder / name).write_bytes(_with_dtype(content, dtype) if name == "config.json" else content)
    _write_weights(folder, tensors)


def _write_weights(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        nonlocal size
        shards.append(list(held))
        save_file(held, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        held.clear()
        size = 0

    for name, tensor in tensors:
        held[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
        if size >= SHARD_BYTES:
            flush()
    if held:
        flush()
    if len(shards) == 1:
        (folder / "1.safetensors").rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        place = f"model-{number:05}-of-{len(shards):05}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / place)
        places.update(dict.fromkeys(names, place))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _with_dtype(config: bytes, dtype: str) -> bytes:
    values = json.loads(config)
    values["torch_dtype" if "torch_dtype" in values else "dtype"] = dtype
    return json.dumps(values, indent=2).encode() + b"\n"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
