"""Routing capture and replay: the recorded routes, a forward pass that follows them, and the router losses."""

import dataclasses
import functools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gspo_jax import objectives
from gspo_jax.config import base
from gspo_jax.errors import UserError
from gspo_jax.kernels.attention import causal_attention
from gspo_jax.kernels.rotary import Rotation, rms_norm
from gspo_jax.models import moe, transformer
from gspo_jax.models.config import by_path
from gspo_jax.models.moe import Routing, layers_first
from gspo_jax.rollout.decoder import response_keys
from gspo_jax.rollout.sampling import SamplingParams, StopRule
from gspo_jax.routing import decomposition, drift
from gspo_jax.routing.replay import to_replay
from gspo_jax.setup import learning
from gspo_jax.setup.checks import check_dense
from gspo_jax.training import metrics as metrics_lib
from gspo_jax.training.scoring import Scoring, make_old_policy, score
from gspo_jax.training.state import new_state
from gspo_jax.training.update import Penalties, make_gradient, make_update
from gspo_jax.types import Batch, OldPolicy, Packing, Rollout, RouterRecord, Weights
from tests import tiny
from tests.alone import Alone
from tests.tiny import dealt, generate, leaf_errors, mostly_slow, packed, prompts

CONFIG = dataclasses.replace(tiny.CONFIG, num_experts=300, moe_intermediate_size=4)
"""300 experts: ids that do not fit into a byte."""
GRAPH, _ = transformer.abstract(CONFIG)
weights = partial(tiny.weights, CONFIG)
P, G, S, T, E = 4, 4, 5, 6, CONFIG.num_experts
SCORING = Scoring(logprob_chunk=64, group_size=G)
NO_PENALTIES = Penalties()


def reference():
    """Return the parameters of a second policy."""
    return jax.tree.map(lambda x: x * 1.1, weights())


NATIVE = np.full((CONFIG.num_layers, P * G, S + T, CONFIG.experts_per_token), -1)
"""A record without any route, so that the routers choose: one compiled program serves both."""


def of_tokens(rollout, x):
    """Return values [L, B, N, …] of whole rows at the response tokens."""
    return x[:, :, rollout.prompts.shape[1] :]


def learn(policy, rollout, replay=NATIVE, scoring=SCORING):
    """Return the gradient of a fixed weighted sum of log-probs, and the scores."""
    return _learn(policy, rollout, replay, scoring)


@partial(jax.jit, static_argnums=3)
def _learn(policy, rollout, replay, scoring):
    target = jnp.cos(jnp.arange(rollout.mask.size, dtype=jnp.float32)).reshape(rollout.mask.shape)

    def loss(w):
        scores = score(GRAPH, w, Alone(rollout), scoring, routing=Routing(replay))
        return jnp.where(rollout.mask, scores.logprobs * target, 0).sum(), scores

    return jax.grad(loss, has_aux=True)(policy)


OLD_POLICY = {
    replay: make_old_policy(GRAPH, SCORING, recompute=True, replay=replay) for replay in ("r2", "r3")
}  # compiled on the first call


@pytest.fixture(scope="module")
def rollout():
    keys = response_keys(jax.random.key(1), jnp.arange(P * G))
    stop = StopRule(max_length=T, eos_ids=(3, 5, 7, 9))
    settings = {"sampling": SamplingParams(), "stop": stop, "router_logprobs": True, "slots": 4}
    return jax.device_get(generate(GRAPH, weights(), prompts(P=P, S=S), keys, **settings)[0])


def in_rows(rollout, turns=None) -> Packing:
    """Return rows that compute the responses in so many micro-batches, one if `turns` is None."""
    return packed(rollout, group_size=G, turns=turns)


def real(rollout) -> np.ndarray:
    """Return where prompts and responses hold tokens, bool [B, N]."""
    in_prompt = np.arange(rollout.prompts.shape[1])[None] < rollout.prompt_lengths[:, None]
    return np.concatenate([in_prompt, rollout.mask], axis=1)


@pytest.fixture(scope="module")
def native(rollout):
    """Return gradient and scores of the forward pass without replay."""
    return jax.device_get(learn(weights(), rollout))


