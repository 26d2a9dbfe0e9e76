"""Seeded sampling on a CPU, for --enable-deterministic-inference.

SGLang samples with noise that is a hash of the request's seed, the token's position and its id. Its hash for CPUs is in
a package without a build for CPUs only, and its batch-invariant kernels need a GPU: on a CPU, the last bits of a
log-prob can depend on the rest of the batch. The same weights therefore give the same tokens, except for near ties.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import library

MASK = 0xFFFFFFFF


def allow_on_cpu() -> None:
    """Call it once, before SGLang reads its arguments."""
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices

    add_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None
    library.define("sgl_kernel::murmur_hash32_cpu", "(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    library.impl("sgl_kernel::murmur_hash32_cpu", "CPU", hash_of)


def hash_of(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """uint32 [rows, columns] from seeds [rows] of 64 bits, positions [rows] and token ids [columns]."""
    low_high = [(seed.to(torch.int64) >> shift) & MASK for shift in (0, 32)]
    blocks = [*(half[:, None] for half in low_high), positions.to(torch.int64)[:, None], columns.to(torch.int64)[None]]
    return murmur3(blocks).to(torch.uint32)


def murmur3(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """MurmurHash3_x86_32 (Appleby) with seed 0 of 4-byte blocks: int64 tensors below 2**32, broadcast.

    Products wrap at 64 bits, which does not change their low 32 bits.
    """
    h = torch.zeros((), dtype=torch.int64)
    for block in blocks:
        k = _rotated((block * 0xCC9E2D51) & MASK, 15)
        h = _rotated(h ^ ((k * 0x1B873593) & MASK), 13)
        h = (h * 5 + 0xE6546B64) & MASK
    h = h ^ (4 * len(blocks))
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK
    return h ^ (h >> 16)


def _rotated(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & MASK
