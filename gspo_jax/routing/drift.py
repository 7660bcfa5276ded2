"""Routing drift: how far the expert choice for the same tokens moves between two policies.

The choice of a later policy's router is compared with the recorded choice of an earlier one. `compare` returns sums, so
that micro-batches can be added up; `metrics` turns them into rates.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class Drift:
    """Sums over the compared tokens: those in the mask whose old route is known (not -1)."""

    tokens: Float[Array, ""]
    """Number of compared tokens."""
    flips: Float[Array, " L"]
    """Per layer, the sum over tokens of 1 - |E_old & E_new| / K."""
    changed: Float[Array, ""]
    """Tokens whose expert set differs in at least one layer."""
    layers_changed: Float[Array, ""]
    """Sum over tokens of the number of layers whose expert set differs."""
    top1_changed: Float[Array, ""]
    """Sum over tokens of the fraction of layers whose most probable expert differs."""
    kl: Float[Array, ""] | None
    """Sum over tokens of `router_kl`, averaged over layers; None without old log-probs."""
    shift: Float[Array, ""] | None
    """Sum over tokens of `router_shift`; None without old log-probs."""


def compare(
    old: Int[Array, "L B T K"],
    new: Int[Array, "L B T K"],
    mask: Bool[Array, "B T"],
    *,
    old_logprobs: Float[Array, "L B T K"] | None = None,
    new_logprobs: Float[Array, "L B T K"] | None = None,
) -> Drift:
    """Sum up how the expert choice `new` differs from `old`.

    Args:
      old: recorded expert ids, most probable first; -1 if unknown.
      new: the later router's own choice for the same tokens, in its order.
      mask: True on the tokens to compare.
      old_logprobs, new_logprobs: log-probs of the two routers at the experts of `old`.
    """
    L, K = old.shape[0], old.shape[-1]
    old, new = old.astype(jnp.int32), new.astype(jnp.int32)
    known = mask & (old >= 0).all(axis=(0, 3))
    kept = (old[..., :, None] == new[..., None, :]).any(axis=-1).sum(axis=-1)  # [L, B, T]
    changed = known[None] & (kept < K)
    kl = shift = None
    if old_logprobs is not None:
        assert new_logprobs is not None
        kl = jnp.where(known, router_kl(old_logprobs, new_logprobs).mean(axis=0), 0).sum()
        shift = jnp.where(known, router_shift(old_logprobs, new_logprobs), 0).sum()
    return Drift(
        tokens=_count(known),
        flips=jnp.where(known[None], 1 - kept / K, 0).sum(axis=(1, 2)),
        changed=_count(changed.any(axis=0)),
        layers_changed=_count(changed),
        top1_changed=_count(known[None] & (old[..., 0] != new[..., 0])) / L,
        kl=kl,
        shift=shift,
    )


def router_shift(old: Float[Array, "L B N K"], new: Float[Array, "L B N K"]) -> Float[Array, "B N"]:
    """RSPO's router shift γ per position: exp(−mean over layers and the old experts of |log ρ_new − log ρ_old|).

    https://arxiv.org/abs/2510.23027

    Args:
      old: log-probs of the old router at the experts that it chose.
      new: log-probs of a later router at the same experts.
    """
    return jnp.exp(-jnp.abs(new - old).mean(axis=(0, 3)))


def router_kl(old: Float[Array, "L B T K"], new: Float[Array, "L B T K"]) -> Float[Array, "L B T"]:
    """KL(old ‖ new) of two routers in nats, over the old router's K experts plus all other experts lumped into one.

    By the data-processing inequality this is a lower bound on the KL over all experts, and needs only K instead of E
    numbers per token. The probability of the lumped rest is floored at 1e-7. Arguments as for `router_shift`.
    """
    old_rest, new_rest = (jnp.maximum(1 - jnp.exp(x).sum(axis=-1), 1e-7) for x in (old, new))
    return (jnp.exp(old) * (old - new)).sum(axis=-1) + old_rest * jnp.log(old_rest / new_rest)


def metrics(drift: Drift) -> dict[str, jax.Array]:
    """Return means over the compared tokens, keyed by their names in metrics.jsonl."""
    n = jnp.maximum(drift.tokens, 1)
    per_layer = drift.flips / n
    found = {
        "routing/flip_rate": per_layer.mean(),
        "routing/flip_rate_per_layer": per_layer,
        "routing/tokens_changed": drift.changed / n,
        "routing/layers_changed": drift.layers_changed / n,
        "routing/top1_changed": drift.top1_changed / n,
    }
    if drift.kl is not None and drift.shift is not None:
        found |= {"routing/router_kl": drift.kl / n, "routing/router_shift": drift.shift / n}
    return found


def _count(x: Bool[Array, "..."]) -> Float[Array, ""]:
    return x.sum().astype(jnp.float32)
