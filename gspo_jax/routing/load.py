"""Expert load: how evenly tokens are spread over each layer's routed experts. Shared experts have none."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def expert_counts(experts: Int[Array, "L B T K"], mask: Bool[Array, "B T"], *, num_experts: int) -> Float[Array, "L E"]:
    """Count (token, expert) pairs by layer and expert over the mask; ids of -1 are ignored."""
    each = jnp.where(mask[None, :, :, None], experts.astype(jnp.int32), -1)
    columns = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, 1, num_experts), 4)
    return (each[..., None] == columns).sum(axis=(1, 2, 3)).astype(jnp.float32)


def shares(counts: Float[Array, "L E"]) -> Float[Array, "L E"]:
    """Return each expert's share of its layer's pairs; equal without pairs."""
    total = counts.sum(axis=1, keepdims=True)
    return jnp.where(total > 0, counts / jnp.maximum(total, 1), 1 / counts.shape[1])


def metrics(counts: Float[Array, "L E"]) -> dict[str, jax.Array]:
    """Return load metrics averaged over layers, keyed as in metrics.jsonl.

    Maximal violation is max_e load_e / mean load − 1 (arXiv 2408.15664). Load entropy is the entropy of the shares over
    log E: 1 if all experts are used equally, 0 if only one is. Dead experts have no pair.
    """
    share, E = shares(counts), counts.shape[1]
    entropy = -jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1)), 0).sum(axis=1)
    return {
        "routing/max_violation": (share.max(axis=1) * E - 1).mean(),
        "routing/load_entropy": (entropy / jnp.log(max(E, 2))).mean(),
        "routing/dead_experts": (counts == 0).mean(),
    }
