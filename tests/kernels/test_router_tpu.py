"""The router's TPU kernel, interpreted, against `moe.route`."""

import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.kernels import router_tpu
from gspo_jax.models.moe import route


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("tokens", "k"), [(384, 8), (256, 1)])
def test_choices_equal_the_router_s(tokens, k, renormalise):
    """Equal logits included, of which the first ones are chosen."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((tokens, 128)), jnp.float32).at[::7].set(0)
    router = jnp.asarray(rng.standard_normal((128, 128)) / 8, jnp.float32)
    router = router.at[:, 64:].set(router[:, :64])
    routes, weights = route((x @ router)[None], k=k, renormalise=renormalise)
    ids, logprobs, shares = router_tpu.choose(x, router, k=k, renormalise=renormalise, interpret=True)
    np.testing.assert_array_equal(ids.T, routes.experts[0])
    np.testing.assert_allclose(logprobs.T, routes.logprobs[0], atol=1e-5)
    np.testing.assert_allclose(shares.T, weights[0], atol=1e-6)
