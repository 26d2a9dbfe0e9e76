"""Advantages of a group of episodes, from their rewards."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from areal.types import Floats

EPSILON = 1e-4
"""Added to the standard deviation, as in TRL's GRPOTrainer."""
RESOLUTION = 1e-6
"""Rewards that differ by less than this fraction of the largest are considered equal (float32 noise)."""


def grpo(rewards: ArrayLike, *, std: bool) -> Floats:
    """Advantages [n] of the n episodes of one task: (reward - group mean) / standard deviation of the group.

    std=True is GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2). The paper does not say which deviation; this is
    the sample deviation (n - 1) plus EPSILON, as in TRL and verl. std=False is Dr. GRPO (arXiv 2503.20783).

    Equal rewards, and therefore a group of one, give exact zeros. Raises ValueError for a non-finite reward.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(
            f"rewards {values.tolist()} of a group are not all finite: the agent must return a finite number"
        )
    if values.max() - values.min() <= RESOLUTION * np.abs(values).max():
        return np.zeros(len(values), dtype=np.float32)
    centred = values - values.mean()
    if std:
        centred /= values.std(ddof=1) + EPSILON
    return centred.astype(np.float32)