@pytest.fixture(scope="module")
def foreign(native):
    """Return expert ids that differ from the router's own choice for every token of every layer."""
    return (native[1].routes.experts + 1) % E


@pytest.fixture(scope="module")
def followed(rollout, foreign):
    """Return gradient and scores of the forward pass that replays `foreign`."""
    return jax.device_get(learn(weights(), rollout, foreign))


def assert_same(expected, found):
    """Assert that gradient, log-probs, entropies and hidden states are bitwise equal."""
    chex.assert_trees_all_equal(expected[0], found[0])
    for name in ("logprobs", "entropy", "hidden"):
        np.testing.assert_array_equal(getattr(expected[1], name), getattr(found[1], name), err_msg=name)


def test_replaying_the_own_routes_changes_no_bit(rollout, native):
    own = learn(weights(), rollout, native[1].routes.experts)
    assert_same(native, own)
    np.testing.assert_array_equal(own[1].routes.native, native[1].routes.experts)


@pytest.mark.slow
def test_a_program_without_replay_gives_the_same_bits(rollout, native):
    assert_same(native, jax.device_get(learn(weights(), rollout, None)))


def test_foreign_routes_are_taken_and_the_router_still_learns(rollout, native, foreign, followed):
    (gradient, scores), mask = followed, rollout.mask
    np.testing.assert_array_equal(scores.routes.experts, foreign)
    assert np.abs(scores.logprobs - native[1].logprobs)[mask].min() > 1e-4
    router = gradient.trainable["layers"][0]["mlp"]["router"][...]
    assert (np.abs(router).max(axis=(1, 2)) > 1e-3).all(), "the router gets a gradient in every layer"
    at = partial(of_tokens, rollout)
    assert not drift.compare(at(foreign), at(scores.routes.experts), mask).flips.any()
    assert (drift.compare(at(foreign), at(scores.routes.native), mask).flips > 0).all()
    # Layer 0 sees the same input either way, so its own choice is the same.
    np.testing.assert_array_equal(scores.routes.native[0], native[1].routes.experts[0])


def test_tokens_without_a_record_are_routed_natively_one_by_one(rollout, native, foreign):
    """One -1 among a token's K ids makes that token native. Tokens before the first replayed one are unaffected."""
    replay = foreign.copy()
    replay[:, :, ::2, -1] = -1
    routes = learn(weights(), rollout, replay)[1].routes
    np.testing.assert_array_equal(routes.experts[:, :, 1::2], foreign[:, :, 1::2])
    np.testing.assert_array_equal(routes.experts[:, :, ::2], routes.native[:, :, ::2])
    late = foreign.copy()
    late[:, :, : S + 2] = -1
    scores = learn(weights(), rollout, late)[1]
    np.testing.assert_allclose(scores.logprobs[:, :3], native[1].logprobs[:, :3], atol=1e-5)
    there = rollout.mask[:, 3]
    assert np.abs(scores.logprobs - native[1].logprobs)[there, 3].min() > 1e-4


@pytest.mark.slow
def test_a_rematerialised_backward_takes_the_same_experts(rollout, native, foreign, followed):
    again = partial(learn, weights(), rollout, scoring=dataclasses.replace(SCORING, remat="full"))
    for expected, replay in ((native, native[1].routes.experts), (followed, foreign)):
        gradient, scores = again(replay)
        np.testing.assert_array_equal(scores.routes.experts, expected[1].routes.experts)
        assert leaf_errors(expected[0], gradient) < 1e-5


def test_a_record_of_the_old_policy_is_needed_for_r2(rollout):
    with pytest.raises(ValueError, match="r2 replays the routes of the old policy, but none were recorded"):
        to_replay("r2", rollout.routes, None)
    assert to_replay("none", rollout.routes, None) == (None, None)
    assert to_replay("r3", rollout.routes, None) == (rollout.routes.experts, None)
    assert to_replay("r3w", rollout.routes, None) == (rollout.routes.experts, rollout.routes.logprobs)
    with pytest.raises(ValueError, match=r"r3w replays .* it recorded no router log-probs"):
        to_replay("r3w", dataclasses.replace(rollout.routes, logprobs=None), None)


