"""The transformer is consistent under padding, prefill and cached decode, remat, and dtype."""

import dataclasses
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gspo_jax.models import families, transformer
from gspo_jax.models.cache import Cache, DecodeSlots, empty_pool, heads_first
from gspo_jax.models.families import qwen3
from gspo_jax.models.moe import Routing
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rollout.decoder import make_reshard
from gspo_jax.types import Weights
from tests.tiny import (  # noqa: F401
    CONFIG,
    EIGHT,
    LATENT,
    MIXED,
    leaf_errors,
    mixed_family,
    mostly_slow,
    params,
    prompts,
    weights,
)


def model(config=CONFIG, dtype=jnp.float32):
    graph, _ = transformer.abstract(config, dtype=dtype)
    return nnx.merge(graph, params(config))


@partial(jax.jit, static_argnames=("config", "dtype"))
def forward(weights, tokens, more, config, dtype):
    return nnx.merge(transformer.abstract(config, dtype=dtype)[0], weights)(tokens, **more)


def run(tokens, *, config=CONFIG, dtype=jnp.float32, **more):
    """Return the outputs of a forward pass, compiled once for all tests."""
    return forward(params(config), tokens, more, config, dtype)


def test_first_parameters_are_made_in_their_shards():
    mesh = mesh_lib.make_mesh(EIGHT)
    found = transformer.init_params(CONFIG, jax.random.key(0), mesh=mesh)
    expected = mesh_lib.param_shardings(transformer.abstract(CONFIG)[1], mesh)
    assert jax.tree.map(lambda x: x.sharding, found) == expected
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, params())
    for path, x in jax.tree.leaves_with_path(found):
        mean, deviation = (1, 0) if "norm" in jax.tree_util.keystr(path) else (0, 0.02)
        np.testing.assert_allclose([x.mean(), x.std()], [mean, deviation], atol=2e-3)


def test_what_stands_in_padding_changes_nothing():
    batch = prompts()
    valid = np.arange(10)[None] < batch.lengths[:, None]
    other = np.where(valid, batch.tokens, 63)
    a, b = (run(jnp.asarray(tokens), valid=jnp.asarray(valid)).logits for tokens in (batch.tokens, other))
    np.testing.assert_array_equal(np.asarray(a)[valid], np.asarray(b)[valid])


def test_a_hole_in_the_middle_is_as_if_it_were_not_there():
    tokens = jnp.asarray(prompts(P=1).tokens)
    holed = jnp.concatenate([tokens[:, :4], jnp.full((1, 3), 9), tokens[:, 4:]], axis=1)
    valid = jnp.ones(13, bool).at[4:7].set(False)[None]
    a = run(tokens).logits[0]
    b = run(holed, valid=valid).logits[0]
    np.testing.assert_allclose(a, np.delete(b, [4, 5, 6], axis=0), atol=2e-5)


