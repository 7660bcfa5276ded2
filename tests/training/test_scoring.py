"""The trainer's scores of responses: the critic's values, the router shift, and the old policy's record."""

import contextlib
import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gspo_jax.config import base
from gspo_jax.models import critic as critic_lib
from gspo_jax.models import transformer
from gspo_jax.models.moe import Routing
from gspo_jax.parallel import hosts
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.routing.drift import router_shift
from gspo_jax.setup import learning
from gspo_jax.training.layout import deal
from gspo_jax.training.packing import Packer
from gspo_jax.training.scoring import Scoring, kept_ids, make_old_policy, score, values
from gspo_jax.types import Batch, RouterRecord
from tests.alone import Alone
from tests.tiny import CONFIG, EIGHT, dealt, mesh_id, mostly_slow, packed, responses, some_kept, weights

GRAPH, _ = transformer.abstract(CONFIG)
G, T = 2, 8
SCORING = Scoring(temperature=0.8, logprob_chunk=64, group_size=G)


@jax.jit
def alone(weights, responses, routing=None):
    """Return the scores of responses with a row each."""
    return score(GRAPH, weights, Alone(responses), SCORING, routing=routing, kept=kept_ids(responses))


@pytest.fixture(scope="module")
def rollout():
    return with_kept(responses(P=4, G=G, T=T))


def with_kept(rollout):
    return dataclasses.replace(rollout, kept=some_kept(rollout))


def make_critic(*, own_trunk: bool):
    """Return a critic whose head is random instead of zero."""
    graph, shapes = critic_lib.abstract(CONFIG, own_trunk=own_trunk, dtype=jnp.float32)
    first = critic_lib.first_params(shapes, weights().whole)
    head = jax.random.normal(jax.random.key(2), (CONFIG.hidden_size,))
    return graph, nnx.State({**first, "head": first["head"].replace(head)}), head


def test_a_critic_begins_at_zero_on_a_copy_of_the_policy():
    _, shapes = critic_lib.abstract(CONFIG, own_trunk=True, dtype=jnp.float32)
    policy = weights().whole
    first = critic_lib.first_params(shapes, policy)
    assert jax.tree.structure(first) == jax.tree.structure(shapes)
    assert not np.any(first["head"][...])
    assert "head" not in first["trunk"], "a trunk has no language-model head"
    embed, mine = policy["embed"][...], first["trunk"]["embed"][...]
    np.testing.assert_array_equal(embed, mine)
    assert embed.unsafe_buffer_pointer() != mine.unsafe_buffer_pointer(), (
        "the buffers are separate, since both are donated"
    )


@pytest.mark.parametrize("own_trunk", mostly_slow([True, False], always=[True]))
def test_values_are_those_of_the_text_before_each_token(own_trunk, rollout):
    graph, critic, head = make_critic(own_trunk=own_trunk)

    @jax.jit
    def value(responses):
        rows = Alone(responses)
        hidden = score(GRAPH, weights(), rows, SCORING).hidden
        return values(graph, critic, rows, SCORING, policy_hidden=hidden)

    found = np.asarray(value(rollout))
    # The trunk still equals the policy, so both critics compute the policy's hidden states times the head.
    np.testing.assert_allclose(found, alone(weights(), rollout).hidden @ head, rtol=2e-4, atol=2e-4)
    changed = rollout.tokens.copy()
    changed[:, 3] = (changed[:, 3] + 1) % 60 + 1
    after = np.asarray(value(dataclasses.replace(rollout, tokens=changed)))
    there = rollout.mask[:, 4]
    np.testing.assert_allclose(after[:, :4], found[:, :4], atol=1e-5)
    assert np.abs(after - found)[there, 4].min() > 1e-4, "the next value depends on the changed token"


def test_routers_are_watched_at_the_experts_asked_about(rollout):
    own = alone(weights(), rollout).routes
    asked = (own.experts + 1) % CONFIG.num_experts
    both = [
        alone(weights(), rollout, routing=Routing(watch=experts)).routes.watched for experts in (own.experts, asked)
    ]
    np.testing.assert_allclose(both[0], own.logprobs, atol=1e-6)
    in_prompt = np.arange(rollout.prompts.shape[1])[None] < rollout.prompt_lengths[:, None]
    real = np.concatenate([in_prompt, rollout.mask], axis=1)
    assert np.abs(both[1] - both[0])[:, real].min() > 0
    assert own.watched is None


def test_router_shift_by_hand():
    old = np.log(np.array([0.5, 0.25, 0.5, 0.25], np.float32)).reshape(2, 1, 1, 2)  # [L, B, N, K]
    new = np.log(np.array([0.25, 0.25, 0.5, 0.5], np.float32)).reshape(2, 1, 1, 2)
    # |log| of 1/2, 1, 1, 2 is log 2, 0, 0, log 2: the mean is log(2)/2, so γ = 1/√2.
    np.testing.assert_allclose(router_shift(old, new), [[2**-0.5]], rtol=1e-6)