@pytest.fixture(scope="module")
def olds(rollout):
    """Return the old policy's record under r2 and r3, with scores of a different reference policy."""
    return {replay: scored(replay, rollout) for replay in OLD_POLICY}


def scored(replay: str, rollout: Rollout) -> OldPolicy:
    """Return what the old policy and a reference say of the responses, in their order."""
    packing = in_rows(rollout)
    found = OLD_POLICY[replay](weights(), None, reference().trainable, dealt(Batch(rollout=rollout), packing))
    return packing.in_order(jax.device_get(found))


@functools.cache
def make(replay: str, penalties: Penalties):
    """Return an update on the whole experience whose new optimizer state is the gradient."""
    record = optax.trace(decay=0.0), optax.constant_schedule(1.0)
    gradient = make_gradient(GRAPH, SCORING, penalties=penalties, replay=replay)
    return partial(make_update(gradient, *record), objectives.gspo())


def update(experience, policy, *, replay="none", turns=None, penalties=NO_PENALTIES):
    """Return gradient and metrics of one update."""
    experience = dealt(experience, in_rows(experience.rollout, turns))
    state = new_state(jax.tree.map(jnp.array, policy), optax.trace(decay=0.0))
    after, metrics = make(replay, penalties)(state, policy.frozen, experience, 0)
    return jax.device_get((after.policy.opt_state.trace, metrics))


def experience_of(rollout, old, *, scale: float = 1.0) -> Batch:
    advantages = scale * np.random.default_rng(0).standard_normal(P * G)
    return Batch(rollout=rollout, mask=rollout.mask, old=old, advantages=advantages.astype(np.float32))


@pytest.fixture(scope="module")
def first(rollout, olds):
    """Return gradient and metrics of the first update under r2."""
    return update(experience_of(rollout, olds["r2"]), weights(), replay="r2")


@pytest.mark.slow
def test_the_first_update_under_r2_has_not_drifted_at_all(first):
    _, metrics = first
    for name in ("flip_rate", "tokens_changed", "layers_changed", "top1_changed"):
        assert metrics[f"routing/{name}"] == 0, name
    assert not metrics["routing/flip_rate_per_layer"].any()
    assert metrics["routing/replayed"] == 1
    # Scoring and update are separate programs, so their router log-probs may differ in the last bit.
    np.testing.assert_allclose(metrics["routing/router_kl"], 0, atol=1e-7)
    np.testing.assert_allclose(metrics["routing/router_shift"], 1, atol=1e-6)
    assert metrics["ratio/token_log_max"] < 1e-5


@pytest.mark.slow
def test_after_a_large_step_the_router_has_drifted_and_is_still_overruled(rollout, olds, first):
    policy = Weights.full(jax.tree.map(lambda x, g: x - 0.03 * jnp.sign(g), weights().trainable, first[0]))
    old = olds["r2"]
    _, metrics = update(experience_of(rollout, old), policy, replay="r2")
    assert 0 < metrics["routing/flip_rate"] <= metrics["routing/tokens_changed"]
    assert metrics["routing/router_kl"] > 0
    assert metrics["routing/router_shift"] < 1
    assert metrics["routing/replayed"] == 1
    record = np.moveaxis(old.routes.experts, 2, 0)
    scores = learn(policy, rollout, record.astype(np.int32))[1]
    np.testing.assert_array_equal(scores.routes.experts[:, real(rollout)], record[:, real(rollout)])
    chosen = np.moveaxis(scores.routes.chosen, 0, 2)
    found = decomposition.flips(old.routes.experts, chosen, rollout.prompt_lengths, prompt_columns=S).old
    of_token = found.mean(axis=(2, 3))
    np.testing.assert_allclose(metrics["routing/flip_rate"], of_token[rollout.mask].mean(), rtol=1e-6)
    up = experience_of(rollout, old).advantages > 0
    for name, own in (("positive", up), ("negative", ~up)):
        expected = of_token[own][rollout.mask[own]].mean()
        np.testing.assert_allclose(metrics[f"routing/flip_rate_{name}"], expected, rtol=1e-6)
    free = learn(policy, rollout)[1].logprobs
    assert np.abs(scores.logprobs - free)[rollout.mask].max() > 1e-3, "without replay the log-probs would be different"


