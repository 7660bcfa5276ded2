"""What an objective is, whoever defines it: the catalogue's factories return one, `objectives.loss` evaluates it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxtyping import Array, Bool, Float

from gspo_jax.objectives.surrogates import Batch, Surrogate


@dataclass(frozen=True, kw_only=True)
class Critic:
    """How an objective's critic makes advantages and is trained itself: see `gae` and `value_loss`."""

    gamma: float
    """Discount of the rewards, per token."""
    lam: float
    """λ of GAE: 1 trusts the rewards alone, 0 the critic one token ahead."""
    whiten: bool
    """Whether advantages get mean 0 and deviation 1 over the batch."""
    value_clip: float
    """How far a value may move from the old one before its loss is held."""
    value_weight: float
    """Weight of the critic's loss beside the policy's."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """An objective with its hyper-parameters bound; loss = −Σ weights(mask) · surrogate(batch).gain."""

    name: str
    """Name of the factory in `__all__`."""
    surrogate: Callable[[Batch], Surrogate]
    """What the objective says of every token."""
    weights: Callable[[Bool[Array, "B T"]], Float[Array, "B T"]]
    """mask -> w[B, T], 0 outside it. Computed once for a whole mini-batch, then cut up with it."""
    advantage: Callable[..., Float[Array, " B"]] | None
    """(rewards [B], group_size=G) -> Â [B], used where the caller brings rewards; None: they are a critic's."""
    token_advantages: bool
    """Whether the definition allows an advantage for each token, [B, T], besides one for each row."""
    level: Literal["token", "sequence"]
    """Whose ratio is bounded."""
    bounds: Mapping[str, float] = field(hash=False)  # a dict has no hash, and an objective may be a static argument
    """The bounds of that ratio, by name of the hyper-parameter; empty where nothing is clipped."""
    critic: Critic | None = None
    """How the critic is used, where there is one."""
    router_shift: bool = False
    """Whether the surrogate needs `Batch.router_shift`."""
