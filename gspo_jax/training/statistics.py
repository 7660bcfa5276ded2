"""What an update tells of itself: sums that add up over micro-batches, and the metrics made of them.

Names are explained in docs/metrics.md.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gspo_jax import objectives
from gspo_jax.objectives import Info
from gspo_jax.routing import drift as drift_lib
from gspo_jax.training.scoring import ModelScores
from gspo_jax.types import Experience

Metrics = dict[str, Any]


def of_policy(scores: ModelScores, batch: Experience, info: Info) -> tuple[Metrics, Metrics]:
    """What every objective reports of a micro-batch: sums over its tokens; maxima over tokens and responses."""
    rollout, mask = batch.rollout, batch.mask
    d = jnp.where(mask, scores.logprobs - batch.old.logprobs, 0)
    x = jnp.where(mask, scores.logprobs - rollout.logprobs, 0)
    sums = {
        "entropy": jnp.where(mask, scores.entropy, 0).sum(),
        "kl": (jnp.exp(d) - 1 - d).sum(),
        "mismatch_k1": -x.sum(),
        "mismatch_k3": (jnp.exp(x) - 1 - x).sum(),
        "mismatch_abs": jnp.abs(x).sum(),
        "moments": _moments(scores.logprobs, rollout.logprobs, mask),
        "clip": objectives.clip_sums(info, mask),
    }
    if rollout.experts.shape[-1]:  # a dense model routes nothing
        sums["drift"] = drift_lib.compare(rollout.experts, scores.experts, mask)
    if batch.correction is not None:
        sums["correction"] = jnp.where(mask, batch.correction, 0).sum()
        sums["dropped"] = (mask & (batch.correction == 0)).sum().astype(jnp.float32)
    maxima = {
        "token": jnp.abs(d).max(),
        "sequence": jnp.abs(d.sum(axis=1) / jnp.maximum(mask.sum(axis=1), 1)).max(),
        "mismatch": jnp.abs(x).max(),
    }
    return sums, maxima


def of_critic(
    values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    losses: Float[Array, "B T"],
    clipped: Bool[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Metrics:
    """Sums over a micro-batch's tokens of what a critic reports."""
    errors = returns - values
    return {
        "losses": jnp.where(mask, losses, 0).sum(),
        "clipped": jnp.where(mask, clipped, False).sum().astype(jnp.float32),
        "values": jnp.where(mask, values, 0).sum(),
        "moments": _moments(errors, returns, mask),
    }


def metrics(sums: Metrics, maxima: Metrics) -> Metrics:
    """Means per token to learn from, rates and maxima, by their names in metrics.jsonl."""
    tokens = jnp.maximum(sums["clip"].tokens, 1)
    found = {
        "update/tokens": sums["clip"].tokens,
        "actor/loss": sums["loss"],
        "actor/entropy": sums["entropy"] / tokens,
        "actor/kl": sums["kl"] / tokens,
        "ratio/token_log_max": maxima["token"],
        "ratio/sequence_log_max": maxima["sequence"],
        "mismatch/kl": sums["mismatch_k3"] / tokens,
        "mismatch/kl_k1": sums["mismatch_k1"] / tokens,
        "mismatch/mean": sums["mismatch_abs"] / tokens,
        "mismatch/max": maxima["mismatch"],
        "mismatch/pearson": _pearson(sums["moments"], tokens),
        **objectives.clip_fractions(sums["clip"]),
    }
    if "drift" in sums:
        found |= drift_lib.metrics(sums["drift"])
    if "shift" in sums:
        found["routing/router_shift"] = sums["shift"] / tokens
    if "correction" in sums:
        found["mismatch/weight_mean"] = sums["correction"] / tokens
        found["mismatch/dropped"] = sums["dropped"] / tokens
    if "reference_kl" in sums:
        found["reference/kl"] = sums["reference_kl"] / tokens
    return found | (_critic_metrics(sums["critic"], tokens) if "critic" in sums else {})


def _critic_metrics(sums: Metrics, tokens: Array) -> Metrics:
    unexplained, spread, _ = _variances(sums["moments"], tokens)
    return {
        "critic/loss": sums["losses"] / tokens,
        "critic/value_mean": sums["values"] / tokens,
        "critic/return_mean": sums["moments"][1] / tokens,
        "critic/clip_fraction": sums["clipped"] / tokens,
        # Of equal returns there is nothing to explain.
        "critic/explained_variance": jnp.where(spread > 0, 1 - unexplained / jnp.where(spread > 0, spread, 1), 0.0),
    }


def _moments(x: Float[Array, "B T"], y: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, " 6"]:
    """Sums over the mask of x, y and x − y, then of their squares: what variances and a correlation are made of."""
    each = [jnp.where(mask, z, 0) for z in (x, y, x - y)]
    return jnp.stack([z.sum() for z in each] + [(z * z).sum() for z in each])


def _variances(moments: Float[Array, " 6"], n: Array) -> Float[Array, " 3"]:
    """Of x, y and x − y."""
    means, squares = (moments / n).reshape(2, 3)
    return jnp.maximum(squares - means**2, 0)


def _pearson(moments: Float[Array, " 6"], n: Array) -> Array:
    """Pearson's correlation; 1 where either side is constant, as two equal constants agree.

    By the variance of x − y and not by that of x·y, in which float32 would lose what tells two good copies apart.
    """
    x, y, apart = _variances(moments, n)
    spread = jnp.sqrt(x * y)
    return jnp.where(spread > 0, (x + y - apart) / jnp.where(spread > 0, 2 * spread, 1), 1.0)
