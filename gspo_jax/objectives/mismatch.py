"""Corrections for the sampler/trainer mismatch: a factor on each token's weight, from ρ = π_train,old / π_sampler.

A correction maps (old_logprobs, sampler_logprobs, mask), all [B, T], to a constant factor [B, T], at least float32, 0
outside the mask. To add one, write a function here and list its name in `__all__`. One by each token's own ρ is an
`OfToken`, whose weight `score_centering` takes too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gspo_jax.errors import UserError
from gspo_jax.objectives.checks import build, check_positive, check_tokens
from gspo_jax.objectives.surrogates import log_ratio, row_mean, widen

__all__ = ["icepop", "sequence_mask", "sequence_tis", "tis"]

Correction: TypeAlias = Callable[
    [Float[Array, "B T"], Float[Array, "B T"], Bool[Array, "B T"]],
    Float[Array, "B T"],
]
Weight: TypeAlias = Callable[[Float[Array, "..."]], Float[Array, "..."]]
"""ρ -> factor, elementwise."""


@dataclass(frozen=True)
class OfToken:
    """A correction by each token's own ratio: factor[i,t] = weight(ρ)."""

    weight: Weight

    def __call__(self, old: Float[Array, "B T"], sampler: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Array:
        return jnp.where(mask, self.weight(jnp.exp(_log_rho(old, sampler, mask))), 0.0)


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
    return OfToken(lambda rho: jnp.minimum(rho, cap))


def icepop(*, low: float = 0.5, high: float = 5.0) -> Correction:
    """IcePop: weights each token by its ratio inside [low, high] and drops it outside.

    factor[i,t] = ρ if low ≤ ρ ≤ high else 0. https://arxiv.org/abs/2510.18855

    Raises UserError unless 0 ≤ `low` ≤ 1 ≤ `high`.
    """
    _check_interval(low, high)
    return OfToken(lambda rho: jnp.where((low <= rho) & (rho <= high), rho, 0.0))


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


def score_centering(
    kept_logprobs: Float[Array, "B T K"],
    sampler_kept_logprobs: Float[Array, "B T K"],
    present: Bool[Array, "B T K"],
    whole: Bool[Array, "B T"],
    *,
    weight: Weight | Float[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """Return C, whose gradient is the mean score before each token under the sampler; Â·C in the loss takes it out.

    C[i,t] = Σ_{v∈H} sg[m_v − α·p_v]·log p_v, with p = π_θ and q = μ, H the kept ids and ρ the sampler's over the
    policy's mass outside H, (1 − Σ_H q)/max(1 − Σ_H p, 1e-6). m = q and α = ρ; with a correction's `weight` f, m =
    q·f(p/q) and α = ρ·f(1/ρ); with a factor [B, T] both are multiplied by it. https://arxiv.org/abs/2609.20807

    Tokens drawn from q ≠ p have a mean score E_q[f·∇log p] ≠ 0. It moves the policy even where all advantages are
    equal, and no baseline takes it out. With −Â·C in each gain, of the same weight w,

        loss, info = objectives.loss(objective, logprobs, old_logprobs=old, mask=mask, advantages=advantages)
        loss += jnp.sum(info.weights * info.advantages * score_centering(kept, sampler_kept, present, whole))

    the expected gradient at π_θ = π_old, where that of every objective's gain is Â·∇log p, is w·Cov_q(Â, f·∇log p).
    This is exact if H is the vocabulary, or `whole`: all that truncated sampling left, with p and q renormalised over
    it. (Any α is exact then; α = f(1) lets C vanish where p = q.) Otherwise q is taken to be ρ·p outside H. Away from
    π_old, C keeps this form, as in the paper, also in gains that are gated. p is the policy's and a correction's ratio
    π_old's; at π_θ = π_old they agree. A factor [B, T] is taken to be the same for all v, as `sequence_mask`'s and one
    of an objective with `one_gain` nearly are. From the sampler's log-probs as π_old the mean ratio of n tokens weighs
    each by (π_θ/μ)^(1/n), so C is too large by about 1/n then. Where truncated sampling left more than was kept, q is
    the full softmax's at the kept ids, not what was drawn from, and C takes out rounding alone.

    NeMo-RL adds Â·C to any actor's loss in the same way, with a lower bound of the weights too. SkyRL also drops whole
    responses, by the mean of log p/q. vime keeps 128 ids and rules out clipped objectives. prime-rl sums over the ids
    that truncation left, with weight 0 where |p − q| is large.

    Args:
      kept_logprobs: log p at the kept ids, the only argument with a gradient.
      sampler_kept_logprobs: log q likewise.
      present: False in unused entries, whose values have no effect.
      whole: True where p and q are renormalised over the kept ids.
    """
    c = centering_coefficients(kept_logprobs, sampler_kept_logprobs, present, whole, weight=weight)
    return jnp.sum(c * jnp.where(present, widen(kept_logprobs), 0.0), axis=2)


def centering_size(
    coefficients: Float[Array, "B T K"], kept_logprobs: Float[Array, "B T K"], present: Bool[Array, "B T K"]
) -> Float[Array, "B T"]:
    """Return the sum of |∂C/∂z| over the logits z of the vocabulary, for C's coefficients c = m − α·p.

    Σ_{v∈H} |c_v − p_v·S| + (1 − Σ_H p)·|S|, S = Σ_H c. It is Σ |q − p| where C is exact and has no weight, and 0 where
    p = q, also where H has so much of the mass that α, which then multiplies a constant, is all rounding.
    """
    p = jnp.where(present, jnp.exp(jax.lax.stop_gradient(widen(kept_logprobs))), 0.0)
    total = jnp.sum(coefficients, axis=2, keepdims=True)
    outside = jnp.maximum(1 - jnp.sum(p, axis=2), 0.0)
    return jnp.sum(jnp.abs(coefficients - p * total), axis=2) + outside * jnp.abs(total[:, :, 0])


def centering_coefficients(
    kept_logprobs: Float[Array, "B T K"],
    sampler_kept_logprobs: Float[Array, "B T K"],
    present: Bool[Array, "B T K"],
    whole: Bool[Array, "B T"],
    *,
    weight: Weight | Float[Array, "B T"] | None = None,
) -> Float[Array, "B T K"]:
    """Return m − α·p of `score_centering`, constant, 0 in unused entries."""
    log_p, log_q = (
        jnp.where(present, jax.lax.stop_gradient(widen(x)), 0.0) for x in (kept_logprobs, sampler_kept_logprobs)
    )
    p, q = (jnp.where(present, jnp.exp(x), 0.0) for x in (log_p, log_q))
    outside_p, outside_q = (1 - jnp.sum(x, axis=2) for x in (p, q))
    rho = jnp.where(whole, 1.0, jnp.maximum(outside_q, 0.0) / jnp.maximum(outside_p, 1e-6))
    if weight is None:
        m, alpha = q, rho
    elif callable(weight):
        m = q * weight(jnp.exp(log_p - log_q))
        alpha = rho * weight(1 / jnp.maximum(rho, 1e-30))
    else:
        m, alpha = q * weight[:, :, None], rho * weight
    return jnp.where(present, m - alpha[:, :, None] * p, 0.0)


def _log_rho(old: Float[Array, "B T"], sampler: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    check_tokens(old_logprobs=old, sampler_logprobs=sampler, mask=mask)
    return jax.lax.stop_gradient(log_ratio(old, sampler, mask))


def _check_interval(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high:
        raise UserError(f"low={low} and high={high} do not enclose the ratio 1, where sampler and trainer agree")
