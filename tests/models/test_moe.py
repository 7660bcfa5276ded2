"""The router against numbers worked by hand; the layers behind it are in tests/models/test_dispatch.py."""

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.models import moe
from gspo_jax.models.moe import Routing

route = jax.jit(moe.route, static_argnames=("k", "renormalise"))


def test_router_is_softmax_then_top_k_then_renormalise():
    """Softmax of log [4, 3, 2, 1] is [.4, .3, .2, .1]; the top two renormalise to 4/7 and 3/7."""
    logits = jnp.log(jnp.asarray([[[1.0, 4.0, 2.0, 3.0]]]))
    routes, weights = route(logits, k=2, renormalise=True)
    assert routes.experts.tolist() == [[[1, 3]]]
    np.testing.assert_allclose(weights, [[[4 / 7, 3 / 7]]], rtol=1e-6)
    np.testing.assert_allclose(routes.logprobs, np.log([[[0.4, 0.3]]]), rtol=1e-6)
    _, plain = route(logits, k=2, renormalise=False)
    np.testing.assert_allclose(plain, [[[0.4, 0.3]]], rtol=1e-6)


def test_what_is_asked_of_the_router():
    """Probabilities [.1, .4, .2, .3]: the router's own choice is 1 and 3; the first token replays 2 and 0."""
    logits = jnp.log(jnp.asarray([[[1.0, 4.0, 2.0, 3.0]] * 2]))
    asked = Routing(
        replay=jnp.asarray([[[2, 0], [2, -1]]], jnp.int8),
        watch=jnp.asarray([[[1, -1], [0, 3]]], jnp.int8),
        load=jnp.asarray([0.5, 0.5, 0.0, 0.0]),
    )
    routes, weights = route(logits, k=2, renormalise=True, asked=asked)
    assert routes.experts.tolist() == [[[2, 0], [1, 3]]]
    assert routes.native is not None
    assert routes.native.tolist() == routes.chosen.tolist() == [[[1, 3], [1, 3]]]
    np.testing.assert_allclose(weights, [[[2 / 3, 1 / 3], [4 / 7, 3 / 7]]], rtol=1e-6)
    np.testing.assert_allclose(routes.watched, [[[np.log(0.4), 0], [np.log(0.1), np.log(0.3)]]], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(routes.balance, [[4 * (0.05 + 0.2)] * 2], rtol=1e-6)
    np.testing.assert_allclose(routes.z, [[np.log(10) ** 2] * 2], rtol=1e-6)


def test_weights_are_those_of_the_current_router_at_the_replayed_experts():
    """Probabilities 1/2, 1/4, 1/8, 1/8: replayed experts 1 and 2 weigh 2/3 and 1/3, as do the native 0 and 1."""
    logits = jnp.log(jnp.broadcast_to(jnp.asarray([0.5, 0.25, 0.125, 0.125]), (1, 4, 4))) + 7.0
    replay = jnp.asarray([[[1, 2], [2, 1], [-1, 3], [3, -1]]], jnp.int8)
    routes, weights = route(logits, k=2, renormalise=True, asked=Routing(replay))
    assert routes.experts.tolist() == [[[1, 2], [2, 1], [0, 1], [0, 1]]]
    assert routes.native.tolist() == [[[0, 1]] * 4]
    np.testing.assert_allclose(weights, [[[2 / 3, 1 / 3], [1 / 3, 2 / 3], [2 / 3, 1 / 3], [2 / 3, 1 / 3]]], rtol=1e-6)
    np.testing.assert_allclose(jnp.exp(routes.logprobs[0, :2]), [[0.25, 0.125], [0.125, 0.25]], rtol=1e-6)
    plain = route(logits, k=2, renormalise=False, asked=Routing(replay))[1]
    np.testing.assert_allclose(plain[0, :2], [[0.25, 0.125], [0.125, 0.25]], rtol=1e-6)


def test_the_gradient_of_replayed_weights_is_that_of_a_softmax_over_these_experts():
    """w = softmax(z_1, z_2), so ∂w_1/∂z = w_1 w_2 (0, 1, −1, 0): zero for experts that are not replayed."""
    z = jnp.log(jnp.asarray([[[0.5, 0.25, 0.125, 0.125]]]))
    asked = Routing(jnp.asarray([[[1, 2]]]))
    found = jax.jit(jax.grad(lambda z: route(z, k=2, renormalise=True, asked=asked)[1][0, 0, 0]))(z)
    np.testing.assert_allclose(found, [[[0, 2 / 9, -2 / 9, 0]]], atol=1e-6)


def test_native_routes_and_their_gradient_equal_the_same_experts_replayed():
    rng = np.random.default_rng(0)
    logits, g = (jnp.asarray(rng.standard_normal((2, 5, n)), jnp.float32) for n in (8, 3))

    def run(logits, asked):
        routes, weights = route(logits, k=3, renormalise=True, asked=asked)
        return (weights * g).sum() + routes.logprobs[..., 1].sum(), routes

    gradient = jax.value_and_grad(run, has_aux=True)
    (value, routes), own = gradient(logits, None)
    (again, _), replayed = gradient(logits, Routing(routes.experts))
    assert value == again
    np.testing.assert_allclose(own, replayed, atol=1e-7)
