"""Routing drift against numbers worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.routing import drift

compare, metrics = jax.jit(drift.compare), jax.jit(drift.metrics)


def test_flips_by_hand():
    """One row, three tokens, two layers, K = 2; the third token was never fed (-1), and the mask covers all three.

    Layer 0: token 0 keeps {0,1} in another order (0 flips, new top-1), token 1 goes {2,3} -> {2,5} (1/2).
    Layer 1: token 0 goes {4,5} -> {6,7} (1, new top-1), token 1 keeps {1,2} (0).
    Flip rate: 0.25 in layer 0, 0.5 in layer 1. Each token changed in one layer. Token 0 has a new top-1 expert in both
    layers.
    """
    old = jnp.asarray([[[[0, 1], [2, 3], [-1, -1]]], [[[4, 5], [1, 2], [-1, -1]]]], jnp.int8)
    new = jnp.asarray([[[[1, 0], [2, 5], [3, 3]]], [[[6, 7], [1, 2], [3, 3]]]])
    found = metrics(compare(old, new, jnp.ones((1, 3), bool)))
    np.testing.assert_allclose(found["routing/flip_rate_per_layer"], [0.25, 0.5])
    assert found["routing/flip_rate"] == 0.375
    assert found["routing/tokens_changed"] == 1.0
    assert found["routing/layers_changed"] == 1.0
    assert found["routing/top1_changed"] == 0.5
    assert "routing/router_kl" not in found, "no log-probs were recorded"


def test_router_kl_and_shift_by_hand():
    """One token with a record and one without; one layer, K = 2 of three experts.

    Old [1/2, 1/4 | 1/4], new [1/4, 1/4 | 1/2]: KL = (1/2) log 2 + 0 + (1/4) log(1/2) = (1/4) log 2. The mean of |log
    ρ_new − log ρ_old| is (log 2 + 0) / 2, so γ = 1/√2.
    """
    experts = jnp.asarray([[[[0, 1], [-1, -1]]]])
    old = jnp.log(jnp.asarray([[[[0.5, 0.25], [1, 1]]]]))
    new = jnp.log(jnp.asarray([[[[0.25, 0.25], [1, 1]]]]))
    seen = compare(experts, experts, jnp.ones((1, 2), bool), old_logprobs=old, new_logprobs=new)
    found = metrics(seen)
    np.testing.assert_allclose(found["routing/router_kl"], np.log(2) / 4, rtol=1e-6)
    np.testing.assert_allclose(found["routing/router_shift"], 2**-0.5, rtol=1e-6)


def test_flips_count_for_the_tokens_that_a_position_predicts():
    """A prompt's last position, of three tokens, loses expert 1 with p = 1/4 of K = 2; another, of one, loses none.

    Flip rate: 3/4 of 1/2; probability lost: 3/4 of 1/4. The counts by layer of the same, -1 where unknown.
    """
    old, new = (jnp.asarray([[[[0, 1], [2, 3], [-1, -1]]]]), jnp.asarray([[[[0, 4], [3, 2], [0, 1]]]]))
    logprobs = jnp.log(jnp.broadcast_to(jnp.asarray([0.5, 0.25]), old.shape))
    counts = jnp.asarray([[3.0, 1.0, 1.0]])
    found = metrics(compare(old, new, counts, old_logprobs=logprobs, new_logprobs=logprobs))
    np.testing.assert_allclose(found["routing/flip_rate"], 3 / 8)
    np.testing.assert_allclose(found["routing/tokens_changed"], 3 / 4)
    np.testing.assert_allclose(found["routing/mass_lost"], 3 / 16)
    flips = drift.flipped(old, new)
    assert flips.tolist() == [[[1, 0, -1]]]
    shares = drift.rates(jnp.moveaxis(flips, 0, 2), jnp.ones((1, 3), bool), k=2)
    np.testing.assert_allclose(shares, [1 / 4, 1 / 2])


def test_router_kl_is_zero_between_equals_and_a_lower_bound_of_the_whole():
    rng = np.random.default_rng(0)
    p, q = (np.log(rng.dirichlet(np.ones(16), size=(2, 3, 5))) for _ in range(2))
    whole = (np.exp(p) * (p - q)).sum(axis=-1)
    chosen = np.argsort(-p, axis=-1)[..., :4]
    old, new = (jnp.asarray(np.take_along_axis(x, chosen, -1), jnp.float32) for x in (p, q))
    router_kl = jax.jit(drift.router_kl)
    found = router_kl(old, new)
    assert (found > 0).all()
    assert (found < whole).all()
    assert not router_kl(old, old).any()


def test_nothing_compared_is_zero_and_masked_tokens_do_not_count():
    old = jnp.zeros((1, 1, 2, 1), jnp.int8)
    new = jnp.ones((1, 1, 2, 1), jnp.int32)
    none = metrics(compare(old, new, jnp.zeros((1, 2), bool)))
    assert all((np.asarray(v) == 0).all() for v in none.values())
    one = compare(old, new, jnp.asarray([[True, False]]))
    assert one.tokens == 1
    assert one.flips.tolist() == [1.0]


def test_sums_of_parts_are_the_sum_of_the_whole():
    rng = np.random.default_rng(0)
    old = jnp.asarray(rng.integers(-1, 4, (3, 4, 5, 2)), jnp.int8)
    new = jnp.asarray(rng.integers(0, 4, (3, 4, 5, 2)))
    logprobs = {f"{who}_logprobs": jnp.asarray(-rng.random((3, 4, 5, 2)) - 1) for who in ("old", "new")}
    mask = jnp.asarray(rng.random((4, 5)) < 0.7)

    def part(rows: slice) -> drift.Drift:
        own = {name: x[:, rows] for name, x in logprobs.items()}
        return compare(old[:, rows], new[:, rows], mask[rows], **own)

    whole, a, b = part(slice(None)), part(slice(2)), part(slice(2, None))
    jax.tree.map(lambda w, x, y: np.testing.assert_allclose(w, x + y, rtol=1e-6), whole, a, b)
