"""Sampled tokens follow the distribution whose log-probs are reported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.errors import UserError
from gspo_jax.rollout.decoder import response_keys
from gspo_jax.rollout.sampling import SamplingParams, draw, truncate

LOGITS = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05]))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (0, 1.0, 0.0, 5),
        (2, 1.0, 0.0, 2),
        (9, 1.0, 0.0, 5),
        (0, 0.71, 0.0, 3),
        (0, 0.69, 0.0, 2),
        (0, 1e-6, 0.0, 1),
        (4, 0.8, 0.0, 3),
        (0, 1.0, 0.3, 3),
        (0, 1.0, 0.24, 4),
        (2, 1.0, 0.24, 2),
        (0, 0.71, 0.5, 2),
    ],
)
def test_truncation_keeps_the_most_probable(top_k, top_p, min_p, kept):
    """Cumulative .4 .7 .85 .95 1, relative to the first 1 .75 .375 .25 .125; with top_k=4 first, .42 .32 .16 .11."""
    out = truncate(jnp.asarray(LOGITS)[None], top_k=top_k, top_p=top_p, min_p=min_p)[0]
    assert np.isfinite(out).tolist() == [True] * kept + [False] * (5 - kept)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.3),
        SamplingParams(temperature=2.0, top_k=4),
        SamplingParams(temperature=0.7, top_p=0.9, min_p=0.1),
    ],
    ids=str,
)
def test_frequencies_pass_chi_square_against_the_reported_distribution(sampling):
    n = 20_000
    keys = response_keys(jax.random.key(0), jnp.arange(n))
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (n, 5))
    tokens, behaviour, full = (np.asarray(a) for a in draw(keys, logits, sampling))
    scaled = LOGITS / sampling.temperature
    np.testing.assert_allclose(full, (scaled - np.log(np.exp(scaled).sum()))[tokens], atol=1e-5)
    chosen, counts = np.unique(tokens, return_counts=True)
    probs = np.array([np.exp(behaviour[tokens == t][0]) for t in chosen])
    assert abs(probs.sum() - 1) < 1e-5, "the behaviour distribution sums to one over the tokens that can be drawn"
    chi_square = ((counts - n * probs) ** 2 / (n * probs)).sum()
    assert chi_square < 18.5, "chi-square stays below its 0.999 quantile for 4 degrees of freedom"


def test_greedy_takes_the_largest_and_scores_at_temperature_one():
    tokens, behaviour, full = draw(
        response_keys(jax.random.key(0), jnp.arange(1)), jnp.asarray(LOGITS)[None], SamplingParams(temperature=0.0)
    )
    assert tokens[0] == 0
    assert behaviour[0] == 0
    np.testing.assert_allclose(full, np.log(0.4), atol=1e-6)


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 1.0}])
def test_bad_settings_are_refused(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        SamplingParams(**bad)
