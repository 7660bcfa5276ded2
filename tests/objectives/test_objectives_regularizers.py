"""The KL to a reference and the critic's loss: by hand, against loops and differences, and with any padding."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_jax.errors import UserError
from gspo_jax.objectives import regularizers
from tests import oracles

kl = jax.jit(regularizers.kl, static_argnames="estimator")
value_loss = jax.jit(regularizers.value_loss, static_argnames="clip")
MASK = np.array([[1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]], bool)
ESTIMATORS = pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
POISON = pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30, -1e30])


def test_kl_by_hand():
    # π_θ = 1/2 and π_ref = 1/4: x = −log 2.
    new, reference = jnp.full((1, 1), np.log(0.5)), jnp.full((1, 1), np.log(0.25))
    got = [kl(new, reference, jnp.ones((1, 1), bool), estimator=name)[0, 0] for name in ("k1", "k2", "k3")]
    np.testing.assert_allclose(got, [np.log(2), np.log(2) ** 2 / 2, 0.5 + np.log(2) - 1], rtol=1e-6)


@partial(jax.jit, static_argnames="estimator")
def kl_with_gradient(new, reference, estimator):
    got, back = jax.vjp(lambda y: kl(y, reference, jnp.array(MASK), estimator=estimator), new)
    return got, back(jnp.ones_like(new))[0]


@ESTIMATORS
@settings(deadline=None, max_examples=25, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-3, 0.1, 2.0]))
def test_kl_and_its_gradient_equal_the_formula(estimator, seed, scale):
    rng = np.random.default_rng(seed)
    new = -rng.exponential(size=MASK.shape)
    reference = new + scale * rng.normal(size=MASK.shape)
    x = reference - new
    # First in x, then in log π_θ = log π_ref − x.
    value = {"k1": -x, "k2": x**2 / 2, "k3": np.exp(x) - x - 1}[estimator]
    slope = {"k1": np.ones_like(x), "k2": -x, "k3": 1 - np.exp(x)}[estimator]
    with jax.enable_x64(True):
        got, gradient = kl_with_gradient(new, reference, estimator)
        np.testing.assert_allclose(got, np.where(MASK, value, 0), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(gradient, np.where(MASK, slope, 0), rtol=1e-9, atol=1e-12)


@ESTIMATORS
def test_the_reference_is_a_constant(estimator):
    new = jnp.full((1, 2), -1.0)
    gradient = jax.grad(lambda y: kl(new, y, jnp.ones((1, 2), bool), estimator=estimator).sum())(new - 0.5)
    np.testing.assert_array_equal(gradient, np.zeros((1, 2)))


def test_k3_is_held_at_twenty_on_both_sides():
    mask = jnp.ones((1, 4), bool)
    reference = jnp.array([[19.0, 200.0, -19.0, -200.0]])
    got, back = jax.vjp(lambda y: kl(y, reference, mask, estimator="k3"), jnp.zeros((1, 4)))
    np.testing.assert_allclose(got, [[np.exp(19) - 20, np.exp(20) - 21, 18 + np.exp(-19), 19 + np.exp(-20)]], rtol=1e-5)
    np.testing.assert_allclose(back(jnp.ones((1, 4)))[0], [[1 - np.exp(19), 0, 1 - np.exp(-19), 0]], rtol=1e-5)
    # k1 and k2 are not clamped.
    np.testing.assert_allclose(kl(jnp.zeros((1, 4)), reference, mask, estimator="k1"), -reference)
    np.testing.assert_allclose(kl(jnp.zeros((1, 4)), reference, mask, estimator="k2"), reference**2 / 2)


def test_k3_of_a_small_difference_is_precise_in_float32():
    # x = 2^-12: e^x − x − 1 = x²/2 + x³/6 + …, of which exp(x) − 1 − x would keep no correct digit.
    x = 2.0**-12
    got = kl(jnp.zeros((1, 1)), jnp.full((1, 1), x), jnp.ones((1, 1), bool), estimator="k3")
    np.testing.assert_allclose(got, [[x**2 / 2 + x**3 / 6]], rtol=2e-3)


def test_k3_is_never_negative():
    x = np.concatenate([np.logspace(-9, 1, 4000), -np.logspace(-9, 1, 4000)]).astype(np.float32)
    assert np.min(jax.jit(regularizers.k3)(x)) >= 0


@POISON
@ESTIMATORS
def test_padding_changes_nothing_in_kl(estimator, poison):
    rng = np.random.default_rng(0)
    new, reference = (jnp.asarray(-rng.exponential(size=MASK.shape), jnp.float32) for _ in range(2))
    spoilt = [jnp.where(MASK, x, poison) for x in (new, reference)]
    want = kl_with_gradient(new, reference, estimator)
    np.testing.assert_array_equal(want[0][~MASK], 0)
    for ours, theirs in ((spoilt[0], reference), (new, spoilt[1]), spoilt):
        jax.tree.map(np.testing.assert_array_equal, kl_with_gradient(ours, theirs, estimator), want)


def test_kl_subtracts_in_float32():
    new, reference = jnp.full((1, 1), -8.0, jnp.bfloat16), jnp.full((1, 1), -1 / 256, jnp.bfloat16)
    got = kl(new, reference, jnp.ones((1, 1), bool), estimator="k1")
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, [[-8 + 1 / 256]])


def test_kl_of_what_does_not_fit():
    with pytest.raises(UserError, match="no estimator 'k4'; there are k1, k2, k3"):
        kl(jnp.zeros((1, 1)), jnp.zeros((1, 1)), jnp.ones((1, 1), bool), estimator="k4")
    with pytest.raises(ValueError, match=r"logprobs \[1, 2\], reference_logprobs \[1, 1\], mask \[1, 2\]; all must"):
        kl(jnp.zeros((1, 2)), jnp.zeros((1, 1)), jnp.ones((1, 2), bool), estimator="k1")


# --- the critic's loss ----------------------------------------------------------------------------


def test_value_loss_by_hand():
    # V_old = 1, clip 0.5. V = 2 is clipped to 1.5: for R = 1 the free error 1 is larger, for R = 3 the clipped 1.5. V =
    # 0 is clipped to 0.5: for R = 0 the clipped 0.5 is larger; V = 1.25 stays within the clip.
    values, returns = jnp.array([[2.0, 2.0, 0.0, 1.25]]), jnp.array([[1.0, 3.0, 0.0, 2.0]])
    old, mask = jnp.ones((1, 4)), jnp.ones((1, 4), bool)
    loss, cut = value_loss(values, old, returns, mask, clip=0.5)
    np.testing.assert_allclose(loss, [[0.5, 1.125, 0.125, 0.28125]], rtol=1e-6)
    np.testing.assert_array_equal(cut, [[False, True, True, False]])
    gradient = jax.grad(lambda v: value_loss(v, old, returns, mask, clip=0.5)[0].sum())(values)
    np.testing.assert_allclose(gradient, [[1, 0, 0, -0.75]], rtol=1e-6)


@partial(jax.jit, static_argnames="clip")
def value_loss_with_gradient(values, old, returns, mask, clip):
    loss, back, cut = jax.vjp(lambda v: value_loss(v, old, returns, mask, clip=clip), values, has_aux=True)
    return loss, cut, back(jnp.ones_like(values))[0]


@settings(deadline=None, max_examples=40, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32 - 1), clip=st.sampled_from([0.1, 0.5, 100.0, float("1e30")]))
def test_value_loss_and_its_gradient_equal_the_loops(seed, clip):
    rng = np.random.default_rng(seed)
    values, old, returns = rng.normal(size=(3, *MASK.shape))
    want = np.zeros((3, *MASK.shape))
    for i, t in np.argwhere(MASK):
        want[:, i, t] = oracles.value_loss(values[i, t], old[i, t], returns[i, t], clip)
    for dtype, tolerance in ((np.float64, 1e-9), (np.float32, 1e-5)):
        with jax.enable_x64(dtype is np.float64):
            of = (jnp.asarray(x, dtype) for x in (values, old, returns))
            loss, cut, gradient = value_loss_with_gradient(*of, MASK, clip)
            assert loss.dtype == dtype
            np.testing.assert_allclose(loss, want[0], rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(gradient, want[2], rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(cut, want[1])


def test_rounding_cuts_no_gradient_within_the_clip():
    """Within the clip, V_old + (V − V_old) may differ from V in the last bit, which must not cut the gradient."""
    rng = np.random.default_rng(0)
    old = jnp.asarray(rng.normal(size=(32, 32)), jnp.float32)
    values = old + jnp.asarray(rng.uniform(-0.15, 0.15, size=(32, 32)), jnp.float32)
    mask = jnp.ones((32, 32), bool)
    assert not value_loss(values, old, jnp.zeros((32, 32)), mask, clip=0.2)[1].any()


def test_old_values_and_returns_are_constants():
    x = jnp.array([[2.0, 2.0, 0.0, 1.25]])

    def of(old, returns):
        return value_loss(x, old, returns, jnp.ones((1, 4), bool), clip=0.5)[0].sum()

    for gradient in jax.grad(of, argnums=(0, 1))(jnp.ones((1, 4)), jnp.array([[1.0, 3.0, 0.0, 2.0]])):
        np.testing.assert_array_equal(gradient, np.zeros((1, 4)))


@POISON
def test_padding_changes_nothing_in_the_value_loss(poison):
    rng = np.random.default_rng(0)
    clean = [jnp.asarray(x, jnp.float32) for x in rng.normal(size=(3, *MASK.shape))]
    want = value_loss_with_gradient(*clean, MASK, 0.5)
    assert not np.any(want[0][~MASK]) and not np.any(want[1][~MASK]) and np.any(want[1]) and np.any(want[2])
    for which in ([0], [1], [2], [0, 1, 2]):
        spoilt = (jnp.where(MASK, x, poison) if i in which else x for i, x in enumerate(clean))
        got = value_loss_with_gradient(*spoilt, MASK, 0.5)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_value_loss_subtracts_in_float32():
    # −8 + 1/256 in both differences, which bf16 would round to −8.
    small, big = jnp.full((1, 1), 1 / 256, jnp.bfloat16), jnp.full((1, 1), 8.0, jnp.bfloat16)
    loss, _ = value_loss(small, small, big, jnp.ones((1, 1), bool), clip=0.5)
    assert loss.dtype == jnp.float32
    np.testing.assert_array_equal(loss, [[(8 - 1 / 256) ** 2 / 2]])
    loss, cut = value_loss(small, big, small, jnp.ones((1, 1), bool), clip=0.5)
    np.testing.assert_allclose(loss, [[(7.5 - 1 / 256) ** 2 / 2]], rtol=1e-6)
    assert cut.all()


def test_value_loss_of_what_does_not_fit():
    one = jnp.zeros((1, 1))
    with pytest.raises(
        UserError, match=r"clip=0.0 is not a positive number; it bounds how far a value may move, usually 0.2"
    ):
        value_loss(one, one, one, jnp.ones((1, 1), bool), clip=0.0)
    with pytest.raises(ValueError, match=r"values \[1, 1\], old_values \[1, 1\], returns \[1, 2\], mask \[1, 1\]; all"):
        value_loss(one, one, jnp.zeros((1, 2)), jnp.ones((1, 1), bool), clip=0.2)
