"""Losses of a training step: pure functions on per-token tensors of shape [T], in nats.

Each returns a sum over tokens. The caller divides by the loss tokens of the whole mini-batch (over all micro-batches
and ranks), so that neither packing nor sharding changes the gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def ppo_loss(
    logprobs: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip: float,
    importance_cap: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Decoupled PPO (arXiv 2505.24298, eq. 5), as a loss:

        - sum_t w_t * min(pi_prox / pi_behav, cap) * min(u_t A_t, clip(u_t, 1 - clip, 1 + clip) A_t),  u = pi / pi_prox

    logprobs: log pi, the only one with a gradient; proximal: log pi_prox, under the weights before the step's first
    update; behaviour: log pi_behav, under the weights that sampled the token; weights: the loss mask. All [T]. A token
    of weight 0 adds exactly 0 to loss, gradient and statistics, whatever its other values.

    The importance weight is truncated at the cap; the token stays in the token mean.

    Returns the loss and weighted sums over tokens: "importance" (the applied weight), "capped" (tokens whose weight was
    capped), "clipped" (tokens whose gradient the clip removed).
    """
    active = weights != 0
    zero = logprobs.new_zeros(())
    # Masked before any arithmetic: 0 * inf is nan, in the gradient too.
    logprobs = torch.where(active, logprobs, zero)
    proximal = torch.where(active, proximal.detach(), zero)
    behaviour = torch.where(active, behaviour.detach(), zero)
    advantages = torch.where(active, advantages.detach(), zero)

    log_importance = proximal - behaviour
    importance = log_importance.clamp(max=math.log(importance_cap)).exp()  # capped before exp: no overflow
    ratio = (logprobs - proximal).exp()
    free = ratio * advantages
    bounded = ratio.clamp(1 - clip, 1 + clip) * advantages
    loss = -(weights * importance * torch.minimum(free, bounded)).sum()

    def total(values: Tensor) -> Tensor:
        return (weights * values).sum().detach()

    return loss, {
        "importance": total(importance),
        "capped": total(log_importance > math.log(importance_cap)),
        "clipped": total(bounded < free),
    }


def sft_loss(logprobs: Tensor, weights: Tensor) -> Tensor:
    """Weighted cross-entropy, - sum_t w_t log pi_t. logprobs, weights: [T]. Weight 0 adds exactly 0."""
    return -(weights * torch.where(weights != 0, logprobs, logprobs.new_zeros(()))).sum()
