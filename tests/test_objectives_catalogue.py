"""The contract of every objective in the catalogue: one row of `ROWS` buys all of it.

The invariants are numbered as in the specification: 1 a float64 oracle, 2 any split, 3 ratio one, 4 padding, 5 kinship,
6 float32 before subtraction.
"""

import inspect
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspo_jax import objectives
from gspo_jax.objectives import catalogue
from tests import oracles

B, T = 8, 6


class Row(NamedTuple):
    """What the contract needs to know of an objective."""

    wide: dict[str, float]
    """Hyper-parameters that leave some ratios inside and some beyond."""
    defaults: dict[str, float]
    token_advantages: bool


ROWS = {
    "grpo": Row(wide={"low": 0.2, "high": 0.27}, defaults={"low": 0.2, "high": 0.2}, token_advantages=True),
    "gspo": Row(wide={"low": 0.1, "high": 0.15}, defaults={"low": 3e-4, "high": 4e-4}, token_advantages=False),
    "gspo_token": Row(wide={"low": 0.1, "high": 0.15}, defaults={"low": 3e-4, "high": 4e-4}, token_advantages=True),
}
NAMES = pytest.mark.parametrize("name", ROWS)


def test_every_objective_has_a_row():
    assert sorted(ROWS) == sorted(catalogue.__all__) == sorted(oracles.ORACLES)


@NAMES
def test_defaults_are_those_of_the_specification(name):
    parameters = inspect.signature(getattr(catalogue, name)).parameters
    assert {key: parameter.default for key, parameter in parameters.items()} == ROWS[name].defaults


# --- batches --------------------------------------------------------------------------------------


def masks(rng: np.random.Generator) -> np.ndarray:
    """[B, T]: full, empty, one token, ragged, and ragged with holes, in any order."""
    kinds = rng.permutation(["full", "empty", "one", "ragged", "ragged", "holes", "holes", "any"])
    mask = np.zeros((B, T), bool)
    for i, kind in enumerate(kinds):
        n = {"full": T, "empty": 0, "one": 1}.get(kind, int(rng.integers(2, T + 1)))
        mask[i, :n] = True
        if kind in ("holes", "any"):
            mask[i] &= rng.random(T) < 0.6
    return mask


def log_ratios(rng: np.random.Generator, mask: np.ndarray, hyper: dict[str, float]) -> np.ndarray:
    """[B, T]: row means inside the bounds, beyond them and far off, tokens scattered about the mean or all on it."""
    lower, upper = np.log1p(-hyper["low"]), np.log1p(hyper["high"])
    centres = rng.choice([0.0, lower / 2, upper / 2, lower * 1.7, upper * 1.7, -1.5, 1.5], size=B)
    noise = rng.normal(size=(B, T)) * rng.choice([0.0, 0.1, 0.5], size=(B, 1))
    noise -= (noise * mask).sum(axis=1, keepdims=True) / np.maximum(mask.sum(axis=1, keepdims=True), 1)
    return centres[:, None] + noise


def draw_batch(seed: int, name: str, hyper: dict[str, float], row_constant: bool = False) -> oracles.Batch:
    """A batch whose numbers float32 holds exactly, as float64, with 0 outside the mask."""
    rng = np.random.default_rng(seed)
    mask = masks(rng)
    columns = T if ROWS[name].token_advantages and not row_constant and rng.random() < 0.7 else 1
    advantages = rng.choice([-2.0, -0.5, 0.0, 0.7, 1.5], size=(B, columns)) * np.ones((B, T))
    old = -rng.exponential(size=(B, T))
    new = old + log_ratios(rng, mask, hyper)
    rounded = [np.where(mask, x.astype(np.float32).astype(np.float64), 0.0) for x in (new, old, advantages)]
    return oracles.Batch(rounded[0], rounded[1], mask, rounded[2])


def row_advantages(batch: oracles.Batch) -> np.ndarray:
    """[B], of a batch whose advantages are constant in a row."""
    return batch.advantages.sum(axis=1) / np.maximum(batch.mask.sum(axis=1), 1)


def given_advantages(objective: objectives.Objective, batch: oracles.Batch) -> np.ndarray:
    """[B, T] where the objective takes them, else [B]."""
    return batch.advantages if objective.token_advantages else row_advantages(batch)


