"""Group advantages against values worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.algorithms.advantages import EPSILON, grpo


def test_by_hand() -> None:
    # Mean 0.25; sample deviation sqrt((0.75^2 + 3 * 0.25^2) / 3) = 0.5.
    deviation = 0.5 + EPSILON
    np.testing.assert_allclose(grpo([1, 0, 0, 0], std=True), np.array([0.75, -0.25, -0.25, -0.25]) / deviation, 1e-6)
    np.testing.assert_allclose(grpo([1, 0, 0, 0], std=False), [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(grpo([-0.2, 1], std=True), np.array([-0.6, 0.6]) / (math.sqrt(0.72) + EPSILON), 1e-6)
    assert grpo([1, 0], std=True).dtype == np.float32


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize(
    "rewards",
    [[0.7], [0.0] * 8, [0.1] * 3, [-1e9] * 5, [0.3, 0.1 + 0.2], [1.0, 1.0 + 1e-7], [1 / 3, float(np.float32(1 / 3))]],
)
def test_equal_rewards_give_exact_zeros(rewards: list[float], std: bool) -> None:
    """Equal up to float32 noise, or alone: nothing to learn, and no noise blown up to an advantage of 1."""
    assert grpo(rewards, std=std).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_an_error(bad: float) -> None:
    with pytest.raises(ValueError, match="not all finite"):
        grpo([1.0, bad], std=True)


groups = st.lists(st.integers(-64, 64).map(lambda i: i / 8), min_size=2, max_size=32)


@given(groups, st.booleans())
def test_centred_and_in_the_order_of_the_rewards(rewards: list[float], std: bool) -> None:
    advantages = grpo(rewards, std=std)
    assert abs(advantages.sum()) < 1e-3
    assert (np.diff(advantages[np.argsort(rewards, kind="stable")]) >= 0).all()
    if std and len(set(rewards)) > 1:
        assert advantages.std(ddof=1) == pytest.approx(1, rel=1e-2)


@given(groups, st.integers(-100, 100))
def test_a_constant_reward_changes_nothing(rewards: list[float], shift: int) -> None:
    shifted = grpo([reward + shift for reward in rewards], std=True)
    np.testing.assert_allclose(shifted, grpo(rewards, std=True), atol=1e-5)
