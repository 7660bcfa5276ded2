"""The router against numbers worked by hand; the layers behind it are in tests/test_dispatch.py."""

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
