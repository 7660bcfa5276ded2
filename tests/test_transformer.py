"""The transformer agrees with itself: padding, prefill and cached decode, remat, dtype."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gspo_jax.models import transformer
from gspo_jax.models.cache import Cache, Slots, empty_ring, heads_first
from tests.tiny import CONFIG, leaf_errors, params, prompts


def model(config=CONFIG, dtype=jnp.float32):
    graph, _ = transformer.abstract(config, dtype=dtype)
    return nnx.merge(graph, params(config))


def test_what_stands_in_padding_changes_nothing():
    batch = prompts()
    valid = np.arange(10)[None] < batch.lengths[:, None]
    other = np.where(valid, batch.tokens, 63)
    a, b = (model()(jnp.asarray(tokens), valid=jnp.asarray(valid)).logits for tokens in (batch.tokens, other))
    np.testing.assert_array_equal(np.asarray(a)[valid], np.asarray(b)[valid])


def test_a_hole_in_the_middle_is_as_if_it_were_not_there():
    tokens = jnp.asarray(prompts(P=1).tokens)
    holed = jnp.concatenate([tokens[:, :4], jnp.full((1, 3), 9), tokens[:, 4:]], axis=1)
    valid = jnp.ones(13, bool).at[4:7].set(False)[None]
    a = model()(tokens).logits[0]
    b = model()(holed, valid=valid).logits[0]
    np.testing.assert_allclose(a, np.delete(b, [4, 5, 6], axis=0), atol=2e-5)


@pytest.mark.parametrize("group_size", [1, 3])
def test_cached_decode_equals_a_full_forward(group_size):
    """Every row's logits, token by token, ragged prompts prefilled once per group."""
    batch, T = prompts(P=4), 6
    net = model()
    B = 4 * group_size
    tokens = jnp.asarray(np.random.default_rng(1).integers(1, 64, (B, T)))
    valid = np.arange(10)[None] < batch.lengths[:, None]
    out, kept = jax.jit(partial(net.prefill, prompt=10, responses=1))(batch.tokens, jnp.asarray(valid))
    k, v = map(heads_first, kept)
    ring = empty_ring(CONFIG, B, T, k.dtype)
    cache = Cache(k, v, jnp.asarray(batch.lengths), ring, ring, jnp.zeros((), jnp.int32), group_size)
    decode = jax.jit(net.decode)
    stepped, routes = [], []
    for t in range(T):
        step, cache = decode(tokens[:, t], Slots(jnp.arange(B), jnp.full(B, t + 1), aligned=True), cache)
        stepped.append(step.logits[:, 0])
        routes.append(step.routes.experts[:, :, 0])
    forward = jax.jit(lambda tokens, valid: net(tokens, valid=valid))
    for b in range(B):
        p = b // group_size
        n = int(batch.lengths[p])
        text = jnp.pad(jnp.concatenate([batch.tokens[p, :n], tokens[b]]), (0, 10 - n))
        whole = forward(text[None], jnp.arange(10 + T)[None] < n + T)
        np.testing.assert_allclose(out.logits[p, :n], whole.logits[0, :n], atol=5e-5)
        np.testing.assert_allclose(jnp.stack(stepped)[:, b], whole.logits[0, n : n + T], atol=5e-5)
        np.testing.assert_array_equal(jnp.stack(routes, 1)[:, :, b], whole.routes.experts[:, 0, n : n + T])


def test_remat_changes_memory_not_gradients():
    graph, _ = transformer.abstract(CONFIG)
    tokens = jnp.asarray(prompts().tokens)

    def loss(p, remat):
        return nnx.merge(graph, p)(tokens, remat=remat).logits.std()

    none, *others = (jax.jit(jax.grad(lambda p, r=r: loss(p, r)))(params()) for r in transformer.REMATS)
    assert all(leaf_errors(none, other) < 1e-5 for other in others)


def test_bfloat16_computes_in_bfloat16_and_stays_close():
    tokens = jnp.asarray(prompts().tokens)
    half, full = (model(dtype=d)(tokens) for d in (jnp.bfloat16, jnp.float32))
    assert half.hidden.dtype == jnp.bfloat16
    assert half.logits.dtype == half.routes.logprobs.dtype == jnp.float32
    assert float(jnp.abs(half.logits - full.logits).mean()) < 0.05 * float(jnp.abs(full.logits).mean())


def test_routes_are_reported_per_layer():
    tokens = jnp.asarray(prompts().tokens)
    routes = model()(tokens).routes
    assert routes.experts.shape == (2, 8, 10, 2)
    assert (routes.logprobs[..., 0] >= routes.logprobs[..., 1]).all()
    assert int(routes.experts.max()) < 8
