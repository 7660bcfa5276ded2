"""Routing drift by hand-worked numbers."""

import jax.numpy as jnp
import numpy as np

from gspo_jax.routing import drift


def test_flip_rate_by_hand():
    """One row, three tokens, two layers, K = 2; the third token was never fed (-1), the mask covers all.

    Layer 0: token 0 keeps {0,1} in another order (0 flips), token 1 goes {2,3} -> {2,5} (1/2).
    Layer 1: token 0 goes {4,5} -> {6,7} (1), token 1 keeps {1,2} (0).
    Flip rate 0.25 in layer 0, 0.5 in layer 1; both tokens changed in some layer; one layer each.
    """
    old = jnp.asarray([[[[0, 1], [4, 5]], [[2, 3], [1, 2]], [[-1, -1], [-1, -1]]]], jnp.int8)
    new = jnp.asarray([[[[1, 0], [2, 5], [3, 3]]], [[[6, 7], [2, 1], [3, 3]]]])
    found = drift.metrics(drift.compare(old, new, jnp.ones((1, 3), bool)))
    np.testing.assert_allclose(found["routing/flip_rate_per_layer"], [0.25, 0.5])
    assert found["routing/flip_rate"] == 0.375
    assert found["routing/tokens_changed"] == 1.0
    assert found["routing/layers_changed"] == 1.0


def test_nothing_compared_is_zero_and_masked_tokens_do_not_count():
    old = jnp.zeros((1, 2, 1, 1), jnp.int8)
    new = jnp.ones((1, 1, 2, 1), jnp.int32)
    none = drift.metrics(drift.compare(old, new, jnp.zeros((1, 2), bool)))
    assert all((np.asarray(v) == 0).all() for v in none.values())
    one = drift.compare(old, new, jnp.asarray([[True, False]]))
    assert one.tokens == 1
    assert one.flips.tolist() == [1.0]


def test_sums_of_parts_are_the_sum_of_the_whole():
    rng = np.random.default_rng(0)
    old = jnp.asarray(rng.integers(-1, 4, (4, 5, 3, 2)), jnp.int8)
    new = jnp.asarray(rng.integers(0, 4, (3, 4, 5, 2)))
    mask = jnp.asarray(rng.random((4, 5)) < 0.7)
    whole = drift.compare(old, new, mask)
    a, b = drift.compare(old[:2], new[:, :2], mask[:2]), drift.compare(old[2:], new[:, 2:], mask[2:])
    np.testing.assert_allclose(whole.flips, a.flips + b.flips)
    np.testing.assert_allclose(whole.changed, a.changed + b.changed)
