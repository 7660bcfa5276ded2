"""Routing drift: how far the experts of the same tokens moved between two policies.

Routes recorded when a response was sampled are compared with those of a later forward over the same response. Sums are
returned, so that micro-batches add; `metrics` turns them into rates.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class Drift:
    """Sums over the tokens compared: those in the mask whose old route is known (not -1)."""

    tokens: Float[Array, ""]
    """Tokens compared."""
    flips: Float[Array, " L"]
    """Per layer, the sum over tokens of 1 - |E_old & E_new| / K."""
    changed: Float[Array, ""]
    """Tokens with a different expert set in any layer."""
    layers_changed: Float[Array, ""]
    """Sum over tokens of the number of layers whose expert set differs."""


def compare(old: Int[Array, "B T L K"], new: Int[Array, "L B T K"], mask: Bool[Array, "B T"]) -> Drift:
    """Counts the flips of `new` against `old` over response tokens.

    Args:
      old: the routes recorded at sampling; -1 where a token was never fed.
      new: the routes of a forward over the same tokens, as the model returns them.
      mask: True on response tokens.
    """
    K = old.shape[-1]
    new = jnp.moveaxis(new, 0, 2)
    known = mask & (old >= 0).all(axis=(2, 3))
    kept = (old[..., :, None] == new[..., None, :]).any(axis=-1).sum(axis=-1)  # [B, T, L]
    flips = jnp.where(known[..., None], 1 - kept / K, 0)
    changed = jnp.where(known[..., None], kept < K, False)
    return Drift(
        tokens=known.sum().astype(jnp.float32),
        flips=flips.sum(axis=(0, 1)),
        changed=changed.any(axis=-1).sum().astype(jnp.float32),
        layers_changed=changed.sum().astype(jnp.float32),
    )


def router_shift(old: Float[Array, "B N L K"], new: Float[Array, "L B N K"]) -> Float[Array, "B N"]:
    """RSPO's γ of every position: exp(−mean over layers and the old experts of |log ρ_new − log ρ_old|).

    https://arxiv.org/abs/2510.23027

    Args:
      old: log-probs of the old router at the experts that it chose.
      new: those of a later router at the same experts.
    """
    return jnp.exp(-jnp.abs(jnp.moveaxis(new, 0, 2) - old).mean(axis=(2, 3)))


def metrics(drift: Drift) -> dict[str, jax.Array]:
    """Rates per compared token: flip rate (mean, and per layer), share of tokens changed, layers changed per token."""
    n = jnp.maximum(drift.tokens, 1)
    per_layer = drift.flips / n
    return {
        "routing/flip_rate": per_layer.mean(),
        "routing/flip_rate_per_layer": per_layer,
        "routing/tokens_changed": drift.changed / n,
        "routing/layers_changed": drift.layers_changed / n,
    }
