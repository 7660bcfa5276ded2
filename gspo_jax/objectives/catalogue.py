"""Objectives, one short factory per paper, each a composition of primitives.

To add one, write a function here and list its name in `__all__`. Â is per response, [B], or per token, [B, T], where
the docstring allows it. m is the mask.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from gspo_jax.errors import UserError
from gspo_jax.objectives.advantages import group_centered, leave_one_out
from gspo_jax.objectives.checks import check_choice, check_fraction, check_not_negative, check_offsets, check_positive
from gspo_jax.objectives.objective import CriticSettings, Objective
from gspo_jax.objectives.surrogates import (
    Surrogate,
    TokenBatch,
    binary_kl,
    clip_log_ratio,
    clipped,
    constant_length,
    geometric,
    log_ratio,
    lowest_before,
    policy_gradient,
    probability_change,
    row_mean,
    sequence_mean,
    soft_gated,
    token_mean,
    weighted_score,
    widen,
)

__all__ = [
    "cispo",
    "dapo",
    "dppo_kl",
    "dppo_tv",
    "dr_grpo",
    "dro",
    "gmpo",
    "grpo",
    "gspo",
    "gspo_token",
    "luspo",
    "minirl",
    "minpro",
    "ppo",
    "reinforce",
    "rloo",
    "rspo",
    "sapo",
    "tbpo",
    "vespo",
]


def reinforce() -> Objective:
    """REINFORCE with the rest of the group as baseline and all tokens weighted equally.

    gain[i,t] = Â·log π_θ. https://arxiv.org/abs/2402.14740

    Â [B] by `leave_one_out`, or [B, T]. The ratio is reported, never bounded. Weights: token mean.
    """
    return Objective(
        name="reinforce",
        surrogate=policy_gradient,
        weights=token_mean,
        advantage=leave_one_out,
        token_advantages=True,
        weighs_tokens=False,
    )


def rloo() -> Objective:
    """REINFORCE leave-one-out: the whole response is one action, with the sum of its token log-probs.

    gain[i,t] = Â·log π_θ. https://arxiv.org/abs/2402.14740

    Â [B] by `leave_one_out`. The ratio is reported, never bounded. Weights: m / N_rows.
    """
    return Objective(
        name="rloo", surrogate=policy_gradient, weights=_PER_ROW, advantage=leave_one_out, weighs_tokens=False
    )


def ppo(
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual_clip: float | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
    value_clip: float = 0.2,
    value_weight: float = 0.5,
) -> Objective:
    """Proximal Policy Optimization: per-token clipping, with advantages from a critic.

    gain[i,t] = min(r·Â, clip(r, 1 − low, 1 + high)·Â), r = exp(log π_θ − log π_old). https://arxiv.org/abs/1707.06347

    Â [B] or [B, T], from `gae` with `gamma`, `lam` and `whiten`, never from rewards alone. `value_clip` and
    `value_weight` apply to `value_loss`. `low` and `high` are offsets from 1, `dual_clip` as in `clipped`. Weights:
    token mean. Raises UserError for hyper-parameters out of range.
    """
    check_fraction("1 means no discount, 0 looks one token ahead", gamma=gamma, lam=lam)
    check_positive("it bounds how far a value may move, usually 0.2", value_clip=value_clip)
    check_not_negative("it is the weight of the critic's loss, usually 0.5", value_weight=value_weight)
    critic = CriticSettings(gamma=gamma, lam=lam, whiten=whiten, value_clip=value_clip, value_weight=value_weight)
    return _clipped(
        "ppo", low, high, dual_clip, weights=token_mean, advantage=None, token_advantages=True, critic=critic
    )


def grpo(*, low: float = 0.2, high: float = 0.2, dual_clip: float | None = None) -> Objective:
    """Group Relative Policy Optimization: PPO's per-token clipping without a critic.

    gain[i,t] = min(r·Â, clip(r, 1 − low, 1 + high)·Â), r = exp(log π_θ − log π_old). https://arxiv.org/abs/2402.03300

    Â [B] or [B, T] by `group_zscore`. `low` and `high` are offsets from 1 (the tuned baseline in the GSPO paper: 0.2
    and 0.27), `dual_clip` as in `clipped`. Weights: sequence mean. Raises UserError for `low` outside [0, 1], `high`
    below 0, `dual_clip` not above 1.
    """
    return _clipped("grpo", low, high, dual_clip, weights=sequence_mean, token_advantages=True)


def dr_grpo(
    *, low: float = 0.2, high: float = 0.2, dual_clip: float | None = None, length: float | None = None
) -> Objective:
    """Dr. GRPO: GRPO without dividing by the group's standard deviation and by response length.

    gain[i,t] = min(r·Â, clip(r, 1 − low, 1 + high)·Â), r = exp(log π_θ − log π_old). https://arxiv.org/abs/2503.20783

    Â [B] by `group_centered`. `low`, `high` and `dual_clip` as in `grpo`. Weights: m / (N_rows · `length`), where None
    is the width T of the batch. Raises UserError as `grpo` does, and for `length` not above 0.
    """
    if length is not None:
        check_positive("it divides every response alike, so use the maximum response length in tokens", length=length)
    weights = partial(constant_length, length=length)
    return _clipped("dr_grpo", low, high, dual_clip, weights=weights, advantage=group_centered)


def dapo(*, low: float = 0.2, high: float = 0.28, dual_clip: float | None = None) -> Objective:
    """DAPO's decoupled clip: GRPO with a wider upper than lower bound and all tokens weighted equally.

    gain[i,t] = min(r·Â, clip(r, 1 − low, 1 + high)·Â), r = exp(log π_θ − log π_old). https://arxiv.org/abs/2503.14476

    Â [B] or [B, T] by `group_zscore`. `low`, `high` and `dual_clip` as in `grpo`. Weights: token mean. Dynamic sampling
    and overlong reward shaping belong to the training loop. Raises UserError as `grpo` does.
    """
    return _clipped("dapo", low, high, dual_clip, weights=token_mean, token_advantages=True)


def gspo(*, low: float = 3e-4, high: float = 4e-4, dual_clip: float | None = None) -> Objective:
    """Group Sequence Policy Optimization: one importance ratio per response, clipped as a whole.

    gain[i,t] = min(s_i·Â, clip(s_i, 1 − low, 1 + high)·Â), s_i = exp((1/n_i) Σ_t m·(log π_θ − log π_old)), gradient
    through s_i. https://arxiv.org/abs/2507.18071

    Â [B] by `group_zscore`. `low` and `high` are offsets from 1, `dual_clip` as in `clipped`. Weights: sequence mean.
    Raises UserError for `low` outside [0, 1], `high` below 0, `dual_clip` not above 1.
    """
    return _clipped("gspo", low, high, dual_clip, weights=sequence_mean, level="sequence")


def gspo_token(*, low: float = 3e-4, high: float = 4e-4, dual_clip: float | None = None) -> Objective:
    """GSPO with per-token advantages: the value of the sequence ratio with the gradient of the token's log-prob.

    gain[i,t] = min(s·Â, clip(s, 1 − low, 1 + high)·Â), s[i,t] = sg[s_i]·π_θ / sg[π_θ], s_i as in `gspo`. For Â constant
    along a row it equals `gspo` in value, clipping and gradient. https://arxiv.org/abs/2507.18071

    Â [B] or [B, T] by `group_zscore`. `low`, `high` and `dual_clip` as in `gspo`. Weights: sequence mean. Raises
    UserError as `gspo` does.
    """
    check_offsets(low, high, dual_clip)

    def surrogate(b: TokenBatch) -> Surrogate:
        d = log_ratio(b.logprobs, b.old_logprobs, b.mask)
        log_s = jax.lax.stop_gradient(row_mean(d, b.mask))
        # The difference has value 0 and the gradient of log π_θ.
        log_s = log_s[:, None] + (d - jax.lax.stop_gradient(d))
        return clipped(log_s, b.advantages, low=low, high=high, dual_clip=dual_clip)

    return Objective(
        name="gspo_token",
        surrogate=surrogate,
        weights=sequence_mean,
        token_advantages=True,
        level="sequence",
        weighs_tokens=False,
        bounds={"low": low, "high": high},
    )


def cispo(*, low: float = 1.0, high: float = 4.0, mask: Literal["ppo"] | None = None) -> Objective:
    """CISPO (MiniMax-M1): clips a token's importance weight; without `mask` no gradient is gated.

    gain[i,t] = sg[clip(r, 1 − low, 1 + high)]·Â·log π_θ, r = exp(log π_θ − log π_old). With `mask` "ppo" this is
    multiplied by the unified mask M, 0 where PPO would clip: Â > 0 and r > 1 + high, or Â < 0 and r < 1 − low.
    https://arxiv.org/abs/2506.13585

    Â [B] or [B, T] by `group_zscore`. `low` and `high` are offsets from 1: the defaults cap the weight at 5 with no
    floor (an implementation with absolute bounds writes 5 for our 4). Tokens with a clipped weight are reported as
    gated. Weights: token mean. Raises UserError for `low` outside [0, 1], `high` below 0, an unknown `mask`.
    """
    check_offsets(low, high)
    if mask is not None:
        check_choice(("ppo",), mask=mask)

    def surrogate(b: TokenBatch) -> Surrogate:
        plain = policy_gradient(b)
        under, over = plain.ratio < 1 - low, plain.ratio > 1 + high
        weight = jnp.clip(plain.ratio, 1 - low, 1 + high)
        if mask == "ppo":
            weight = jnp.where(jnp.where(b.advantages > 0, over, under), 0.0, weight)
        return Surrogate(weight * plain.gain, plain.ratio, under, over)

    return Objective(
        name="cispo", surrogate=surrogate, weights=token_mean, token_advantages=True, bounds={"low": low, "high": high}
    )


def gmpo(*, log_clip: float = 0.4) -> Objective:
    """Geometric-Mean Policy Optimization: the geometric mean of a response's clipped token ratios.

    gain[i,t] = Â·exp((1/n_i) Σ_t m·l), l = σ·min(σ·d, σ·clip(d, −c, c)), d = log π_θ − log π_old, c = `log_clip`, σ =
    sgn Â. https://arxiv.org/abs/2507.20673

    Â [B] by `group_zscore`. The bound is on log r, so 0.4 clips r at 0.67 and 1.49. Weights: sequence mean. Raises
    UserError for `log_clip` not above 0.
    """
    check_positive(_LOG_CLIP, log_clip=log_clip)

    def surrogate(b: TokenBatch) -> Surrogate:
        d = log_ratio(b.logprobs, b.old_logprobs, b.mask)
        return geometric(b, clip_log_ratio(d, b.advantages, log_clip=log_clip))

    return Objective(
        name="gmpo",
        surrogate=surrogate,
        weights=sequence_mean,
        one_gain=True,
        weighs_tokens=False,
        bounds={"log_clip": log_clip},
    )


def rspo(*, log_clip: float = 0.4, gamma_min: float = 0.8, apply: Literal["before", "after"] = "before") -> Objective:
    """Router-Shift Policy Optimization: GMPO with each token damped by how far its routing has shifted.

    gain[i,t] = Â·exp((1/n_i) Σ_t m·l), l as in `gmpo` for d = log π_θ − log π_old + log γ', γ' = sg[max(gamma_min, γ)].
    With `apply` "after", the first version's form, log γ' is added to l behind the clip instead.
    https://arxiv.org/abs/2510.23027 (version 2)

    Â [B] by `group_zscore`. γ [B, T] is the caller's `router_shift`, exp(−mean over layers and the old experts of |log
    ρ_θ − log ρ_old|), ρ the router's probabilities. Weights: sequence mean. Raises UserError for `log_clip` not above
    0, `gamma_min` outside (0, 1], an unknown `apply`.
    """
    check_positive(_LOG_CLIP, log_clip=log_clip)
    if not 0 < gamma_min <= 1:
        raise UserError(f"gamma_min={gamma_min} lies outside (0, 1]; it is the smallest damping factor of a token")
    check_choice(("before", "after"), apply=apply)

    def surrogate(b: TokenBatch) -> Surrogate:
        assert b.router_shift is not None, "rspo needs TokenBatch.router_shift; objectives.loss checks for it"
        damping = jnp.log(jnp.maximum(gamma_min, b.router_shift))
        d = log_ratio(b.logprobs, b.old_logprobs, b.mask)
        if apply == "before":
            return geometric(b, clip_log_ratio(d + damping, b.advantages, log_clip=log_clip))
        bounded = clip_log_ratio(d, b.advantages, log_clip=log_clip)
        return geometric(b, bounded._replace(log_ratios=bounded.log_ratios + damping))

    return Objective(
        name="rspo",
        surrogate=surrogate,
        weights=sequence_mean,
        one_gain=True,
        weighs_tokens=False,
        bounds={"log_clip": log_clip},
        router_shift=True,
    )


def sapo(*, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Objective:
    """Soft Adaptive Policy Optimization: a smooth gate instead of a hard clip, steeper for negative advantages.

    gain[i,t] = (4/τ)·σ(τ(r − 1))·Â, τ = `tau_pos` if Â > 0 else `tau_neg`, r = exp(log π_θ − log π_old). At r = 1 the
    gradient is Â·∇log π_θ. https://arxiv.org/abs/2511.20347

    Â [B] or [B, T] by `group_zscore`. Tokens with a gate below 1/2 are reported as gated. Weights: sequence mean.
    Raises UserError for a temperature not above 0.
    """
    check_positive("it is the steepness of the gate, usually about 1", tau_pos=tau_pos, tau_neg=tau_neg)

    def surrogate(b: TokenBatch) -> Surrogate:
        d = log_ratio(b.logprobs, b.old_logprobs, b.mask)
        return soft_gated(d, b.advantages, tau_pos=tau_pos, tau_neg=tau_neg)

    return Objective(name="sapo", surrogate=surrogate, weights=sequence_mean, token_advantages=True)


def dppo_tv(*, low: float = 0.15, high: float = 0.15, cap: float = 20.0) -> Objective:
    """Divergence PPO, total variation: tokens are dropped by the change of their probability, not by its ratio.

    gain[i,t] = sg[min(r, cap)·M]·Â·log π_θ, M = 0 where Â > 0 and p − q > `high`, or Â < 0 and p − q < −`low`; p = π_θ
    and q = π_old of the token, r = p/q. https://arxiv.org/abs/2602.04879, with its binary total variation

    Â [B] by `group_zscore`. The paper has one bound δ and no cap. The bound per sign and the cap are verl's, which also
    counts tokens with Â = 0 as dropped if their probability fell. Weights: token mean. Raises UserError for bounds
    outside [0, 1], `cap` not above 0.
    """
    check_fraction("it bounds the change of a token's probability", low=low, high=high)
    check_positive(_CAP, cap=cap)

    def change(b: TokenBatch, _: Array) -> Array:
        return probability_change(b.logprobs, b.old_logprobs, b.mask)

    return _gated("dppo_tv", change, -low, high, weights=token_mean, cap=cap)


def dppo_kl(*, low: float = 0.05, high: float = 0.05, cap: float = 20.0) -> Objective:
    """Divergence PPO, KL: as `dppo_tv`, with the KL of "this token or another one" as the change.

    gain[i,t] = sg[min(r, cap)·M]·Â·log π_θ, M = 0 where Â > 0, p > q and k > `high`, or Â < 0, p < q and k > `low`; k =
    q·log(q/p) + (1 − q)·log((1 − q + 1e-8)/(1 − p + 1e-8)). https://arxiv.org/abs/2602.04879

    Â [B] by `group_zscore`. Paper and verl differ from this as in `dppo_tv`. Weights: token mean. Raises UserError for
    bounds below 0, `cap` not above 0.
    """
    check_not_negative("it bounds a KL divergence, in nats", low=low, high=high)
    check_positive(_CAP, cap=cap)

    def change(b: TokenBatch, _: Array) -> Array:
        k = binary_kl(b.logprobs, b.old_logprobs, b.mask)
        return jnp.sign(log_ratio(b.logprobs, b.old_logprobs, b.mask)) * k

    return _gated("dppo_kl", change, -low, high, weights=token_mean, cap=cap)


def luspo(*, low: float = 2e-3, high: float = 2.5e-3, dual_clip: float | None = None) -> Objective:
    """Length-Unbiased Sequence Policy Optimization: GSPO with responses weighted by their length.

    gain[i,t] = min(s_i·Â, clip(s_i, 1 − low, 1 + high)·Â), s_i as in `gspo`; a response adds n_i such terms.
    https://arxiv.org/abs/2602.05261

    Â [B] by `group_zscore`. `low`, `high` and `dual_clip` as in `gspo`. Weights: m / N_rows. Raises UserError as `gspo`
    does.
    """
    return _clipped("luspo", low, high, dual_clip, weights=_PER_ROW, level="sequence")


def minirl(*, low: float = 0.2, high: float = 0.27) -> Objective:
    """MiniRL: the policy gradient with each token's importance weight, 0 where PPO would clip.

    gain[i,t] = sg[r·M]·Â·log π_θ, M = 0 where Â > 0 and r > 1 + high, or Â < 0 and r < 1 − low; r = exp(log π_θ − log
    π_old). https://arxiv.org/abs/2512.01374

    Â [B] by `group_centered`. `low` and `high` are offsets from 1. The paper weights by the ratio to the sampler's
    policy, π_θ/μ, and gates by π_θ/π_old; here the factor π_old/μ comes from `mismatch.tis`. Weights: m / N_rows.
    Raises UserError for `low` outside [0, 1], `high` below 0.
    """
    check_offsets(low, high)
    bounds = {"low": low, "high": high}
    return _gated(
        "minirl", lambda b, r: r, 1 - low, 1 + high, weights=_PER_ROW, advantage=group_centered, bounds=bounds
    )


def vespo(*, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0) -> Objective:
    """Variational Sequence-level Soft Policy Optimization: a smooth weight of the whole response's ratio.

    gain[i,t] = sg[φ(W_i)]·Â·log π_θ, φ(W) = W^k·exp(λ·(1 − W)), W_i = exp(Σ_t m·d), d = log π_θ − log π_old; (k, λ) =
    (`k_pos`, `lambda_pos`) where Â ≥ 0, else (`k_neg`, `lambda_neg`). https://arxiv.org/abs/2602.10693

    φ is 1 at W = 1 and vanishes at 0 and at ∞. Each d is clipped to ±20, and log W to [log 1e-8, 20]. Â [B] by
    `group_zscore`. A response with φ below 1/2 is reported as gated. Weights: token mean. Raises UserError for a
    parameter not above 0.
    """
    check_positive(
        "it shapes the weight W^k·exp(λ·(1 − W)) of a response, usually 2 or 3",
        k_pos=k_pos,
        lambda_pos=lambda_pos,
        k_neg=k_neg,
        lambda_neg=lambda_neg,
    )

    def surrogate(b: TokenBatch) -> Surrogate:
        d = jax.lax.stop_gradient(log_ratio(b.logprobs, b.old_logprobs, b.mask))
        log_w = jnp.clip(jnp.sum(jnp.clip(d, -20.0, 20.0), axis=1, keepdims=True), jnp.log(1e-8), 20.0)
        log_w = jnp.broadcast_to(log_w, b.mask.shape)
        k, rate = (jnp.where(b.advantages >= 0, *pair) for pair in ((k_pos, k_neg), (lambda_pos, lambda_neg)))
        weight = jnp.exp(k * log_w - rate * jnp.expm1(log_w))
        gated = b.mask & (weight < 0.5)
        ratio = jnp.exp(log_w)
        return Surrogate(weighted_score(b, weight), ratio, gated & (log_w < 0), gated & (log_w >= 0))

    return Objective(name="vespo", surrogate=surrogate, weights=token_mean, level="sequence")


def dro(*, beta: float = 0.1) -> Objective:
    """Direct Reward Optimization: the policy gradient with a quadratic penalty on the log-ratio in place of a clip.

    gain[i,t] = Â·log π_θ − (β/2)·(log π_θ − log π_old)², β = `beta`. Its gradient, (Â − β·d)·∇log π_θ, vanishes where
    the log-ratio d is Â/β. https://arxiv.org/abs/2405.19107, by token as in verl and Tinker

    Â [B] or [B, T] by `group_zscore`; the paper's is the reward less a learned soft value of the prompt. The penalty
    holds tokens with Â = 0 too, except in groups that dynamic sampling drops. Weights of a mismatch correction multiply
    both terms. verl has no default for β, and its documentation shows 0.05. Nothing is gated. Weights: token mean.
    Raises UserError for `beta` not above 0.
    """
    check_positive("it is the weight of the penalty, usually 0.05 to 0.1", beta=beta)

    def surrogate(b: TokenBatch) -> Surrogate:
        b = b._replace(logprobs=widen(b.logprobs))  # the gradients of both terms are added before they are rounded
        plain = policy_gradient(b)
        penalty = beta / 2 * log_ratio(b.logprobs, b.old_logprobs, b.mask) ** 2
        return plain._replace(gain=plain.gain - penalty)

    return Objective(name="dro", surrogate=surrogate, weights=token_mean, token_advantages=True, weighs_tokens=False)


def tbpo(*, low: float = 3e-4, high: float = 4e-4, high_neg: float = 7e-4) -> Objective:
    """Trust-Band Policy Optimization: GSPO whose ratios are bounded on both sides where Â < 0.

    gain[i,t] = min(s_i, 1 + high)·Â where Â ≥ 0, else clip(s_i, 1 − low, 1 + high_neg)·Â, s_i as in `gspo`: for Â < 0
    it is a dual clip at 1 + `high_neg`. https://arxiv.org/abs/2604.07853

    The paper also multiplies by the response's geometric-mean ratio π_old/μ to the sampler's policy, capped at 2: that
    is `mismatch.sequence_tis`. A public implementation holds that ratio above 1/2 too, and has 1e-3 for all bounds. Â
    [B] by `group_zscore`. The bounds are offsets from 1. Weights: sequence mean. Raises UserError for `low` outside [0,
    1], `high` below 0, `high_neg` not above 0.
    """
    check_positive("it is an offset from 1, so high_neg=7e-4 clips at 1.0007 where Â < 0", high_neg=high_neg)
    made = _clipped("tbpo", low, high, 1 + high_neg, weights=sequence_mean, level="sequence")
    return dataclasses.replace(made, bounds={**made.bounds, "high_neg": high_neg})


def minpro(*, low: float = 1.0, high: float = 4.0) -> Objective:
    """Minimum Prefix Ratio: CISPO with each token's ratio multiplied by the smallest one before it in its response.

    gain[i,t] = sg[clip(ρ·r, 1 − low, 1 + high)]·Â·log π_θ, r = exp(log π_θ − log π_old), ρ[i,t] = min_{u<t} r[i,u] over
    sampled tokens, 1 for the first. ρ·r stands in for the product of the prefix's ratios, a token's exact weight, whose
    variance grows with its position. https://arxiv.org/abs/2601.22718

    Â [B] or [B, T] by `group_zscore`. `low` and `high` as in `cispo`, with its defaults: a floor would undo what ρ is
    for. The ratio reported is ρ·r, and tokens with a clipped one are reported as gated. Weights: token mean. Raises
    UserError for `low` outside [0, 1], `high` below 0.
    """
    check_offsets(low, high)

    def surrogate(b: TokenBatch) -> Surrogate:
        d = jax.lax.stop_gradient(log_ratio(b.logprobs, b.old_logprobs, b.mask))
        ratio = jnp.exp(d + lowest_before(d, b.mask))
        weight = jnp.clip(ratio, 1 - low, 1 + high)
        return Surrogate(weighted_score(b, weight), ratio, ratio < 1 - low, ratio > 1 + high)

    bounds = {"low": low, "high": high}
    return Objective(name="minpro", surrogate=surrogate, weights=token_mean, token_advantages=True, bounds=bounds)


_PER_ROW = partial(constant_length, length=1.0)  # m / N_rows
_CAP = "it is the largest importance weight of a token, usually 20"
_LOG_CLIP = "it bounds log r, so 0.4 clips r at 0.67 and 1.49"


def _clipped(
    name: str,
    low: float,
    high: float,
    dual_clip: float | None,
    *,
    level: Literal["token", "sequence"] = "token",
    **others: Any,
) -> Objective:
    """Build an objective with PPO's clip of each token's ratio, or of one ratio per response, as in `gspo`."""
    check_offsets(low, high, dual_clip)

    def surrogate(b: TokenBatch) -> Surrogate:
        d = log_ratio(b.logprobs, b.old_logprobs, b.mask)
        if level == "sequence":
            d = jnp.broadcast_to(row_mean(d, b.mask)[:, None], d.shape)
        return clipped(d, b.advantages, low=low, high=high, dual_clip=dual_clip)

    of_tokens, bounds = level == "token", {"low": low, "high": high}
    others |= {"level": level, "one_gain": not of_tokens, "weighs_tokens": of_tokens, "bounds": bounds}
    return Objective(name=name, surrogate=surrogate, **others)


def _gated(
    name: str,
    change: Callable[[TokenBatch, Array], Array],
    least: float,
    most: float,
    *,
    cap: float = math.inf,
    **others: Any,
) -> Objective:
    """Build a policy gradient weighted by capped ratios, 0 where `change` of batch and ratio leaves [least, most]."""

    def surrogate(b: TokenBatch) -> Surrogate:
        ratio = jnp.exp(jax.lax.stop_gradient(log_ratio(b.logprobs, b.old_logprobs, b.mask)))
        moved = change(b, ratio)
        gated_low, gated_high = (b.advantages < 0) & (moved < least), (b.advantages > 0) & (moved > most)
        weight = jnp.where(gated_low | gated_high, 0.0, jnp.minimum(ratio, cap))
        return Surrogate(weighted_score(b, weight), ratio, gated_low, gated_high)

    return Objective(name=name, surrogate=surrogate, **others)
