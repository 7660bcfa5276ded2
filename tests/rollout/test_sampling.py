"""Sampled tokens follow the distribution whose log-probs are reported, and kept ids are those of a float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.errors import UserError
from gspo_jax.parallel import mesh as mesh_lib
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
    tokens, behaviour, full, _ = jax.device_get(draw(keys, logits, sampling))
    scaled = LOGITS / sampling.temperature
    np.testing.assert_allclose(full, (scaled - np.log(np.exp(scaled).sum()))[tokens], atol=1e-5)
    chosen, counts = np.unique(tokens, return_counts=True)
    probs = np.array([np.exp(behaviour[tokens == t][0]) for t in chosen])
    assert abs(probs.sum() - 1) < 1e-5, "the behaviour distribution sums to one over the tokens that can be drawn"
    chi_square = ((counts - n * probs) ** 2 / (n * probs)).sum()
    assert chi_square < 18.5, "chi-square stays below its 0.999 quantile for 4 degrees of freedom"


ROWS = (np.random.default_rng(0).normal(size=(64, 12)) * 4).round().astype(np.float32) / 4 + 0.0
"""Logits, many of them tied."""
KEYS = response_keys(jax.random.key(0), jnp.arange(64))
jitted = jax.jit(draw, static_argnums=2)


def kept_by(logits, sampling):
    """Return the set that truncation leaves of one row, with its probabilities under the full softmax, in float64."""
    p = np.exp(logits.astype(np.float64) / sampling.temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda v: -p[v])
    kept = set(order)
    if sampling.top_k:
        kept = {v for v in kept if logits[v] >= logits[order[sampling.top_k - 1]]}
    if sampling.top_p < 1:
        total, mass = sum(p[v] for v in kept), 0.0
        for v in [v for v in order if v in kept]:
            mass, last = mass + p[v] / total, v
            if mass >= sampling.top_p:
                break
        kept = {v for v in kept if logits[v] >= logits[last]}
    return {v for v in kept if p[v] >= sampling.min_p * p.max()}, p, order


@pytest.mark.parametrize(
    ("sampling", "whole"),
    [
        (SamplingParams(top_k=3, keep_top=3), "mixed"),  # ties with the third
        (SamplingParams(top_p=0.8, keep_top=6), "mixed"),
        (SamplingParams(min_p=0.3, keep_top=4), "mixed"),
        (SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.05, keep_top=10), "all"),
        (SamplingParams(temperature=2.0, top_p=0.95, keep_top=4), "none"),
        (SamplingParams(keep_top=3), "none"),
        (SamplingParams(temperature=0.5, keep_top=12), "none"),
    ],
    ids=str,
)
def test_kept_ids_and_their_log_probs(sampling, whole):
    """A row keeps the whole set that is left if it has no more than K ids, else the K most probable and the token."""
    tokens, behaviour, logprobs, kept = jax.device_get(jitted(KEYS, jnp.asarray(ROWS), sampling))
    for row, token, q, own, record in zip(ROWS, tokens, behaviour, logprobs, zip_rows(kept), strict=True):
        left, p, order = kept_by(row, sampling)
        assert token in left
        fits = sampling.truncates and len(left) <= sampling.keep_top
        expected = left if fits else set(order[: sampling.keep_top])
        if token not in expected:
            expected = expected - {order[sampling.keep_top - 1]} | {token}
        used = record.ids >= 0
        assert sorted(record.ids[used]) == sorted(expected) and (record.ids[~used] == -1).all()
        mass = sum(p[v] for v in left) if fits else 1.0
        np.testing.assert_allclose(record.logprobs[used], np.log(p[record.ids[used]] / mass), atol=2e-6)
        assert not record.logprobs[~used].any() and record.whole == fits
        np.testing.assert_allclose(q, np.log(p[token] / sum(p[v] for v in left)), atol=2e-6)
        assert own == record.logprobs[record.ids == token].item(), "the token's own, bit by bit"
        assert own == q or not fits, "renormalised over the set where it is whole"
    assert {"all": kept.whole.all(), "none": not kept.whole.any(), "mixed": 0 < kept.whole.sum() < 64}[whole]
    missed = (tokens[:, None] != np.argsort(-ROWS, axis=1, kind="stable")[:, : sampling.keep_top]).all(axis=1)
    assert missed.any() or whole == "all" or sampling.keep_top == 12, "some tokens are none of the K most probable"


def zip_rows(kept):
    return [jax.tree.map(lambda x, i=i: x[i], kept) for i in range(len(kept.whole))]


@pytest.mark.parametrize("sampling", [SamplingParams(keep_top=7), SamplingParams(top_k=5, keep_top=7)], ids=str)
def test_shards_of_the_vocabulary_find_the_same_ids(sampling):
    mesh = mesh_lib.make_mesh({"data": 4, "tensor": 2})
    expected = jitted(KEYS, jnp.asarray(ROWS), sampling)
    with jax.set_mesh(mesh):
        found = jitted(KEYS, mesh_lib.constrain(jnp.asarray(ROWS), "batch", "vocab"), sampling)
    np.testing.assert_array_equal(found.kept.ids, expected.kept.ids)
    np.testing.assert_allclose(found.kept.logprobs, expected.kept.logprobs, atol=1e-6)


def test_greedy_takes_the_largest_and_scores_at_temperature_one():
    tokens, behaviour, full, _ = draw(
        response_keys(jax.random.key(0), jnp.arange(1)), jnp.asarray(LOGITS)[None], SamplingParams(temperature=0.0)
    )
    assert tokens[0] == 0
    assert behaviour[0] == 0
    np.testing.assert_allclose(full, np.log(0.4), atol=1e-6)


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 1.0}])
def test_bad_settings_are_refused(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        SamplingParams(**bad)
