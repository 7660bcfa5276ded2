"""One short factory per paper, each a composition of primitives, so that two papers can be compared line by line.

A new objective is a function here and its name in `__all__`: that is all a config or `objectives.make` needs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gspo_jax.objectives.advantages import group_zscore
from gspo_jax.objectives.surrogates import Batch, Surrogate, clipped, log_ratio, row_mean, sequence_mean
from gspo_jax.types import UserError

__all__ = ["grpo", "gspo", "gspo_token"]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """An objective with its hyper-parameters bound; loss = −Σ weights(mask) · surrogate(batch).gain."""

    name: str
    """Name of the factory in `__all__`."""
    surrogate: Callable[[Batch], Surrogate]
    """What the objective says of every token."""
    weights: Callable[[Bool[Array, "B T"]], Float[Array, "B T"]]
    """mask -> w[B, T], 0 outside it. Computed once for a whole mini-batch, then cut up with it."""
    advantage: Callable[..., Float[Array, " B"]]
    """(rewards [B], group_size=G) -> Â [B], used where the caller brings rewards and not advantages."""
    token_advantages: bool
    """Whether the definition allows an advantage for each token, [B, T], besides one for each row."""


def grpo(*, low: float = 0.2, high: float = 0.2) -> Objective:
    """Group Relative Policy Optimization: the clip of PPO on every token, without a critic.

    gain[i,t] = min(r·Â, clip(r, 1 − low, 1 + high)·Â), r = exp(log π_θ − log π_old). https://arxiv.org/abs/2402.03300

    Â [B] or [B, T]; `low` and `high` are offsets from 1 (the tuned baseline in the GSPO paper: 0.2 and 0.27). Raises
    UserError for `low` outside [0, 1] or `high` below 0.
    """
    _check_offsets(low, high)

    def surrogate(b: Batch) -> Surrogate:
        return clipped(log_ratio(b.logprobs, b.old_logprobs, b.mask), b.advantages, low=low, high=high)

    return Objective(
        name="grpo", surrogate=surrogate, weights=sequence_mean, advantage=group_zscore, token_advantages=True
    )


def gspo(*, low: float = 3e-4, high: float = 4e-4) -> Objective:
    """Group Sequence Policy Optimization: one ratio for a response, clipped as a whole.

    gain[i,t] = min(s_i·Â, clip(s_i, 1 − low, 1 + high)·Â), s_i = exp((1/n_i) Σ_t m·(log π_θ − log π_old)), gradient
    through s_i. https://arxiv.org/abs/2507.18071

    Â [B]; `low` and `high` are offsets from 1. Raises UserError for `low` outside [0, 1] or `high` below 0.
    """
    _check_offsets(low, high)

    def surrogate(b: Batch) -> Surrogate:
        log_s = row_mean(log_ratio(b.logprobs, b.old_logprobs, b.mask), b.mask)
        return clipped(jnp.broadcast_to(log_s[:, None], b.mask.shape), b.advantages, low=low, high=high)

    return Objective(
        name="gspo", surrogate=surrogate, weights=sequence_mean, advantage=group_zscore, token_advantages=False
    )


def gspo_token(*, low: float = 3e-4, high: float = 4e-4) -> Objective:
    """GSPO with an advantage for each token: the value of the sequence ratio, the gradient of the token's own.

    gain[i,t] = min(s·Â, clip(s, 1 − low, 1 + high)·Â), s[i,t] = sg[s_i]·π_θ / sg[π_θ], s_i as in `gspo`; with Â
    constant in a row it is `gspo` in value, clip and gradient. https://arxiv.org/abs/2507.18071

    Â [B] or [B, T]; `low` and `high` are offsets from 1. Raises UserError for `low` outside [0, 1] or `high` below 0.
    """
    _check_offsets(low, high)

    def surrogate(b: Batch) -> Surrogate:
        d = log_ratio(b.logprobs, b.old_logprobs, b.mask)
        log_s = jax.lax.stop_gradient(row_mean(d, b.mask))
        # d − sg[d] is 0 in value and log π_θ in gradient.
        return clipped(log_s[:, None] + (d - jax.lax.stop_gradient(d)), b.advantages, low=low, high=high)

    return Objective(
        name="gspo_token", surrogate=surrogate, weights=sequence_mean, advantage=group_zscore, token_advantages=True
    )


def _check_offsets(low: float, high: float) -> None:
    """The bounds are offsets: `low=0.2` clips at 0.8."""
    if not 0 <= low <= 1:
        raise UserError(f"low={low} lies outside [0, 1]; it is an offset from 1, so low=0.2 clips at 0.8")
    if not high >= 0:
        raise UserError(f"high={high} lies below 0; it is an offset from 1, so high=0.2 clips at 1.2")
