"""Routing drift: how far expert choices for the same tokens move between two policies.

`compare` returns additive sums, `metrics` rates. A token has the routes of the position that predicts it, the one
before or the prompt's last: they made its log-prob. A choice is the router's own, with a sigmoid router's bias and
groups: an expert that these alone bring in or push out is flipped too. Probabilities are p of `models/moe.py`, without
them.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Shaped


@struct.dataclass
class Drift:
    """Sums over tokens with a known old route (not -1). `kl`, `shift` and `lost` need old log-probs."""

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
    lost: Float[Array, ""] | None
    """The old router's probability of the flipped experts, averaged over layers."""


def compare(
    old: Int[Array, "L B T K"],
    new: Int[Array, "L B T K"],
    counts: Shaped[Array, "B T"],
    *,
    old_logprobs: Float[Array, "L B T K"] | None = None,
    new_logprobs: Float[Array, "L B T K"] | None = None,
) -> Drift:
    """Sum up how the expert choice `new` differs from `old`, each most probable first.

    `old` is -1 if unknown. Log-probs are of the two routers at the experts of `old`.

    Args:
      counts: tokens that each position counts for: a mask, or numbers as of `layout.predicted`.
    """
    L, K = old.shape[0], old.shape[-1]
    known = jnp.where((old >= 0).all(axis=(0, 3)), counts, 0).astype(jnp.float32)
    gone = _gone(old, new)
    changed = gone.any(axis=-1)

    def total(x: Shaped[Array, "B T"]) -> Float[Array, ""]:
        return jnp.where(known > 0, x * known, 0).sum()

    kl = shift = lost = None
    if old_logprobs is not None:
        assert new_logprobs is not None
        kl = total(router_kl(old_logprobs, new_logprobs).mean(axis=0))
        shift = total(router_shift(old_logprobs, new_logprobs))
        lost = total(jnp.where(gone, jnp.exp(old_logprobs), 0).sum(axis=-1).mean(axis=0))
    return Drift(
        tokens=known.sum(),
        flips=(gone.sum(axis=-1) / K * known[None]).sum(axis=(1, 2)),
        changed=total(changed.any(axis=0)),
        layers_changed=total(changed.sum(axis=0)),
        top1_changed=total((old[..., 0] != new[..., 0]).sum(axis=0)) / L,
        kl=kl,
        shift=shift,
        lost=lost,
    )


def flipped(old: Int[Array, "L B T K"], new: Int[Array, "L B T K"]) -> Int[Array, "L B T"]:
    """Return how many experts of `old` are not in `new`; -1 where `old` is unknown."""
    return jnp.where((old >= 0).all(axis=-1), _gone(old, new).sum(axis=-1), -1)


def rates(flips: Int[Array, "*B T L"], mask: Bool[Array, "*B T"], *, k: int) -> Float[Array, " 2"]:
    """Return the share of flipped experts, of `k` in each layer, and the share of (token, layer) pairs with one.

    `flips` are as of `flipped`.
    """
    known = jnp.where(mask[..., None] & (flips >= 0), jnp.float32(1), 0)
    found = jnp.stack([(known * flips).sum() / k, (known * (flips > 0)).sum()])
    return found / jnp.maximum(known.sum(), 1)


def _gone(old: Int[Array, "L B T K"], new: Int[Array, "L B T K"]) -> Bool[Array, "L B T K"]:
    old, new = old.astype(jnp.int32), new.astype(jnp.int32)
    return ~(old[..., :, None] == new[..., None, :]).any(axis=-1)


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
    if drift.kl is not None and drift.shift is not None and drift.lost is not None:
        found |= {"routing/router_kl": drift.kl / n, "routing/router_shift": drift.shift / n}
        found["routing/mass_lost"] = drift.lost / n
    return found
