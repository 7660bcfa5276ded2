"""Primitives of the objectives: log-ratios and their mean over a response, clips and gates, token weights.

Arrays in, arrays out; no mesh, no model. All functions work under jit and grad and on inputs sharded over rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped


class Batch(NamedTuple):
    """Inputs of an objective's surrogate."""

    logprobs: Float[Array, "B T"]
    """log π_θ of the response tokens."""
    old_logprobs: Float[Array, "B T"]
    """log π_old of the same tokens."""
    mask: Bool[Array, "B T"]
    """True on the tokens that the policy sampled; elsewhere the log-probs are undefined."""
    advantages: Float[Array, "B T"]
    """Advantages Â, constant, at least float32, 0 outside the mask."""
    router_shift: Float[Array, "B T"] | None = None
    """Router shift γ (1: unchanged routing), constant, at least float32, 1 outside the mask."""


class Surrogate(NamedTuple):
    """Per-token result of an objective, before weighting."""

    gain: Float[Array, "B T"]
    """Quantity to maximise; the only field that carries a gradient."""
    ratio: Float[Array, "B T"]
    """Importance ratio by which the objective weights or gates, constant."""
    gated_low: Bool[Array, "B T"]
    """True where the lower bound set the gradient to zero (cispo: clipped the weight; sapo, vespo: halved the gate)."""
    gated_high: Bool[Array, "B T"]
    """True where the upper bound did the same."""


class ClippedLogRatios(NamedTuple):
    """Log-ratios clipped to their bounds; clipped entries carry no gradient."""

    log_ratios: Float[Array, "B T"]
    gated_low: Bool[Array, "B T"]
    gated_high: Bool[Array, "B T"]


def widen(x: Shaped[Array, "..."]) -> Float[Array, "..."]:
    """Cast x to float32, leaving float64 as it is: bf16 spacing near 1 (2^-8) would swamp a clip range of 3e-4."""
    x = jnp.asarray(x)  # pyright: ignore[reportUnknownMemberType] (jax leaves a default of its stub untyped)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def log_ratio(
    logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Log importance ratio of each token: d = log π_θ − log π_old, 0 outside the mask.

    Inputs outside the mask, NaN included, affect neither value nor gradient. `old_logprobs` are constants.
    """
    # Widening one operand promotes the difference.
    return jnp.where(mask, widen(logprobs) - jax.lax.stop_gradient(old_logprobs), 0.0)


def row_mean(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, " B"]:
    """Masked mean of each row, (1/n_i) Σ_t m·x, 0 for an empty row.

    The row mean of log-ratios is the log of the sequence ratio s_i, a geometric mean.
    """
    return jnp.sum(x, axis=1, where=mask) / jnp.maximum(jnp.sum(mask, axis=1), 1)


def policy_gradient(b: Batch) -> Surrogate:
    """Plain policy gradient without a gate: gain = Â·log π_θ, whose gradient is Â whatever the ratio."""
    ratio = jnp.exp(jax.lax.stop_gradient(log_ratio(b.logprobs, b.old_logprobs, b.mask)))
    not_gated = jnp.broadcast_to(False, b.mask.shape)
    return Surrogate(b.advantages * jnp.where(b.mask, b.logprobs, 0.0), ratio, not_gated, not_gated)


def clipped(
    log_ratios: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    low: float,
    high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """PPO's clipped surrogate: gain = min(r·Â, clip(r, 1 − low, 1 + high)·Â), r = exp(log_ratios).

    https://arxiv.org/abs/1707.06347. With `dual_clip` = c the gain is at least c·Â where Â < 0; without it, a large
    ratio makes the gradient there arbitrarily large. https://arxiv.org/abs/1912.09729

    A ratio exactly on a bound is not gated. For a gated token, or Â = 0, the gradient is 0 even if r overflows.
    """
    ceiling = jnp.where(advantages > 0, 1 + high, jnp.inf if dual_clip is None else dual_clip)
    ratio = jnp.exp(jax.lax.stop_gradient(log_ratios))
    gated_low = (advantages < 0) & (ratio < 1 - low)
    gated_high = (advantages != 0) & (ratio > ceiling)
    # Masked before exp, not after: if exp overflows, its backward pass would compute 0 * inf.
    unclipped = jnp.exp(jnp.where(gated_high | (advantages == 0), 0.0, log_ratios))
    bounded = jnp.where(gated_low, 1 - low, jnp.where(gated_high, ceiling, unclipped))
    return Surrogate(bounded * advantages, ratio, gated_low, gated_high)


def clip_log_ratio(
    log_ratios: Float[Array, "B T"], advantages: Float[Array, "B T"], *, log_clip: float
) -> ClippedLogRatios:
    """Clip log-ratios as in GMPO: l = σ·min(σ·d, σ·clip(d, −c, c)), d = log_ratios, c = log_clip, σ = sgn Â.

    https://arxiv.org/abs/2507.20673. A ratio exactly on a bound is not gated. Where Â is 0, l is 0 even if d is not.
    """
    gated_low = (advantages < 0) & (log_ratios < -log_clip)
    gated_high = (advantages > 0) & (log_ratios > log_clip)
    unclipped = jnp.where(advantages == 0, 0.0, log_ratios)
    bounded = jnp.where(gated_low, -log_clip, jnp.where(gated_high, log_clip, unclipped))
    return ClippedLogRatios(bounded, gated_low, gated_high)


def geometric(b: Batch, bounded: ClippedLogRatios) -> Surrogate:
    """Geometric-mean surrogate, one gain per response: gain = Â·exp((1/n) Σ m·l), l the clipped log-ratios.

    A gated token loses only its own term of the gradient.
    """
    log_mean = row_mean(bounded.log_ratios, b.mask)[:, None]
    ratio = jnp.exp(jax.lax.stop_gradient(log_ratio(b.logprobs, b.old_logprobs, b.mask)))
    return Surrogate(b.advantages * jnp.exp(log_mean), ratio, bounded.gated_low, bounded.gated_high)


def soft_gated(
    log_ratios: Float[Array, "B T"], advantages: Float[Array, "B T"], *, tau_pos: float, tau_neg: float
) -> Surrogate:
    """SAPO's soft-gated surrogate: gain = (4/τ)·σ(τ(r − 1))·Â, τ = tau_pos if Â > 0 else tau_neg, r = exp(log_ratios).

    https://arxiv.org/abs/2511.20347. A token counts as gated where 4p(1 − p), p the sigmoid, is below 1/2.
    """
    tau = jnp.where(advantages > 0, tau_pos, tau_neg)
    # The sigmoid is flat long before e^80; beyond it exp overflows and its gradient would be 0 * inf.
    ratio = jnp.exp(jnp.minimum(log_ratios, 80.0))
    # Not jax.nn.sigmoid, whose gradient p·(1 − p) cancels for p near 1.
    p = jnp.exp(jax.nn.log_sigmoid(tau * (ratio - 1)))
    gated = 4 * p * (1 - p) < 0.5
    below = ratio < 1
    return Surrogate(4 / tau * p * advantages, jax.lax.stop_gradient(ratio), gated & below, gated & ~below)


def weighted_score(b: Batch, weight: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Gain of a policy gradient whose tokens have a weight, which is constant: weight·Â·log π_θ.

    Where Â is 0 so is the gain, even if the weight overflows.
    """
    return jnp.where(b.advantages == 0, 0.0, weight * b.advantages) * jnp.where(b.mask, b.logprobs, 0.0)