def forward(objective, logprobs, old_logprobs, mask, advantages, weights=None):
    """((loss, info), gradient in the log-probs)."""

    def of(x):
        return objectives.loss(
            objective, x, old_logprobs=old_logprobs, mask=mask, advantages=advantages, weights=weights
        )

    return jax.value_and_grad(of, has_aux=True)(logprobs)


@cache
def compiled(name: str, **hyper: float):
    """`forward` of one objective, traced once for each type and shape."""
    objective = objectives.make(name, **hyper)
    return jax.jit(lambda *arrays, **more: forward(objective, *arrays, **more))


def run(objective: objectives.Objective, batch: oracles.Batch, dtype: type = np.float32):
    """`forward` of a whole batch, without jit."""
    arrays = (batch.logprobs, batch.old_logprobs, batch.mask, given_advantages(objective, batch))
    return forward(objective, *(jnp.asarray(x, bool if x.dtype == bool else dtype) for x in arrays))


# --- 1: the oracle --------------------------------------------------------------------------------


@NAMES
def test_the_oracle_agrees_with_itself(name):
    """Its gradient, worked out by hand, is the central difference of its value."""
    oracle, hyper = oracles.ORACLES[name], ROWS[name].wide
    for seed in range(3):
        batch = draw_batch(seed, name, hyper)
        want = oracles.central_differences(oracle, batch, **hyper)
        np.testing.assert_allclose(oracle.gradient(batch, **hyper), want, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-9), (np.float32, 1e-5)])
@pytest.mark.parametrize("bounds", ["wide", "defaults"])
@NAMES
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_value_and_gradient_equal_the_oracle(name, bounds, dtype, tolerance, seed):
    hyper = getattr(ROWS[name], bounds)
    oracle, batch = oracles.ORACLES[name], draw_batch(seed, name, hyper)
    ratio, gate = oracle.ratio_and_gate(batch, **hyper)
    # A ratio that rounding can carry over the bound has two right gradients; on the bound itself: the surrogates' test.
    assume(np.all(np.abs(ratio - (1 - hyper["low"])) > 2e-6) and np.all(np.abs(ratio - (1 + hyper["high"])) > 2e-6))
    with jax.enable_x64(dtype is np.float64):
        arrays = (batch.logprobs, batch.old_logprobs, batch.advantages)
        new, old, advantages = (jnp.asarray(x, dtype) for x in arrays)
        if not ROWS[name].token_advantages:
            advantages = jnp.asarray(row_advantages(batch), dtype)
        (loss, info), gradient = compiled(name, **hyper)(new, old, jnp.asarray(batch.mask), advantages)
        assert loss.dtype == gradient.dtype == info.ratio.dtype == dtype
        size = np.sum(oracles.sequence_mean(batch.mask) * np.abs(batch.advantages) * ratio)
        want = oracle.value(batch, batch.logprobs, batch.logprobs, **hyper)
        np.testing.assert_allclose(loss, want, rtol=tolerance, atol=tolerance * size)
        np.testing.assert_allclose(gradient, oracle.gradient(batch, **hyper), rtol=tolerance, atol=tolerance * 1e-3)
        np.testing.assert_allclose(info.ratio, ratio, rtol=tolerance)
        np.testing.assert_array_equal(info.gated_low, gate == -1)
        np.testing.assert_array_equal(info.gated_high, gate == 1)
        np.testing.assert_array_equal(info.gated, gate != 0)
        np.testing.assert_allclose(info.weights, oracles.sequence_mean(batch.mask), rtol=tolerance)
        np.testing.assert_allclose(info.advantages, batch.advantages, rtol=tolerance)


def test_the_batches_reach_every_corner():
    """What the strategy above promises: each sign of Â inside and beyond each bound, holes, empty rows, one token."""
    for name, row in ROWS.items():
        seen = set()
        for seed in range(20):
            batch = draw_batch(seed, name, row.wide)
            ratio, _ = oracles.ORACLES[name].ratio_and_gate(batch, **row.wide)
            side = np.where(ratio > 1 + row.wide["high"], 1, np.where(ratio < 1 - row.wide["low"], -1, 0))
            seen |= {
                (int(np.sign(a)), int(s)) for a, s in zip(batch.advantages[batch.mask], side[batch.mask], strict=True)
            }
            assert {0, 1, T} <= set(batch.mask.sum(axis=1))
        assert len(seen) == 9


# --- 2: any split ---------------------------------------------------------------------------------