@pytest.mark.parametrize(
    ("config", "group_size"),
    mostly_slow([(CONFIG, 1), (MIXED, 3), (LATENT, 2)], always=[(MIXED, 3), (LATENT, 2)]),
    ids=["one stack", "two stacks", "latent"],
)
def test_cached_decode_equals_a_full_forward(config, group_size, mixed_family):  # noqa: F811
    """Logits and routes of every row match token by token, with ragged prompts prefilled once per group."""
    batch, T = prompts(P=4), 6
    net = model(config)
    B = 4 * group_size
    tokens = jnp.asarray(np.random.default_rng(1).integers(1, 64, (B, T)))
    valid = np.arange(10)[None] < batch.lengths[:, None]
    out, kept = jax.jit(net.prefill)(batch.tokens, jnp.asarray(valid))
    k, v = heads_first(kept.k), heads_first(kept.v)
    pools, table = (empty_pool(x, 3 * B, -(-T // 3)) for x in (k, v)), jnp.arange(3 * B).reshape(B, 3)
    cache = Cache(k, v, jnp.asarray(batch.lengths), *pools, table, group_size)
    decode = jax.jit(net.decode)
    stepped, routes = [], []
    for t in range(T):
        step, cache = decode(
            tokens[:, t, None], DecodeSlots(jnp.arange(B), jnp.full((B, 1), t + 1), aligned=True), cache
        )
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


@pytest.mark.slow
@pytest.mark.parametrize("remat", [remat for remat in transformer.REMATS if remat != "none"])
def test_remat_changes_memory_not_gradients(remat):
    graph, _ = transformer.abstract(CONFIG)
    tokens = jnp.asarray(prompts().tokens)

    def loss(p, remat):
        return nnx.merge(graph, p)(tokens, remat=remat).logits.std()

    plain, again = (jax.jit(jax.grad(partial(loss, remat=r)))(params()) for r in ("none", remat))
    assert leaf_errors(plain, again) < 1e-5


def test_bfloat16_computes_in_bfloat16_and_stays_close():
    tokens = jnp.asarray(prompts().tokens)
    half, full = (run(tokens, dtype=d) for d in (jnp.bfloat16, jnp.float32))
    assert half.hidden.dtype == jnp.bfloat16
    assert half.logits.dtype == half.routes.logprobs.dtype == jnp.float32
    assert float(jnp.abs(half.logits - full.logits).mean()) < 0.05 * float(jnp.abs(full.logits).mean())


def test_routes_are_reported_per_layer():
    tokens = jnp.asarray(prompts().tokens)
    routes = run(tokens).routes
    assert routes.experts.shape == (2, 8, 10, 2)
    assert (routes.logprobs[..., 0] >= routes.logprobs[..., 1]).all()
    assert int(routes.experts.max()) < 8


def test_a_dense_stack_and_a_routed_one(mixed_family):  # noqa: F811
    """Routes and replay cover the routed stack of a two-stack model, and the sampler's copy equals the weights."""
    tokens = jnp.asarray(prompts().tokens)
    out = run(tokens, config=MIXED)
    assert MIXED.route_shape == (2, 2)
    assert out.routes.experts.shape == (2, 8, 10, 2)
    other = (out.routes.experts + 1) % 8
    replayed = run(tokens, config=MIXED, routing=Routing(replay=other))
    np.testing.assert_array_equal(replayed.routes.experts, other)
    np.testing.assert_array_equal(replayed.routes.native[0], out.routes.experts[0])
    given, mesh = weights(MIXED), mesh_lib.make_mesh({}, devices=jax.devices()[:1])
    copy = make_reshard(Weights.full(transformer.abstract(MIXED)[1]), mesh, jnp.float32)(given)
    assert leaf_errors(given, copy) == 0


@pytest.mark.parametrize("turns", mostly_slow([1, 2], always=[2]), ids=lambda n: "alternating" if n == 2 else "halves")
def test_one_stack_cut_in_two_is_the_same_model(turns, monkeypatch):
    """Two stacks of two layers, one after the other or in turn: outputs, replay, cache entries and decoded logits."""
    whole_config = dataclasses.replace(CONFIG, num_layers=4)
    (half,) = qwen3.stacks(dataclasses.replace(CONFIG, num_layers=2))
    stacks = (dataclasses.replace(half, turns=turns),) * 2
    monkeypatch.setitem(families.FAMILIES, "cut", types.SimpleNamespace(**vars(qwen3) | {"stacks": lambda _: stacks}))
    config = dataclasses.replace(whole_config, family="cut")
    whole, batch = params(whole_config), prompts()
    own = {i: np.array(numbers) for i, numbers in enumerate(config.layer_numbers)}
    assert [list(numbers) for numbers in own.values()] == ([[0, 2], [1, 3]] if turns == 2 else [[0, 1], [2, 3]])
    layers = {i: jax.tree.map(lambda x, n=n: x[n], whole["layers"][0]) for i, n in own.items()}
    cut = nnx.State({**whole, "layers": layers})
    replay = jnp.asarray(np.random.default_rng(0).integers(0, 8, (4, *batch.tokens.shape, 2)))

    def outputs(params, config):
        net = nnx.merge(transformer.abstract(config)[0], params)
        tokens = jnp.asarray(batch.tokens)
        plain, kept = net.prefill(tokens)
        k, v = heads_first(kept.k), heads_first(kept.v)
        P, pool = len(tokens), empty_pool(k, len(tokens), 4)
        cache = Cache(k, v, jnp.asarray(batch.lengths), pool, pool, jnp.arange(P)[:, None], 1)
        slots = DecodeSlots(jnp.arange(P), jnp.ones((P, 1), jnp.int32), aligned=True)
        step, _ = net.decode(tokens[:, :1], slots, cache)
        replayed = net(tokens, routing=Routing(replay=replay))
        return [(out.logits, out.routes) for out in (plain, step, replayed)], k, v

    a, b = jax.jit(outputs, static_argnums=1)(whole, whole_config), jax.jit(outputs, static_argnums=1)(cut, config)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), a, b)
