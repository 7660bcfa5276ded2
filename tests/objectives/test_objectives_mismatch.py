"""Corrections of the sampler-trainer mismatch: each one applied to the same ratios, worked by hand."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.errors import UserError
from gspo_jax.objectives import mismatch
from gspo_jax.objectives.mismatch import icepop, make_correction, sequence_mask, sequence_tis, tis

# Ratios ρ by row; row 1 has a hole, row 2 no token, row 3 agrees.
RHO = np.array([[1.5, 3.0, 0.25], [0.9, 9.0, 1.1], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
MASK = np.array([[1, 1, 1], [1, 0, 1], [0, 0, 0], [1, 1, 0]], bool)
SAMPLER = np.full((4, 3), -1.0)
OLD = SAMPLER + np.log(RHO)
NAMES = pytest.mark.parametrize("name", mismatch.__all__)


def factor(correction, old=OLD, sampler=SAMPLER, mask=MASK, dtype=jnp.float32):
    return correction(jnp.asarray(old, dtype), jnp.asarray(sampler, dtype), jnp.asarray(mask))


def test_tis_caps():
    np.testing.assert_allclose(factor(tis()), [[1.5, 2, 0.25], [0.9, 0, 1.1], [0, 0, 0], [1, 1, 0]], rtol=1e-6)
    np.testing.assert_allclose(factor(tis(cap=1.0))[0], [1, 1, 0.25], rtol=1e-6)
    np.testing.assert_array_equal(factor(tis(), old=SAMPLER + 200.0)[0], [2, 2, 2])


def test_icepop_drops_both_ends():
    np.testing.assert_allclose(factor(icepop()), [[1.5, 3, 0], [0.9, 0, 1.1], [0, 0, 0], [1, 1, 0]], rtol=1e-6)
    np.testing.assert_allclose(factor(icepop(low=0.2, high=2.0))[0], [1.5, 0, 0.25], rtol=1e-6)
    np.testing.assert_array_equal(factor(icepop(), old=SAMPLER + 200.0), np.zeros((4, 3)))


def test_sequence_mask_drops_rows():
    # Geometric means: (1.5 · 3 · 0.25)^(1/3) = 1.040, (0.9 · 1.1)^(1/2) = 0.99499, none, 1.
    np.testing.assert_array_equal(factor(sequence_mask()), [[0, 0, 0], [1, 0, 1], [0, 0, 0], [1, 1, 0]])
    np.testing.assert_array_equal(factor(sequence_mask(high=1.05)), [[1, 1, 1], [1, 0, 1], [0, 0, 0], [1, 1, 0]])
    np.testing.assert_array_equal(factor(sequence_mask(low=0.995)), [[0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 0]])


def test_sequence_tis_caps_the_geometric_mean():
    high = (1.5 * 3 * 0.25) ** (1 / 3)
    low = (0.9 * 1.1) ** 0.5
    want = np.array([[high] * 3, [low, 0, low], [0, 0, 0], [1, 1, 0]])
    np.testing.assert_allclose(factor(sequence_tis()), want, rtol=1e-6)
    np.testing.assert_allclose(factor(sequence_tis(cap=1.0))[0], np.ones(3), rtol=1e-6)
    np.testing.assert_array_equal(factor(sequence_tis(), old=SAMPLER + 200.0)[0], [2, 2, 2])


def test_no_limit_below_is_allowed():
    np.testing.assert_allclose(factor(icepop(low=0.0))[0], [1.5, 3, 0.25], rtol=1e-6)
    np.testing.assert_array_equal(factor(sequence_mask(low=0.0), old=SAMPLER - 9.0), MASK)


def test_a_ratio_on_the_limit_is_credible():
    agreed = np.full((4, 3), -1.0)
    for correction in (icepop(low=1.0, high=1.0), sequence_mask(low=1.0, high=1.0)):
        np.testing.assert_array_equal(factor(correction, old=agreed), MASK)


@NAMES
def test_the_defaults_are_those_of_the_specification(name):
    defaults = {"tis": {"cap": 2.0}, "sequence_tis": {"cap": 2.0}}
    defaults |= {"icepop": {"low": 0.5, "high": 5.0}, "sequence_mask": {"low": 0.99, "high": 1.01}}
    parameters = inspect.signature(getattr(mismatch, name)).parameters
    assert {key: p.default for key, p in parameters.items()} == defaults[name]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
    want = factor(getattr(mismatch, name)(**defaults[name]))
    np.testing.assert_array_equal(factor(make_correction(name)), want)


@NAMES
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30, -1e30])
def test_padding_changes_nothing(name, poison):
    want = factor(make_correction(name))
    for old, sampler in ((np.where(MASK, OLD, poison), SAMPLER), (OLD, np.where(MASK, SAMPLER, poison))):
        np.testing.assert_array_equal(factor(make_correction(name), old=old, sampler=sampler), want)


@NAMES
def test_the_factor_is_a_constant(name):
    mask = jnp.asarray(MASK)

    def of(old, sampler):
        return make_correction(name)(old, sampler, mask).sum()

    for gradient in jax.grad(of, argnums=(0, 1))(jnp.asarray(OLD, jnp.float32), jnp.asarray(SAMPLER, jnp.float32)):
        np.testing.assert_array_equal(gradient, np.zeros((4, 3)))


@NAMES
def test_the_factor_is_at_least_float32(name):
    # In bf16, −8 + 1/256 is −8, which would make ρ 1 − 0.0039 instead of 1.
    old, sampler = np.full((1, 1), -8.0), np.full((1, 1), -8.0)
    got = factor(make_correction(name), old, sampler, np.ones((1, 1), bool), jnp.bfloat16)
    assert got.dtype == jnp.float32
    old, sampler = np.full((1, 1), -1 / 256), np.full((1, 1), -8.0)
    got = factor(tis(cap=1e9), old, sampler, np.ones((1, 1), bool), jnp.bfloat16)
    np.testing.assert_allclose(got, [[np.exp(8 - 1 / 256)]], rtol=1e-6)
    with jax.enable_x64(True):
        assert factor(make_correction(name), dtype=jnp.float64).dtype == jnp.float64


@pytest.mark.parametrize(
    ("name", "hyper", "says"),
    [
        ("tsi", {}, "no mismatch correction 'tsi'; did you mean 'tis'. there are icepop, sequence_mask, sequence_tis"),
        ("tis", {"low": 1.0}, "tis has no hyper-parameter 'low'; there are cap"),
        ("tis", {"cap": 0.0}, "cap=0.0 is not a positive number; it is the largest weight of a token, usually 2"),
        ("sequence_tis", {"cap": -1.0}, "cap=-1.0 is not a positive number; it is the largest weight of a response"),
        ("icepop", {"low": 1.1}, "low=1.1 and high=5.0 do not enclose the ratio 1, where sampler and trainer agree"),
        ("icepop", {"high": 0.9}, "low=0.5 and high=0.9 do not enclose the ratio 1"),
        ("sequence_mask", {"low": -0.1}, "low=-0.1 and high=1.01 do not enclose the ratio 1"),
    ],
)
def test_what_a_config_can_get_wrong(name, hyper, says):
    with pytest.raises(UserError, match=says):
        make_correction(name, **hyper)


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"old_logprobs \[4, 3\], sampler_logprobs \[4, 1\], mask \[4, 3\]; all must"):
        factor(tis(), sampler=SAMPLER[:, :1])


def test_factories_beside_the_module_are_built_likewise():
    np.testing.assert_array_equal(factor(make_correction("mine", {"mine": tis}, cap=1.5)), factor(tis(cap=1.5)))
    with pytest.raises(
        UserError, match=r"mine returns 3; return a function of \(old_logprobs, sampler_logprobs, mask\)"
    ):
        make_correction("mine", {"mine": lambda: 3})
