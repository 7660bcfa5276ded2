"""Objectives for group-based RL: functions from arrays to arrays, usable without the rest of the package.

    loss, info = objectives.loss(objectives.gspo(low=3e-4, high=4e-4), logprobs,
        old_logprobs=old, mask=mask, rewards=rewards, group_size=8)

The B rows are P prompts × G adjacent responses of T tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gspo_jax.errors import UserError, choices, nearest
from gspo_jax.objectives import catalogue
from gspo_jax.objectives.catalogue import *  # noqa: F403 (catalogue.__all__ is the only list)
from gspo_jax.objectives.checks import build, check_tokens
from gspo_jax.objectives.objective import CriticSettings, Objective
from gspo_jax.objectives.surrogates import TokenBatch, log_ratio, row_mean, widen

__all__ = ["ClipSums", "CriticSettings", "Info", "Objective", "clip_fractions", "clip_sums", "loss", "make"]
__all__ += catalogue.__all__


class Info(NamedTuple):
    """Per-token diagnostics of a loss, all constant; 0 or False outside the mask."""

    ratio: Float[Array, "B T"]
    """Constant along a row for `gspo`; 1 outside the mask."""
    gated_low: Bool[Array, "B T"]
    """True where the lower bound zeroed the gradient, as in `Surrogate`."""
    gated_high: Bool[Array, "B T"]
    advantages: Float[Array, "B T"]
    weights: Float[Array, "B T"]
    masked: Bool[Array, "B T"] | None
    """True where the off-policy sequence mask removed the gain; None if it is off."""

    @property
    def gated(self) -> Bool[Array, "B T"]:
        """True where either bound zeroed the gradient."""
        return self.gated_low | self.gated_high


class ClipSums(NamedTuple):
    """Sums behind the clip fractions, additive over micro-batches."""

    tokens: Float[Array, ""]
    rows: Float[Array, ""]
    """Rows with a token in the mask."""
    token_low: Float[Array, ""]
    token_high: Float[Array, ""]
    sequence_low: Float[Array, ""]
    """Sum over rows of the fraction of tokens gated by the lower bound."""
    sequence_high: Float[Array, ""]


def make(
    name: str, own: Mapping[str, Callable[..., Any]] | None = None, /, **hyper_parameters: float | str | None
) -> Objective:
    """Build the objective `name` of the catalogue or of `own`, further factories by name.

    Raises:
      UserError: a name is unknown, or a hyper-parameter without default is missing.
    """
    factories = {each: getattr(catalogue, each) for each in catalogue.__all__} | dict(own or {})
    made = build("objective", factories, name, hyper_parameters)
    if not isinstance(made, Objective):
        raise UserError(f"{name} returns {made!r}; return a gspo_jax.objectives.Objective")
    return made


def loss(
    objective: Objective,
    logprobs: Float[Array, "B T"],
    *,
    old_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    rewards: Float[Array, " B"] | None = None,
    group_size: int | None = None,
    advantages: Float[Array, " B"] | Float[Array, "B T"] | None = None,
    weights: Float[Array, "B T"] | None = None,
    router_shift: Float[Array, "B T"] | None = None,
    sampler_logprobs: Float[Array, "B T"] | None = None,
) -> tuple[Float[Array, ""], Info]:
    """Return the loss of a batch, −Σ w·gain, and its per-token diagnostics.

    `mask` is True on the tokens that the policy sampled, EOS included. Values outside it have no effect, NaN included.
    Pass either `rewards` with `group_size`, or `advantages`. `weights` default to `objective.weights(mask)`. If
    computed once per mini-batch and split with it, micro-batch losses add up to the mini-batch's. `router_shift` is
    only for objectives that need it (`rspo`), `sampler_logprobs` (log μ) only for a `negative_mask`.

    Raises ValueError for mismatched shapes, UserError for arguments that the objective's definition rules out.
    """
    _check_objective(objective)
    check_tokens(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    if advantages is None:
        advantages = _group_advantages(objective, rewards, group_size)
    elif rewards is not None or group_size is not None:
        raise ValueError(_REWARDS_OR_ADVANTAGES)
    advantages = _token_advantages(objective, advantages, mask)
    weights = _fill_outside_mask("weights", objective.weights(mask) if weights is None else weights, mask, 0.0)
    shift = _router_shift(objective, router_shift, mask)
    surrogate = objective.surrogate(TokenBatch(logprobs, old_logprobs, mask, advantages, shift))
    masked = _masked(objective, logprobs, sampler_logprobs, mask, advantages)
    ratio = jnp.where(mask, surrogate.ratio, 1.0)
    info = Info(ratio, surrogate.gated_low, surrogate.gated_high, advantages, weights, masked)
    gain = surrogate.gain if masked is None else jnp.where(masked, 0.0, surrogate.gain)
    return -jnp.sum(weights * gain), info


def clip_sums(info: Info, mask: Bool[Array, "B T"]) -> ClipSums:
    """Return a micro-batch's sums, to be added up for `clip_fractions`."""
    lengths = jnp.sum(mask, axis=1)
    low, high = jnp.sum(info.gated_low, axis=1), jnp.sum(info.gated_high, axis=1)
    per_row = jnp.maximum(lengths, 1)
    return ClipSums(
        tokens=widen(jnp.sum(lengths)),
        rows=widen(jnp.sum(lengths > 0)),
        token_low=widen(jnp.sum(low)),
        token_high=widen(jnp.sum(high)),
        sequence_low=jnp.sum(low / per_row),
        sequence_high=jnp.sum(high / per_row),
    )