def probability_change(
    logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """p − q, the change of each token's probability, p = π_θ and q = π_old; constant, 0 outside the mask.

    From the log-ratio d by expm1, as q·(e^d − 1) or p·(1 − e^−d), so that a small change keeps its sign and digits.
    """
    d = log_ratio(logprobs, old_logprobs, mask)
    larger = jnp.exp(jnp.where(mask, jnp.maximum(widen(logprobs), old_logprobs), 0.0))
    return jax.lax.stop_gradient(-jnp.sign(d) * larger * jnp.expm1(-jnp.abs(d)))


def binary_kl(
    logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """KL from π_old to π_θ of "this token or another one": q·log(q/p) + (1 − q)·log((1 − q)/(1 − p)).

    1e-8 is added to 1 − q and 1 − p, which are at least 0. Constant, 0 outside the mask.
    """
    d = log_ratio(logprobs, old_logprobs, mask)
    new, old = (jnp.where(mask, widen(x), -1.0) for x in (logprobs, old_logprobs))
    others, others_old = (jnp.maximum(-jnp.expm1(x), 0.0) for x in (new, old))
    k = -jnp.exp(old) * d + others_old * (jnp.log(others_old + 1e-8) - jnp.log(others + 1e-8))
    return jax.lax.stop_gradient(k)


def sequence_mean(mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Weights that count all responses equally: w = m / (N_rows · n_i), N_rows the number of rows with a token."""
    lengths, rows = _lengths_and_rows(mask)
    # Not 1 / (rows · lengths), which overflows int32 for a big batch of long responses. An empty row's 1/0 is masked.
    return jnp.where(mask, 1.0 / rows / lengths[:, None], 0.0)


def token_mean(mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Weights that count all tokens equally: w = m / Σ n."""
    return jnp.where(mask, 1.0 / jnp.sum(mask), 0.0)


def constant_length(mask: Bool[Array, "B T"], *, length: float | None) -> Float[Array, "B T"]:
    """Weights without length normalisation: w = m / (N_rows · length).

    `length` is the same constant for every batch; None uses the width T of the mask.
    """
    _, rows = _lengths_and_rows(mask)
    return jnp.where(mask, 1.0 / rows / (mask.shape[1] if length is None else length), 0.0)


def _lengths_and_rows(mask: Bool[Array, "B T"]) -> tuple[Int[Array, " B"], Int[Array, ""]]:
    """Return the row lengths n_i and the number of rows with n_i ≥ 1."""
    lengths = jnp.sum(mask, axis=1)
    return lengths, jnp.sum(lengths > 0)
