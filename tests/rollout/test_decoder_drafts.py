"""Drafts change no response: tokens, experts and ends are those of the decoder without them, in fewer steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.models import transformer
from gspo_jax.parallel import hosts
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rollout import decoder
from gspo_jax.rollout.decoder import make_reshard, response_keys
from gspo_jax.rollout.drafting import Drafting
from gspo_jax.rollout.pages import Pool
from gspo_jax.rollout.polled import PolledDecode
from gspo_jax.rollout.sampling import SamplingParams, StopRule
from gspo_jax.types import Prompts, TextRows, Weights
from tests.tiny import CONFIG, EIGHT, generate, mostly_slow, params, place, prompts, weights

GRAPH, _SHAPES = transformer.abstract(CONFIG)
SHAPES = Weights.full(_SHAPES)
ALWAYS = 10**9
"""Fixed rows of a machine on which the widest step costs as much as any."""
SETTINGS = {
    "sampling": SamplingParams(min_p=0.7, keep_top=44),
    "stop": StopRule(max_length=40, eos_ids=(3,)),
    "router_logprobs": True,
}
LIMITS = jnp.asarray(np.random.default_rng(0).integers(1, 41, 32), jnp.int32)


def decode(batch=None, *, seed=0, **changes):
    """Return 32 responses in groups of 4, each with its own limit."""
    keys = response_keys(jax.random.key(seed + 1), jnp.arange(32))
    given = SETTINGS | {"limits": LIMITS} | changes
    return jax.device_get(generate(GRAPH, weights(), batch or prompts(seed=seed), keys, **given))


def remembered(rollout, *, wrong, seed=0):
    """Return prompts with two earlier responses each: the first two of the group, some tokens of which are wrong."""
    random, T = np.random.default_rng(seed), rollout.tokens.shape[1]
    tokens, lengths = (x.reshape(8, 4, *x.shape[1:])[:, :2] for x in (rollout.tokens, rollout.mask.sum(axis=1)))
    noise = random.integers(4, 64, tokens.shape)
    tokens = np.where(random.random(tokens.shape) < wrong, noise, tokens)
    assert tokens.shape == (8, 2, T)
    earlier = TextRows(jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32))
    return dataclasses.replace(prompts(seed=seed), earlier=earlier)


def same(found, expected):
    """Assert equal tokens and experts, and log-probs equal to 1e-6 and two units in the last place.

    Products of more rows may sum in another order.
    """
    for name in ("tokens", "mask", "action_mask", "truncated"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    np.testing.assert_array_equal(found.routes.experts, expected.routes.experts)
    for a, b in (
        (found.logprobs, expected.logprobs),
        (found.behaviour_logprobs, expected.behaviour_logprobs),
        (found.routes.logprobs, expected.routes.logprobs),
        *(() if found.kept is None else ((found.kept.logprobs, expected.kept.logprobs),)),
    ):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=2.5e-7)
    if found.kept is not None:
        np.testing.assert_array_equal(found.kept.ids, expected.kept.ids)
        np.testing.assert_array_equal(found.kept.whole, expected.kept.whole)


CASES = [(8, 3), (16, 2), (5, 8)]


@pytest.mark.parametrize(("slots", "drafts"), mostly_slow(CASES, always=[(8, 3)]))
def test_drafts_change_no_response(slots, drafts):
    expected = decode(slots=slots)
    batch = remembered(expected.rollout, wrong=0.1)
    found = decode(batch, slots=slots, drafting=Drafting("history", drafts, ALWAYS))
    same(found.rollout, expected.rollout)
    assert not found.unfinished.any()
    stats, before = found.stats, expected.stats
    assert stats.decode_tokens == before.decode_tokens == stats.busy_steps + stats.accepted
    assert 0 < stats.accepted < stats.drafted and stats.steps <= before.steps
    kept = found.rollout.kept
    assert stats.kept == kept.whole.sum() and 0 < stats.kept < stats.sampled_tokens, "some sets have more than 44 ids"
    np.testing.assert_array_equal(found.rollout.logprobs[kept.whole], found.rollout.behaviour_logprobs[kept.whole])


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "cold": SamplingParams(temperature=0.2),
    "truncated": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
}


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "name"), [("own", "greedy"), ("group", "cold"), ("history", "truncated")])
def test_nor_under_other_distributions(name, drafter):
    settings = {"sampling": SAMPLINGS[name], "slots": 4}
    expected = decode(**settings)
    batch = remembered(expected.rollout, wrong=0.1) if drafter == "history" else None
    found = decode(batch, **settings, drafting=Drafting(drafter, 3, ALWAYS))
    same(found.rollout, expected.rollout)
    assert found.stats.drafted > 0 and (found.stats.accepted > 0 or drafter != "history")


@pytest.mark.slow
def test_nor_where_pages_are_few():
    """A draft takes no page: what is set aside, and when, may differ, but no token of what is sampled."""
    whole = decode(slots=8).rollout
    settings = {"slots": 8, "pool": Pool(8, 24), "min_ended": 0.75}
    found, unfinished, stats = decode(remembered(whole, wrong=0.1), **settings, drafting=Drafting("history", 3, ALWAYS))
    np.testing.assert_array_equal(found.tokens, np.where(found.mask, whole.tokens, 0))
    np.testing.assert_allclose(found.logprobs, np.where(found.mask, whole.logprobs, 0), atol=1e-6)
    known = (found.routes.experts >= 0).all(axis=(2, 3))
    np.testing.assert_array_equal(found.routes.experts[known], whole.routes.experts[known])
    ended = found.mask.sum(axis=1) == whole.mask.sum(axis=1)
    np.testing.assert_array_equal(unfinished, ~ended)
    assert ended.sum() >= 24 and stats.accepted > 0


@pytest.mark.slow
def test_nor_with_keys_and_values_in_int8():
    settings = {"slots": 4, "cache_dtype": "int8"}
    expected = decode(**settings).rollout
    found = decode(remembered(expected, wrong=0.1), **settings, drafting=Drafting("history", 3, ALWAYS))
    same(found.rollout, expected)
    assert found.stats.accepted > 0


@pytest.mark.slow
def test_nor_on_eight_devices():
    expected = decode(slots=16).rollout
    given = remembered(expected, wrong=0.1)
    mesh = mesh_lib.make_mesh(EIGHT)
    with jax.set_mesh(mesh):
        copy = make_reshard(SHAPES, mesh, jnp.float32)(Weights.full(place(params(), mesh)))
        batch, numbers, limits = hosts.shard_rows(mesh, (given, np.arange(32), np.asarray(LIMITS)))
        keys = response_keys(jax.random.key(1), numbers)
        options = SETTINGS | {"slots": 16, "limits": limits, "drafting": Drafting("history", 3, ALWAYS)}
        found = jax.device_get(generate(GRAPH, copy, batch, keys, **options))
    same(found.rollout, expected)
    assert found.stats.accepted.sum() > 0
    steps = found.stats.steps.reshape(-1, EIGHT["expert"])
    assert (steps == steps[:, :1]).all(), "shards of one expert group take the same number of steps"


@pytest.mark.slow
def test_wide_steps_are_taken_where_they_pay():
    """With right drafts and free rows every step is wide; with wrong ones, or rows that cost, few or none are."""
    expected = decode(slots=8)
    right, wrong = (remembered(expected.rollout, wrong=share) for share in (0.0, 1.0))
    free, dear = Drafting("history", 3, 200), Drafting("history", 3, 0)
    steps = {name: decode(batch, slots=8, drafting=free).stats for name, batch in (("right", right), ("wrong", wrong))}
    assert steps["right"].steps < 0.8 * expected.stats.steps
    assert steps["wrong"].drafted < 0.5 * steps["right"].drafted
    assert decode(right, slots=8, drafting=dear).stats.drafted == 0


@pytest.mark.slow
def test_two_thousand_random_cases():
    """Responses to random prompts by random weights, with random keys, limits and drafts: no token differs."""
    options = {"sampling": SamplingParams(temperature=0.5), "slots": 4, "router_logprobs": True}
    options["stop"] = StopRule(max_length=12, eos_ids=(3,))
    accepted = 0
    for case in range(125):  # of 16 responses to 8 prompts each
        random = np.random.default_rng(case)
        scale = random.uniform(0.3, 1.0)
        scaled = jax.tree.map(functools.partial(jnp.multiply, scale), weights())
        tokens, lengths = random.integers(4, 64, (8, 6)), random.integers(1, 7, 8)
        batch = Prompts(jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32))
        keys = response_keys(jax.random.key(case), jnp.arange(16))
        limits = jnp.asarray(random.integers(1, 13, 16), jnp.int32)
        expected = jax.device_get(generate(GRAPH, scaled, batch, keys, limits=limits, **options)).rollout
        drafts = np.where(random.random((8, 2, 12)) < 0.2, 5, expected.tokens.reshape(8, 2, 12))
        known = expected.mask.sum(axis=1).reshape(8, 2)
        earlier = TextRows(jnp.asarray(drafts, jnp.int32), jnp.asarray(known, jnp.int32))
        batch, drafting = dataclasses.replace(batch, earlier=earlier), Drafting("history", 3, ALWAYS)
        found = jax.device_get(generate(GRAPH, scaled, batch, keys, limits=limits, drafting=drafting, **options))
        same(found.rollout, expected)
        accepted += int(found.stats.accepted.sum())
    assert accepted > 2000


@pytest.mark.slow
def test_coming_back_to_the_host_changes_no_bit():
    expected = decode(slots=8).rollout
    batch, keys = remembered(expected, wrong=0.1), response_keys(jax.random.key(1), jnp.arange(32))
    prefilled = decoder.prefill(GRAPH, weights(), batch, keys, sampling=SETTINGS["sampling"], router_logprobs=True)
    options = {"sampling": SETTINGS["sampling"], "stop": SETTINGS["stop"], "slots": 8, "pool": Pool(40, 8)}
    options |= {"min_ended": 1.0, "drafting": Drafting("history", 3, ALWAYS)}
    inputs = weights(), prefilled, keys, LIMITS
    once = decoder.decode(GRAPH, *inputs, **options, prompt_length=batch.tokens.shape[1])
    pieces = PolledDecode(graph=GRAPH, **options, poll_steps=8)
    polls = []
    found = pieces(*inputs, prompt_length=batch.tokens.shape[1], poll=lambda: polls.append(1))
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((found, once)))
    assert len(polls) > 2
    same(jax.device_get(found.rollout), expected)


def test_widths_that_cannot_pay_are_not_compiled():
    assert Drafting("own", 3, 0).widths(8) == Drafting("own", 3, 8).widths(1000) == (1,)
    assert Drafting("own", 3, 200).widths(8) == (1, 4) and Drafting("own", 8, 200).widths(8) == (1, 4, 9)
    assert Drafting("own", 1).widths(4) == (1, 2) and Drafting("own", 3).widths(256) == (1,), "the defaults of a CPU"
