"""Routing's share of the importance ratio's noise, from replayed old routes (routing/decomposition.py)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from gspo_jax import estimates
from gspo_jax.engine import Engine
from gspo_jax.parallel import hosts
from gspo_jax.routing import decomposition
from gspo_jax.routing.decomposition import Flips, LogRatios
from gspo_jax.routing.drift import rates, router_kl
from gspo_jax.types import Batch, OldPolicy, RouterRecord, Weights

POSITIONS = 8
"""Position bins of a response."""
PROBABILITIES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 1.0)
"""Bins of flipped experts by old router probability."""
LENGTHS = (16, 64, 256, 1024)
"""Tokens of a response that `by_length` averages over."""
SEED = 0


def measure(engine: Engine, weights: Weights, batch: Batch) -> tuple[LogRatios, OldPolicy, OldPolicy]:
    """Split the sampled tokens' log-ratios under `weights`, and return native and replayed scores. Two forward passes.

    The ratios are whole on every host, in batch order.
    """
    asked = _with_routes(batch, _to_replay(engine, batch))
    native, replayed = (run(weights, None, None, asked) for run in (engine.programs.native, engine.programs.replayed))
    return _ratios(batch, replayed.logprobs, native.logprobs), native, replayed


def by_layer(engine: Engine, weights: Weights, batch: Batch) -> list[LogRatios]:
    """Return a split per layer, with only that layer routed by its own router. A forward pass each."""
    before = _to_replay(engine, batch)

    def logprobs(experts: Any) -> Any:
        asked = _with_routes(batch, RouterRecord(experts, before.logprobs))
        return engine.programs.replayed(weights, None, None, asked).logprobs

    replayed = logprobs(before.experts)
    each = (logprobs(before.experts.at[..., layer, :].set(-1)) for layer in range(before.experts.shape[-2]))
    return [_ratios(batch, replayed, alone) for alone in each]


def flip_metrics(batch: Batch, native: OldPolicy, replayed: OldPolicy) -> dict[str, float]:
    """Return flips of the batch's old routes, in a native pass and with these replayed, keyed as in metrics.jsonl."""
    found = {}
    for name, scored in (("native", native), ("replayed", replayed)):
        rate, _ = _rates(scored.flips, batch.mask, k=batch.routes.experts.shape[-1])
        found[f"routing/{name}_flip_rate"] = float(rate)
    return found


_rates = jax.jit(rates, static_argnames="k")


def _to_replay(engine: Engine, batch: Batch) -> RouterRecord:
    """Return the old policy's routes; under r3w the sampler's, whose weights it used."""
    return batch.rollout.routes if engine.config.routing.replay == "r3w" else batch.routes


def _with_routes(batch: Batch, routes: RouterRecord) -> Batch:
    return dataclasses.replace(batch, rollout=dataclasses.replace(batch.rollout, routes=routes))


def _ratios(batch: Batch, replayed: Any, native: Any) -> LogRatios:
    columns = hosts.allgather((batch.old.logprobs, replayed, native, batch.rollout.action_mask))
    return LogRatios.of(*batch.packing.in_order(columns))


def described(
    ratios: LogRatios,
    before: RouterRecord,
    after: RouterRecord,
    replayed: RouterRecord,
    prompt_lengths: np.ndarray,
    *,
    group_size: int,
    unseen: Bool[np.ndarray, " B"],
) -> dict[str, Any]:
    """Return all measurements after some updates.

    Args:
      before, after, replayed: the old routes, the new, and the old replayed, on the host.
      unseen: responses that no update has learned from, measured once more by themselves.
    """
    prompt_columns = before.experts.shape[1] - ratios.mask.shape[1]
    found = decomposition.flips(
        np.asarray(before.experts).astype(int),
        np.asarray(after.experts).astype(int),
        prompt_lengths,
        prompt_columns=prompt_columns,
        old_logprobs=None if before.logprobs is None else np.asarray(before.logprobs),
    )
    kl = None
    if before.logprobs is not None and replayed.logprobs is not None:
        old, new = (
            np.moveaxis(decomposition.at_predicting(np.asarray(x), prompt_lengths, prompt_columns), 2, 0)
            for x in (before.logprobs, replayed.logprobs)
        )
        kl = np.asarray(router_kl(jnp.asarray(old), jnp.asarray(new)))
    facts = _measured(ratios, found, kl, group_size)
    if unseen.any():
        facts["unseen"] = _measured(ratios.where(unseen[:, None]), found, kl, group_size)
    parts = min(POSITIONS, ratios.mask.shape[1])
    facts["by_position"] = decomposition.by_position(ratios, parts=parts, group_size=group_size)
    facts["by_length"] = decomposition.by_length(ratios, LENGTHS)
    facts["by_flips"] = decomposition.by_flips(ratios, found, group_size=group_size)
    facts["by_rank"] = decomposition.by_rank(ratios, found, group_size=group_size)
    if found.probability is not None:
        facts["by_probability"] = decomposition.by_probability(ratios, found, PROBABILITIES, group_size=group_size)
    return facts


def _measured(
    ratios: LogRatios, found: Flips, kl: Float[np.ndarray, "L B T"] | None, group_size: int
) -> dict[str, Any]:
    tokens, K = max(1, int(ratios.mask.sum())), found.old.shape[3]
    gone = found.old & ratios.mask[:, :, None, None]
    lost, of_group = gone.sum(axis=(1, 2, 3)), ratios.mask.sum(axis=1)
    lost, of_group = (x.reshape(-1, group_size).sum(axis=1) for x in (lost, of_group))
    rates = lost / (np.maximum(of_group, 1) * found.old.shape[2] * K)
    facts: dict[str, Any] = {
        "tokens": int(ratios.mask.sum()),
        "flip_rate": float(gone.sum() / (tokens * found.old.shape[2] * K)),
        "flip_interval": list(estimates.interval(rates[of_group > 0], seed=SEED)),
        "flip_rate_per_layer": (gone.sum(axis=(0, 1, 3)) / (tokens * K)).tolist(),
        "tokens_changed": float((gone.any(axis=(2, 3))).sum() / tokens),
    }
    if kl is not None:
        facts["router_kl"] = float(kl[:, ratios.mask].mean())
    for level, these in (("token", ratios), ("sequence", ratios.of_responses)):
        moments = these.moments(group_size)
        one = decomposition.split(moments)
        between = decomposition.share_interval(moments, seed=SEED)
        facts[level] = one._asdict() | {"share": one.share, "interval": list(between)}
    return facts
