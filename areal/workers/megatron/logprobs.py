"""Log-probs and entropy of tokens from logits whose vocabulary may be split over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 1 << 24
"""Float32 values processed at a time, so that the softmax of a large vocabulary is never in memory as a whole."""
NOT_A_WORD = -1e30
"""Logit of the columns that pad the vocabulary; finite, because the entropy multiplies it by a probability of 0."""


def logprobs_and_entropy(
    logits: Tensor, labels: Tensor, *, temperature: float, vocab: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature)[label] and the entropy of that softmax, float32 [T] each, in nats.

    logits: [T, columns], where rank r of `group` holds the columns from r * columns on; labels: [T]. Columns from
    `vocab` on are padding. Only the log-probs have a gradient.
    """
    return _LogProbs.apply(logits, labels, temperature, vocab, group)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, vocab: int, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        columns = logits.size(1)
        first = group.rank() * columns
        own = max(0, min(columns, vocab - first))
        inside = (labels >= first) & (labels < first + columns)
        local = torch.where(inside, labels - first, 0)
        logprobs, entropy, normaliser = (
            torch.empty(len(labels), dtype=torch.float32, device=logits.device) for _ in range(3)
        )
        for rows, x in _chunks(logits, temperature, own):
            top = x.amax(1)
            if group.size() > 1:
                dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            x -= top[:, None]
            label = x.gather(1, local[rows, None])[:, 0] * inside[rows]
            exponential = x.exp()
            sums = torch.stack((label, exponential.sum(1), torch.linalg.vecdot(exponential, x)))
            if group.size() > 1:
                dist.all_reduce(sums, group=group)
            label, total, moment = sums
            log_total = total.log()
            logprobs[rows] = label - log_total
            entropy[rows] = log_total - moment / total
            normaliser[rows] = log_total + top
        ctx.save_for_backward(logits, local, inside, normaliser)
        ctx.temperature, ctx.own = temperature, own
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, inside, normaliser = ctx.saved_tensors
        scaled = gradient / ctx.temperature
        result = torch.empty_like(logits)
        for rows, x in _chunks(logits, ctx.temperature, ctx.own):
            x -= normaliser[rows, None]
            x.exp_().mul_(-scaled[rows, None])
            x.scatter_add_(1, local[rows, None], (scaled * inside)[rows, None])
            result[rows] = x
        return result, None, None, None, None


def _chunks(logits: Tensor, temperature: float, own: int) -> Iterator[tuple[slice, Tensor]]:
    """(rows, float32 copy of their logits / temperature)."""
    step = max(1, CHUNK // logits.size(1))
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        x = logits[rows].to(torch.float32, copy=True)
        x[:, own:] = NOT_A_WORD
        yield rows, x.div_(temperature)
