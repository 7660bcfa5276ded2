"""Advantages: numbers worked by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.objectives.advantages import group_centered, group_zscore, leave_one_out

ALL = pytest.mark.parametrize("advantage", [group_zscore, group_centered, leave_one_out])


def test_zscore_by_hand():
    # [1, 0, 0, 1]: mean 1/2, sum of squares 4 · 1/4 = 1, sample variance 1/3, so ±(1/2)·√3 = ±0.8660 (less the 1e-6).
    # [3, 1, 2, 2]: mean 2, sum of squares 2, sample variance 2/3, so ±√(3/2) = ±1.2247 and 0.
    got = group_zscore(jnp.array([1.0, 0, 0, 1, 3, 1, 2, 2]), group_size=4)
    np.testing.assert_allclose(got, [0.866024, -0.866024, -0.866024, 0.866024, 1.224743, -1.224743, 0, 0], atol=2e-6)


def test_zscore_damps_a_spread_of_the_size_of_epsilon():
    # ±1e-6 about the mean: std = √2 · 1e-6, so 1e-6 / (√2 · 1e-6 + 1e-6) = 1 / (1 + √2) = √2 − 1.
    got = group_zscore(jnp.array([0.0, 2e-6]), group_size=2)
    np.testing.assert_allclose(got, [1 - np.sqrt(2), np.sqrt(2) - 1], rtol=1e-5)


def test_centered_by_hand():
    # Groups of three, means 2 and 5: the second group's level does not reach the first.
    got = group_centered(jnp.array([3.0, 1, 2, 4, 4, 7]), group_size=3)
    np.testing.assert_allclose(got, [1, -1, 0, -1, -1, 2], atol=1e-6)


def test_leave_one_out_by_hand():
    # [3, 1, 2]: 3 − (1 + 2)/2 = 1.5, 1 − (3 + 2)/2 = −1.5, 2 − (3 + 1)/2 = 0.
    # [4, 4, 7]: 4 − 5.5 = −1.5 twice, 7 − 4 = 3.
    got = leave_one_out(jnp.array([3.0, 1, 2, 4, 4, 7]), group_size=3)
    np.testing.assert_allclose(got, [1.5, -1.5, 0, -1.5, -1.5, 3], atol=1e-6)


@ALL
@pytest.mark.parametrize("group_size", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, -1e-3, 1e6, 123.456])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(advantage, group_size, reward):
    constant = advantage(jnp.full(2 * group_size, reward, jnp.float32), group_size=group_size)
    np.testing.assert_array_equal(constant, np.zeros(2 * group_size))
    alone = advantage(jnp.array([reward, -reward, 3.0]), group_size=1)
    np.testing.assert_array_equal(alone, np.zeros(3))


@ALL
def test_rewards_of_other_types_are_widened(advantage):
    # In bf16 the sample deviation of [256, 257] would be that of [256, 256]; here the inputs alone are bf16.
    rewards = np.array([1, 0, 0, 0, 1, 1, 1, 0])
    want = advantage(jnp.asarray(rewards, jnp.float32), group_size=4)
    for dtype in (jnp.bfloat16, jnp.int32, jnp.bool_):
        got = advantage(jnp.asarray(rewards, dtype), group_size=4)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, want)


@ALL
@pytest.mark.parametrize("group_size", [3, 0, -2, 16])
def test_rewards_that_do_not_split_into_groups(advantage, group_size):
    with pytest.raises(ValueError, match=f"8 rewards do not split into groups of {group_size}; give a positive"):
        advantage(jnp.zeros(8), group_size=group_size)


@ALL
def test_rewards_of_the_wrong_rank(advantage):
    with pytest.raises(ValueError, match=r"rewards are \[2, 4\]; they must be \[B\]"):
        advantage(jnp.zeros((2, 4)), group_size=4)
