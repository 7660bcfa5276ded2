"""The primitives: weights against loops, empty rows, values exactly on a bound, and overflow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.objectives.surrogates import (
    binary_kl,
    clipped,
    constant_length,
    log_ratio,
    probability_change,
    row_mean,
    sequence_mean,
    token_mean,
    widen,
)
from tests import oracles

# Lengths 4, 1, 0, and 2 with a hole in front of each.
MASK = np.array([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]], bool)


def test_weights_by_hand():
    # Three rows have tokens, seven tokens in total.
    mask = jnp.asarray(MASK)
    np.testing.assert_allclose(sequence_mean(mask).sum(axis=1), [1 / 3, 1 / 3, 0, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(sequence_mean(mask)[0, 0], 1 / 12, rtol=1e-6)
    np.testing.assert_allclose(token_mean(mask).sum(axis=1), [4 / 7, 1 / 7, 0, 2 / 7], rtol=1e-6)
    np.testing.assert_allclose(constant_length(mask, length=10.0).sum(axis=1), [4 / 30, 1 / 30, 0, 2 / 30], rtol=1e-6)


@pytest.mark.parametrize("mask", [MASK, np.zeros((2, 3), bool), np.ones((2, 3), bool)])
def test_weights_equal_the_loops(mask):
    np.testing.assert_allclose(sequence_mean(jnp.asarray(mask)), oracles.sequence_mean(mask), rtol=1e-6)
    np.testing.assert_allclose(token_mean(jnp.asarray(mask)), oracles.token_mean(mask), rtol=1e-6)
    want = oracles.constant_length(mask, {"length": 5.0})
    np.testing.assert_allclose(constant_length(jnp.asarray(mask), length=5.0), want, rtol=1e-6)


def test_widen_leaves_float64_alone():
    assert widen(jnp.ones(2, jnp.bfloat16)).dtype == jnp.float32
    assert widen(jnp.ones(2, jnp.int32)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert widen(jnp.ones(2, jnp.float64)).dtype == jnp.float64


def test_log_ratio_is_zero_outside_the_mask_in_value_and_gradient():
    mask = jnp.array([[True, False, False, False, False]])
    new = jnp.array([[-1.0, jnp.nan, 1e30, jnp.inf, -1e30]])
    old = jnp.array([[-3.0, -1.0, -1e30, jnp.inf, jnp.nan]])
    value, back = jax.vjp(lambda x: jnp.exp(log_ratio(x, old, mask)), new)
    np.testing.assert_allclose(value, [[np.exp(2), 1, 1, 1, 1]], rtol=1e-6)
    np.testing.assert_allclose(back(jnp.ones_like(new))[0], [[np.exp(2), 0, 0, 0, 0]], rtol=1e-6)


def test_row_mean_reads_the_mask_alone():
    x = jnp.array([[1.0, 2.0, 6.0, jnp.nan], [jnp.nan, 1e30, 0.0, 0.0]])
    mask = jnp.array([[True, True, True, False], [False] * 4])
    np.testing.assert_array_equal(row_mean(x, mask), [3.0, 0.0])


def test_an_overflowing_ratio_leaves_no_nan_where_its_gradient_is_zero():
    # e^200 is inf in float32: gated for Â > 0, zero for Â = 0, and infinite, as it should be, for Â < 0.
    d = jnp.full((1, 3), 200.0)
    advantages = jnp.array([[1.0, 0.0, -1.0]])
    said, back = jax.vjp(lambda x: clipped(x, advantages, low=0.2, high=0.2).gain, d)
    np.testing.assert_allclose(said, [[1.2, 0.0, -np.inf]], rtol=1e-6)
    np.testing.assert_array_equal(back(jnp.ones_like(d))[0], [[0.0, 0.0, -np.inf]])


def test_a_nan_in_a_live_token_is_not_hidden():
    d, one = jnp.full((1, 1), jnp.nan), jnp.ones((1, 1))
    assert np.isnan(clipped(d, one, low=0.2, high=0.2).gain)
    assert np.isnan(clipped(one, one * jnp.nan, low=0.2, high=0.2).gain)


P, Q = np.array([[0.3, 0.5, 0.9, 1e-6]]), np.array([[0.2, 0.7, 0.9, 0.5]])


def test_the_change_of_a_probability_by_hand():
    mask = jnp.array([[True, True, True, False]])
    found = probability_change(jnp.log(P), jnp.log(Q), mask)
    np.testing.assert_allclose(found, [[0.1, -0.2, 0.0, 0.0]], rtol=1e-5, atol=1e-9)
    far = probability_change(jnp.array([[-1e-3, -200.0]]), jnp.array([[-200.0, -1e-3]]), jnp.ones((1, 2), bool))
    np.testing.assert_allclose(far, [[np.exp(-1e-3), -np.exp(-1e-3)]], rtol=1e-6)


def test_the_kl_of_a_token_or_another_one_by_hand():
    mask = jnp.array([[True, True, True, False]])
    found = binary_kl(jnp.log(P), jnp.log(Q), mask)
    want = Q * np.log(Q / P) + (1 - Q) * np.log((1 - Q) / (1 - P))
    np.testing.assert_allclose(found, np.where(mask, want, 0), rtol=1e-4, atol=1e-7)
    # π_old = 1 − 1e-4 and π_θ = 1: the other outcome has 1e-8 left. A log-prob that rounding put above 0 counts as 0.
    for above in (0.0, 1e-6):
        sure = binary_kl(jnp.array([[above]]), jnp.log(jnp.array([[1 - 1e-4]])), jnp.ones((1, 1), bool))
        np.testing.assert_allclose(sure, [[1e-4 * np.log(1e-4 / 1e-8) - 1e-4]], rtol=2e-2)
    reversed_ = binary_kl(jnp.log(jnp.array([[1 - 1e-4]])), jnp.zeros((1, 1)), jnp.ones((1, 1), bool))
    np.testing.assert_allclose(reversed_, [[1e-4]], rtol=2e-2)


@pytest.mark.parametrize("change", [probability_change, binary_kl])
def test_a_change_of_probability_is_a_constant_and_knows_no_padding(change):
    mask = jnp.array([[True, True, False, False]])
    new, old = (jnp.where(mask, jnp.log(x), jnp.nan) for x in (P, Q))
    found, gradient = jax.value_and_grad(lambda x: change(x, old, mask).sum())(new)
    assert np.isfinite(found)
    np.testing.assert_array_equal(gradient, np.zeros((1, 4)))
    np.testing.assert_array_equal(change(new, old, mask)[0, 2:], [0, 0])
