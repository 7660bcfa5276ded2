"""The contract of every objective in the catalogue; one row of `ROWS` buys the whole suite.

Invariants, as numbered in the specification: 1 a float64 oracle, 2 any split, 3 ratio one, 4 padding, 5 kinship, 6
float32 before subtraction.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspo_jax import objectives
from gspo_jax.errors import UserError
from gspo_jax.objectives import catalogue
from gspo_jax.objectives.advantages import group_centered, group_zscore, leave_one_out
from tests import oracles
from tests.oracles import Hyper
from tests.tiny import mostly_slow

B, T = 8, 6


class Row(NamedTuple):
    """The facts about an objective that the contract needs."""

    defaults: Hyper
    wide: Hyper
    """Hyper-parameters that put some ratios inside the bounds and some beyond."""
    more: tuple[Hyper, ...] = ()
    """Further settings for the oracle test: options, and bounds of 0, which a ratio of 1 meets exactly."""
    advantage: Callable[..., Any] | None = group_zscore
    token_advantages: bool = False
    level: str = "token"


WIDE, ON, DUAL = {"low": 0.2, "high": 0.27}, {"low": 0.0, "high": 0.0}, {"low": 0.2, "high": 0.27, "dual_clip": 2.0}
GSPO = Row(
    defaults={"low": 3e-4, "high": 4e-4, "dual_clip": None},
    wide={"low": 0.1, "high": 0.15},
    more=(ON, {"low": 0.1, "high": 0.15, "dual_clip": 1.5}),
    level="sequence",
)
CRITIC = {"gamma": 1.0, "lam": 1.0, "whiten": True, "value_clip": 0.2, "value_weight": 0.5}
ROWS = {
    "reinforce": Row(defaults={}, wide={}, advantage=leave_one_out, token_advantages=True),
    "rloo": Row(defaults={}, wide={}, advantage=leave_one_out),
    "ppo": Row(
        defaults={"low": 0.2, "high": 0.2, "dual_clip": None} | CRITIC,
        wide=WIDE,
        more=(ON, DUAL),
        advantage=None,
        token_advantages=True,
    ),
    "grpo": Row(
        defaults={"low": 0.2, "high": 0.2, "dual_clip": None}, wide=WIDE, more=(ON, DUAL), token_advantages=True
    ),
    "dr_grpo": Row(
        defaults={"low": 0.2, "high": 0.2, "dual_clip": None, "length": None},
        wide=WIDE | {"length": 10.0},
        more=(ON, DUAL),
        advantage=group_centered,
    ),
    "dapo": Row(
        defaults={"low": 0.2, "high": 0.28, "dual_clip": None}, wide=WIDE, more=(ON, DUAL), token_advantages=True
    ),
    "gspo": GSPO,
    "gspo_token": GSPO._replace(token_advantages=True),
    "cispo": Row(
        defaults={"low": 1.0, "high": 4.0, "mask": None},
        wide=WIDE,
        more=(ON, WIDE | {"mask": "ppo"}, ON | {"mask": "ppo"}),
        token_advantages=True,
    ),
    # 0.375 is a log-ratio that float32 batches hold exactly.
    "gmpo": Row(defaults={"log_clip": 0.4}, wide={"log_clip": 0.375}),
    "rspo": Row(
        defaults={"log_clip": 0.4, "gamma_min": 0.8, "apply": "before"},
        wide={"log_clip": 0.375, "gamma_min": 0.7},
        more=({"log_clip": 0.375, "gamma_min": 0.7, "apply": "after"},),
    ),
    "sapo": Row(
        defaults={"tau_pos": 1.0, "tau_neg": 1.05}, wide={"tau_pos": 3.0, "tau_neg": 6.0}, token_advantages=True
    ),
}
ROWS |= {
    "dppo_tv": Row(
        defaults={"low": 0.15, "high": 0.15, "cap": 20.0},
        wide={"low": 0.1, "high": 0.1, "cap": 1.5},
        more=(ON | {"cap": 20.0},),
    ),
    "dppo_kl": Row(
        defaults={"low": 0.05, "high": 0.05, "cap": 20.0},
        wide={"low": 0.02, "high": 0.02, "cap": 1.5},
        more=(ON | {"cap": 20.0},),
    ),
    "luspo": GSPO._replace(defaults={"low": 2e-3, "high": 2.5e-3, "dual_clip": None}),
    "minirl": Row(
        defaults={"low": 0.2, "high": 0.27},
        wide={"low": 0.1, "high": 0.15},
        more=(ON,),
        advantage=group_centered,
    ),
    "vespo": Row(
        defaults={"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
        wide={"k_pos": 1.0, "lambda_pos": 1.5, "k_neg": 2.0, "lambda_neg": 1.0},
        level="sequence",
    ),
    "dro": Row(defaults={"beta": 0.1}, wide={"beta": 0.5}, token_advantages=True),
    "tbpo": Row(
        defaults={"low": 3e-4, "high": 4e-4, "high_neg": 7e-4},
        wide={"low": 0.1, "high": 0.15, "high_neg": 0.3},
        more=(ON | {"high_neg": 0.3},),
        level="sequence",
    ),
    "minpro": Row(defaults={"low": 1.0, "high": 4.0}, wide=WIDE, more=(ON,), token_advantages=True),
}
OF_PROBABILITY = ("dppo_tv", "dppo_kl")
"""Objectives whose bounds are on the change of a probability, not on a ratio."""
NAMES = pytest.mark.parametrize("name", ROWS)
KINDS = pytest.mark.parametrize(
    "name", mostly_slow(ROWS, always=("rloo", "grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "rspo"))
)
"""One objective of each kind of weights and ratio; the others differ in their surrogate alone, and are slow."""


def settings_of(rows: Sequence[tuple[str, Hyper]], *, slow: Sequence[tuple[str, Hyper]] = ()) -> Any:
    """Parametrise a test over objectives and their settings; those in `slow` are marked slow."""
    ids = ["-".join([name, *(f"{key}={value}" for key, value in hyper.items())]) for name, hyper in (*rows, *slow)]
    return pytest.mark.parametrize("name, hyper", mostly_slow([*rows, *slow], always=rows), ids=ids)


KNOWN_SURROGATE = ("ppo", "dr_grpo", "dapo", "luspo")
"""Objectives with the surrogate of grpo or gspo, whose further settings are only tested against the oracle."""
OPTIONS = [
    (name, hyper) for name, row in ROWS.items() for hyper in (row.wide, *row.more * (name not in KNOWN_SURROGATE))
]
MORE = [(name, hyper) for name in KNOWN_SURROGATE for hyper in ROWS[name].more]
DEFAULTS = [(name, row.defaults) for name, row in ROWS.items() if row.defaults]


def test_every_objective_has_a_row():
    assert sorted(ROWS) == sorted(catalogue.__all__) == sorted(oracles.ORACLES)


@NAMES
def test_defaults_are_those_of_the_specification(name):
    parameters = inspect.signature(getattr(catalogue, name)).parameters
    assert {key: parameter.default for key, parameter in parameters.items()} == ROWS[name].defaults


@NAMES
def test_an_objective_says_what_it_is(name):
    row, objective = ROWS[name], objectives.make(name, **ROWS[name].wide)
    assert (objective.level, objective.token_advantages) == (row.level, row.token_advantages)
    assert objective.advantage is row.advantage and (objective.critic is None) == (row.advantage is not None)
    bounds = {key: row.wide[key] for key in ("low", "high", "high_neg", "log_clip") if key in row.wide}
    assert objective.bounds == ({} if name in OF_PROBABILITY else bounds)
    assert objective.router_shift == ("gamma_min" in row.defaults)
    assert hash(objective) is not None  # objectives may be static arguments


def test_only_ppo_has_a_critic():
    assert objectives.make("ppo").critic == objectives.CriticSettings(**CRITIC)
    given = {"gamma": 0.9, "lam": 0.5, "whiten": False, "value_clip": 0.1, "value_weight": 0.0}
    assert objectives.make("ppo", **given).critic == objectives.CriticSettings(**given)


# --- batches --------------------------------------------------------------------------------------


def masks(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Return masks [rows, T] in random order: full, empty, one token, ragged, and ragged with holes."""
    kinds = rng.permutation(["full", "empty", "one", "ragged", "ragged", "holes", "holes", "any"] * (rows // 8))
    mask = np.zeros((rows, T), bool)
    for i, kind in enumerate(kinds):
        n = {"full": T, "empty": 0, "one": 1}.get(kind, int(rng.integers(2, T + 1)))
        mask[i, :n] = True
        if kind in ("holes", "any"):
            mask[i] &= rng.random(T) < 0.6
    return mask


def centres(hyper: Hyper) -> list[float]:
    """Return log-ratios inside the bounds, beyond them and far off, and exactly on them where floats allow it."""
    lower, upper = -hyper.get("log_clip", 0.5), hyper.get("log_clip", 0.5)
    on = [lower, upper, 0.0] if "log_clip" in hyper else [0.0, 0.0]
    if "low" in hyper:
        lower = -1.5 if hyper["low"] == 1 else np.log1p(-hyper["low"])
        upper = np.log1p(hyper["high"])
    dual = [f * np.log(hyper["dual_clip"]) for f in (0.9, 1.2)] if hyper.get("dual_clip") else []
    band = [f * np.log1p(hyper["high_neg"]) for f in (0.5, 0.9, 1.2)] if "high_neg" in hyper else []
    return [*on, lower / 2, upper / 2, lower * 1.7, upper * 1.7, -1.5, 1.5, *dual, *band]


def draw_batch(seed: int, name: str, hyper: Hyper, row_constant: bool = False, rows: int = B) -> oracles.Batch:
    """Return a batch in float64 whose numbers float32 holds exactly.

    A row's log-ratios scatter about a centre that is their mean, or all equal it.
    """
    rng = np.random.default_rng(seed)
    mask = masks(rng, rows)
    columns = T if ROWS[name].token_advantages and not row_constant and rng.random() < 0.7 else 1
    advantages = rng.choice([-2.0, -0.5, 0.0, 0.7, 1.5], size=(rows, columns)) * np.ones((rows, T))
    old = -rng.integers(0, 256, size=(rows, T)) / 64
    noise = rng.normal(size=(rows, T)) * rng.choice([0.0, 0.1, 0.5], size=(rows, 1))
    noise -= (noise * mask).sum(axis=1, keepdims=True) / np.maximum(mask.sum(axis=1, keepdims=True), 1)
    centre = rng.choice(centres(hyper), size=(rows, 1))
    if hyper.get("low") == 0:  # rounding of the noise's mean could put a ratio of 1 on either side of the bound
        noise = np.where(centre == 0, 0.0, noise)
    new = old + centre + noise
    if name in OF_PROBABILITY:
        new = np.minimum(new, -1 / 64)
    shift = np.where(rng.random((rows, T)) < 0.3, 1.0, rng.uniform(0.5, 1.0, size=(rows, T)))
    new, old, advantages, shift = (x.astype(np.float32).astype(np.float64) for x in (new, old, advantages, shift))
    new, old, advantages = (np.where(mask, x, 0.0) for x in (new, old, advantages))
    return oracles.Batch(new, old, mask, advantages, np.where(mask, shift, 1.0))


def row_advantages(batch: oracles.Batch) -> np.ndarray:
    """Return advantages [B] of a batch whose advantages are constant in each row."""
    return batch.advantages.sum(axis=1) / np.maximum(batch.mask.sum(axis=1), 1)


def arguments(name: str, batch: oracles.Batch) -> dict[str, np.ndarray]:
    """Return `forward`'s arguments, float64 and bool: token advantages where allowed, router shift where needed."""
    advantages = batch.advantages if ROWS[name].token_advantages else row_advantages(batch)
    shift = {"router_shift": batch.router_shift} if "gamma_min" in ROWS[name].defaults else {}
    return {
        "logprobs": batch.logprobs,
        "old_logprobs": batch.old_logprobs,
        "mask": batch.mask,
        "advantages": advantages,
        **shift,
    }


def cast(arrays: dict[str, np.ndarray], dtype: Any = np.float32) -> dict[str, jax.Array]:
    return {key: jnp.asarray(x, bool if x.dtype == bool else dtype) for key, x in arrays.items()}


def forward(objective: objectives.Objective, logprobs: jax.Array, **rest: Any):
    """Return ((loss, info), gradient in the log-probs)."""
    return jax.value_and_grad(lambda x: objectives.loss(objective, x, **rest), has_aux=True)(logprobs)


@cache
def compiled(name: str, **hyper: Any):
    """Return `forward` of one objective, traced once per dtype and shape."""
    objective = objectives.make(name, **hyper)
    return jax.jit(lambda logprobs, **rest: forward(objective, logprobs, **rest))


def run(name: str, hyper: Hyper, batch: oracles.Batch):
    """Return `forward` of a whole batch in float32."""
    return compiled(name, **hyper)(**cast(arguments(name, batch)))


# --- 1: the oracle --------------------------------------------------------------------------------


SEEDS = [range(12), range(12, 40)]


@pytest.mark.parametrize("seeds", mostly_slow(SEEDS, always=SEEDS[:1]), ids=str)
@settings_of(OPTIONS, slow=[*MORE, *DEFAULTS])
def test_value_and_gradient_equal_the_oracle(name, hyper, seeds):
    """Draws close to a bound are left out: rounding may carry a ratio across. Exactly on it the answer is unique."""
    counted = 0
    for seed in seeds:
        batch = draw_batch(seed, name, hyper)
        want = oracles.judge(oracles.ORACLES[name], batch, hyper)
        if np.all((want.margin == 0) | (want.margin > 1e-5)):
            assert_equals_the_oracle(name, hyper, batch, want)
            counted += 1
    assert counted > len(seeds) / 4


def assert_equals_the_oracle(name: str, hyper: Hyper, batch: oracles.Batch, want: oracles.Verdict) -> None:
    """Assert that value, gradient and facts equal the oracle's in float64 and float32."""
    oracle = oracles.ORACLES[name]
    smooth = (want.margin > 0).all(axis=1)
    witness = oracles.central_differences(oracle, batch, hyper)
    np.testing.assert_allclose(want.gradient[smooth], witness[smooth], rtol=1e-7, atol=1e-9)
    for dtype, tolerance in ((np.float64, 1e-9), (np.float32, 1e-5)):
        with jax.enable_x64(dtype is np.float64):
            (loss, info), gradient = compiled(name, **hyper)(**cast(arguments(name, batch), dtype))
            assert loss.dtype == gradient.dtype == info.ratio.dtype == dtype
        size = np.sum(want.weights * np.abs(want.gain))
        np.testing.assert_allclose(loss, want.loss, rtol=tolerance, atol=tolerance * size)
        np.testing.assert_allclose(gradient, want.gradient, rtol=tolerance, atol=tolerance * 1e-3)
        np.testing.assert_allclose(info.ratio, want.ratio, rtol=tolerance)
        np.testing.assert_array_equal(info.gated_low, want.gate == -1)
        np.testing.assert_array_equal(info.gated_high, want.gate == 1)
        np.testing.assert_array_equal(info.gated, want.gate != 0)
        np.testing.assert_allclose(info.weights, want.weights, rtol=tolerance)
        np.testing.assert_allclose(info.advantages, batch.advantages, rtol=tolerance)


@settings_of(OPTIONS)
def test_the_batches_reach_every_corner(name, hyper):
    """The draws of the oracle test cover each sign of Â, both gates, ratios on bounds, and every kind of row."""
    signs, gates, lengths, on_bounds = set(), set(), set(), 0
    for seed in range(12):
        batch = draw_batch(seed, name, hyper)
        verdict = oracles.judge(oracles.ORACLES[name], batch, hyper)
        signs |= set(np.sign(batch.advantages[batch.mask]))
        gates |= set(verdict.gate[batch.mask])
        lengths |= set(batch.mask.sum(axis=1))
        on_bounds += np.sum(verdict.margin == 0)
        assert np.any(batch.mask[:, 1:] & ~batch.mask[:, :-1])  # some row has a hole
    assert signs == {-1, 0, 1} and {0, 1, T} <= lengths
    assert gates == ({-1, 0, 1} if hyper and name != "dro" else {0})
    assert on_bounds > 0 or not (hyper.get("low") == 0 or "log_clip" in hyper)


KEYS = ("low", "high", "high_neg", "dual_clip")
BOUNDED = [(name, key) for name, row in ROWS.items() for key in KEYS if key in row.defaults]
BOUNDED = [(name, key) for name, key in BOUNDED if name not in OF_PROBABILITY]
BOUNDED += [(name, key) for name in ("gmpo", "rspo") for key in ("log_clip below", "log_clip above")]


@pytest.mark.parametrize("dtype", mostly_slow([np.float32, np.float64], always=[np.float32]))
@pytest.mark.parametrize("name, bound", BOUNDED)
def test_a_ratio_on_the_bound_is_not_gated_and_one_step_further_it_is(name, bound, dtype):
    d = -0.25 if bound in ("low", "log_clip below") else 0.75 if bound == "dual_clip" else 0.25
    sign = 1.0 if bound in ("high", "log_clip above") else -1.0
    with jax.enable_x64(dtype is np.float64):
        new, old, mask = jnp.full((1, 1), d - 1, dtype), jnp.full((1, 1), -1, dtype), jnp.ones((1, 1), bool)
        ratio = np.asarray(jnp.exp(new - old))[0, 0]
        edge = dtype(abs(d)) if "log_clip" in bound else ratio
        for at, gated in ((edge, False), (np.nextafter(edge, dtype(0 if "log_clip" in bound else 1)), True)):
            # The differences are exact, so the offset gives the bound back bit by bit.
            value = 1 - float(at) if bound == "low" else float(at) - ("high" in bound)
            wide = {} if "log_clip" in bound else {"low": 1.0, "high": 9.0}
            objective = objectives.make(name, **wide | {bound.split()[0]: value})
            shift = {"router_shift": jnp.ones((1, 1))} if name == "rspo" else {}
            advantages = jnp.full(1, 2 * sign, dtype)
            (_, info), gradient = forward(objective, new, old_logprobs=old, mask=mask, advantages=advantages, **shift)
            assert bool(info.gated[0, 0]) is gated
            cut = gated and name not in ("cispo", "minpro")  # they cap the weight but pass the gradient
            np.testing.assert_allclose(gradient, [[0.0 if cut else -2 * sign * ratio]], rtol=1e-6)


# --- 2: any split ---------------------------------------------------------------------------------


@KINDS
def test_devices_and_micro_batches_add_up(name):
    """A sharded mini-batch adds up to the whole; each micro-batch takes rows from every device."""
    hyper = ROWS[name].wide
    objective, batch = objectives.make(name, **hyper), draw_batch(1, name, hyper, rows=32)
    arrays = cast(arguments(name, batch))
    (loss, info), gradient = compiled(name, **hyper)(**arrays)
    assert np.count_nonzero(gradient) > 30
    whole = objectives.clip_fractions(objectives.clip_sums(info, arrays["mask"]))

    def share(part):
        (loss, info), gradient = forward(objective, **part)
        return loss, objectives.clip_sums(info, part["mask"]), gradient

    @jax.jit
    def split(arrays):
        found, arrays = [], arrays | {"weights": objective.weights(arrays["mask"])}
        for count in (1, 4):
            micro = {key: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1) for key, x in arrays.items()}
            losses, sums, gradients = jax.vmap(share)(micro)
            sums = jax.tree.map(jnp.sum, sums)
            found.append((jnp.sum(losses), objectives.clip_fractions(sums), gradients.swapaxes(0, 1).reshape(-1, T)))
        return found

    rows = NamedSharding(Mesh(np.array(jax.devices()), "data"), PartitionSpec("data"))
    found = split(jax.device_put(arrays, rows))
    assert len(found[0][2].sharding.device_set) == 8
    for got_loss, got_fractions, got_gradient in found:
        np.testing.assert_allclose(got_loss, loss, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(got_gradient, gradient, rtol=1e-6, atol=1e-12)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got_fractions, whole)


@pytest.mark.slow
@NAMES
def test_uneven_micro_batches_add_up(name):
    """One of a single response, and one of all others."""
    hyper = ROWS[name].wide
    batch = draw_batch(1, name, hyper)
    (loss, _), gradient = run(name, hyper, batch)
    arrays = cast(arguments(name, batch))
    arrays["weights"] = objectives.make(name, **hyper).weights(arrays["mask"])
    cuts = [1, B - 1]
    ends = np.cumsum(cuts)
    parts = [
        compiled(name, **hyper)(**{key: x[end - n : end] for key, x in arrays.items()})
        for end, n in zip(ends, cuts, strict=True)
    ]
    np.testing.assert_allclose(sum(part[0][0] for part in parts), loss, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(np.concatenate([part[1] for part in parts]), gradient, rtol=1e-6, atol=1e-12)


# --- 3: ratio one ---------------------------------------------------------------------------------


def on_policy(batch: oracles.Batch) -> oracles.Batch:
    """Return the same batch with policy and router unmoved."""
    return batch._replace(logprobs=batch.old_logprobs, router_shift=np.ones_like(batch.router_shift))


@NAMES
def test_at_ratio_one_the_gradient_is_reinforce(name):
    hyper = ROWS[name].wide
    batch = on_policy(draw_batch(2, name, hyper))
    (_, info), gradient = run(name, hyper, batch)
    np.testing.assert_allclose(
        gradient, -oracles.ORACLES[name].weights(batch.mask, hyper) * batch.advantages, rtol=1e-6
    )
    np.testing.assert_array_equal(info.ratio, np.ones((B, T)))
    assert not info.gated.any() and np.any(gradient)


@NAMES
def test_all_but_the_logprobs_are_constants(name):
    """On policy, old log-probs, advantages and shift derived from the live log-probs get no gradient."""
    objective = objectives.make(name)
    batch = on_policy(draw_batch(2, name, ROWS[name].defaults, row_constant=True))
    arrays = cast(arguments(name, batch) | {"advantages": row_advantages(batch)})
    mask = arrays["mask"]

    def of(x):
        made = {"old_logprobs": x, "advantages": arrays["advantages"] - 0.1 * jnp.sum(x, axis=1, where=mask)}
        if objective.router_shift:
            made["router_shift"] = jnp.exp(x - jax.lax.stop_gradient(x))
        return objectives.loss(objective, **arrays | made | {"logprobs": x})

    gradient, info = jax.grad(of, has_aux=True)(arrays["logprobs"])
    np.testing.assert_allclose(gradient, -info.weights * info.advantages, rtol=1e-6)


@NAMES
def test_info_carries_no_gradient(name):
    objective = objectives.make(name, **ROWS[name].wide)
    batch = draw_batch(3, name, ROWS[name].wide, row_constant=True)
    arrays = cast(arguments(name, batch))

    def of(x):
        advantages = jnp.sum(x, axis=1, where=arrays["mask"])
        info = objectives.loss(objective, **arrays | {"logprobs": x, "advantages": advantages})[1]
        return jnp.sum(info.ratio) + jnp.sum(info.advantages) + jnp.sum(info.weights)

    np.testing.assert_array_equal(jax.grad(of)(arrays["logprobs"]), np.zeros((B, T)))


# --- 4: padding, overflow, emptiness --------------------------------------------------------------


@pytest.mark.parametrize("poison", [np.nan, 1e30, -1e30, np.inf, -np.inf])
@settings_of(OPTIONS)
def test_padding_changes_nothing(name, hyper, poison):
    batch = draw_batch(4, name, hyper)
    clean = arguments(name, batch) | {"weights": oracles.ORACLES[name].weights(batch.mask, hyper)}
    empty = ~batch.mask.any(axis=1)

    def poisoned(x):
        return np.where(empty, poison, x) if x.ndim == 1 else np.where(batch.mask, x, poison)

    want = compiled(name, **hyper)(**cast(clean))
    np.testing.assert_array_equal(want[1][~batch.mask], 0)
    assert np.all(np.isfinite(want[1])) and np.any(want[1])
    keys = [key for key in clean if key != "mask"]
    for spoilt in (*([key] for key in keys), keys):
        got = compiled(name, **hyper)(**cast({key: poisoned(x) if key in spoilt else x for key, x in clean.items()}))
        jax.tree.map(np.testing.assert_array_equal, got, want)


@NAMES
def test_a_batch_without_tokens_has_no_loss(name):
    batch = draw_batch(5, name, ROWS[name].wide)
    batch = batch._replace(mask=np.zeros((B, T), bool))
    (loss, info), gradient = run(name, ROWS[name].wide, batch)
    assert loss == 0
    np.testing.assert_array_equal(gradient, np.zeros((B, T)))
    fractions = objectives.clip_fractions(objectives.clip_sums(info, jnp.asarray(batch.mask)))
    assert all(value == 0 for value in fractions.values())


@settings_of(OPTIONS)
def test_an_overflowing_ratio_leaves_no_nan_where_its_gradient_is_bounded(name, hyper):
    """e^200 is inf in float32. At +200 the gradient is bounded for Â > 0 and 0 for Â = 0; at −200, for every Â.

    A penalty has its own, for Â = 0 too.
    """
    old, signs = np.full((B, T), -1.0), np.tile([[1.0], [0.0], [1.0], [-1.0]], (B // 4, T))
    new = old + np.tile([[200.0], [200.0], [-200.0], [-200.0]], (B // 4, T))
    batch = oracles.Batch(new, old, np.ones((B, T), bool), signs, np.ones((B, T)))
    (loss, info), gradient = run(name, hyper, batch)
    assert np.isfinite(loss) and np.all(np.isfinite(gradient))
    np.testing.assert_allclose(gradient[1::4], 200 * hyper.get("beta", 0) / batch.mask.size, rtol=1e-6)
    assert np.all(np.isposinf(info.ratio[:2])) or name in ("sapo", "vespo")


# --- 5: kinship -----------------------------------------------------------------------------------

KIN = [ROWS["gspo"].wide, *ROWS["gspo"].more, ROWS["gspo"].defaults]


@pytest.mark.parametrize("hyper", KIN, ids=str)
def test_gspo_token_is_gspo_where_advantages_are_constant_in_a_row(hyper):
    for seed in range(5):
        arrays = cast(arguments("gspo", draw_batch(seed, "gspo", hyper)))
        whole, token = (compiled(name, **hyper)(**arrays) for name in ("gspo", "gspo_token"))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), whole, token)


def test_a_clipped_gspo_row_has_no_gradient_and_the_others_keep_theirs():
    mask = jnp.ones((4, 3), bool)
    old = jnp.full((4, 3), -1.0)
    # Row means are +0.2 and -0.2, beyond the bounds; a row is cut only where Â pushes further out.
    new = old + jnp.array([[0.6, 0.0, 0.0], [0.6, 0.0, 0.0], [-0.6, 0.0, 0.0], [-0.6, 0.0, 0.0]])
    advantages = jnp.array([1.0, -1.0, 1.0, -1.0])
    (_, info), gradient = compiled("gspo")(new, old_logprobs=old, mask=mask, advantages=advantages)
    np.testing.assert_array_equal(gradient[jnp.array([0, 3])], np.zeros((2, 3)))
    # Every token of the row gets 1/N_rows · 1/n · s = 1/12 · e^±0.2.
    np.testing.assert_allclose(gradient[1], np.full(3, np.exp(0.2) / 12), rtol=1e-6)
    np.testing.assert_allclose(gradient[2], np.full(3, -np.exp(-0.2) / 12), rtol=1e-6)
    np.testing.assert_array_equal(info.gated_high.all(axis=1), [True, False, False, False])
    np.testing.assert_array_equal(info.gated_low.all(axis=1), [False, False, False, True])


# Log-ratios 0.9, 0.1, −0.7 in a row of three, mirrored for Â < 0.
THREE = {
    "old_logprobs": jnp.full((2, 3), -1.0),
    "logprobs": jnp.array([[-0.1, -0.9, -1.7], [-1.9, -1.1, -0.3]]),
    "mask": jnp.ones((2, 3), bool),
    "advantages": jnp.array([2.0, -2.0]),
}


def test_a_gated_token_of_gmpo_loses_only_its_own_term():
    # l = 0.4, 0.1, −0.7 with mean −1/15, mirrored +1/15; 1/(N_rows · n) = 1/6.
    (loss, info), gradient = compiled("gmpo")(**THREE)
    up, down = 2 * np.exp(-1 / 15) / 6, 2 * np.exp(1 / 15) / 6
    np.testing.assert_allclose(gradient, [[0, -up, -up], [0, down, down]], rtol=1e-6)
    np.testing.assert_allclose(loss, 3 * (down - up), rtol=1e-5)
    np.testing.assert_array_equal(info.gated_high, [[True, False, False], [False] * 3])
    np.testing.assert_array_equal(info.gated_low, [[False] * 3, [True, False, False]])


def test_rspo_damps_both_signs():
    # γ = 0.9, then 0.5 raised to γ_min = 0.8, then 1: gmpo's result times (0.9 · 0.8)^(1/3).
    shift = jnp.array([[0.9, 0.5, 1.0]] * 2)
    (loss, info), gradient = compiled("rspo", apply="after")(**THREE, router_shift=shift)
    (undamped_loss, undamped_info), undamped = compiled("gmpo")(**THREE)
    np.testing.assert_allclose(gradient, undamped * 0.72 ** (1 / 3), rtol=1e-6)
    np.testing.assert_allclose(loss, undamped_loss * 0.72 ** (1 / 3), rtol=1e-5)
    np.testing.assert_array_equal(info.ratio, undamped_info.ratio)


def test_rspo_before_the_clip_damps_no_token_that_is_cut():
    # Log-ratio 0.45 is above the bound of 0.4; γ = 0.9 or 0.8, applied before the clip, carries it below, γ = 1 does
    # not.
    batch = THREE | {"logprobs": jnp.full((2, 3), -0.55), "router_shift": jnp.array([[0.9, 0.8, 1.0]] * 2)}
    (_, after), gradient_after = compiled("rspo", apply="after")(**batch)
    (loss, before), gradient = compiled("rspo")(**batch)
    np.testing.assert_array_equal(after.gated_high, [[True] * 3, [False] * 3])
    np.testing.assert_array_equal(gradient_after[0], np.zeros(3))
    np.testing.assert_array_equal(before.gated_high, [[False, False, True], [False] * 3])
    up = 2 * np.exp((0.45 + np.log(0.9) + 0.45 + np.log(0.8) + 0.4) / 3) / 6
    down = 2 * np.exp(0.45 + np.log(0.72) / 3) / 6
    np.testing.assert_allclose(gradient, [[-up, -up, 0], [down] * 3], rtol=1e-6)
    np.testing.assert_allclose(loss, 3 * (down - up), rtol=1e-5)


def test_cispo_caps_the_weight_and_passes_the_gradient():
    one = {"old_logprobs": jnp.zeros((1, 2)), "mask": jnp.ones((1, 2), bool), "advantages": jnp.ones(1)}
    new = jnp.log(jnp.array([[8.0, 0.125]]))
    (_, info), gradient = compiled("cispo")(new, **one)
    np.testing.assert_allclose(gradient, [[-5 / 2, -0.125 / 2]], rtol=1e-6)  # capped at 1 + 4; a floor of 1 − 1 is none
    np.testing.assert_array_equal(info.gated, [[True, False]])
    (_, info), gradient = compiled("cispo", mask="ppo")(new, **one)
    np.testing.assert_allclose(gradient, [[0, -0.125 / 2]], rtol=1e-6)
    np.testing.assert_array_equal(info.gated, [[True, False]])


def test_sapo_at_ratio_one_and_far_out():
    one = {"old_logprobs": jnp.zeros((2, 2)), "mask": jnp.ones((2, 2), bool), "advantages": jnp.array([1.0, -1.0])}
    (loss, _), gradient = compiled("sapo", tau_pos=0.5, tau_neg=2.0)(jnp.zeros((2, 2)), **one)
    np.testing.assert_allclose(loss, -(2 / 0.5 - 2 / 2.0) / 2, rtol=1e-6)  # 2Â/τ, averaged over two rows
    np.testing.assert_allclose(gradient, [[-0.25] * 2, [0.25] * 2], rtol=1e-6)
    # Far above ratio 1 the sigmoid is 1 and the gain 4Â/τ; far below it is σ(−τ).
    far = jnp.array([[200.0, 200.0], [-200.0, -200.0]])
    (loss, info), gradient = compiled("sapo", tau_pos=0.5, tau_neg=2.0)(far, **one)
    np.testing.assert_allclose(loss, -(4 / 0.5 - 4 / 2.0 / (1 + np.exp(2.0))) / 2, rtol=1e-6)
    np.testing.assert_array_equal(gradient, np.zeros((2, 2)))
    np.testing.assert_array_equal(info.gated_high, [[True] * 2, [False] * 2])
    np.testing.assert_array_equal(info.gated_low, [[False] * 2, [True] * 2])


def one_token(p, q, advantage):
    """A token of probability p after q."""
    return {
        "logprobs": jnp.log(jnp.array([[p]])),
        "old_logprobs": jnp.log(jnp.array([[q]])),
        "mask": jnp.ones((1, 1), bool),
        "advantages": jnp.array([advantage]),
    }


@pytest.mark.parametrize(
    ("name", "p", "q", "advantage", "weight", "gated"),
    [
        # A rare token may rise fourteenfold, a likely one may not fall by a fifth; bounds 0.15 on the probability.
        ("dppo_tv", 0.14, 0.01, 1.0, 14.0, False),
        ("dppo_tv", 0.30, 0.01, 1.0, 0.0, True),
        ("dppo_tv", 0.30, 0.01, -1.0, 20.0, False),  # capped, and the other way
        ("dppo_tv", 0.70, 0.90, -1.0, 0.0, True),
        ("dppo_tv", 0.70, 0.90, 1.0, 7 / 9, False),
        # 0.5·log(0.5/0.3) + 0.5·log(0.5/0.7) = 0.0872; 0.5 to 0.4: 0.0204.
        ("dppo_kl", 0.30, 0.50, -1.0, 0.0, True),
        ("dppo_kl", 0.30, 0.50, 1.0, 0.6, False),
        ("dppo_kl", 0.40, 0.50, -1.0, 0.8, False),
        ("dppo_kl", 0.70, 0.50, 1.0, 0.0, True),
        ("minirl", 0.26, 0.20, 1.0, 0.0, True),
        ("minirl", 0.25, 0.20, 1.0, 1.25, False),
        ("minirl", 0.30, 0.20, -1.0, 1.5, False),
        ("minirl", 0.10, 0.20, -1.0, 0.0, True),
        # 2²·e^(3·(1 − 2)) = 0.199; 2³·e^(2·(1 − 2)) = 1.083; 0.5²·e^(1.5) = 1.12; 0.5³·e = 0.340.
        ("vespo", 0.40, 0.20, 1.0, 4 * np.exp(-3), True),
        ("vespo", 0.40, 0.20, -1.0, 8 * np.exp(-2), False),
        ("vespo", 0.10, 0.20, 1.0, 0.25 * np.exp(1.5), False),
        ("vespo", 0.10, 0.20, -1.0, 0.125 * np.exp(1.0), True),
    ],
)
def test_weights_of_one_token_worked_by_hand(name, p, q, advantage, weight, gated):
    arguments = one_token(p, q, advantage)
    (_, info), gradient = compiled(name)(**arguments)
    np.testing.assert_allclose(gradient, [[-advantage * weight]], rtol=1e-5)
    assert bool(info.gated[0, 0]) is gated


@pytest.mark.parametrize(("name", "low"), [("dppo_tv", 0.0), ("dppo_tv", 1e-3), ("dppo_kl", 1e-3)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_smallest_change_of_a_probability_keeps_its_sign(name, low, sign):
    """With bounds of 0 any change in the direction of Â is gated; exp(new) − exp(old) would often round to 0."""
    old = jnp.full((1, 1), -2e-6, jnp.float32)
    new = jnp.nextafter(old, jnp.full((1, 1), 0.0 if sign > 0 else -1.0, jnp.float32))
    of = compiled(name, low=low, high=low, cap=20.0)
    for advantage, gated in ((sign, low == 0), (-sign, False)):  # the other way there is no bound
        (_, info), _ = of(new, old_logprobs=old, mask=jnp.ones((1, 1), bool), advantages=jnp.array([advantage]))
        assert bool(info.gated[0, 0]) is gated


def test_vespo_weighs_whole_responses_by_the_product_of_their_ratios():
    new = jnp.log(jnp.array([[0.4, 0.2, 0.25], [0.2, 0.1, 0.3]]))
    old = jnp.log(jnp.array([[0.2, 0.2, 0.5], [0.2, 0.2, 0.3]]))
    one = {"old_logprobs": old, "mask": jnp.ones((2, 3), bool), "advantages": jnp.array([1.0, -2.0])}
    (_, info), gradient = compiled("vespo")(new, **one)
    np.testing.assert_allclose(info.ratio, [[1.0] * 3, [0.5] * 3], rtol=1e-6)
    np.testing.assert_allclose(gradient, [[-1 / 6] * 3, [2 * 0.125 * np.exp(1.0) / 6] * 3], rtol=1e-5)
    np.testing.assert_array_equal(info.gated_low, [[False] * 3, [True] * 3])
    far = jnp.array([[-300.0] * 3, [-1e-3] * 3])
    (_, info), gradient = compiled("vespo")(far, **one | {"old_logprobs": jnp.full((2, 3), -30.0)})
    np.testing.assert_allclose(info.ratio[:, 0], [1e-8, np.exp(20)], rtol=1e-5)
    np.testing.assert_allclose(gradient, np.zeros((2, 3)), atol=1e-12)
    # Of +30 and −25 nats 20 count each way, and the others make up for them.
    opposed = jnp.array([[-1.0, -51.0, -31.0], [-56.0, -1.0, -41.0]])
    (_, info), _ = compiled("vespo")(opposed, **one | {"old_logprobs": jnp.full((2, 3), -31.0)})
    np.testing.assert_allclose(info.ratio[:, 0], [1.0, np.exp(-10)], rtol=1e-5)


def test_luspo_is_gspo_with_rows_weighed_by_their_length():
    batch = draw_batch(3, "luspo", ROWS["luspo"].wide)
    arrays = cast(arguments("luspo", batch))
    of_gspo, of_luspo = (compiled(name, **ROWS[name].wide)(**arrays)[1] for name in ("gspo", "luspo"))
    np.testing.assert_allclose(of_luspo, of_gspo * batch.mask.sum(axis=1, keepdims=True), rtol=1e-6, atol=1e-9)


def test_dro_pulls_the_ratio_to_the_exponential_of_advantage_over_beta():
    """By hand: the gradient is −(Â − β·d)/2 for each of two tokens, and with Â = 0 the penalty alone."""
    one = {"old_logprobs": jnp.array([[-1.0], [-1.0]]), "mask": jnp.ones((2, 1), bool)}
    new = jnp.array([[-0.5], [-1.25]])
    of = compiled("dro", beta=2.0)
    (loss, info), gradient = of(new, **one, advantages=jnp.array([1.0, 0.0]))
    np.testing.assert_allclose(gradient, [[0.0], [2 * -0.25 / 2]], atol=1e-7)  # d = 0.5 = Â/β, and −0.25
    np.testing.assert_allclose(loss, -((-0.5 - 0.25) + (0 - 0.0625)) / 2, rtol=1e-6)
    np.testing.assert_allclose(info.ratio, np.exp([[0.5], [-0.25]]), rtol=1e-6)
    assert not info.gated.any()


def test_tbpo_bounds_responses_with_a_negative_advantage_on_both_sides():
    """As gspo where Â > 0 and below ratio 1; above it, a response to unlearn that has become likelier is dropped."""
    old, mask = jnp.full((4, 2), -1.0), jnp.ones((4, 2), bool)
    new = old + jnp.array([[0.04, 0.0], [0.08, 0.0], [-0.04, 0.0], [0.04, 0.0]])
    hyper = {"low": 0.01, "high": 0.01, "high_neg": 0.03}
    arrays = {"old_logprobs": old, "mask": mask, "advantages": jnp.array([-1.0, -1.0, -1.0, 1.0])}
    (_, info), gradient = compiled("tbpo", **hyper)(new, **arrays)
    # Row means 0.02, 0.04, −0.02, 0.02: the second passes 1.03, the third falls below 0.99, the last passes 1.01.
    np.testing.assert_allclose(gradient, [[np.exp(0.02) / 8] * 2, [0, 0], [0, 0], [0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(info.gated_high[:, 0], [False, True, False, True])
    np.testing.assert_array_equal(info.gated_low[:, 0], [False, False, True, False])
    (_, _), of_gspo = compiled("gspo", low=0.01, high=0.01)(new, **arrays)
    np.testing.assert_allclose(of_gspo[1], [np.exp(0.04) / 8] * 2, rtol=1e-6)  # what gspo would learn from


def test_minpro_weighs_a_token_by_the_smallest_ratio_before_it():
    # Ratios 2, 0.5, (a reply), 4, 1 after a first token that nothing precedes.
    ratios, mask = jnp.array([[2.0, 0.5, 1e-6, 4.0, 1.0]]), jnp.array([[True, True, False, True, True]])
    given = {"old_logprobs": jnp.full((1, 5), -9.0), "mask": mask, "advantages": jnp.ones(1)}
    (_, info), gradient = compiled("minpro")(jnp.log(ratios) - 9, **given)
    np.testing.assert_allclose(info.ratio, [[2.0, 2 * 0.5, 1.0, 0.5 * 4, 0.5 * 1]], rtol=1e-5)
    np.testing.assert_allclose(gradient, np.array([[-2.0, -1.0, 0, -2.0, -0.5]]) / 4, rtol=1e-5)
    # A prefix that only became likelier counts too: it is the smallest ratio, not one of at most 1.
    given = {"old_logprobs": jnp.zeros((1, 3)), "mask": jnp.ones((1, 3), bool), "advantages": jnp.ones(1)}
    (_, info), _ = compiled("minpro")(jnp.log(jnp.array([[3.0, 2.0, 0.5]])), **given)
    np.testing.assert_allclose(info.ratio, [[3.0, 6.0, 1.0]], rtol=1e-5)
    np.testing.assert_array_equal(info.gated_high, [[False, True, False]])


# --- the off-policy sequence mask -----------------------------------------------------------------


@NAMES
def test_the_off_policy_mask_removes_negative_tokens_of_responses_that_moved_too_far(name):
    """By hand from the gain that is left: δ = 0.1, the mean of log μ − log π_θ over a row's tokens."""
    hyper = ROWS[name].wide
    batch = draw_batch(7, name, hyper, rows=32)
    moved = np.random.default_rng(7).normal(0.1, 0.3, size=batch.mask.shape)
    sampler = np.where(batch.mask, batch.logprobs + moved, np.nan)
    arrays = cast(arguments(name, batch) | {"sampler_logprobs": sampler})
    plain = objectives.make(name, **hyper)
    objective = dataclasses.replace(plain, negative_mask=0.1)
    (loss, info), gradient = jax.jit(lambda logprobs, **rest: forward(objective, logprobs, **rest))(**arrays)
    means = [np.mean(row[mask]) if mask.any() else 0.0 for row, mask in zip(moved, batch.mask, strict=True)]
    gone = (np.array(means) > 0.1)[:, None] & (batch.advantages < 0) & batch.mask
    assert gone.any() and (batch.mask & ~gone & (batch.advantages < 0)).any()
    np.testing.assert_array_equal(info.masked, gone)
    del arrays["sampler_logprobs"]
    left = arrays | {"weights": jnp.where(gone, 0.0, plain.weights(arrays["mask"]))}
    (want, _), want_gradient = forward(plain, **left)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(gradient, want_gradient, rtol=1e-6, atol=1e-9)


def test_the_off_policy_mask_is_a_constant_and_strict():
    """At the bound a row counts; the gradient through the comparison is none."""
    one = {
        "logprobs": jnp.array([[-1.25], [-1.25]]),
        "old_logprobs": jnp.array([[-1.0], [-1.0]]),
        "sampler_logprobs": jnp.array([[-1.0], [-0.75]]),
        "mask": jnp.ones((2, 1), bool),
        "advantages": jnp.array([-1.0, -1.0]),
    }
    objective = dataclasses.replace(objectives.grpo(), negative_mask=0.25)
    (_, info), gradient = forward(objective, **one)
    np.testing.assert_array_equal(info.masked, [[False], [True]])
    assert gradient[1, 0] == 0


def test_the_off_policy_mask_needs_the_samplers_log_probs():
    one = {"old_logprobs": jnp.zeros((1, 1)), "mask": jnp.ones((1, 1), bool), "advantages": jnp.ones(1)}
    masked = dataclasses.replace(objectives.grpo(), negative_mask=0.1)
    with pytest.raises(UserError, match=r"compares with the sampler's policy; pass sampler_logprobs"):
        objectives.loss(masked, jnp.zeros((1, 1)), **one)
    with pytest.raises(ValueError, match="grpo has no negative_mask"):
        objectives.loss(objectives.grpo(), jnp.zeros((1, 1)), sampler_logprobs=jnp.zeros((1, 1)), **one)
    with pytest.raises(ValueError, match="the shapes are"):
        objectives.loss(masked, jnp.zeros((1, 1)), sampler_logprobs=jnp.zeros((1, 2)), **one)


def test_rloo_adds_up_the_logprobs_of_a_response():
    logprobs = jnp.log(jnp.array([[0.5, 0.25, 0.5], [0.1, 0.2, 0.3]]))
    mask = jnp.array([[True, True, True], [True, True, False]])
    loss, info = objectives.loss(
        objectives.rloo(), logprobs, old_logprobs=logprobs, mask=mask, advantages=jnp.array([1.0, -3.0])
    )
    np.testing.assert_allclose(loss, -(np.log(1 / 16) - 3 * np.log(0.02)) / 2, rtol=1e-6)
    np.testing.assert_array_equal(info.weights, [[0.5] * 3, [0.5, 0.5, 0]])


def test_a_dual_clip_bounds_what_a_bad_token_can_cost():
    one = {"old_logprobs": jnp.zeros((2, 1)), "mask": jnp.ones((2, 1), bool), "advantages": jnp.array([-1.0, 1.0])}
    new = jnp.full((2, 1), np.log(8.0))
    (loss, info), gradient = compiled("grpo")(new, **one)
    np.testing.assert_allclose([loss, *gradient[:, 0]], [(8 - 1.2) / 2, 4, 0], rtol=1e-6)
    (loss, info), gradient = compiled("grpo", dual_clip=3.0)(new, **one)
    np.testing.assert_allclose([loss, *gradient[:, 0]], [(3 - 1.2) / 2, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(info.gated_high, [[True], [True]])


# --- 6: float32 before subtraction ----------------------------------------------------------------


def test_logprobs_are_float32_before_they_are_subtracted():
    # −8 − (−1/256) = −7.99609375 in float32; bf16 has a step of 1/32 there and would give −8. In a row of one token, s
    # = r.
    new, old = jnp.full((1, 1), -8.0, jnp.bfloat16), jnp.full((1, 1), -1 / 256, jnp.bfloat16)
    for name in ("grpo", "gspo", "gspo_token"):
        (loss, info), _ = forward(
            objectives.make(name), new, old_logprobs=old, mask=jnp.ones((1, 1), bool), advantages=jnp.ones(1)
        )
        np.testing.assert_allclose([loss, info.ratio[0, 0]], [-np.exp(-7.99609375), np.exp(-7.99609375)], rtol=1e-6)


@KINDS
def test_bf16_in_is_the_same_as_its_numbers_in_float32(name):
    arrays = cast(arguments(name, draw_batch(6, name, ROWS[name].wide)), jnp.bfloat16)
    wide = {key: x if x.dtype == bool else x.astype(jnp.float32) for key, x in arrays.items()}
    of = compiled(name, **ROWS[name].wide)
    (loss, info), gradient = of(**arrays)
    (want_loss, want_info), want_gradient = of(**wide)
    assert loss.dtype == info.ratio.dtype == info.advantages.dtype == info.weights.dtype == jnp.float32
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), (loss, info), (want_loss, want_info))
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(gradient.astype(jnp.float32), want_gradient, rtol=2**-8)
