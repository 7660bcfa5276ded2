"""Primitives of the objectives: log-ratios, clips and gates, token weights.

All work under jit and grad and on inputs sharded over rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped


class TokenBatch(NamedTuple):
    """Inputs of an objective's surrogate."""

    logprobs: Float[Array, "B T"]
    """log π_θ."""
    old_logprobs: Float[Array, "B T"]
    """log π_old."""
    mask: Bool[Array, "B T"]
    """True on the tokens that the policy sampled. Elsewhere log-probs are undefined."""
    advantages: Float[Array, "B T"]
    """Â, constant, at least float32, 0 outside the mask."""
    router_shift: Float[Array, "B T"] | None = None
    """γ (1: unchanged routing), constant, at least float32, 1 outside the mask."""


class Surrogate(NamedTuple):
    """Per-token result of an objective, before weighting."""

    gain: Float[Array, "B T"]
    """Quantity to maximise; the only field that carries a gradient."""
    ratio: Float[Array, "B T"]
    """Importance ratio, constant."""
    gated_low: Bool[Array, "B T"]
    """True where the lower bound zeroed the gradient (cispo, minpro: clipped the weight; sapo, vespo: halved the
    gate)."""
    gated_high: Bool[Array, "B T"]


class ClippedLogRatios(NamedTuple):
    """Log-ratios clipped to their bounds. Clipped entries carry no gradient."""

    log_ratios: Float[Array, "B T"]
    gated_low: Bool[Array, "B T"]
    gated_high: Bool[Array, "B T"]


def widen(x: Shaped[Array, "..."]) -> Float[Array, "..."]:
    """Cast x to float32, but keep float64. The bf16 spacing near 1, 2^-8, would swamp a clip range of 3e-4."""
    x = jnp.asarray(x)  # pyright: ignore[reportUnknownMemberType] (jax leaves a default of its stub untyped)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def log_ratio(
    logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Return each token's log importance ratio, d = log π_θ − log π_old, 0 outside the mask.

    Inputs outside the mask, NaN included, affect neither value nor gradient. `old_logprobs` are constants.
    """
    return jnp.where(mask, widen(logprobs) - jax.lax.stop_gradient(old_logprobs), 0.0)


def row_mean(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, " B"]:
    """Return each row's masked mean, (1/n_i) Σ_t m·x, 0 for an empty row."""
    return jnp.sum(x, axis=1, where=mask) / jnp.maximum(jnp.sum(mask, axis=1), 1)


def lowest_before(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Return the smallest x of each row's earlier tokens in the mask, 0 where there is none and outside the mask."""
    nothing = jax.lax.full((), jnp.inf, x.dtype)
    earlier = jax.lax.pad(jnp.where(mask, x, nothing), nothing, ((0, 0, 0), (1, -1, 0)))
    lowest = jax.lax.cummin(earlier, axis=1)
    return jnp.where(mask & (lowest < nothing), lowest, 0.0)


def policy_gradient(b: TokenBatch) -> Surrogate:
    """Plain policy gradient without a gate: gain = Â·log π_θ."""
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

    https://arxiv.org/abs/1707.06347. With `dual_clip` = c the gain is at least c·Â where Â < 0, which bounds the
    gradient there. https://arxiv.org/abs/1912.09729

    A ratio exactly on a bound is not gated. For a gated token, or Â = 0, the gradient is 0 even if r overflows.
    """
    ceiling = jnp.where(advantages > 0, 1 + high, jnp.inf if dual_clip is None else dual_clip)
    ratio = jnp.exp(jax.lax.stop_gradient(log_ratios))
    gated_low = (advantages < 0) & (ratio < 1 - low)
    gated_high = (advantages != 0) & (ratio > ceiling)
    # Masked before exp: if exp overflows, its backward pass would compute 0 * inf.
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


def geometric(b: TokenBatch, bounded: ClippedLogRatios) -> Surrogate:
    """Geometric-mean surrogate, one gain per response: gain = Â·exp((1/n) Σ m·l), l the clipped log-ratios.

    A gated token loses only its own gradient term.
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
    # The sigmoid is flat long before e^80, and exp would overflow to a gradient of 0 * inf.
    ratio = jnp.exp(jnp.minimum(log_ratios, 80.0))
    # Not jax.nn.sigmoid: its gradient p·(1 − p) cancels for p near 1.
    p = jnp.exp(jax.nn.log_sigmoid(tau * (ratio - 1)))
    gated = 4 * p * (1 - p) < 0.5
    below = ratio < 1
    return Surrogate(4 / tau * p * advantages, jax.lax.stop_gradient(ratio), gated & below, gated & ~below)


def weighted_score(b: TokenBatch, weight: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Policy-gradient gain with a constant weight per token: weight·Â·log π_θ.

    0 where Â is 0, even if the weight overflows.
    """
    return jnp.where(b.advantages == 0, 0.0, weight * b.advantages) * jnp.where(b.mask, b.logprobs, 0.0)


def probability_change(
    logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Return p − q, the change of each token's probability, p = π_θ and q = π_old; constant, 0 outside the mask.

    Computed with expm1, so a small change keeps its sign and digits.
    """
    d = log_ratio(logprobs, old_logprobs, mask)
    larger = jnp.exp(jnp.where(mask, jnp.maximum(widen(logprobs), old_logprobs), 0.0))
    return jax.lax.stop_gradient(-jnp.sign(d) * larger * jnp.expm1(-jnp.abs(d)))


def binary_kl(
    logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """KL from π_old to π_θ of "this token or another one": q·log(q/p) + (1 − q)·log((1 − q)/(1 − p)).

    1e-8 is added to 1 − q and 1 − p. Constant, 0 outside the mask.
    """
    d = log_ratio(logprobs, old_logprobs, mask)
    new, old = (jnp.where(mask, widen(x), -1.0) for x in (logprobs, old_logprobs))
    others, others_old = (jnp.maximum(-jnp.expm1(x), 0.0) for x in (new, old))
    k = -jnp.exp(old) * d + others_old * (jnp.log(others_old + 1e-8) - jnp.log(others + 1e-8))
    return jax.lax.stop_gradient(k)


def sequence_mean(mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Weight all responses equally: w = m / (N_rows · n_i), N_rows the number of rows with a token."""
    lengths, rows = _lengths_and_rows(mask)
    # rows · lengths would overflow int32 for big batches of long responses. An empty row's 1/0 is masked.
    return jnp.where(mask, 1.0 / rows / lengths[:, None], 0.0)


def token_mean(mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Weight all tokens equally: w = m / Σ n."""
    return jnp.where(mask, 1.0 / jnp.sum(mask), 0.0)


def constant_length(mask: Bool[Array, "B T"], *, length: float | None) -> Float[Array, "B T"]:
    """Weight without length normalisation: w = m / (N_rows · length); None uses the width T of the mask."""
    _, rows = _lengths_and_rows(mask)
    return jnp.where(mask, 1.0 / rows / (mask.shape[1] if length is None else length), 0.0)


def _lengths_and_rows(mask: Bool[Array, "B T"]) -> tuple[Int[Array, " B"], Int[Array, ""]]:
    lengths = jnp.sum(mask, axis=1)
    return lengths, jnp.sum(lengths > 0)
