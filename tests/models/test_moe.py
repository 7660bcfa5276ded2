"""Routers against numbers worked by hand and in float64; tests/models/test_dispatch.py has the layers behind them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gspo_jax.errors import UserError
from gspo_jax.models import moe
from gspo_jax.models.config import Stack
from gspo_jax.models.moe import MoE, Routing
from tests.tiny import CONFIG

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


@pytest.mark.parametrize("renormalise", [True, False])
def test_replayed_weights_are_the_record_s(renormalise):
    """The record has 0.3 and 0.2 of experts 2 and 1, the router others; an unknown token has the router's own."""
    logits = jnp.log(jnp.broadcast_to(jnp.asarray([0.5, 0.25, 0.125, 0.125]), (1, 2, 4)))
    of = jnp.log(jnp.asarray([[[0.3, 0.2]] * 2]))
    asked = Routing(jnp.asarray([[[2, 1], [2, -1]]], jnp.int8), weigh_by=of)
    routes, weights = route(logits, k=2, renormalise=renormalise, asked=asked)
    expected = [[[0.6, 0.4], [2 / 3, 1 / 3]]] if renormalise else [[[0.3, 0.2], [0.5, 0.25]]]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    np.testing.assert_allclose(jnp.exp(routes.logprobs), [[[0.125, 0.25], [0.5, 0.25]]], rtol=1e-6)
    gradient = jax.grad(lambda z: route(z, k=2, renormalise=renormalise, asked=asked)[1][..., 0].sum())(logits)
    assert not gradient[0, 0].any() and gradient[0, 1].any()


def test_the_margin_is_between_the_least_chosen_and_the_next():
    """0.3 − 0.2 of probabilities .1, .4, .2, .3, whatever is replayed; the least itself if all are chosen.

    Of scores whose shares these are, 0.1 − 0.4 if a bias chooses experts 0 and 2.
    """
    shares = jnp.asarray([[[0.1, 0.4, 0.2, 0.3]]])
    for k, replay, expected in ((2, None, 0.1), (2, [[[0, 2]]], 0.1), (4, None, 0.1)):
        asked = Routing(None if replay is None else jnp.asarray(replay), watch=jnp.full((1, 1, k), -1))
        np.testing.assert_allclose(
            route(jnp.log(shares), k=k, renormalise=True, asked=asked)[0].margin, [[expected]], rtol=1e-5
        )
    config = dataclasses.replace(UNGROUPED, num_experts=4, experts_per_token=2)
    bias, asked = jnp.asarray([1.0, 0, 1, 0]), Routing(watch=jnp.full((1, 1, 2), -1))
    routes, _ = moe.sigmoid_router(jnp.log(shares / (1 - shares)), config, asked, bias)
    assert sorted(routes.experts[0, 0].tolist()) == [0, 2]
    np.testing.assert_allclose(routes.margin, [[-0.3]], rtol=1e-5)


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


SIGMOID = dataclasses.replace(
    CONFIG, num_experts=12, experts_per_token=3, expert_groups=4, groups_per_token=2, routed_scaling_factor=2.5
)
UNGROUPED = dataclasses.replace(SIGMOID, expert_groups=1, groups_per_token=1, norm_topk_prob=False)


