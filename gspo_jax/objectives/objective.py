"""The Objective type."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxtyping import Array, Bool, Float

from gspo_jax.objectives.advantages import group_zscore
from gspo_jax.objectives.surrogates import Surrogate, TokenBatch


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """Settings of a critic's advantages (`gae`) and training (`value_loss`)."""

    gamma: float
    """Discount per token."""
    lam: float
    """1 relies on the rewards alone, 0 on the critic one token ahead."""
    whiten: bool
    """Normalise advantages over the batch to mean 0 and standard deviation 1."""
    value_clip: float
    """Around the old value."""
    value_weight: float
    """Relative to the policy's loss."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """An objective with its hyper-parameters bound; loss = −Σ weights(mask) · surrogate(batch).gain."""

    name: str
    surrogate: Callable[[TokenBatch], Surrogate]
    weights: Callable[[Bool[Array, "B T"]], Float[Array, "B T"]]
    """mask -> w[B, T], 0 outside the mask."""
    advantage: Callable[..., Float[Array, " B"] | Float[Array, "B T"]] | None = group_zscore
    """(rewards [B], NaN without a score, group_size=G) -> Â [B]; None: Â comes from a critic."""
    by_reward: bool = False
    """True if `advantage` takes the rewards by name, {name: [B]}, in place of their sum, as `advantages.gdpo`."""
    by_energy: bool = False
    """True if `advantage` also takes each token's energy and the mask, and gives Â [B, T], as
    `advantages.optimal_token_baseline`."""
    token_advantages: bool = False
    """True if advantages may also be per token, [B, T]."""
    turn_discount: float | None = None
    """γ per turn of `advantages.group_turns`; None: one advantage per episode, beside those of step rewards."""
    level: Literal["token", "sequence"] = "token"
    """Level of the bounded importance ratio."""
    one_gain: bool = False
    """True if a response has one gain, so that the weight of each token falls on the log-probs of all of them alike."""
    weighs_tokens: bool = True
    """True if the gain weighs each token by its whole ratio π_θ/π_old, alone or in a product. From the sampler's
    log-probs as π_old that is a correction already, beside which there is no `mismatch.score_centering`."""
    bounds: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)  # a dict has no hash
    """Bounds of that ratio, keyed by hyper-parameter name."""
    critic: CriticSettings | None = None
    router_shift: bool = False
    negative_mask: float | None = None
    """δ of the off-policy sequence mask of DeepSeek-V3.2, https://arxiv.org/abs/2512.02556; None: off. Where Â < 0, a
    response's tokens have no gain if their mean log μ − log π_θ exceeds δ, μ the sampler's policy."""