CUTS = [[B], [4, 4], [2, 2, 2, 2], [3, 5], [1] * B]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@NAMES
def test_micro_batches_add_up(name, cuts):
    objective = objectives.make(name, **ROWS[name].wide)
    batch = draw_batch(1, name, ROWS[name].wide)
    (loss, info), gradient = run(objective, batch)
    arrays = (batch.logprobs, batch.old_logprobs, batch.mask, given_advantages(objective, batch))
    arrays = (*arrays, np.asarray(objective.weights(jnp.asarray(batch.mask))))
    total, gradients, sums, start = 0.0, [], None, 0
    for rows in cuts:
        part = [jnp.asarray(x[start : start + rows], bool if x.dtype == bool else np.float32) for x in arrays]
        (part_loss, part_info), part_gradient = forward(objective, *part)
        total, start = total + part_loss, start + rows
        gradients.append(part_gradient)
        part_sums = objectives.clip_sums(part_info, part[2])
        sums = part_sums if sums is None else jax.tree.map(jnp.add, sums, part_sums)
    np.testing.assert_allclose(total, loss, rtol=1e-6)
    np.testing.assert_allclose(np.concatenate(gradients), gradient, rtol=1e-6, atol=1e-9)
    whole = objectives.clip_fractions(objectives.clip_sums(info, jnp.asarray(batch.mask)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), objectives.clip_fractions(sums), whole)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@NAMES
def test_devices_add_up(name, devices):
    objective = objectives.make(name, **ROWS[name].wide)
    batch = draw_batch(1, name, ROWS[name].wide)
    want = run(objective, batch)
    rows = NamedSharding(Mesh(np.array(jax.devices()[:devices]), "data"), PartitionSpec("data"))
    arrays = (batch.logprobs, batch.old_logprobs, batch.mask, given_advantages(objective, batch))
    sharded = [jax.device_put(x if x.dtype == bool else x.astype(np.float32), rows) for x in arrays]
    got = compiled(name, **ROWS[name].wide)(*sharded)
    assert len(got[1].sharding.device_set) == devices
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), got, want)


# --- 3: ratio one ---------------------------------------------------------------------------------


@NAMES
def test_at_ratio_one_the_gradient_is_reinforce(name):
    objective = objectives.make(name)
    batch = draw_batch(2, name, ROWS[name].defaults)
    batch = batch._replace(logprobs=batch.old_logprobs)
    (loss, info), gradient = run(objective, batch)
    reinforce = -oracles.sequence_mean(batch.mask) * batch.advantages
    np.testing.assert_allclose(gradient, reinforce, rtol=1e-6)
    np.testing.assert_allclose(loss, reinforce.sum(), rtol=1e-5)
    np.testing.assert_array_equal(info.ratio, np.ones((B, T)))
    assert not info.gated.any()


@NAMES
def test_old_logprobs_and_advantages_are_constants(name):
    """On policy the caller may hand over the same array twice; a penalty in the advantages has no gradient either."""
    objective = objectives.make(name)
    batch = draw_batch(2, name, ROWS[name].defaults, row_constant=True)
    new, mask = jnp.asarray(batch.logprobs, jnp.float32), jnp.asarray(batch.mask)
    base = jnp.asarray(row_advantages(batch), jnp.float32)

    def of(x):
        penalty = 0.1 * jnp.sum(x, axis=1, where=mask)
        return objectives.loss(objective, x, old_logprobs=x, mask=mask, advantages=base - penalty)

    gradient, info = jax.grad(of, has_aux=True)(new)
    np.testing.assert_allclose(gradient, -info.weights * info.advantages, rtol=1e-6)


@NAMES
def test_info_carries_no_gradient(name):
    objective = objectives.make(name, **ROWS[name].wide)
    batch = draw_batch(3, name, ROWS[name].wide, row_constant=True)
    old, mask = jnp.asarray(batch.old_logprobs, jnp.float32), jnp.asarray(batch.mask)

    def of(x):
        advantages = jnp.sum(x, axis=1, where=mask)
        info = objectives.loss(objective, x, old_logprobs=old, mask=mask, advantages=advantages)[1]
        return jnp.sum(info.ratio) + jnp.sum(info.advantages) + jnp.sum(info.weights)

    np.testing.assert_array_equal(jax.grad(of)(jnp.asarray(batch.logprobs, jnp.float32)), np.zeros((B, T)))