def test_the_old_policy_s_views(rollout):
    graph, critic, head = make_critic(own_trunk=False)
    reference = jax.tree.map(lambda x: x * 1.1, weights())

    def seen(program, *given, turns=None):
        packing = packed(rollout, group_size=G, turns=turns)
        return packing.in_order(jax.device_get(program(weights(), *given, dealt(Batch(rollout=rollout), packing))))

    plain = seen(make_old_policy(GRAPH, SCORING, recompute=False), None, None)
    np.testing.assert_array_equal(plain.logprobs, rollout.logprobs)
    assert plain.values is plain.reference_logprobs is plain.routes is plain.energy is None
    whole = make_old_policy(GRAPH, SCORING, recompute=True, critic=graph, energy=True)
    found = seen(whole, critic, reference.trainable)
    own, mask = alone(weights(), rollout), rollout.mask
    np.testing.assert_allclose(found.logprobs[mask], own.logprobs[mask], atol=1e-5)
    np.testing.assert_allclose(found.values[mask], (own.hidden @ head)[mask], rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(found.reference_logprobs[mask], alone(reference, rollout).logprobs[mask], atol=1e-5)
    assert np.abs(found.reference_logprobs - found.logprobs)[mask].max() > 0.01
    full = alone(weights(), dataclasses.replace(rollout, kept=None))
    apart = (own.logprobs - full.logprobs)[mask]
    assert (np.abs(apart) > 1e-3).tolist() == rollout.kept.whole[mask].tolist(), "renormalised where whole"
    logits = (np.asarray(own.hidden, np.float64) @ np.asarray(own.head, np.float64) / SCORING.temperature)[mask]
    for row, ids, all_kept in zip(logits, rollout.kept.ids[mask], rollout.kept.whole[mask], strict=True):
        row[np.isin(np.arange(len(row)), ids, invert=True) & all_kept] = -np.inf
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    energy = 1 - 2 * p[np.arange(len(p)), rollout.tokens[mask]] + np.square(p).sum(axis=1)
    np.testing.assert_allclose(found.energy[mask], energy, rtol=1e-4)
    assert np.ptp(energy) > 0.01
    recorded, expected = np.moveaxis(np.asarray(found.routes.experts), 2, 0), np.asarray(own.routes.experts)
    in_prompt = np.arange(rollout.prompts.shape[1])[None] < rollout.prompt_lengths[:, None]
    real = np.concatenate([in_prompt, mask], axis=1)
    np.testing.assert_array_equal(recorded[:, real], expected[:, real])
    assert (recorded[:, ~real] == -1).all()
    in_parts = seen(whole, critic, reference.trainable, turns=2)
    chex.assert_trees_all_close(in_parts, found, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "at_once"),
    mostly_slow([(None, 1), (None, 3), (EIGHT, 3)], always=[]),
    ids=lambda s: str(s) if isinstance(s, int) else mesh_id(s or {"unsharded": 1}),
)
def test_rows_have_the_old_policy_s_views_of_each_response_alone(sizes, at_once):
    """Log-probs, routes at every position, values and reference, under replay of a sampler's routes."""
    rollout, rng = with_kept(responses(P=16, G=4, T=T)), np.random.default_rng(0)
    experts = rng.integers(0, CONFIG.num_experts, rollout.routes.experts.shape).astype(np.int8)
    experts[..., 1] = (experts[..., 0] + 1) % CONFIG.num_experts
    experts[:, : rollout.prompts.shape[1]] = np.repeat(experts[::4, : rollout.prompts.shape[1]], 4, axis=0)
    experts[::5, -3:] = -1
    rollout = dataclasses.replace(rollout, routes=RouterRecord(experts, None))
    graph, critic, _ = make_critic(own_trunk=True)
    policy, reference = weights(), jax.tree.map(lambda x: x * 1.1, weights())
    packer = Packer(group_size=4, minibatches=2, shards=8 if sizes else 1, row_lengths=(48, 12))
    packing = packer(rollout.mask.sum(axis=1), rollout.prompt_lengths)
    mesh = mesh_lib.make_mesh(sizes or {"data": 1}, devices=jax.devices()[: 8 if sizes else 1])
    with jax.set_mesh(mesh) if sizes else contextlib.nullcontext():
        scoring = dataclasses.replace(SCORING, group_size=4, at_once=at_once)
        score_all = make_old_policy(GRAPH, scoring, recompute=True, replay="r3", critic=graph)
        given = hosts.shard_rows(mesh, rollout) if sizes else rollout
        batch = Batch(rollout=jax.jit(deal)(given, packing), packing=packing)
        found = packing.in_order(jax.device_get(score_all(policy, critic, reference.trainable, batch)))
    asked = jnp.moveaxis(jnp.asarray(experts, jnp.int32), 2, 0)
    own = jax.device_get(alone(policy, rollout, routing=Routing(replay=asked)))
    value = jax.jit(lambda rollout, hidden: values(graph, critic, Alone(rollout), SCORING, policy_hidden=hidden))
    expected = {
        "logprobs": own.logprobs,
        "values": value(rollout, own.hidden),
        "reference_logprobs": alone(reference, rollout).logprobs,
    }
    for field, numbers in expected.items():
        a, b = getattr(found, field)[rollout.mask], np.asarray(numbers)[rollout.mask]
        np.testing.assert_allclose(a, b, atol=2e-5, err_msg=field)
    real = np.asarray(Alone(rollout).valid)[..., None, None]
    routes, kept = (np.moveaxis(np.asarray(x), 0, 2) for x in (own.routes.experts, own.routes.logprobs))
    np.testing.assert_array_equal(found.routes.experts, np.where(real, routes, -1))
    np.testing.assert_allclose(found.routes.logprobs, np.where(real, kept, 0), atol=2e-5)


@pytest.mark.parametrize(
    ("platform", "remat", "minibatches", "at_once"),
    [("tpu", "dots", 4, 4), ("tpu", "none", 6, 2), ("tpu", "dots", 1, 1), ("tpu", "full", 4, 1), ("cpu", "dots", 4, 1)],
)
def test_micro_batches_in_one_pass(monkeypatch, platform, remat, minibatches, at_once):
    """Several on TPU, as many as divide the mini-batches, unless remat is for lack of memory."""
    config = base()
    config.model.remat, config.training.minibatches = remat, minibatches
    monkeypatch.setattr(learning, "platform", lambda: platform)
    assert learning.make_scoring(config).at_once == at_once