def test_the_reference_policy_routes_natively(rollout, native, foreign, olds):
    """The reference policy routes natively, even where r3 makes the old policy replay routes no router would choose."""
    expected = learn(reference(), rollout)[1].logprobs
    other = RouterRecord(np.moveaxis(foreign, 0, 2).astype(np.int16), rollout.routes.logprobs)
    led = dataclasses.replace(rollout, routes=other)
    led = scored("r3", led)
    for old in (*olds.values(), led):
        np.testing.assert_allclose(old.reference_logprobs[rollout.mask], expected[rollout.mask], atol=1e-5)
    there = real(rollout)
    np.testing.assert_array_equal(led.routes.experts[there], other.experts[there])
    assert np.abs(led.logprobs - native[1].logprobs)[rollout.mask].min() > 1e-4


@pytest.mark.parametrize(
    ("experts", "dtype"), [(1, np.int8), (128, np.int8), (129, np.int16), (300, np.int16), (40_000, np.int32)]
)
def test_ids_are_the_smallest_integer_that_holds_all_and_none(experts, dtype):
    assert dataclasses.replace(CONFIG, num_experts=experts, experts_per_token=1).expert_dtype == dtype


def test_records_of_prefill_decode_and_scoring_agree(rollout, olds):
    """All three records agree, prompts included. The sampler never feeds a response's last token; padding is -1."""
    sampler, trainer = rollout.routes, olds["r2"].routes
    assert sampler.experts.dtype == trainer.experts.dtype == np.int16
    assert sampler.experts.shape == (P * G, S + T, CONFIG.num_layers, CONFIG.experts_per_token)
    assert sampler.experts.max() > 255, "the case has expert ids above 255"
    there, fed = real(rollout), real(rollout)
    fed[np.arange(P * G), S + rollout.mask.sum(axis=1) - 1] = False
    for known in ((trainer.experts >= 0).all, (trainer.experts >= 0).any):
        np.testing.assert_array_equal(known(axis=(2, 3)), there)
    for known in ((sampler.experts >= 0).all, (sampler.experts >= 0).any):
        np.testing.assert_array_equal(known(axis=(2, 3)), fed)
    np.testing.assert_array_equal(sampler.experts[fed], trainer.experts[fed])
    np.testing.assert_allclose(sampler.logprobs[fed], trainer.logprobs[fed], atol=1e-5)
    assert not sampler.logprobs[~fed].any() and not trainer.logprobs[~there].any()


def test_scoring_counts_flips_where_tokens_are_predicted(rollout, olds, native, foreign):
    """Against the sampler's own routes none; against others those of the noise command; -1 outside the responses."""
    for old in olds.values():
        np.testing.assert_array_equal(old.flips, np.where(rollout.mask, 0, -1)[..., None] * np.ones(2, int))
    shifted = native[1].routes.experts.astype(np.int16)
    shifted[0, ..., 0] = foreign[0, ..., 0]
    shifted = np.moveaxis(shifted, 0, 2)
    other = dataclasses.replace(rollout, routes=RouterRecord(shifted, rollout.routes.logprobs))
    found = scored("r2", other)
    expected = decomposition.flips(shifted, found.routes.experts, rollout.prompt_lengths, prompt_columns=S).old
    np.testing.assert_array_equal(found.flips[rollout.mask], expected.sum(axis=3)[rollout.mask])
    assert (found.flips[rollout.mask][:, 0] > 0).any() and not found.flips[rollout.mask][:, 1].any()
    rate, changed = drift.rates(found.flips, rollout.mask, k=2)
    np.testing.assert_allclose(rate, expected[rollout.mask].mean(), rtol=1e-6)
    np.testing.assert_allclose(changed, expected.any(axis=3)[rollout.mask].mean(), rtol=1e-6)


