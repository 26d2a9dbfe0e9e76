from __future__ import annotations

import multiprocessing
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from areal.workers.megatron import logprobs
from areal.workers.megatron.logprobs import logprobs_and_entropy

TOKENS, VOCAB, PADDED = 7, 10, 12


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(TOKENS, PADDED, generator=generator)
    logits[:, VOCAB:] = 0  # what a padded output layer gives
    labels = torch.tensor([0, 9, 5, 4, 6, 3, 8])
    return logits, labels, torch.randn(TOKENS, generator=generator)


def expected(temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, labels, gradient = inputs()
    logits.requires_grad_()
    distribution = torch.distributions.Categorical(logits=logits[:, :VOCAB] / temperature)
    result = distribution.log_prob(labels)
    result.backward(gradient)
    return result.detach(), distribution.entropy().detach(), logits.grad


def check(rank: int, ranks: int, store: str) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
    try:
        for temperature in (1.0, 0.7):
            logits, labels, gradient = inputs()
            own = logits.chunk(ranks, 1)[rank].clone().requires_grad_()
            result, entropy = logprobs_and_entropy(
                own, labels, temperature=temperature, vocab=VOCAB, group=dist.group.WORLD
            )
            assert not entropy.requires_grad
            result.backward(gradient)
            want, want_entropy, want_gradient = expected(temperature)
            torch.testing.assert_close(result, want)
            torch.testing.assert_close(entropy, want_entropy)
            torch.testing.assert_close(own.grad, want_gradient.chunk(ranks, 1)[rank])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("chunk", [logprobs.CHUNK, 3 * PADDED])
def test_one_rank(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK", chunk)
    check(0, 1, str(tmp_path / "store"))


def test_vocabulary_over_two_ranks(tmp_path: Path) -> None:
    """Rank 1, a process of its own, has columns 6 to 11, two of them padding."""
    other = multiprocessing.get_context("spawn").Process(target=check, args=(1, 2, str(tmp_path / "store")))
    other.start()
    try:
        check(0, 2, str(tmp_path / "store"))
    finally:
        other.join(60)
    assert other.exitcode == 0


def test_extreme_logits_in_half_precision(tmp_path: Path) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        logits = torch.tensor([[1e4, -1e4, 0.0]], dtype=torch.bfloat16, requires_grad=True)
        result, entropy = logprobs_and_entropy(
            logits, torch.tensor([1]), temperature=0.5, vocab=3, group=dist.group.WORLD
        )
        result.sum().backward()
        assert result.dtype == torch.float32
        assert result.item() == pytest.approx(-4e4, rel=1e-2)
        assert entropy.item() == 0
        assert logits.grad.tolist() == [[-2, 2, 0]]
    finally:
        dist.destroy_process_group()
