"""Routing drift: how far expert choices for the same tokens move between two policies.

`compare` returns additive sums, `metrics` rates. A choice is the router's own, with a sigmoid router's bias and
groups: an expert that these alone bring in or push out is flipped too. Probabilities are p of `models/moe.py`, without
them.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class Drift:
    """Sums over the tokens in the mask with a known old route (not -1). `kl` and `shift` need old log-probs."""

    tokens: Float[Array, ""]
    flips: Float[Array, " L"]
    """Per layer, 1 - |E_old & E_new| / K."""
    changed: Float[Array, ""]
    """Tokens with a different expert set in at least one layer."""
    layers_changed: Float[Array, ""]
    """Number of layers with a different expert set."""
    top1_changed: Float[Array, ""]
    """Fraction of layers whose most probable expert among the chosen is another."""
    kl: Float[Array, ""] | None
    """`router_kl`, averaged over layers."""
    shift: Float[Array, ""] | None


def compare(
    old: Int[Array, "L B T K"],
    new: Int[Array, "L B T K"],
    mask: Bool[Array, "B T"],
    *,
    old_logprobs: Float[Array, "L B T K"] | None = None,
    new_logprobs: Float[Array, "L B T K"] | None = None,
) -> Drift:
    """Sum up how the expert choice `new` differs from `old`, each most probable first.

    `old` is -1 if unknown. Log-probs are of the two routers at the experts of `old`.
    """
    L, K = old.shape[0], old.shape[-1]
    old, new = old.astype(jnp.int32), new.astype(jnp.int32)
    known = mask & (old >= 0).all(axis=(0, 3))
    kept = (old[..., :, None] == new[..., None, :]).any(axis=-1).sum(axis=-1)
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
    """Return RSPO's router shift γ: exp(−mean over layers and the old experts of |log ρ_new − log ρ_old|).

    https://arxiv.org/abs/2510.23027. Both arguments are log-probs at the old router's experts. Of a sigmoid router ρ is
    σ_e / Σσ: a factor common to all scores, which renormalised weights do not have, is no shift, and neither is a bias.
    """
    return jnp.exp(-jnp.abs(new - old).mean(axis=(0, 3)))


def router_kl(old: Float[Array, "L B T K"], new: Float[Array, "L B T K"]) -> Float[Array, "L B T"]:
    """Return KL(old ‖ new) of two routers in nats, over the old router's K experts plus all others lumped into one.

    By the data-processing inequality, a lower bound on the KL over all experts. The rest's probability is floored at
    1e-7. Of a sigmoid router it is the KL of the scores divided by their sum.
    """
    old_rest, new_rest = (jnp.maximum(1 - jnp.exp(x).sum(axis=-1), 1e-7) for x in (old, new))
    return (jnp.exp(old) * (old - new)).sum(axis=-1) + old_rest * jnp.log(old_rest / new_rest)


def metrics(drift: Drift) -> dict[str, jax.Array]:
    """Return means over the compared tokens, keyed as in metrics.jsonl."""
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