def router_logits(weights, rollout) -> list:
    """Return every layer's router logits [B, T, E] at the response tokens, from a plain loop without prompt sharing."""
    model = nnx.merge(GRAPH, weights)
    graph, stacked = nnx.split(model.layers[0])
    valid, found, eps = jnp.asarray(real(rollout)), [], CONFIG.rms_norm_eps
    rotation = Rotation.of(jnp.cumsum(valid, axis=1) - 1, CONFIG.rope_frequencies())
    x = model.embed[...][jnp.concatenate([rollout.prompts, rollout.tokens], axis=1)]

    class Plain:
        is_step = False

        def attend(self, q, k, v, keep=None):
            return causal_attention(q, k, v, valid), None

        def recur(self, rule, inputs):
            raise NotImplementedError

    for layer in range(CONFIG.num_layers):
        block = nnx.merge(graph, jax.tree.map(lambda p, i=layer: p[i], stacked))
        y, _ = block.attention(rms_norm(x, block.attention_norm[...], eps), rotation, Plain())
        found.append((rms_norm(x + y, block.mlp_norm[...], eps) @ block.mlp.router[...])[:, S:])
        x, _, _ = block(x, rotation, valid, Plain())
    return found


@pytest.fixture(scope="module")
def expected_losses(rollout, olds):
    """Return the gradient of 0.3 · balance loss + 0.01 · z-loss, means over tokens, and both mean losses.

    Computed from the full router probabilities of every token.
    """
    mask, experts = rollout.mask, olds["r2"].routes.experts[:, S:]
    shares = [np.bincount(experts[mask][:, layer].ravel(), minlength=E) for layer in range(CONFIG.num_layers)]
    shares = [jnp.asarray(counts / counts.sum(), jnp.float32)[None, None] for counts in shares]
    of_tokens = mask / mask.sum()

    def loss(w):
        logits = router_logits(w, rollout)
        balance = sum(E * (jax.nn.softmax(z) * f).sum(axis=-1) for z, f in zip(logits, shares, strict=True))
        squares = sum(jnp.log(jnp.exp(z).sum(axis=-1)) ** 2 for z in logits)
        each = jnp.stack([balance, squares]) / len(logits)
        return (jnp.asarray([0.3, 0.01])[:, None, None] * of_tokens[None] * each).sum(), each

    gradient, each = jax.jit(jax.grad(loss, has_aux=True))(weights().trainable)
    return gradient, *np.asarray(each)[:, mask].mean(axis=1)


LOSSES = Penalties(balance=0.3, router_z=0.01)


def assert_losses(expected_losses, gradient, metrics):
    """Assert that the gradient and both mean losses are the expected ones, to 1e-5 and 1e-6."""
    expected, balance, z = expected_losses
    assert leaf_errors(expected, gradient) < 1e-5
    np.testing.assert_allclose(metrics["routing/balance_loss"], balance, rtol=1e-6)
    np.testing.assert_allclose(metrics["routing/z_loss"], z, rtol=1e-6)
    assert balance > 1.0, "load and router probabilities are uneven in the same way"


@pytest.mark.slow
def test_r3_with_the_sampler_s_layout_is_r2_and_losses_add_up(rollout, olds, first, expected_losses):
    """On policy, r3 gives the numbers of r2, and the gradient of the router losses adds to that of the objective.

    The sampler never fed a response's last token, so r3 routes it natively, which changes nothing here. The r2 run has
    one micro-batch and no router losses, this one two micro-batches and both losses.
    """
    settings = {"replay": "r3", "penalties": LOSSES, "turns": 2}
    both, metrics = update(experience_of(rollout, olds["r3"]), weights(), **settings)
    router, seen = update(experience_of(rollout, olds["r3"], scale=0), weights(), **settings)
    assert_losses(expected_losses, router, seen)
    expected, expected_metrics = first
    assert leaf_errors(jax.tree.map(jnp.add, expected, router), both) < 1e-5
    tokens = expected_metrics["update/tokens"]
    np.testing.assert_allclose(metrics["routing/replayed"], 1 - P * G / tokens, rtol=1e-6)
    assert metrics.keys() - expected_metrics.keys() == {"routing/balance_loss", "routing/z_loss"}
    for name in expected_metrics.keys() - {"routing/replayed", "actor/loss", "actor/grad_norm"}:
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(olds["r3"].logprobs, olds["r2"].logprobs, atol=1e-6)


