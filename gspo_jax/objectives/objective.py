"""The Objective type, which the catalogue's factories return and `objectives.loss` evaluates."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxtyping import Array, Bool, Float

from gspo_jax.objectives.surrogates import Batch, Surrogate


@dataclass(frozen=True, kw_only=True)
class Critic:
    """Settings of an objective's critic: how it estimates advantages (`gae`) and how it is trained (`value_loss`)."""

    gamma: float
    """Discount of the rewards, per token."""
    lam: float
    """λ of GAE: 1 relies on the rewards alone, 0 on the critic one token ahead."""
    whiten: bool
    """True if advantages are normalised to mean 0 and standard deviation 1 over the batch."""
    value_clip: float
    """Clip range of a value around the old value in the critic's loss."""
    value_weight: float
    """Weight of the critic's loss relative to the policy's."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """An objective with its hyper-parameters bound; loss = −Σ weights(mask) · surrogate(batch).gain."""

    name: str
    """Name of the factory in `__all__`."""
    surrogate: Callable[[Batch], Surrogate]
    """Function from a batch to per-token gains, ratios and gates."""
    weights: Callable[[Bool[Array, "B T"]], Float[Array, "B T"]]
    """mask -> w[B, T], 0 outside the mask. Computed once for a whole mini-batch, then split along with it."""
    advantage: Callable[..., Float[Array, " B"]] | None
    """(rewards [B], group_size=G) -> Â [B], used if the caller passes rewards; None: Â comes from a critic."""
    token_advantages: bool
    """True if the definition allows per-token advantages [B, T] besides per-response ones [B]."""
    level: Literal["token", "sequence"]
    """Level of the importance ratio that is bounded."""
    bounds: Mapping[str, float] = field(hash=False)  # a dict has no hash, and an objective may be a static argument
    """Bounds of that ratio, keyed by hyper-parameter name; empty if it has none."""
    critic: Critic | None = None
    """Settings of the critic; None if the objective has none."""
    router_shift: bool = False
    """True if the surrogate needs `Batch.router_shift`."""
    negative_mask: float | None = None
    """δ of the off-policy sequence mask of DeepSeek-V3.2, https://arxiv.org/abs/2512.02556; None: off. Where Â < 0, the
    tokens of a response have no gain if the mean of log μ − log π_θ over them exceeds δ, μ the sampler's policy."""
