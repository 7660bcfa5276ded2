"""Layers with a state: packed rows score responses as rows of their own, and the decoder samples what is scored."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.config import base
from gspo_jax.errors import UserError
from gspo_jax.models import flops, transformer
from gspo_jax.models.config import periods
from gspo_jax.models.published import find
from gspo_jax.parallel import hosts
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.rows import shards
from gspo_jax.rollout import decoder
from gspo_jax.rollout.decoder import make_reshard, response_keys
from gspo_jax.rollout.drafting import NO_DRAFTS
from gspo_jax.rollout.pages import Pool, whole_pool
from gspo_jax.rollout.polled import PolledDecode
from gspo_jax.rollout.prefixes import Prefix, pack
from gspo_jax.rollout.sampling import SamplingParams, StopRule
from gspo_jax.setup import checks, memory
from gspo_jax.training.layout import Layout, deal
from gspo_jax.training.scoring import Scoring, score
from gspo_jax.types import Weights
from tests.alone import Alone
from tests.tiny import CONFIG, generate, packed, params, place, prompts, responses
from tests.tiny import weights as random_weights

HYBRID = dataclasses.replace(
    CONFIG,
    family="qwen3_next",
    shared_intermediate_size=12,
    partial_rotary_factor=0.5,
    zero_centred_norms=True,
    layer_types=("linear_attention", "full_attention"),
    linear_key_heads=2,
    linear_value_heads=4,
    linear_key_dim=8,
    linear_value_dim=6,
)
GRAPH, _SHAPES = transformer.abstract(HYBRID)
SHAPES = Weights.full(_SHAPES)
SETTINGS = {"sampling": SamplingParams(), "stop": StopRule(max_length=40, eos_ids=(3,)), "router_logprobs": True}
LIMITS = jnp.asarray(np.random.default_rng(0).integers(1, 41, 32), jnp.int32)
SCORING = Scoring(logprob_chunk=64)
DENSE = dataclasses.replace(HYBRID, num_experts=0, shared_intermediate_size=0)
"""Compiles in half the time."""


def weights() -> Weights:
    return random_weights(HYBRID)


def test_patterns_of_layers():
    assert periods("lllf" * 12) == [(("l", "l", "l", "f"), 12)]
    assert periods("aaab") == [(("a",), 3), (("b",), 1)]
    assert periods("xlflflf") == [(("x",), 1), (("l", "f"), 3)]
    assert periods("abc") == [(("a",), 1), (("b",), 1), (("c",), 1)]
    for kinds in ("llfl", "lflfl", "f", "dlllflllf"):
        assert "".join("".join(pattern) * times for pattern, times in periods(kinds)) == kinds


@pytest.fixture(scope="module")
def texts():
    """Return responses, four to each prompt, of 1 to 12 tokens."""
    return responses(P=4, G=4, T=12)


def test_packed_rows_equal_responses_alone(texts):
    """Log-probs and gradients: a prompt, computed once, starts all its responses."""
    packing = packed(texts, group_size=4)
    order, (graph, _) = packing.responses[0], transformer.abstract(DENSE)
    weight = jnp.asarray(np.random.default_rng(2).standard_normal(texts.tokens.shape) * texts.mask, jnp.float32)

    def loss(params, layout, weight):
        logprobs = score(graph, Weights.full(params), layout, SCORING).logprobs
        return (jnp.where(layout.responses.mask, logprobs, 0) * weight).sum()

    graded = jax.jit(jax.value_and_grad(loss))
    first = jax.tree.map(lambda x: x[0], (deal(texts, packing), packing))
    value, grads = graded(params(DENSE), Layout.of(*first, 0, 0), weight[order])
    expected, theirs = graded(params(DENSE), Alone(texts), weight)
    assert np.isclose(value, expected, rtol=1e-5)
    for mine, other in zip(jax.tree.leaves(grads), jax.tree.leaves(theirs), strict=True):
        assert np.linalg.norm(mine - other) <= 1e-5 * np.linalg.norm(other)


def decode(slots=None, **changes):
    """Return 32 responses of mixed lengths, each with its own limit."""
    keys = response_keys(jax.random.key(1), jnp.arange(32))
    return jax.device_get(
        generate(GRAPH, weights(), prompts(), keys, **SETTINGS | {"slots": slots, "limits": LIMITS} | changes)
    )


def resumed(slots):
    """Return responses, half of which were cut off, prefilled again as prefixes and continued."""
    cut = decode(slots, min_ended=0.4)
    left, found = cut.unfinished, cut.rollout
    assert 8 < left.sum() < 24
    prefix = Prefix(found.tokens, np.where(left, found.mask.sum(axis=1), 0))
    packed_prefix = pack(prompts(), prefix, shards=1, limit=40, with_ends=True)
    assert packed_prefix.ends.shape[1] > 1, "several prefixes in a row"
    again = decode(slots, prefix=packed_prefix, limits=jnp.where(left, LIMITS, 0))
    assert not again.unfinished.any()
    more = again.rollout
    rollout = jax.tree.map(lambda a, b: np.where(left.reshape(-1, *(1,) * (a.ndim - 1)), a, b), more, found)
    logprobs = np.where(found.mask & left[:, None], found.logprobs, rollout.logprobs)
    return dataclasses.replace(rollout, logprobs=logprobs)


@pytest.mark.slow
def test_the_trainer_scores_what_was_sampled():
    """States are refilled with responses, move as slots become fewer, and start from the ends of prefixes."""
    found = resumed(7)
    scored = jax.jit(lambda w, rollout: score(GRAPH, w, Alone(rollout), SCORING).logprobs)(weights(), found)
    np.testing.assert_allclose(found.logprobs[found.mask], np.asarray(scored)[found.mask], atol=1e-4)


@pytest.fixture(scope="module")
def whole():
    """Return the responses decoded with a slot each."""
    return decode().rollout


def same(found, expected):
    """Assert equal tokens and experts, and log-probs equal up to rounding."""
    for name in ("tokens", "mask", "truncated"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    np.testing.assert_array_equal(found.routes.experts, expected.routes.experts)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)


@pytest.mark.slow
def test_slots_and_pages_change_nothing(whole):
    same(decode(7, pool=Pool(8, 21)).rollout, whole)
    same(resumed(7), whole)


@pytest.mark.slow
def test_eight_devices_sample_the_same_and_coming_back_changes_no_bit(whole):
    """Polled every 8 steps, with states handed from program to program, every bit is as without."""
    mesh, slots = mesh_lib.make_mesh({"fsdp": 2, "expert": 2, "tensor": 2}), 16
    with jax.set_mesh(mesh):
        copy = make_reshard(SHAPES, mesh, jnp.float32)(Weights.full(place(params(HYBRID), mesh, HYBRID)))
        batch, numbers, limits = hosts.shard_rows(mesh, (prompts(), np.arange(32), np.asarray(LIMITS)))
        keys = response_keys(jax.random.key(1), numbers)
        lengths = np.minimum(np.arange(32) % 3, whole.mask.sum(axis=1) - 1)
        prefix = pack(jax.device_get(batch), Prefix(whole.tokens, lengths), shards=shards(), limit=40, with_ends=True)
        for given in (None, hosts.shard_rows(mesh, prefix)):
            options = {"sampling": SETTINGS["sampling"]}
            prefilled = decoder.prefill(GRAPH, copy, batch, keys, given, **options, router_logprobs=True)
            options |= {"stop": SETTINGS["stop"], "slots": slots, "min_ended": 1.0, "drafting": NO_DRAFTS}
            expected = decoder.decode(GRAPH, copy, prefilled, keys, limits, **options)
            np.testing.assert_array_equal(expected.rollout.tokens, whole.tokens)
            options["pool"] = whole_pool(slots // shards(), 40)
            pieces = PolledDecode(graph=GRAPH, **options, poll_steps=8)
            found = pieces(copy, prefilled, keys, limits, prompt_length=10, poll=lambda: None)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_array_equal(a, b)


def test_drafts_are_refused():
    config = base()
    config.sampling.draft = "own"
    with pytest.raises(UserError, match=r"cannot take back a wrong draft; use --config\.sampling\.draft=none"):
        checks.check_recurrent(config, HYBRID)
    checks.check_recurrent(config, CONFIG)


def test_what_states_take():
    """Qwen3.5-35B-A3B keeps 30 layers of 32 heads [128, 128] in float32 and 3 inputs of 8192 channels in bfloat16."""
    config, model = base(), find("Qwen3.5-35B-A3B")
    config.model.dtype = "bfloat16"
    assert memory.state_bytes(config, model, {"tensor": 1}) == 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert memory.state_bytes(config, model, {"tensor": 2}) * 2 == memory.state_bytes(config, model, {"tensor": 1})
    assert memory.token_bytes(config, model, {"tensor": 1}) == 10 * 2 * 2 * 256 * 2
    # Two operations for each of some 3 billion weights, and the delta rule.
    token = flops.forward(model, flops.Work(1, 1, 0)).forward
    assert 5.5e9 < token < 7.5e9
    pair = flops.forward(model, flops.Work(0, 0, 1)).forward
    assert pair == 10 * 4 * 16 * 256