@pytest.fixture(scope="module")
def metrics_of(rollout):
    """Return the metrics of an update's forward pass, whose old policy is the sampler."""
    batch = experience_of(rollout, OldPolicy(rollout.logprobs))

    @jax.jit
    def metrics(scores):
        old, arrays = batch.old.logprobs, {"mask": batch.mask, "advantages": batch.advantages}
        _, info = objectives.loss(objectives.gspo(), scores.logprobs, old_logprobs=old, **arrays)
        rows = {"layout": Alone(batch.rollout), "routes": layers_first(batch.routes)}
        sums, maxima = metrics_lib.of_policy(scores, batch, info, config=CONFIG, **rows)
        return metrics_lib.from_sums({"loss": 0.0, **sums}, maxima)

    return metrics


def test_the_mismatch_of_rounding_errors_has_a_kl_that_is_not_negative(rollout, native, metrics_of):
    """x = 1e-4, which float32 log-probs hold up to 1e-7: x²/2 = 5e-9, of which exp(x) − 1 − x keeps no digit."""
    scores = jax.tree.map(jnp.asarray, native[1])
    routes = scores.routes._replace(watched=scores.routes.logprobs, margin=jnp.zeros(scores.routes.experts.shape[:3]))
    found = metrics_of(dataclasses.replace(scores, routes=routes, logprobs=rollout.logprobs + np.float32(1e-4)))
    np.testing.assert_allclose([found["mismatch/kl"], found["actor/kl"]], 5e-9, rtol=0.01)


@pytest.mark.slow
def test_without_coefficients_there_are_no_router_losses(rollout, olds, first):
    gradient, metrics = update(experience_of(rollout, olds["r2"], scale=0), weights(), replay="r2")
    assert not any(np.any(g) for g in jax.tree.leaves(gradient))
    assert not {"routing/balance_loss", "routing/z_loss"} & (metrics.keys() | first[1].keys())


GROUPED = dataclasses.replace(
    tiny.CONFIG,
    family="glm4_moe",
    dense_layers=1,
    num_layers=3,
    experts_per_token=2,
    expert_groups=4,
    groups_per_token=2,
    shared_intermediate_size=16,
)
"""Sigmoid routers with a bias and groups."""


def test_replay_leaves_no_route_of_a_sigmoid_router_in_the_ratio():
    """Other biases flip choices, within groups and between them, and no probability; replayed, no log-prob changes."""
    graph, tokens = transformer.abstract(GROUPED)[0], jnp.asarray(prompts(P=3).tokens)
    rng, params = np.random.default_rng(0), tiny.params(GROUPED)

    def moved(path, x):
        own = "choice_bias" in jax.tree_util.keystr(path)
        return jnp.asarray(rng.normal(0, 0.2, x.shape), jnp.float32) if own else x

    @jax.jit
    def forward(params, replay, watch):
        out = nnx.merge(graph, params)(tokens, routing=Routing(replay, watch))
        return jax.nn.log_softmax(out.logits), out.routes

    free = jnp.full((2, *tokens.shape, 2), -1)
    logprobs, routes = forward(params, free, free)
    other = jax.tree_util.tree_map_with_path(moved, params)
    native, chosen = forward(other, free, routes.experts)
    replayed, kept = forward(other, routes.experts, routes.experts)
    flips = drift.compare(
        routes.experts,
        kept.chosen,
        jnp.ones(tokens.shape, bool),
        old_logprobs=routes.logprobs,
        new_logprobs=kept.watched,
    )
    found = drift.metrics(flips)
    assert found["routing/flip_rate"] > 0.2, "a flip by bias is one"
    groups = np.asarray(routes.experts) // 2, np.asarray(kept.chosen) // 2
    assert (np.sort(groups[0]) != np.sort(groups[1])).any(), "and so is one to another group"
    np.testing.assert_array_equal(kept.experts, routes.experts)
    np.testing.assert_array_equal(replayed, logprobs)
    np.testing.assert_array_equal(kept.logprobs, routes.logprobs)
    assert abs(found["routing/router_kl"]) < 1e-6 and found["routing/router_shift"] == 1
    np.testing.assert_array_equal(kept.chosen[0], chosen.chosen[0])  # below, replay gives routers other tokens
    assert np.abs(native - logprobs).max() > 1e-2


