"""What the objectives are made of: log-ratios, their mean over a response, the clip, the weights of tokens.

Arrays in, arrays out; no mesh, no model. All of it may be sharded over rows and holds under jit and grad.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped


class Batch(NamedTuple):
    """What an objective looks at."""

    logprobs: Float[Array, "B T"]
    """log π_θ of the response tokens."""
    old_logprobs: Float[Array, "B T"]
    """log π_old of the same tokens."""
    mask: Bool[Array, "B T"]
    """True on the tokens that the policy sampled; the log-probs hold anything elsewhere."""
    advantages: Float[Array, "B T"]
    """Â, a constant, at least float32, 0 outside the mask."""


class Surrogate(NamedTuple):
    """What one objective says of every token, before the weights."""

    gain: Float[Array, "B T"]
    """The quantity to maximise; the one field that carries a gradient."""
    ratio: Float[Array, "B T"]
    """Importance ratio that the gate looked at, a constant."""
    gated_low: Bool[Array, "B T"]
    """True where the lower bound cut the gradient to zero."""
    gated_high: Bool[Array, "B T"]
    """True where the upper bound cut the gradient to zero."""


def widen(x: Shaped[Array, "..."]) -> Float[Array, "..."]:
    """x in float32, or in float64 where it already is: bf16 spacing near 1 (2^-8) would swamp a clip range of 3e-4."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def log_ratio(
    logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """How much likelier each token has become: d = log π_θ − log π_old, and 0 outside the mask.

    What stands outside the mask, NaN included, reaches neither value nor gradient. `old_logprobs` are constants.
    """
    return jnp.where(mask, widen(logprobs) - jax.lax.stop_gradient(widen(old_logprobs)), 0.0)


def row_mean(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, " B"]:
    """(1/n_i) Σ_t m·x, and 0 for an empty row; of log-ratios, the log of the sequence ratio s_i (a geometric mean)."""
    return jnp.sum(x, axis=1, where=mask) / jnp.maximum(jnp.sum(mask, axis=1), 1)


def clipped(log_ratios: Float[Array, "B T"], advantages: Float[Array, "B T"], *, low: float, high: float) -> Surrogate:
    """The clipped surrogate of PPO: gain = min(r·Â, clip(r, 1 − low, 1 + high)·Â), r = exp(log_ratios).

    https://arxiv.org/abs/1707.06347. A ratio exactly on a bound is not gated. Where the gate is shut, or Â is 0, the
    gradient is 0 even if r overflows.
    """
    ratio = jnp.exp(jax.lax.stop_gradient(log_ratios))
    gated_low = (advantages < 0) & (ratio < 1 - low)
    gated_high = (advantages > 0) & (ratio > 1 + high)
    # Emptied before exp and not after it: behind an overflow the gradient of exp is 0 * inf.
    idle = gated_low | gated_high | (advantages == 0)
    passed = jnp.exp(jnp.where(idle, 0.0, log_ratios))
    kept = jnp.where(gated_low, 1 - low, jnp.where(gated_high, 1 + high, passed))
    return Surrogate(kept * advantages, ratio, gated_low, gated_high)


def sequence_mean(mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Every response counts the same: w = m / (N_rows · n_i), N_rows the rows with a token."""
    lengths, rows = _lengths_and_rows(mask)
    # Not 1 / (rows · lengths): a big batch of long responses overflows int32. An empty row's 1/0 is not selected.
    return jnp.where(mask, 1.0 / rows / lengths[:, None], 0.0)


def token_mean(mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Every token counts the same: w = m / Σ n."""
    return jnp.where(mask, 1.0 / jnp.sum(mask), 0.0)


def constant_length(mask: Bool[Array, "B T"], *, length: float) -> Float[Array, "B T"]:
    """No normalisation by length: w = m / (N_rows · length), `length` the same number in every batch."""
    _, rows = _lengths_and_rows(mask)
    return jnp.where(mask, 1.0 / rows / length, 0.0)


def _lengths_and_rows(mask: Bool[Array, "B T"]) -> tuple[Int[Array, " B"], Int[Array, ""]]:
    """n_i, and the number of rows with n_i ≥ 1."""
    lengths = jnp.sum(mask, axis=1)
    return lengths, jnp.sum(lengths > 0)
