"""The hash of seeded sampling on a CPU, against published values and a second implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areal.workers.sglang.seeded import hash_of, murmur3


@pytest.mark.parametrize(
    ("text", "value"),
    [(b"test", 0xBA6BD213), (b"\x00\x00\x00\x00", 0x2362F9DE), (b"\xff\xff\xff\xff", 0x76293B50), (b"", 0)],
)
def test_published_values(text: bytes, value: int) -> None:
    blocks = [torch.tensor(int.from_bytes(text[i : i + 4], "little")) for i in range(0, len(text), 4)]
    assert murmur3(blocks).item() == value


def reference(words: list[int]) -> int:
    """MurmurHash3_x86_32 on Python's own integers."""
    mask, h = 0xFFFFFFFF, 0
    for k in words:
        k = k * 0xCC9E2D51 & mask
        k = (k << 15 | k >> 17) & mask
        h ^= k * 0x1B873593 & mask
        h = (h << 13 | h >> 19) & mask
        h = (h * 5 + 0xE6546B64) & mask
    h ^= 4 * len(words)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


def test_rows_are_seed_and_position_and_columns_token_ids() -> None:
    seeds, positions, columns = [0, 7, 2**63 - 1, 2**40 + 3], [1, 1, 900, 131071], [0, 5, 151935]
    hashes = hash_of(torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions), torch.tensor(columns))
    assert hashes.dtype == torch.uint32
    expected = [
        [reference([seed & 0xFFFFFFFF, seed >> 32, position, column]) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert hashes.tolist() == expected


def test_the_noise_is_uniform_and_rows_are_independent() -> None:
    noise = hash_of(torch.tensor([3, 4, 3]), torch.tensor([9, 9, 10]), torch.arange(50_000)).to(torch.float64) / 2**32
    assert np.allclose(noise.mean(1), 0.5, atol=0.01)
    assert np.allclose(np.corrcoef(noise.numpy()), np.eye(3), atol=0.02)