ROUTERS = {
    "softmax": dataclasses.replace(tiny.CONFIG, norm_topk_prob=True),
    "softmax, not renormalised": dataclasses.replace(tiny.CONFIG, norm_topk_prob=False),
    "sigmoid in groups": dataclasses.replace(GROUPED, routed_scaling_factor=2.5),
}


@pytest.mark.parametrize("name", mostly_slow(ROUTERS, always=("sigmoid in groups",)))
def test_replayed_weights_are_those_of_the_record_and_teach_no_router(name):
    """With other routers, log-probs move under r3 and stay under r3w, which gives routers no gradient.

    Where the record is unknown they have one.
    """
    config = ROUTERS[name]
    graph, tokens = transformer.abstract(config)[0], jnp.asarray(prompts(P=3).tokens)
    rng, params = np.random.default_rng(0), tiny.params(config)

    def is_router(path):
        return any(name in jax.tree_util.keystr(path) for name in ("router", "choice_bias"))

    def moved(path, x):
        return x + jnp.asarray(rng.normal(0, 0.2, x.shape), jnp.float32) if is_router(path) else x

    def forward(params, replay, weigh_by=None):
        out = nnx.merge(graph, params)(tokens, routing=Routing(replay, weigh_by=weigh_by))
        return jax.nn.log_softmax(out.logits), out.routes

    @jax.jit
    def learn(params, replay, weigh_by):
        """Return log-probs, and the largest gradient of a router."""

        def loss(params):
            logprobs, _ = forward(params, replay, weigh_by)
            return logprobs[..., 0].sum(), logprobs

        gradient, logprobs = jax.grad(loss, has_aux=True)(params)
        leaves = jax.tree_util.tree_leaves_with_path(gradient)
        return logprobs, jnp.stack([jnp.abs(x).max() for path, x in leaves if is_router(path)]).max()

    r3, (L, K) = jax.jit(forward), config.route_shape
    logprobs, routes = r3(params, jnp.full((L, *tokens.shape, K), -1))
    other = jax.tree_util.tree_map_with_path(moved, params)
    np.testing.assert_allclose(r3(params, routes.experts)[0], logprobs, atol=1e-5)
    assert np.abs(r3(other, routes.experts)[0] - logprobs).max() > 1e-2
    kept, gradient = learn(other, routes.experts, routes.logprobs)
    np.testing.assert_allclose(kept, logprobs, atol=1e-5)
    assert gradient == 0
    native, gradient = learn(other, routes.experts.at[:, :, 1, 0].set(-1), routes.logprobs)
    np.testing.assert_allclose(native[:, 0], logprobs[:, 0], atol=1e-5)
    assert np.abs(native - logprobs)[:, 1].max() > 1e-2 and gradient > 1e-3


def test_the_sampler_records_what_r3w_replays():
    """Router log-probs, whoever computes the old policy's; not the weights of sigmoids that are not renormalised."""
    config = base()
    for config.routing.replay, kept in (("r3", False), ("r3w", True)):
        config.training.old_logprobs = "recompute"
        assert learning.keeps_router_logprobs(config, GROUPED) == kept
    for model in ROUTERS.values():
        check_dense(config, model)
    with pytest.raises(UserError, match=r"routing.replay is 'r3w', .* since norm_topk_prob is false; use 'r3'"):
        check_dense(config, dataclasses.replace(GROUPED, norm_topk_prob=False))


def test_biases_move_against_the_load():
    """By the rate, up where an expert has less than its share; layer by layer, and nothing else moves."""
    params = tiny.params(GROUPED)
    load = jnp.asarray([[0.3, 0.2, 0.125, 0.125, 0.25, 0.0, 0.0, 0.0], [0.125] * 8])
    found, before = by_path(moe.balanced(params, load, GROUPED, rate=0.01)), by_path(params)
    steps = found["layers.1.mlp.choice_bias"] - before["layers.1.mlp.choice_bias"]
    np.testing.assert_allclose(steps, 0.01 * np.array([[-1, -1, 0, 0, -1, 1, 1, 1], [0] * 8]), atol=1e-7)
    for path, leaf in before.items():
        if "choice_bias" not in path:
            np.testing.assert_array_equal(found[path], leaf)
