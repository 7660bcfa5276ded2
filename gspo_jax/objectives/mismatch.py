"""Corrections for the sampler/trainer mismatch: a factor on each token's weight, from ρ = π_train,old / π_sampler.

A correction maps (old_logprobs, sampler_logprobs, mask), all [B, T], to a constant factor [B, T], at least float32, 0
outside the mask. To add one, write a function here and list its name in `__all__`.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gspo_jax.errors import UserError
from gspo_jax.objectives.checks import build, check_positive, check_tokens
from gspo_jax.objectives.surrogates import log_ratio, row_mean

__all__ = ["icepop", "sequence_mask", "sequence_tis", "tis"]

Correction: TypeAlias = Callable[
    [Float[Array, "B T"], Float[Array, "B T"], Bool[Array, "B T"]],
    Float[Array, "B T"],
]


def make_correction(
    name: str, own: Mapping[str, Callable[..., Any]] | None = None, /, **hyper_parameters: float
) -> Correction:
    """Build the correction `name` of this module or of `own`, further factories by name.

    Raises:
      UserError: a name is unknown, or a hyper-parameter without default is missing.
    """
    factories: dict[str, Callable[..., Any]] = {each: globals()[each] for each in __all__} | dict(own or {})
    made: Correction = build("mismatch correction", factories, name, hyper_parameters)
    if not callable(made):
        raise UserError(f"{name} returns {made!r}; return a function of (old_logprobs, sampler_logprobs, mask)")
    return made


def tis(*, cap: float = 2.0) -> Correction:
    """Truncated importance sampling: weights each token by its ratio, up to a cap.

    factor[i,t] = min(ρ, cap). https://fengyao.notion.site/off-policy-rl

    Raises UserError for `cap` not above 0.
    """
    check_positive("it is the largest weight of a token, usually 2", cap=cap)

    def correction(old: Float[Array, "B T"], sampler: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Array:
        return jnp.where(mask, jnp.minimum(jnp.exp(_log_rho(old, sampler, mask)), cap), 0.0)

    return correction


def icepop(*, low: float = 0.5, high: float = 5.0) -> Correction:
    """IcePop: weights each token by its ratio inside [low, high] and drops it outside.

    factor[i,t] = ρ if low ≤ ρ ≤ high else 0. https://arxiv.org/abs/2510.18855

    Raises UserError unless 0 ≤ `low` ≤ 1 ≤ `high`.
    """
    _check_interval(low, high)

    def correction(old: Float[Array, "B T"], sampler: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Array:
        rho = jnp.exp(_log_rho(old, sampler, mask))
        return jnp.where(mask & (low <= rho) & (rho <= high), rho, 0.0)

    return correction


def sequence_mask(*, low: float = 0.99, high: float = 1.01) -> Correction:
    """Sequence mask: drops responses with a geometric-mean ratio outside [low, high].

    factor[i,t] = 1 if low ≤ exp((1/n_i) Σ_t m·log ρ) ≤ high else 0.

    Raises UserError unless 0 ≤ `low` ≤ 1 ≤ `high`.
    """
    _check_interval(low, high)

    def correction(old: Float[Array, "B T"], sampler: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Array:
        log_rho = _log_rho(old, sampler, mask)
        rho = jnp.exp(row_mean(log_rho, mask))[:, None]
        return (mask & (low <= rho) & (rho <= high)).astype(log_rho.dtype)

    return correction


def sequence_tis(*, cap: float = 2.0) -> Correction:
    """Truncated importance sampling of responses: weights each by its geometric-mean ratio, up to a cap.

    factor[i,t] = min(exp((1/n_i) Σ_t m·log ρ), cap), the mismatch weight of TBPO. https://arxiv.org/abs/2604.07853

    verl's sequence TIS caps the product of the ratios instead. Raises UserError for `cap` not above 0.
    """
    check_positive("it is the largest weight of a response, usually 2", cap=cap)

    def correction(old: Float[Array, "B T"], sampler: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Array:
        rho = jnp.exp(row_mean(_log_rho(old, sampler, mask), mask))[:, None]
        return jnp.where(mask, jnp.minimum(rho, cap), 0.0)

    return correction


def _log_rho(old: Float[Array, "B T"], sampler: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    check_tokens(old_logprobs=old, sampler_logprobs=sampler, mask=mask)
    return jax.lax.stop_gradient(log_ratio(old, sampler, mask))


def _check_interval(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high:
        raise UserError(f"low={low} and high={high} do not enclose the ratio 1, where sampler and trainer agree")