# --- 4: padding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [np.nan, 1e30, -1e30, np.inf, -np.inf])
@NAMES
def test_padding_changes_nothing(name, poison):
    objective = objectives.make(name, **ROWS[name].wide)
    batch = draw_batch(4, name, ROWS[name].wide)
    weights = oracles.sequence_mean(batch.mask)
    clean = [batch.logprobs, batch.old_logprobs, given_advantages(objective, batch), weights]
    empty = ~batch.mask.any(axis=1)

    def poisoned(x):
        return np.where(empty, poison, x) if x.ndim == 1 else np.where(batch.mask, x, poison)

    def outcome(new, old, advantages, weights):
        arrays = [jnp.asarray(x, jnp.float32) for x in (new, old, advantages, weights)]
        return forward(objective, arrays[0], arrays[1], jnp.asarray(batch.mask), arrays[2], arrays[3])

    want = outcome(*clean)
    np.testing.assert_array_equal(want[1][~batch.mask], 0)
    assert np.all(np.isfinite(want[1])) and np.any(want[1])
    for poisons in ([0], [1], [2], [3], [0, 1, 2, 3]):
        got = outcome(*(poisoned(x) if i in poisons else x for i, x in enumerate(clean)))
        jax.tree.map(np.testing.assert_array_equal, got, want)


@NAMES
def test_a_batch_without_tokens_has_no_loss(name):
    batch = draw_batch(5, name, ROWS[name].wide)
    batch = batch._replace(mask=np.zeros((B, T), bool))
    (loss, info), gradient = run(objectives.make(name), batch)
    assert loss == 0
    np.testing.assert_array_equal(gradient, np.zeros((B, T)))
    fractions = objectives.clip_fractions(objectives.clip_sums(info, jnp.asarray(batch.mask)))
    assert all(value == 0 for value in fractions.values())


# --- 5: kinship -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", ["wide", "defaults"])
def test_gspo_token_is_gspo_where_advantages_are_constant_in_a_row(bounds):
    hyper = getattr(ROWS["gspo"], bounds)
    for seed in range(5):
        batch = draw_batch(seed, "gspo", hyper)
        whole, token = (run(make(**hyper), batch) for make in (objectives.gspo, objectives.gspo_token))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), whole, token)


def test_a_clipped_gspo_row_has_no_gradient_and_the_others_keep_theirs():
    mask = jnp.ones((4, 3), bool)
    old = jnp.full((4, 3), -1.0)
    # Row means +0.2 and -0.2, beyond the bounds; only where Â pushes further out is a row cut.
    new = old + jnp.array([[0.6, 0.0, 0.0], [0.6, 0.0, 0.0], [-0.6, 0.0, 0.0], [-0.6, 0.0, 0.0]])
    advantages = jnp.array([1.0, -1.0, 1.0, -1.0])
    (_, info), gradient = forward(objectives.gspo(), new, old, mask, advantages)
    np.testing.assert_array_equal(gradient[jnp.array([0, 3])], np.zeros((2, 3)))
    # 1/N_rows · 1/n · s = 1/12 · e^±0.2, along the row the same.
    np.testing.assert_allclose(gradient[1], np.full(3, np.exp(0.2) / 12), rtol=1e-6)
    np.testing.assert_allclose(gradient[2], np.full(3, -np.exp(-0.2) / 12), rtol=1e-6)
    np.testing.assert_array_equal(info.gated_high.all(axis=1), [True, False, False, False])
    np.testing.assert_array_equal(info.gated_low.all(axis=1), [False, False, False, True])


# --- 6: float32 before subtraction ----------------------------------------------------------------


@NAMES
def test_logprobs_are_widened_before_they_are_subtracted(name):
    # −8 − (−1/256) = −7.99609375 in float32; bf16 has a step of 1/32 there and would say −8. Row of one: s = r.
    new, old = jnp.full((1, 1), -8.0, jnp.bfloat16), jnp.full((1, 1), -1 / 256, jnp.bfloat16)
    mask = jnp.ones((1, 1), bool)
    (loss, info), gradient = forward(objectives.make(name), new, old, mask, jnp.ones(1, jnp.bfloat16))
    want = np.exp(-7.99609375)
    np.testing.assert_allclose(info.ratio, [[want]], rtol=1e-6)
    np.testing.assert_allclose(loss, -want, rtol=1e-6)
    assert loss.dtype == info.ratio.dtype == info.advantages.dtype == info.weights.dtype == jnp.float32
    assert gradient.dtype == jnp.bfloat16
