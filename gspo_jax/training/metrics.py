"""Metrics of an update, from sums over micro-batches. docs/metrics.md explains every name."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gspo_jax import objectives
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.moe import Routes
from gspo_jax.objectives import Info
from gspo_jax.objectives.regularizers import k3
from gspo_jax.routing import drift as drift_lib
from gspo_jax.routing import load as load_lib
from gspo_jax.training.layout import Layout, mask_of_rows, predicted
from gspo_jax.training.scoring import ModelScores
from gspo_jax.types import Batch, RouterRecord

Metrics = dict[str, Any]


def of_policy(
    scores: ModelScores,
    batch: Batch,
    info: Info,
    *,
    config: ModelConfig,
    layout: Layout,
    routes: RouterRecord,
    replayed: Int[Array, "L R M K"] | None = None,
) -> tuple[Metrics, Metrics]:
    """Return a micro-batch's policy and routing statistics: (sums over tokens, maxima over tokens and responses).

    `routes` are the old policy's, at the rows' positions, layers first. `replayed` are -1 where the router chose.
    """
    rollout, mask = batch.rollout, batch.mask
    d = jnp.where(mask, scores.logprobs - batch.old.logprobs, 0)
    x = jnp.where(mask, scores.logprobs - rollout.logprobs, 0)
    s = d.sum(axis=1) / jnp.maximum(mask.sum(axis=1), 1)
    sums = {
        "entropy": jnp.where(mask, scores.entropy, 0).sum(),
        "kl": k3(d).sum(),
        "mismatch_k1": -x.sum(),
        "mismatch_k3": k3(x).sum(),
        "mismatch_abs": jnp.abs(x).sum(),
        "mismatch_beyond": (jnp.abs(x) > math.log(2)).sum().astype(jnp.float32),
        "spread": jnp.stack([z.sum() for z in (d, d * d, s, s * s, mask.any(axis=1).astype(jnp.float32))]),
        "moments": _moments(scores.logprobs, rollout.logprobs, mask),
        "clip": objectives.clip_sums(info, mask),
        "learning": _of_learning(info, mask),
    }
    if config.is_routed:
        sums["routes"] = _of_routes(scores.routes, batch, layout, routes, config.num_experts, replayed)
    if info.masked is not None:
        sums["masked"] = info.masked.sum().astype(jnp.float32)
    if batch.correction is not None:
        sums["correction"] = jnp.where(mask, batch.correction, 0).sum()
        sums["dropped"] = (mask & (batch.correction == 0)).sum().astype(jnp.float32)
    maxima = {
        "token": jnp.abs(d).max(),
        "sequence": jnp.abs(s).max(),
        "mismatch": jnp.abs(x).max(),
    }
    return sums, maxima


def _of_learning(info: Info, mask: Bool[Array, "B T"]) -> Float[Array, " 2"]:
    """Return the gated shares of responses with an advantage other than 0, added up, and their number."""
    own = (mask & (info.advantages != 0)).any(axis=1)
    gated = (info.gated_low | info.gated_high).sum(axis=1) / jnp.maximum(mask.sum(axis=1), 1)
    return jnp.stack([jnp.where(own, gated, 0).sum(), own.sum()])


def of_batch(batch: Batch) -> Metrics:
    """Return how the trainer's routers differ from the sampler's over a whole batch, if it was scored by both."""
    if batch.old.flips is None:
        return {}
    flip_rate, changed = drift_lib.rates(batch.old.flips, batch.mask, k=batch.routes.experts.shape[-1])
    return {"mismatch/flip_rate": flip_rate, "mismatch/routers_changed": changed}


def _of_routes(
    routes: Routes, batch: Batch, layout: Layout, old: RouterRecord, num_experts: int, replayed: Array | None
) -> Metrics:
    now, mask = jax.tree.map(jax.lax.stop_gradient, routes), mask_of_rows(layout, batch.mask)
    compare, counts = partial(drift_lib.compare, old.experts, now.chosen), predicted(layout, batch.mask)
    advantages = batch.advantages.reshape(len(batch.mask), -1)

    def flips(own: Bool[Array, "B #T"]) -> Float[Array, " 2"]:
        drift = compare(predicted(layout, batch.mask & own))
        return jnp.stack([drift.flips.mean(), drift.tokens])

    assert now.margin is not None
    sums: Metrics = {
        "drift": compare(counts, old_logprobs=old.logprobs, new_logprobs=now.watched),
        "positive": flips(advantages > 0),
        "negative": flips(advantages < 0),
        "margin": (now.margin.mean(axis=0) * counts).sum(),
        "load": load_lib.expert_counts(now.experts, mask, num_experts=num_experts),
    }
    if replayed is not None:
        known = (replayed >= 0).all(axis=3)
        sums["replayed"] = jnp.where(mask, known.mean(axis=0), 0).sum()
    return sums


def of_critic(
    values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    losses: Float[Array, "B T"],
    clipped: Bool[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Metrics:
    errors = returns - values
    return {
        "losses": jnp.where(mask, losses, 0).sum(),
        "clipped": jnp.where(mask, clipped, False).sum().astype(jnp.float32),
        "values": jnp.where(mask, values, 0).sum(),
        "moments": _moments(errors, returns, mask),
    }


def from_sums(sums: Metrics, maxima: Metrics) -> Metrics:
    """Return an update's metrics, keyed as in metrics.jsonl. Means are per trainable token."""
    tokens = jnp.maximum(sums["clip"].tokens, 1)
    d, d2, s, s2, rows = sums["spread"]
    rows = jnp.maximum(rows, 1)
    found = {
        "update/tokens": sums["clip"].tokens,
        "actor/loss": sums["loss"],
        "actor/entropy": sums["entropy"] / tokens,
        "actor/kl": sums["kl"] / tokens,
        "ratio/token_log_std": jnp.sqrt(jnp.maximum(d2 / tokens - (d / tokens) ** 2, 0)),
        "ratio/sequence_log_std": jnp.sqrt(jnp.maximum(s2 / rows - (s / rows) ** 2, 0)),
        "ratio/token_log_max": maxima["token"],
        "ratio/sequence_log_max": maxima["sequence"],
        "mismatch/kl": sums["mismatch_k3"] / tokens,
        "mismatch/kl_k1": sums["mismatch_k1"] / tokens,
        "mismatch/mean": sums["mismatch_abs"] / tokens,
        "mismatch/beyond_2x": sums["mismatch_beyond"] / tokens,
        "mismatch/max": maxima["mismatch"],
        "mismatch/pearson": _pearson(sums["moments"], tokens),
        **objectives.clip_fractions(sums["clip"]),
        "clip_fraction/learning": sums["learning"][0] / jnp.maximum(sums["learning"][1], 1),
    }
    if "routes" in sums:
        found |= _routing_metrics(sums["routes"], tokens)
    if "balance" in sums:
        found["routing/balance_loss"] = sums["balance"] / tokens
    if "z" in sums:
        found["routing/z_loss"] = sums["z"] / tokens
    if "masked" in sums:
        found["clip_fraction/negative_mask"] = sums["masked"] / tokens
    if "correction" in sums:
        found["mismatch/weight_mean"] = sums["correction"] / tokens
        found["mismatch/dropped"] = sums["dropped"] / tokens
    if "center" in sums:
        found["mismatch/center"] = sums["center"] / tokens
    if "reference_kl" in sums:
        found["reference/kl"] = sums["reference_kl"] / tokens
    if "teacher_kl" in sums:
        found["teacher/kl"] = sums["teacher_kl"] / tokens
    return found | (_critic_metrics(sums["critic"], tokens) if "critic" in sums else {})


