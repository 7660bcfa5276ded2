"""Objectives of equal clipping: gates and gradients against float64 NumPy, shares, and what chance decides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import objectives
from gspo_jax.objectives.surrogates import TokenBatch
from gspo_jax.studies import clipping

B, T = 12, 9


def batch(seed: int = 0, *, spread: float = 0.15) -> TokenBatch:
    """Return a mini-batch whose responses have drifted as a whole and token by token; one has no advantage."""
    rng = np.random.default_rng(seed)
    old = rng.uniform(-3, -0.1, (B, T))
    moved = rng.normal(0, spread, (B, T)) + rng.normal(0, 0.01, (B, 1))
    lengths = rng.integers(3, T + 1, B)
    mask = np.arange(T) < lengths[:, None]
    advantages = np.repeat(rng.choice([-1.5, -0.5, 0.7, 1.2], B)[:, None], T, axis=1)
    advantages[3] = 0.0
    return TokenBatch(*map(jnp.asarray, (old + moved, old, mask, np.where(mask, advantages, 0.0))))


def numpy_gates(b: TokenBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (d, log s, GSPO's gate, GRPO's gate), written from the papers' formulas."""
    logprobs, old, mask, advantages = (np.asarray(x) for x in b[:4])
    d = np.where(mask, logprobs - old, 0.0)
    s = np.repeat((d.sum(1) / mask.sum(1))[:, None], T, axis=1)

    def gate(log_ratio, low, high):
        up, down = (advantages > 0) & (np.exp(log_ratio) > 1 + high), (advantages < 0) & (np.exp(log_ratio) < 1 - low)
        return mask & (up | down)

    return d, s, gate(s, 3e-3, 4e-3), gate(d, 0.2, 0.2)


@functools.cache
def jitted(name: str):
    return jax.jit(getattr(clipping, name)().surrogate)


def gate_of(name: str, b: TokenBatch) -> np.ndarray:
    found = jitted(name)(b)
    assert not np.any(found.gated_low & found.gated_high)
    return np.asarray(found.gated_low | found.gated_high)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", ["grpo_at_share", "gspo_at_share", "drop_responses", "drop_tokens", "mask_on_tokens"])
def test_value_and_gradient_are_those_of_the_gate(name):
    b = batch(spread=0.25)
    d, s, _, _ = numpy_gates(b)
    used, gate = (s if name == "gspo_at_share" else d), gate_of(name, b)
    assert 0 < gate.sum() < b.mask.sum() and not np.any(gate & ~np.asarray(b.mask))
    objective, mask, advantages = getattr(clipping, name)(), np.asarray(b.mask), np.asarray(b.advantages)
    weights = mask / mask.sum(1, keepdims=True) / B

    def loss(logprobs):
        return objectives.loss(
            objective, logprobs, old_logprobs=b.old_logprobs, mask=b.mask, advantages=b.advantages[:, 0]
        )[0]

    value, gradient = jax.value_and_grad(loss)(b.logprobs)
    assert value == pytest.approx(-(weights * np.exp(np.where(gate, 0.0, used)) * advantages).sum(), rel=1e-12)
    each = np.where(gate, 0.0, weights * np.exp(used) * advantages)
    if name == "gspo_at_share":  # through the mean over the response
        each = np.where(mask, each.sum(1, keepdims=True) / mask.sum(1, keepdims=True), 0.0)
    np.testing.assert_allclose(gradient, -each, rtol=1e-12, atol=1e-18)


def test_grpo_at_share_gates_the_tokens_that_moved_most_towards_their_advantage():
    b = batch()
    d, _, of_gspo, _ = numpy_gates(b)
    towards = np.sign(b.advantages) * d
    bound = np.sort(towards[np.asarray(b.mask)])[-of_gspo.sum()]
    assert bound > 0 and np.array_equal(gate_of("grpo_at_share", b), np.asarray(b.mask) & (towards >= bound))


def test_no_token_is_gated_before_the_policy_has_moved():
    b = batch(spread=0.1)
    still = b._replace(logprobs=b.old_logprobs)
    names = ["grpo_at_share", "gspo_at_share", "drop_responses", "drop_tokens", "mask_on_tokens"]
    assert not any(gate_of(name, still).any() for name in names)


def test_shares_are_those_of_the_other_objective():
    dropped, tokens, widened, of_grpo = [], [], [], []
    for seed in range(200):
        b = batch(seed)
        _, _, gspo, grpo = numpy_gates(b)
        wanted = max(gspo.sum(), grpo.sum())
        assert gate_of("drop_tokens", b).sum() == min(wanted, (np.asarray(b.advantages) != 0).sum())
        assert np.array_equal(gate_of("mask_on_tokens", b), gspo)
        both = gate_of("drop_responses", b)
        assert np.array_equal(both & grpo, grpo) and not both[3].any(), "beside the clip; none without an advantage"
        rows = (both & ~grpo).any(1)
        assert np.array_equal((both | grpo)[rows], np.asarray(b.mask)[rows]), "whole responses"
        dropped.append(both.sum() - grpo.sum() + (grpo & rows[:, None]).sum())
        tokens.append(wanted - grpo.sum())
        wide = gate_of("gspo_at_share", b)
        assert np.array_equal(wide, np.asarray(b.mask) & wide.any(1)[:, None])
        widened.append(wide.sum())
        of_grpo.append(grpo.sum())
    assert np.mean(dropped) == pytest.approx(np.mean(tokens), rel=0.05)
    assert np.mean(widened) == pytest.approx(np.mean(of_grpo), rel=0.05)


def test_gspo_at_share_takes_the_responses_that_moved_most():
    b = batch(1, spread=0.25)
    _, s, _, _ = numpy_gates(b)
    towards, wide = (np.sign(b.advantages) * s)[:, 0], gate_of("gspo_at_share", b).any(1)
    assert 0 < wide.sum() < B and towards[wide].min() > towards[~wide].max() and towards[wide].min() > 0


def test_the_draw_is_of_the_log_probs_and_even():
    b = batch()
    assert np.array_equal(gate_of("drop_tokens", b), gate_of("drop_tokens", b))
    of_gspo, of_grpo = clipping.look(b).gspo, clipping.look(b).grpo
    counts = np.zeros((B, T))
    for shift in range(400):  # the same gates of either objective, other bits of the log-probs
        moved = b._replace(logprobs=b.logprobs + 1e-3 * shift, old_logprobs=b.old_logprobs + 1e-3 * shift)
        assert np.array_equal(clipping.look(moved).gspo, of_gspo)
        counts += gate_of("drop_tokens", moved)
    free = np.asarray(b.mask & (b.advantages != 0) & ~of_grpo)
    share = (int(of_gspo.sum()) - int(of_grpo.sum())) / free.sum()
    assert counts[free].mean() / 400 == pytest.approx(share) and np.ptp(counts[free] / 400) < 0.25
