"""Per-token terms added to an objective: the KL to a reference policy and the critic's loss.

Values outside the mask have no effect, NaN included.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gspo_jax.objectives.checks import check_choice, check_positive, check_tokens
from gspo_jax.objectives.surrogates import log_ratio, widen


def kl(
    logprobs: Float[Array, "B T"],
    reference_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    estimator: Literal["k1", "k2", "k3"],
) -> Float[Array, "B T"]:
    """Return a per-token estimate of KL(π_θ ‖ π_ref), 0 outside the mask; only `logprobs` receives a gradient.

    x = log π_ref − log π_θ: k1 = −x, unbiased; k2 = x²/2, with unbiased gradient; k3 = e^x − x − 1, unbiased and never
    negative, x clamped to ±20. http://joschu.net/blog/kl-approx.html

    Raises UserError for an unknown `estimator`, ValueError for mismatched shapes.
    """
    check_choice(("k1", "k2", "k3"), estimator=estimator)
    check_tokens(logprobs=logprobs, reference_logprobs=reference_logprobs, mask=mask)
    x = -log_ratio(logprobs, reference_logprobs, mask)
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x**2 / 2
    return k3(jnp.clip(x, -20.0, 20.0))


def k3(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Return e^x − 1 − x ≥ 0, Schulman's k3 estimate of a KL from log-ratios x."""
    return jnp.expm1(x) - x  # exp(x) − 1 − x cancels for small x, even below 0


def value_loss(
    values: Float[Array, "B T"],
    old_values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    clip: float,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Return the critic's clipped loss per token, 0 outside the mask, and True where the clip gated its gradient.

    loss = ½·max((V − R)², (V_old + clip(V − V_old, −c, c) − R)²), c = `clip`, as in the PPO paper's code.
    https://arxiv.org/abs/1707.06347

    The returns R = Â + V_old and `old_values` are constants. Raises UserError for `clip` not above 0, ValueError for
    mismatched shapes.
    """
    check_positive("it bounds how far a value may move, usually 0.2", clip=clip)
    check_tokens(values=values, old_values=old_values, returns=returns, mask=mask)
    error = jnp.where(mask, widen(values) - jax.lax.stop_gradient(returns), 0.0)
    change = jnp.where(mask, widen(values) - old_values, 0.0)
    # Not from old_values: inside the clip range exactly 0 is added, so rounding cannot gate a gradient there.
    clipped_error = jax.lax.stop_gradient(error + (jnp.clip(change, -clip, clip) - change))
    cut = jnp.abs(clipped_error) > jnp.abs(error)
    return jnp.where(cut, clipped_error, error) ** 2 / 2, cut