def _routing_metrics(sums: Metrics, tokens: Array) -> Metrics:
    found = drift_lib.metrics(sums["drift"]) | load_lib.metrics(sums["load"])
    for sign in ("positive", "negative"):
        flips, own = sums[sign]
        found[f"routing/flip_rate_{sign}"] = flips / jnp.maximum(own, 1)
    found["routing/margin"] = sums["margin"] / tokens
    if "replayed" in sums:
        found["routing/replayed"] = sums["replayed"] / tokens
    return found


def _critic_metrics(sums: Metrics, tokens: Array) -> Metrics:
    unexplained, spread, _ = _variances(sums["moments"], tokens)
    return {
        "critic/loss": sums["losses"] / tokens,
        "critic/value_mean": sums["values"] / tokens,
        "critic/return_mean": sums["moments"][1] / tokens,
        "critic/clip_fraction": sums["clipped"] / tokens,
        # Equal returns have no variance to explain.
        "critic/explained_variance": jnp.where(spread > 0, 1 - unexplained / jnp.where(spread > 0, spread, 1), 0.0),
    }


def _moments(x: Float[Array, "B T"], y: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, " 6"]:
    each = [jnp.where(mask, z, 0) for z in (x, y, x - y)]
    return jnp.stack([z.sum() for z in each] + [(z * z).sum() for z in each])


def _variances(moments: Float[Array, " 6"], n: Array) -> Float[Array, " 3"]:
    means, squares = (moments / n).reshape(2, 3)
    return jnp.maximum(squares - means**2, 0)


def _pearson(moments: Float[Array, " 6"], n: Array) -> Array:
    """Return the Pearson correlation of x and y; 1 if either is constant.

    In float32, Σ x·y loses the small difference of nearly equal copies; the variance of x − y does not.
    """
    x, y, apart = _variances(moments, n)
    spread = jnp.sqrt(x * y)
    return jnp.where(spread > 0, (x + y - apart) / jnp.where(spread > 0, 2 * spread, 1), 1.0)