def clip_fractions(sums: ClipSums) -> dict[str, Float[Array, ""]]:
    """Return the fractions of gated tokens, in total and per bound, by metric name; 0 for an empty mask.

    `clip_fraction/token` weights all tokens equally, `clip_fraction/sequence` all rows with a token.
    """
    tokens, rows = jnp.maximum(sums.tokens, 1), jnp.maximum(sums.rows, 1)
    return {
        "clip_fraction/token": (sums.token_low + sums.token_high) / tokens,
        "clip_fraction/token_low": sums.token_low / tokens,
        "clip_fraction/token_high": sums.token_high / tokens,
        "clip_fraction/sequence": (sums.sequence_low + sums.sequence_high) / rows,
        "clip_fraction/sequence_low": sums.sequence_low / rows,
        "clip_fraction/sequence_high": sums.sequence_high / rows,
    }


_REWARDS_OR_ADVANTAGES = "loss takes either rewards with group_size, or advantages, but not both"


def _check_objective(given: object) -> None:
    if isinstance(given, Objective):
        return
    name = given if isinstance(given, str) else getattr(given, "__name__", "")
    near = nearest(name, catalogue.__all__)
    if isinstance(given, str) and near is None:
        raise UserError(f"no objective {given!r}; {choices(given, catalogue.__all__)}")
    raise UserError(
        f"the objective is {given!r}, not an Objective; pass what its factory returns, objectives.{near or 'gspo'}()"
    )


def _group_advantages(objective: Objective, rewards: Array | None, group_size: int | None) -> Float[Array, " B"]:
    if rewards is None or group_size is None:
        raise ValueError(_REWARDS_OR_ADVANTAGES)
    if objective.advantage is None:
        raise UserError(
            f"{objective.name} takes its advantages from a critic, not from rewards [B]; pass "
            "advantages=gae(rewards, values, mask) with per-token rewards and values [B, T]"
        )
    return objective.advantage(rewards, group_size=group_size)


def _router_shift(objective: Objective, shift: Array | None, mask: Bool[Array, "B T"]) -> Float[Array, "B T"] | None:
    if shift is None:
        if objective.router_shift:
            raise UserError(
                f"{objective.name} damps tokens whose routing has moved; pass router_shift [B, T], "
                "exp(−mean |log ρ_θ − log ρ_old|) over layers and the old experts, or all ones for a dense model"
            )
        return None
    if not objective.router_shift:
        raise ValueError(f"{objective.name} does not use router_shift; leave it out")
    return jax.lax.stop_gradient(_fill_outside_mask("router_shift", widen(shift), mask, 1.0))


def _masked(
    objective: Objective, logprobs: Array, sampler: Array | None, mask: Bool[Array, "B T"], advantages: Array
) -> Bool[Array, "B T"] | None:
    if objective.negative_mask is None:
        if sampler is not None:
            raise ValueError(f"{objective.name} has no negative_mask to use sampler_logprobs for; leave them out")
        return None
    if sampler is None:
        raise UserError("a negative_mask compares with the sampler's policy; pass sampler_logprobs [B, T]")
    check_tokens(logprobs=logprobs, sampler_logprobs=sampler, mask=mask)
    moved = -row_mean(jax.lax.stop_gradient(log_ratio(logprobs, sampler, mask)), mask)
    return (moved > objective.negative_mask)[:, None] & (advantages < 0)


def _fill_outside_mask(
    name: str, x: Float[Array, "B T"], mask: Bool[Array, "B T"], outside: float
) -> Float[Array, "B T"]:
    if x.shape != mask.shape:
        raise ValueError(f"{name} has shape {list(x.shape)}; it must be [B, T] = {list(mask.shape)}")
    return jnp.where(mask, x, outside)


def _token_advantages(objective: Objective, advantages: Array, mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    advantages = jax.lax.stop_gradient(widen(advantages))
    if advantages.shape not in (mask.shape, mask.shape[:1]):
        raise ValueError(
            f"advantages have shape {list(advantages.shape)}; it must be [B] or [B, T], "
            f"here [B, T] = {list(mask.shape)}"
        )
    if advantages.ndim == 2 and not objective.token_advantages:
        raise UserError(
            f"{objective.name} takes one advantage per response, [B], but got {list(advantages.shape)}; "
            "for per-token advantages [B, T] use an objective that allows them, such as gspo_token"
        )
    per_token = advantages if advantages.ndim == 2 else advantages[:, None]
    return jnp.where(mask, per_token, 0.0)
