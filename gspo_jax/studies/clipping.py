"""Objectives that clip as much as GSPO, or as little as GRPO, and differ in what they clip (docs/evidence/clipping.md).

    config.functions.drop_tokens = "gspo_jax.studies.clipping:drop_tokens"

Each asks what GSPO and GRPO would gate in the mini-batch at hand, and gates as many tokens by another choice. A gated
token has no gradient, and counts in all means as under the clip. All but `gspo_at_share` have GRPO's token ratios. A
mini-batch has to be one micro-batch (`packing/microbatches` is 1), since shares are those of what the objective sees at
once. Random choices are a function of the mini-batch's log-probs, so runs stay reproducible.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from gspo_jax.objectives import Objective
from gspo_jax.objectives.surrogates import Surrogate, TokenBatch, clipped, log_ratio, row_mean, sequence_mean

GSPO = {"low": 3e-3, "high": 4e-3}
"""Bounds of responses in configs/drift.py, offsets from 1."""
GRPO = {"low": 0.2, "high": 0.2}
"""Bounds of tokens, the catalogue's."""


class Seen(NamedTuple):
    """Log-ratios of a mini-batch, and what either objective gates."""

    d: Float[Array, "B T"]
    """Log-ratio of each token."""
    s: Float[Array, "B T"]
    """Means of responses."""
    gspo: Bool[Array, "B T"]
    grpo: Bool[Array, "B T"]


def look(b: TokenBatch) -> Seen:
    """Return the log-ratios of a mini-batch, and the gates of GSPO and GRPO."""
    d = log_ratio(b.logprobs, b.old_logprobs, b.mask)
    s = jnp.broadcast_to(row_mean(d, b.mask)[:, None], d.shape)
    of_rows = clipped(s, b.advantages, **GSPO)
    of_tokens = clipped(d, b.advantages, **GRPO)
    gates = (b.mask & (one.gated_low | one.gated_high) for one in (of_rows, of_tokens))
    return Seen(d, s, *gates)


def grpo_at_share() -> Objective:
    """GRPO with bounds that gate as many tokens of each mini-batch as GSPO would.

    One bound on σ·d for all tokens, σ = sgn Â, d = log r: the k largest above 0 are gated, k the tokens that GSPO
    gates.
    """

    def surrogate(b: TokenBatch) -> Surrogate:
        seen = look(b)
        towards = jnp.sign(b.advantages) * jax.lax.stop_gradient(seen.d)
        return gated(seen.d, b.advantages, largest(towards, towards > 0, jnp.sum(seen.gspo)))

    return _made("grpo_at_share", surrogate)


def gspo_at_share() -> Objective:
    """GSPO with bounds so wide that it gates as many tokens of each mini-batch as GRPO would, in expectation.

    Responses are gated from the largest σ·log s on. The one in which k, the tokens that GRPO gates, is used up is gated
    with the probability that makes the expected count k.
    """

    def surrogate(b: TokenBatch) -> Surrogate:
        seen = look(b)
        towards = (jnp.sign(b.advantages) * jax.lax.stop_gradient(seen.s)).max(axis=1, where=b.mask, initial=-jnp.inf)
        gate = first_rows(towards, towards > 0, b.mask, jnp.sum(seen.grpo), key_of(b))
        return gated(seen.s, b.advantages, gate)

    return _made("gspo_at_share", surrogate, level="sequence")


def drop_responses() -> Objective:
    """GRPO, and random responses are gated beside its clip, until as many tokens are as GSPO would gate.

    Responses with an advantage of 0 have no gradient, and are not chosen.
    """

    def surrogate(b: TokenBatch) -> Surrogate:
        seen, (first, second) = look(b), jax.random.split(key_of(b))
        order = jax.random.uniform(first, b.mask.shape[:1])
        left = jnp.maximum(jnp.sum(seen.gspo) - jnp.sum(seen.grpo), 0)
        return gated(seen.d, b.advantages, seen.grpo | first_rows(order, _has_gain(b), b.mask, left, second))

    return _made("drop_responses", surrogate)


def drop_tokens() -> Objective:
    """GRPO, and random tokens are gated beside its clip, until as many are as GSPO would gate.

    Tokens with an advantage of 0 are not chosen.
    """

    def surrogate(b: TokenBatch) -> Surrogate:
        seen = look(b)
        order = jax.random.uniform(key_of(b), b.mask.shape)
        left = jnp.maximum(jnp.sum(seen.gspo) - jnp.sum(seen.grpo), 0)
        others = b.mask & (b.advantages != 0) & ~seen.grpo
        return gated(seen.d, b.advantages, seen.grpo | largest(order, others, left))

    return _made("drop_tokens", surrogate)


def mask_on_tokens() -> Objective:
    """Token ratios under GSPO's gate: a response is gated as a whole, by its mean ratio."""

    def surrogate(b: TokenBatch) -> Surrogate:
        seen = look(b)
        return gated(seen.d, b.advantages, seen.gspo)

    return _made("mask_on_tokens", surrogate)


def gated(log_ratios: Float[Array, "B T"], advantages: Float[Array, "B T"], gate: Bool[Array, "B T"]) -> Surrogate:
    """Return the gain r·Â, and Â without a gradient where the gate is True."""
    ratio = jnp.exp(jax.lax.stop_gradient(log_ratios))
    moving = jnp.exp(jnp.where(gate | (advantages == 0), 0.0, log_ratios))
    return Surrogate(moving * advantages, ratio, gate & (log_ratios < 0), gate & (log_ratios >= 0))


def largest(x: Float[Array, "B T"], eligible: Bool[Array, "B T"], count: Int[Array, ""]) -> Bool[Array, "B T"]:
    """Mark the `count` largest of the eligible numbers, all of them if there are fewer."""
    flat = jnp.where(eligible, x, -jnp.inf).reshape(-1)
    rank = jnp.argsort(jnp.argsort(-flat)).reshape(x.shape)
    return eligible & (rank < count)


def first_rows(
    x: Float[Array, " B"],
    eligible: Bool[Array, " B"],
    mask: Bool[Array, "B T"],
    budget: Int[Array, ""],
    key: Key[Array, ""],
) -> Bool[Array, "B T"]:
    """Mark all tokens of the rows with the largest eligible numbers, up to `budget` tokens.

    The row that the budget's end falls into is marked with the probability of its part of the row.
    """
    length = jnp.where(eligible, jnp.sum(mask, axis=1), 0)
    order = jnp.argsort(-jnp.where(eligible, x, -jnp.inf))
    before = jnp.zeros_like(length).at[order].set(jnp.cumsum(length[order]) - length[order])
    drawn = 1 - jax.random.uniform(key)  # above 0, so that an empty budget marks nothing
    return mask & (eligible & (before + length * drawn <= budget))[:, None]


def key_of(b: TokenBatch) -> Key[Array, ""]:
    """Return a key that is a function of the mini-batch's log-probs."""
    total = jnp.sum(jax.lax.stop_gradient(b.logprobs), where=b.mask).astype(jnp.float32)
    return jax.random.key(jax.lax.bitcast_convert_type(total, jnp.uint32))


def _has_gain(b: TokenBatch) -> Bool[Array, " B"]:
    return jnp.any(b.mask & (b.advantages != 0), axis=1)


def _made(
    name: str, surrogate: Callable[[TokenBatch], Surrogate], *, level: Literal["token", "sequence"] = "token"
) -> Objective:
    return Objective(name=name, surrogate=surrogate, weights=sequence_mean, level=level)
