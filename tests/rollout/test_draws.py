"""The test of draws passes the sampler's, and fails draws that are biased, uneven or too even."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.planning.topology import topology_mesh
from gspo_jax.rollout import draws
from gspo_jax.rollout.sampling import SampledTokens, SamplingParams, draw
from tests import ahead


@pytest.fixture
def _small(monkeypatch):
    """Fewer tokens to draw from, and more draws in a call."""
    monkeypatch.setattr(draws, "VOCABULARY", 2**7)
    monkeypatch.setattr(draws, "ROWS", 2**12)


def rounding(keys, logits, sampling):
    """Draw by argmax of rounded logits plus noise: of the many ties the least id wins.

    To need few draws, with three bits fewer than bfloat16.
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    tokens = jax.lax.reduce_precision(logits + noise, exponent_bits=8, mantissa_bits=4).argmax(axis=1)
    nothing = jnp.zeros(len(tokens))
    return SampledTokens(tokens, nothing, nothing)


@pytest.mark.usefixtures("_small")
def test_the_sampler_s_draws_are_right():
    verdict = draws.try_draws(2**15)
    assert verdict.right and verdict.draws == 2**15, verdict


@pytest.mark.usefixtures("_small")
def test_rounded_logits_are_noticed(monkeypatch):
    monkeypatch.setattr(draws, "draw", rounding)
    verdict = draws.try_draws(2**15)
    assert verdict.halves < 1e-4 and not verdict.right, verdict


def test_p_values_by_hand():
    """60 of 100 lie 2 standard deviations of 5 above 50: p = 0.0455, and chi-squared is 2² in one degree of freedom.

    Of 4096 draws, 3 standard deviations of 32 may be chance, 4 not.
    """
    verdict = draws.judge(np.array([60, 40]))
    assert (verdict.draws, round(verdict.halves, 4), round(verdict.parts, 4)) == (100, 0.0455, 0.091)
    assert verdict.halves == pytest.approx(draws.judge(np.array([40, 60])).halves), "two-sided"
    assert draws.judge(np.array([2048 + 96, 2048 - 96])).right
    assert not draws.judge(np.array([2048 + 128, 2048 - 128])).right


@pytest.mark.parametrize(
    "counts", [np.full(64, 64), 64 + 16 * (-1) ** np.arange(64)], ids=["too even", "too uneven by parts"]
)
def test_counts_that_no_right_sampler_would_give(counts):
    verdict = draws.judge(counts)
    assert verdict.halves == 1 and verdict.parts < 1e-4 and not verdict.right


def test_rows_with_nan_draw_a_token_of_the_vocabulary():
    logits = jnp.zeros((2, 5)).at[0, 3].set(jnp.nan)
    for sampling in (SamplingParams(), SamplingParams(temperature=0.0)):
        tokens, *_ = draw(jax.random.split(jax.random.key(0), 2), logits, sampling)
        assert ((tokens >= 0) & (tokens < 5)).all()


def test_equal_logits_draw_the_least_id():
    logits = jnp.array([[1.0, 3.0, 3.0], [2.0, 1.0, 2.0], [-math.inf, -math.inf, -math.inf]])
    assert draw(jax.random.split(jax.random.key(0), 3), logits, SamplingParams(temperature=0.0)).tokens.tolist() == [
        1,
        0,
        0,
    ]


def compiled() -> dict[str, bool]:
    """Return whether the draw, compiled for a TPU, has an array in bfloat16, by sampling settings."""
    found = {}
    with jax.set_mesh(topology_mesh("v5p:2x2x1", {"data": -1})):
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), draws.ROWS))
        logits = jax.ShapeDtypeStruct((draws.ROWS, draws.VOCABULARY), jnp.float32)
        for sampling in (SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(keep_top=20)):
            traced = jax.jit(draw, static_argnums=2).trace(keys, logits, sampling)
            text = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
            found[str(sampling)] = "bf16[" in (text or "bf16[")
    return found


@pytest.mark.slow
@ahead.needs_libtpu
def test_the_tpu_compiler_keeps_the_draw_in_float32():
    assert set(ahead.figures("tests.rollout.test_draws").values()) == {False}


if __name__ == "__main__":
    print(json.dumps(compiled()))
