"""Expert load metrics against numbers worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.routing import load

metrics = jax.jit(load.metrics)


def test_load_by_hand():
    """One layer of four experts; the second token is masked out. The experts get 2, 1, 1 and 0 of 4 pairs."""
    experts = jnp.asarray([[[[0, 1], [3, 3], [0, 2], [-1, -1]]]], jnp.int8)
    counts = load.expert_counts(experts, jnp.asarray([[True, False, True, True]]), num_experts=4)
    assert counts.tolist() == [[2, 1, 1, 0]]
    found = metrics(counts)
    assert found["routing/max_violation"] == 1.0, "one expert has half of the pairs, twice the even share"
    np.testing.assert_allclose(
        found["routing/load_entropy"], (0.5 * np.log(2) + 0.5 * np.log(4)) / np.log(4), rtol=1e-6
    )
    assert found["routing/dead_experts"] == 0.25


def test_even_load_and_none():
    even = metrics(jnp.full((3, 8), 5.0))
    np.testing.assert_allclose([even[f"routing/{n}"] for n in ("max_violation", "load_entropy")], [0, 1], atol=1e-6)
    np.testing.assert_allclose(load.shares(jnp.zeros((2, 4))), 0.25)
