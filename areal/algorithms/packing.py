"""Assigns sequences to mini-batches, ranks and micro-batches.

The controller plans, the ranks execute. The same arguments give the same plan in every process. The mini-batch of a
sequence depends only on the seed, not on the number of ranks or the budget.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from areal.types import MiniBatch


def microbatches(lengths: Sequence[int], budget: int, *, at_least: int = 1) -> list[tuple[int, ...]]:
    """Algorithm 1 of the AReaL paper (arXiv 2505.24298): micro-batches of at most `budget` tokens each.

    Longest sequence first: it starts a new micro-batch while there are fewer than `at_least`, or if it fits into none;
    otherwise it joins the one with the fewest sequences (then the fewest tokens) that has room. A sequence longer than
    the budget is alone. None is empty, so fewer than `at_least` sequences give fewer micro-batches.

    Beyond the first `at_least`, any two micro-batches together exceed the budget, so there are fewer than
    2 * sum(lengths) / budget of them, or one.

    Returns indices into `lengths`.
    """
    packed: list[list[int]] = []
    # c -> heap of (tokens, number) of the micro-batches with c sequences; if any of them has room, the first has.
    heaps: dict[int, list[tuple[int, int]]] = {}
    counts: list[int] = []  # keys of `heaps`, ascending
    for index in _longest_first(lengths):
        length, count = lengths[index], 0
        if len(packed) >= at_least:
            for candidate in counts:
                if heaps[candidate][0][0] + length <= budget:
                    count = candidate
                    break
        if count:
            tokens, number = heapq.heappop(heaps[count])
            if not heaps[count]:
                del heaps[count]
                counts.remove(count)
        else:
            tokens, number = 0, len(packed)
            packed.append([])
        packed[number].append(index)
        if count + 1 not in heaps:
            heaps[count + 1] = []
            bisect.insort(counts, count + 1)
        heapq.heappush(heaps[count + 1], (tokens + length, number))
    return [tuple(indices) for indices in packed]


def shard(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Split sequences over data-parallel ranks so that their token counts differ by at most the longest sequence.

    Longest first, each to the rank with the fewest tokens. Returns one list of indices per rank, possibly empty.
    """
    return _spread(_longest_first(lengths), lengths, ranks)


def plan(
    lengths: ArrayLike,
    loss_tokens: ArrayLike,
    *,
    minibatches: int,
    ranks: int,
    budget: int,
    seed: int | Sequence[int],
) -> tuple[MiniBatch, ...]:
    """The optimizer updates of one pass; every sequence is in exactly one of them.

    lengths, loss_tokens: tokens and sum of loss weights of each sequence, [S]. In an order drawn from the seed, each
    sequence goes to the mini-batch with the fewest tokens; these are then sharded over ranks and packed. Empty
    mini-batches (fewer sequences than `minibatches`) are left out.
    """
    sizes: list[int] = np.asarray(lengths).tolist()
    weights = np.asarray(loss_tokens, dtype=np.float64)
    order = np.random.default_rng(seed).permutation(len(sizes)).tolist()
    return tuple(
        MiniBatch(
            shards=tuple(_pack(members, sizes, budget) for members in _split(mini, sizes, ranks)),
            loss_tokens=float(weights[mini].sum()),
        )
        for mini in _spread(order, sizes, minibatches)
        if mini
    )


def _split(members: list[int], lengths: list[int], ranks: int) -> list[list[int]]:
    return [[members[i] for i in part] for part in shard([lengths[m] for m in members], ranks)]


def _pack(members: list[int], lengths: list[int], budget: int) -> tuple[tuple[int, ...], ...]:
    packed = microbatches([lengths[m] for m in members], budget)
    return tuple(tuple(members[i] for i in part) for part in packed)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()


def _spread(order: Iterable[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Assign each sequence in turn to the part with the fewest tokens. In any order, the token counts of the parts
    differ by at most the longest sequence."""
    spread: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    for index in order:
        tokens, part = heap[0]
        spread[part].append(index)
        heapq.heapreplace(heap, (tokens + lengths[index], part))
    return spread