def chosen(scores, bias, config):
    """Return one token's experts, by a loop over groups: highest score first."""
    each, n = scores + bias, config.num_experts // config.expert_groups
    value = [sum(sorted(each[g * n : (g + 1) * n])[-2:]) for g in range(config.expert_groups)]
    groups = sorted(range(config.expert_groups), key=lambda g: -value[g])[: config.groups_per_token]
    allowed = [e for e in range(config.num_experts) if config.expert_groups == 1 or e // n in groups]
    best = sorted(allowed, key=lambda e: -each[e])[: config.experts_per_token]
    return sorted(best, key=lambda e: -scores[e])


@pytest.mark.parametrize("config", [SIGMOID, UNGROUPED], ids=["groups", "plain"])
def test_the_sigmoid_router_in_float64(config):
    """Choice by score + bias within groups; weights of scores alone, at native and replayed experts; what is asked."""
    rng = np.random.default_rng(0)
    E, K, shape = config.num_experts, config.experts_per_token, (2, 20)
    logits, bias, load = 2 * rng.standard_normal((*shape, E)), rng.normal(0, 0.3, E), rng.dirichlet(np.ones(E))
    replay = np.array([[rng.permutation(E)[:K] for _ in range(20)] for _ in range(2)])
    replay[0, 0, 1] = -1
    scores = 1 / (1 + np.exp(-logits))
    p = scores / scores.sum(axis=-1, keepdims=True)
    native = np.array([[chosen(token, bias, config) for token in row] for row in scores])
    assert (native != np.argsort(-scores)[..., :K]).any(), "the bias changes the choice"
    used = np.where((replay < 0).any(axis=-1, keepdims=True), native, replay)
    asked = Routing(*map(jnp.asarray, (replay, replay, load)))
    found = {}
    for name, ids, of in (("native", native, None), ("replayed", used, asked)):
        routes, weights = found[name] = moe.sigmoid_router(jnp.asarray(logits), config, of, jnp.asarray(bias))
        own = np.take_along_axis(scores, ids, -1)
        own = own / own.sum(axis=-1, keepdims=True) if config.norm_topk_prob else own
        np.testing.assert_array_equal(routes.experts, ids)
        np.testing.assert_array_equal(routes.chosen, native)
        np.testing.assert_allclose(weights, 2.5 * own, rtol=2e-6)
        np.testing.assert_allclose(routes.logprobs, np.log(np.take_along_axis(p, ids, -1)), atol=2e-6)
        np.testing.assert_allclose(routes.z, np.log(np.exp(logits).sum(axis=-1)) ** 2, rtol=1e-5, atol=1e-6)
    routes, _ = found["replayed"]
    watched = np.where(replay >= 0, np.log(np.take_along_axis(p, np.maximum(replay, 0), -1)), 0)
    np.testing.assert_allclose(routes.watched, watched, atol=2e-6)
    np.testing.assert_allclose(routes.balance, E * (p * load).sum(axis=-1), rtol=2e-6)
    if config.norm_topk_prob:
        other = rng.standard_normal((*shape, E))
        recorded = 1 / (1 + np.exp(-np.take_along_axis(other, np.maximum(replay, 0), -1)))
        of = np.log(recorded / (1 / (1 + np.exp(-other))).sum(axis=-1, keepdims=True))
        of_record = asked.replace(weigh_by=jnp.asarray(of))

        def weights_of(logits):
            return moe.sigmoid_router(logits, config, of_record, jnp.asarray(bias))[1]

        own = np.take_along_axis(scores, native, -1)
        own = np.where((replay < 0).any(axis=-1, keepdims=True), own, recorded)
        expected = 2.5 * own / own.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(weights_of(jnp.asarray(logits)), expected, rtol=2e-6)
        gradient = jax.grad(lambda x: weights_of(x)[..., 0].sum())(jnp.asarray(logits))
        assert gradient[0, 0].any() and not gradient[1].any() and not gradient[0, 1:].any()


def test_the_gradient_of_sigmoid_weights():
    """w_i = c σ_i / Σ σ, so ∂w_i/∂z_j = (1 − σ_j) w_j (δ_ij − w_i / c) at the experts used, and no bias has one."""
    z, bias = jnp.asarray([[[0.3, -1.0, 0.5, 2.0]]]), jnp.asarray([0.0, 1.0, 0.0, -1.0])
    config = dataclasses.replace(UNGROUPED, num_experts=4, experts_per_token=2, norm_topk_prob=True)

    def first(z, bias, asked):
        return moe.sigmoid_router(z, config, asked, bias)[1][0, 0, 0]

    for asked, (i, j) in ((None, (2, 1)), (Routing(jnp.asarray([[[3, 0]]])), (3, 0))):
        dz, db = jax.grad(first, argnums=(0, 1))(z, bias, asked)
        s = 1 / (1 + np.exp(-np.asarray(z[0, 0], np.float64)))
        share = s[i] / (s[i] + s[j])
        expected = np.zeros(4)
        expected[i], expected[j] = (2.5 * share * (1 - share) * np.array([1 - s[i], -(1 - s[j])])).tolist()
        np.testing.assert_allclose(dz[0, 0], expected, atol=1e-6)
        assert not db.any()


@pytest.mark.parametrize("gated", [True, False])
def test_shared_experts_stand_beside_routed_ones(gated):
    stack = Stack(layers=1, attention=nnx.Module, feed_forward=MoE, width=8, experts=4, experts_per_token=2)
    config, rng = dataclasses.replace(CONFIG, num_experts=4, experts_per_token=2), np.random.default_rng(0)
    with_shared = dataclasses.replace(stack, shared_width=6)
    make = {"choose": moe.softmax_router, "rngs": nnx.Rngs(0)}
    layer = MoE(config, with_shared, "gather", gated=gated, **make)
    layer = jax.tree.map(lambda w: jnp.asarray(rng.normal(0, 0.5, w.shape[1:]), jnp.float32), layer)
    x = rng.standard_normal((1, 3, config.hidden_size))
    y, _ = layer(jnp.asarray(x, jnp.float32), jnp.ones((1, 3), bool))
    assert layer.shared is not None
    without = MoE(config, stack, "gather", **make)
    nnx.update(without, nnx.filter_state(nnx.state(layer), lambda path, _: path[0] in ("router", "gate", "up", "down")))
    routed, _ = without(jnp.asarray(x, jnp.float32), jnp.ones((1, 3), bool))
    gate, up, down = (np.asarray(w[...], np.float64) for w in (layer.shared.gate, layer.shared.up, layer.shared.down))
    expected = (x @ gate) / (1 + np.exp(-(x @ gate))) * (x @ up) @ down
    if gated:
        expected = expected / (1 + np.exp(-(x @ np.asarray(layer.shared_gate[...], np.float64))))
    np.testing.assert_allclose(y - routed, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"groups_per_token": 5}, "groups_per_token 5 is outside 1 to expert_groups 4; choose one inside"),
        ({"expert_groups": 5}, "expert_groups 5 does not divide the 12 experts .*; use one of 1, 2, 3, 4, 6"),
        ({"expert_groups": 12}, "into groups of two or more; use one of 1, 2, 3, 4, 6"),
        ({"experts_per_token": 7}, "groups_per_token 2 has 6 experts to choose 7 from; use 3 or more"),
    ],
)
def test_impossible_groups(change, says):
    with pytest.raises(UserError, match=says):
        dataclasses.replace(SIGMOID, **change)


def test_a_part_of_a_shared_expert():
    """config.json counts them."""
    config = dataclasses.replace(SIGMOID, family="glm4_moe", shared_intermediate_size=CONFIG.moe_intermediate_size + 8)
    with pytest.raises(UserError, match="is not a multiple of moe_intermediate_size"):
        _ = config.stacks
