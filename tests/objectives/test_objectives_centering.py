"""Score centring, by enumeration: every response of two tokens from a vocabulary of seven, in float64.

The policy has a table of logits, a row for each token before, so that its gradient is that of any softmax's logits.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import objectives
from gspo_jax.objectives import catalogue
from gspo_jax.objectives.mismatch import centering_coefficients, centering_size, icepop, score_centering, tis

V = 7
RESPONSES = np.array(list(itertools.product(range(V), repeat=2)))
BEFORE = np.stack([np.zeros(len(RESPONSES), int), RESPONSES[:, 0]], axis=1)
MASK = jnp.ones(RESPONSES.shape, bool)
ADVANTAGE = 1.3
THETA = np.random.default_rng(0).normal(size=(V, V))
CORRECTIONS = {"none": None, "tis": tis(cap=1.0), "icepop": icepop(low=0.999, high=3.0)}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def softmax(logits):
    parts = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return parts / parts.sum(axis=-1, keepdims=True)


def int8(weights):
    scale = np.abs(weights).max() / 127
    return np.round(weights / scale) * scale


P = softmax(THETA)
SAMPLERS = {"int8": softmax(int8(THETA)), "another": softmax(np.random.default_rng(1).normal(size=(V, V)))}


def kept_by(q, S):
    """Return q renormalised over S, both [V, V] by the token before."""
    left = np.where(S, q, 0)
    return left / left.sum(axis=1, keepdims=True)


def expected_gradient(name, q, *, center, correction=None, S=None, from_sampler=False, **wide):
    """Return E_{y∼q} of the gradient of the gain of a batch of one response at π_θ = π_old, all of advantage 1.3.

    S is what truncation left of q, and both policies are renormalised over it. `from_sampler`: at π_old = q.
    """
    objective, theta = objectives.make(name, **wide), jnp.asarray(THETA)
    whole = S is not None
    S = np.ones((V, V), bool) if S is None else S
    present = jnp.asarray(S)[BEFORE]
    sampled = jnp.asarray(np.log(np.where(S & (q > 0), q, 1)))
    chance = np.prod(q[BEFORE, RESPONSES], axis=1)  # 0 of responses that q has not
    sampler, at = (
        sampled[BEFORE, RESPONSES],
        (np.arange(len(RESPONSES))[:, None], np.arange(2)[None], RESPONSES),
    )

    def gain(theta):
        log_p = jax.nn.log_softmax(jnp.where(S, theta, -jnp.inf) if whole else theta)
        kept = jnp.where(present, log_p[BEFORE], 0)
        logprobs, weights = kept[at], chance[:, None] * objective.weights(MASK[:1])
        factor = None if correction is None else correction(logprobs, sampler, MASK)
        loss, info = objectives.loss(
            objective,
            logprobs,
            old_logprobs=sampler if from_sampler else jax.lax.stop_gradient(logprobs),
            mask=MASK,
            advantages=jnp.full(len(RESPONSES), ADVANTAGE),
            weights=weights if factor is None else weights * factor,
            router_shift=jnp.ones(MASK.shape) if objective.router_shift else None,
        )
        if center:
            weight = None if correction is None else correction.weight
            c = score_centering(kept, sampled[BEFORE], present, jnp.full(MASK.shape, whole), weight=weight)
            loss += jnp.sum(weights * info.advantages * c)
        return -loss

    return np.asarray(jax.grad(gain)(theta))


@pytest.mark.parametrize("name", catalogue.__all__)
def test_a_constant_advantage_moves_nothing(name):
    """E[∇gain] = 0 under an int8 sampler for every objective, and is not without the term."""
    q = SAMPLERS["int8"]
    without = expected_gradient(name, q, center=False)
    score = q @ np.eye(V) - P  # of a token after each other: Σ_v q_v ∇log p_v in the logits
    w = float(objectives.make(name).weights(MASK[:1])[0, 0])
    by_hand = w * ADVANTAGE * (np.eye(V)[0] + q[0])[:, None] * score
    np.testing.assert_allclose(without, by_hand, atol=1e-13)
    assert np.abs(without).max() > 1e-4
    np.testing.assert_allclose(expected_gradient(name, q, center=True), 0, atol=1e-13)


@pytest.mark.parametrize("name", catalogue.__all__)
def test_from_the_sampler_s_log_probs_it_is_for_objectives_that_do_not_weigh_tokens_by_their_ratio(name):
    """The others have no drift to take out, and the mean ratio of two tokens weighs each by the root of its own."""
    objective = objectives.make(name)
    wide = dict.fromkeys(objective.bounds, 0.5) if objective.level == "sequence" else {}  # rounding gates nothing
    drift = partial(expected_gradient, name, SAMPLERS["int8"], **wide)
    full = np.abs(drift(center=False)).sum()
    if objective.weighs_tokens:
        if name != "vespo":  # whose weight falls with the ratio where Â > 0
            assert np.abs(drift(center=False, from_sampler=True)).sum() < 0.1 * full
        return
    left = np.abs(drift(center=True, from_sampler=True)).sum() / full
    assert left == pytest.approx(0.5 if objective.one_gain or name == "gspo_token" else 0, abs=0.1)


def test_its_size_is_the_distance_of_sampler_and_policy():
    """Σ|q − p|, that of autodiff, and 0 at p = q, also of a head that leaves only rounding outside."""
    log_p, log_q = (jnp.log(jnp.asarray(x))[None] for x in (P, SAMPLERS["int8"]))
    for head, of in ((V, False), (3, False), (V, True)):
        present, whole = jnp.broadcast_to(jnp.arange(V) < head, (1, V, V)), jnp.full((1, V), of)

        def term(logits, present=present, whole=whole):
            return score_centering(jax.nn.log_softmax(logits), log_q, present, whole).sum()

        c = centering_coefficients(log_p, log_q, present, whole)
        size = centering_size(c, log_p, present)
        np.testing.assert_allclose(size[0], np.abs(jax.grad(term)(jnp.asarray(THETA))).sum(axis=1), atol=1e-14)
        if head == V:
            np.testing.assert_allclose(size[0], np.abs(SAMPLERS["int8"] - P).sum(axis=1), atol=1e-8)
    sure = jax.nn.log_softmax(jnp.asarray([30.0, 1, 0, 0, 0, 0, 0], jnp.float32))[None, None]
    given = sure, jnp.ones((1, 1, V), bool).at[:, :, 3:].set(False)
    c = centering_coefficients(sure, *given, jnp.zeros((1, 1), bool))
    assert jnp.abs(c).sum() > 0.5 and centering_size(c, *given) < 1e-6


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("truncated", [False, True])
def test_nor_with_a_correction_s_weights_or_truncated_sampling(correction, sampler, truncated):
    q, S = SAMPLERS[sampler], None
    if truncated:
        S = q >= np.sort(q, axis=1)[:, [-3]]  # top 3
        q = kept_by(q, S)
    settings = {"correction": CORRECTIONS[correction], "S": S}
    assert np.abs(expected_gradient("grpo", q, center=False, **settings)).max() > 1e-5
    np.testing.assert_allclose(expected_gradient("grpo", q, center=True, **settings), 0, atol=1e-13)


def test_untruncated_weights_need_no_centring():
    weight = tis(cap=1e9).weight
    log_p, log_q = (jnp.log(jnp.asarray(x))[None] for x in (P, SAMPLERS["another"]))
    head, of = jnp.arange(V)[None, None] < jnp.full((1, V, 1), 3), jnp.zeros((1, V), bool)
    np.testing.assert_allclose(centering_coefficients(log_p, log_q, head, of, weight=weight), 0, atol=1e-15)


def test_kept_sets_have_no_score_at_equal_parameters():
    """E_{y∼μ}[∇log π^S] = 0 of what top-p 0.8 left, where E_{y∼μ}[∇log π] is not."""
    order = np.argsort(-P, axis=1)
    reached = np.cumsum(np.take_along_axis(P, order, 1), axis=1) - np.take_along_axis(P, order, 1) < 0.8
    S = np.zeros((V, V), bool)
    np.put_along_axis(S, order, reached, axis=1)
    mu = kept_by(P, S)
    assert (S.sum(axis=1) > 1).all() and (S.sum(axis=1) < V).any()
    np.testing.assert_allclose(expected_gradient("gspo", mu, center=False, S=S), 0, atol=1e-13)
    assert np.abs(expected_gradient("gspo", mu, center=False)).max() > 0.01
    same = jnp.log(jnp.where(S, mu, 1))[None]
    given = same, same, jnp.asarray(S)[None], jnp.ones((1, V), bool)
    np.testing.assert_allclose(centering_coefficients(*given), 0, atol=1e-15)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_beyond_the_head_the_sampler_is_taken_for_the_policy_in_proportion(correction):
    """∇C = Σ_H m_v ∇log p_v + α Σ_{v∉H} p_v ∇log p_v, in the logits."""
    weight = None if CORRECTIONS[correction] is None else CORRECTIONS[correction].weight
    f = (lambda x: np.ones_like(x)) if weight is None else lambda x: np.asarray(weight(jnp.asarray(x)))
    q = SAMPLERS["another"]
    H = q >= np.sort(q, axis=1)[:, [-4]]

    def total(theta):
        kept = jnp.where(H, jax.nn.log_softmax(theta), 0)[None]
        return score_centering(
            kept, jnp.log(jnp.where(H, q, 1))[None], jnp.asarray(H)[None], jnp.zeros((1, V), bool), weight=weight
        ).sum()

    found, expected = np.asarray(jax.grad(total)(jnp.asarray(THETA))), np.zeros((V, V))
    for row in range(V):
        rho = (1 - q[row, H[row]].sum()) / (1 - P[row, H[row]].sum())
        for v in range(V):
            p = P[row, v]
            m = q[row, v] * f(p / q[row, v]) if H[row, v] else rho * f(1 / rho) * p
            expected[row] += m * (np.eye(V)[v] - P[row])
    np.testing.assert_allclose(found, expected, atol=1e-13)


def test_a_tail_in_proportion_is_exact():
    H = np.sort(P, axis=1)[:, [-3]] <= P
    q = np.where(H, SAMPLERS["another"], 1.7 * P)
    q /= q.sum(axis=1, keepdims=True)
    log_q, whole = jnp.log(jnp.where(H, q, 1))[None], jnp.zeros((1, V), bool)

    def drift(theta):
        log_p = jax.nn.log_softmax(theta)
        kept = jnp.where(H, log_p, 0)[None]
        return (q * log_p).sum() - score_centering(kept, log_q, jnp.asarray(H)[None], whole).sum()

    np.testing.assert_allclose(jax.grad(drift)(jnp.asarray(THETA)), 0, atol=1e-13)


def test_a_factor_of_the_token_multiplies_it():
    """Also 0, for dropped responses, and unused entries have no effect on value and gradient."""
    factor = jnp.asarray([[0.0, 2.0]])
    log_p, log_q = (jnp.log(jnp.asarray(x[:2, :4]))[None] for x in (P, SAMPLERS["int8"]))
    present, whole = jnp.asarray([[[1, 1, 0, 1], [1, 1, 1, 0]]], bool), jnp.zeros((1, 2), bool)

    def c(log_p, log_q, weight=None):
        return score_centering(log_p, log_q, present, whole, weight=weight)

    plain = c(log_p, log_q)
    np.testing.assert_allclose(c(log_p, log_q, factor), factor * plain, rtol=1e-12)
    assert np.abs(plain).min() > 0
    unknown = jnp.where(present, 0, jnp.nan)
    np.testing.assert_array_equal(c(log_p + unknown, log_q + unknown), plain)
    gradient = jax.grad(lambda x: c(x, log_q + unknown).sum())(log_p + unknown)
    assert (np.asarray(gradient)[~np.asarray(present)] == 0).all() and np.isfinite(gradient).all()
    assert not np.any(jax.grad(lambda x: c(log_p, x).sum())(log_q)), "the sampler's are constants"


def test_the_result_is_at_least_float32():
    with jax.enable_x64(False):
        given = [jnp.full((1, 1, 2), -1.0, jnp.bfloat16)] * 2
        found = score_centering(*given, jnp.ones((1, 1, 2), bool), jnp.zeros((1, 1), bool))
        assert found.dtype == jnp.float32


@pytest.mark.parametrize("name", catalogue.__all__)
def test_one_gain_says_where_a_token_s_weight_falls(name):
    """With a weight on the first token alone, others have a gradient if the gain is the response's alone."""
    objective, mask = objectives.make(name), jnp.ones((1, 3), bool)
    logprobs = jnp.full((1, 3), -1.0)

    def loss(x):
        return objectives.loss(
            objective,
            x,
            old_logprobs=logprobs,
            mask=mask,
            advantages=jnp.ones(1),
            weights=jnp.asarray([[1.0, 0.0, 0.0]]),
            router_shift=jnp.ones((1, 3)) if objective.router_shift else None,
        )[0]

    np.testing.assert_allclose(
        jax.grad(loss)(logprobs), [[-1 / 3] * 3 if objective.one_gain else [-1, 0, 0]], atol=1e-12
    )
