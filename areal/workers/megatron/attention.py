"""Rotary embedding and causal attention over packed sequences, as Megatron's `core_attention`.

Megatron-core recomputes its rotary embedding in every layer, sequence by sequence, and its own core attention refuses
packed input. Here the tables are computed once per micro-batch. The attention is torch's: the variable-length flash
kernel on GPUs in half precision, else one scaled-dot-product call per sequence. (On a CPU this is within a few per cent
of the best padded form for sequences of 30 to 1,000 tokens, and much faster for mixed lengths.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from areal.workers.models.architecture import Rope


@dataclass
class Packing(PackedSeqParams):
    """Layout of a micro-batch of T tokens: lengths (sum T) and starts of sequences; cos and sin [T, 1, head_dim]."""

    lengths: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    cos: Tensor | None = None
    sin: Tensor | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], frequencies: Tensor, dtype: torch.dtype) -> Packing:
        """frequencies: [head_dim / 2], from `inverse_frequencies`, on the device of the tokens."""
        ends = list(accumulate(lengths))
        starts = [0, *ends[:-1]]
        device = frequencies.device
        bounds = torch.tensor([0, *ends], dtype=torch.int32, device=device)
        size = torch.tensor(lengths, device=device)
        positions = torch.arange(ends[-1], device=device) - torch.repeat_interleave(bounds[:-1], size)
        angles = torch.outer(positions.float(), frequencies).repeat(1, 2)[:, None]
        return cls(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            lengths=list(lengths),
            starts=starts,
            cos=angles.cos().to(dtype),
            sin=angles.sin().to(dtype),
        )


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each pair of channels, [head_dim / 2], float32.

    rope.factor > 1 applies Llama 3.1's scaling: wavelengths above original_context / low_freq_factor are stretched by
    the factor, those below original_context / high_freq_factor are kept, and those in between are interpolated.
    """
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.factor == 1.0:
        return plain
    turns = rope.original_context * plain / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / rope.factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, head_dim], channel i paired with i + head_dim / 2."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _flash() -> Callable[..., Any] | None:
    """torch's variable-length flash attention, if available. Importing it takes a second."""
    if not torch.cuda.is_available():
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch before 2.10
        return None
    return varlen_attn


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a Packing."""

    def __init__(self, config: Any, layer_number: int, *args: Any, softmax_scale: float | None = None, **kwargs: Any):
        super().__init__(config=config)
        self._scale = softmax_scale or config.kv_channels**-0.5
        self._flash = _flash()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, packed_seq_params: Packing, **_: Any
    ) -> Tensor:
        """query [T, heads, d]; key, value [T, kv_heads, d]. Returns [T, heads, d]."""
        packing = packed_seq_params
        query, key = (rotate(x, packing.cos, packing.sin) for x in (query, key))
        if self._flash is not None and query.dtype != torch.float32:
            return self._flash(
                query,
                key,
                value,
                packing.cu_seqlens_q,
                packing.cu_seqlens_kv,
                packing.max_seqlen_q,
                packing.max_seqlen_kv,
                scale=self._scale,
                window_size=(-1, 0),  # causal
                enable_gqa=query.size(1) != key.size(1),
            )
        outputs = []
        for q, k, v in zip(*(x.transpose(0, 1).split(packing.lengths, 1) for x in (query, key, value)), strict=True):
            attended = F.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, scale=self._scale, enable_gqa=q.size(0) != k.size(0)
            )
            outputs.append(attended[0].transpose(0, 1))
        return torch.cat(outputs)
