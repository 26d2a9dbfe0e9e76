"""Losses against values worked out by hand, finite differences and REINFORCE."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from areal.algorithms.losses import ppo_loss, sft_loss

CLIP, CAP = 0.2, 5.0


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_of_ratio(ratio: float, advantage: float, importance: float = 1.0) -> tuple[float, float, dict[str, float]]:
    """(loss, d loss / d logprob, statistics) of one token with pi / pi_prox and pi_prox / pi_behav given."""
    proximal = tensor(-1.0)
    logprobs = (proximal + math.log(ratio)).requires_grad_()
    behaviour = proximal - math.log(importance)
    loss, sums = ppo_loss(logprobs, proximal, behaviour, tensor(advantage), tensor(1.0), clip=CLIP, importance_cap=CAP)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.item(), {name: value.item() for name, value in sums.items()}


# For each sign of the advantage: inside the clip, and beyond it on both sides. The gradient is - importance * ratio * A
# where the free surrogate is the smaller one, else 0.
@pytest.mark.parametrize(
    ("ratio", "advantage", "importance", "loss", "gradient", "clipped"),
    [
        (1.1, 2.0, 1.0, -2.2, -2.2, 0),
        (1.5, 2.0, 1.0, -2.4, 0.0, 1),
        (0.5, 2.0, 1.0, -1.0, -1.0, 0),  # the policy moved away from a good token: no clip, it may come back
        (1.1, -2.0, 1.0, 2.2, 2.2, 0),
        (1.5, -2.0, 1.0, 3.0, 3.0, 0),  # the policy moved towards a bad token: no clip
        (0.5, -2.0, 1.0, 1.6, 0.0, 1),
        (1.1, 2.0, 0.5, -1.1, -1.1, 0),
        (0.5, -2.0, 3.0, 4.8, 0.0, 1),
        (1.5, 0.0, 1.0, 0.0, 0.0, 0),  # no advantage: exactly no gradient, and nothing that the clip took away
    ],
)
def test_one_token_by_hand(
    ratio: float, advantage: float, importance: float, loss: float, gradient: float, clipped: int
) -> None:
    value, slope, sums = loss_of_ratio(ratio, advantage, importance)
    assert value == pytest.approx(loss, abs=1e-12)
    assert slope == pytest.approx(gradient, abs=1e-12)
    assert sums == pytest.approx({"importance": importance, "capped": 0.0, "clipped": clipped})


def test_importance_is_truncated_at_the_cap() -> None:
    value, slope, sums = loss_of_ratio(1.0, 1.0, importance=40.0)
    assert (value, slope) == (pytest.approx(-CAP), pytest.approx(-CAP))
    assert sums == pytest.approx({"importance": CAP, "capped": 1.0, "clipped": 0.0})
    value, _, _ = loss_of_ratio(1.0, 1.0, importance=math.exp(600))  # would overflow if it were capped after exp
    assert value == pytest.approx(-CAP)


def test_sum_over_tokens_by_hand() -> None:
    """Four tokens: plain, clipped, capped, masked; the statistics are sums over the first three."""
    proximal = tensor(-1.0, -2.0, -0.5, -3.0)
    logprobs = proximal + tensor(0.0, math.log(2), math.log(0.9), 5.0)
    behaviour = proximal - tensor(0.0, math.log(0.5), math.log(10), -7.0)
    loss, sums = ppo_loss(
        logprobs, proximal, behaviour, tensor(1, 3, -1, 9), tensor(1, 1, 1, 0), clip=CLIP, importance_cap=CAP
    )
    assert loss.item() == pytest.approx(-(1.0 * 1.0 + 0.5 * 1.2 * 3.0 + 5.0 * 0.9 * -1.0))
    assert {name: value.item() for name, value in sums.items()} == pytest.approx(
        {"importance": 1 + 0.5 + 5, "capped": 1.0, "clipped": 1.0}
    )
    assert not any(value.requires_grad for value in sums.values())


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan, 1e30])
def test_a_masked_token_adds_exactly_nothing(garbage: float) -> None:
    """I2: what is masked cannot reach the loss or the gradient, whatever its numbers are."""
    bad = tensor(-1.0, garbage)
    logprobs = tensor(-1.1, garbage).requires_grad_()
    loss, sums = ppo_loss(logprobs, bad, bad, bad, tensor(1, 0), clip=CLIP, importance_cap=CAP)
    alone, alone_sums = ppo_loss(
        tensor(-1.1), tensor(-1.0), tensor(-1.0), tensor(-1.0), tensor(1), clip=CLIP, importance_cap=CAP
    )
    loss.backward()
    assert loss.item() == alone.item()
    assert sums == alone_sums
    assert logprobs.grad is not None
    assert logprobs.grad[1].item() == 0.0
    assert logprobs.grad[0].item() != 0.0

    logprobs.grad = None
    loss = sft_loss(logprobs, tensor(1, 0))
    loss.backward()
    assert loss.item() == 1.1
    assert logprobs.grad.tolist() == [-1.0, 0.0]


def random_batch(tokens: int, seed: int) -> dict[str, Tensor]:
    """Log-probs near each other, with ratios at least 1e-3 away from the kinks of clip and min."""
    rng = np.random.default_rng(seed)
    proximal = rng.uniform(-4, -0.1, tokens)
    log_ratio = rng.normal(0, 0.4, tokens)
    for kink in (math.log(1 - CLIP), math.log(1 + CLIP)):
        log_ratio[np.abs(log_ratio - kink) < 1e-3] += 5e-3
    arrays = {
        "logprobs": proximal + log_ratio,
        "proximal": proximal,
        "behaviour": proximal + rng.normal(0, 1.5, tokens),
        "advantages": rng.normal(0, 1, tokens),
        "weights": rng.integers(0, 3, tokens) / 2,
    }
    return {name: torch.tensor(array) for name, array in arrays.items()}


@pytest.mark.parametrize("seed", range(5))
def test_gradient_is_that_of_finite_differences(seed: int) -> None:
    batch = random_batch(40, seed)
    logprobs = batch.pop("logprobs").requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ppo_loss(x, **batch, clip=CLIP, importance_cap=CAP)[0], logprobs)
    assert torch.autograd.gradcheck(lambda x: sft_loss(x, batch["weights"] / 3), logprobs)


@pytest.mark.parametrize("seed", range(5))
def test_sums_match_equation_5_written_out(seed: int) -> None:
    batch = random_batch(200, seed)
    loss, sums = ppo_loss(**batch, clip=CLIP, importance_cap=CAP)
    total = importance = capped = clipped = 0.0
    for new, prox, old, advantage, weight in zip(*(batch[name].tolist() for name in batch), strict=True):
        if not weight:
            continue
        u, w = math.exp(new - prox), min(math.exp(prox - old), CAP)
        free, bounded = u * advantage, max(min(u, 1 + CLIP), 1 - CLIP) * advantage
        total -= weight * w * min(free, bounded)
        importance += weight * w
        capped += weight * (math.exp(prox - old) > CAP)
        clipped += weight * (bounded < free)
    assert loss.item() == pytest.approx(total)
    assert {name: value.item() for name, value in sums.items()} == pytest.approx(
        {"importance": importance, "capped": capped, "clipped": clipped}
    )
    assert capped > 0
    assert clipped > 0


def test_on_policy_the_gradient_is_reinforce() -> None:
    """Where pi = pi_prox = pi_behav, the gradient in the parameters is that of - sum A log pi."""
    torch.manual_seed(0)
    logits = torch.randn(50, 7, dtype=torch.float64, requires_grad=True)
    actions, advantages = torch.randint(7, (50, 1)), torch.randn(50, dtype=torch.float64)
    weights = torch.randint(2, (50,)).double()
    logprobs = logits.log_softmax(-1).gather(1, actions).squeeze(1)
    loss, _ = ppo_loss(logprobs, logprobs, logprobs, advantages, weights, clip=CLIP, importance_cap=CAP)
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (reinforce,) = torch.autograd.grad(-(weights * advantages * logprobs).sum(), logits)
    torch.testing.assert_close(gradient, reinforce)
    assert reinforce.abs().max() > 0.1


def test_only_the_new_log_probs_get_a_gradient() -> None:
    batch = {name: value.requires_grad_() for name, value in random_batch(40, 0).items()}
    weights = batch.pop("weights").detach()
    loss, _ = ppo_loss(**batch, weights=weights, clip=CLIP, importance_cap=CAP)
    loss.backward()
    assert [name for name, value in batch.items() if value.grad is not None] == ["logprobs"]


@pytest.mark.parametrize("cut", [0, 1, 17, 40])
def test_packing_does_not_change_the_sum(cut: int) -> None:
    batch = random_batch(40, 0)

    def part(section: slice) -> tuple[Tensor, dict[str, Tensor]]:
        return ppo_loss(**{name: value[section] for name, value in batch.items()}, clip=CLIP, importance_cap=CAP)

    (whole, whole_sums), (left, left_sums), (right, right_sums) = (
        part(section) for section in (slice(None), slice(cut), slice(cut, None))
    )
    torch.testing.assert_close(left + right, whole)
    for name, value in whole_sums.items():
        torch.testing.assert_close(left_sums[name] + right_sums[name], value)


def test_sft_by_hand() -> None:
    assert sft_loss(tensor(-1, -2, -4), tensor(1, 0.25, 0)).item() == 1.5
