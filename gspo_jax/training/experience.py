"""Masks, advantages, returns and mismatch corrections for the updates, from rewards and log-probs."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gspo_jax.objectives import Objective
from gspo_jax.objectives.advantages import gae, group_steps, group_turns, whitened
from gspo_jax.objectives.mismatch import Correction
from gspo_jax.objectives.regularizers import kl
from gspo_jax.training.layout import collect, deal
from gspo_jax.types import Batch, OldPolicy, Rewards

ExperienceFn = Callable[[Objective, Batch, Rewards], Batch]
"""(objective, packed batch with log-probs, shaped rewards [B] on the devices) -> the batch with what updates learn
from."""


def make_experience(
    *, group_size: int, correction: Correction | None, kl_in_reward: float, teacher: float = 0.0
) -> ExperienceFn:
    """Build `experience(objective, batch, rewards)`, jitted.

    `kl_in_reward` is β of the k1 estimate of KL(old‖reference) subtracted from every token's reward; it needs a critic.
    `teacher` is the weight of KL(old‖teacher) in every token's advantage, as in `add_teacher`.
    """

    @partial(jax.jit, static_argnums=0)
    def fields(objective: Objective, batch: Batch, rewards: Rewards) -> dict[str, Any]:
        old, own = batch.old, deal(rewards, batch.packing)
        mask = batch.rollout.action_mask & own.learn[..., None]
        found: dict[str, Any] = {"mask": mask}
        if correction is not None:
            found["correction"] = jax.vmap(correction)(old.logprobs, batch.rollout.logprobs, mask)
        if objective.critic is None:
            in_order = partial(collect, packing=batch.packing, count=len(rewards.total))
            of_tokens = objective.by_energy or objective.turn_discount is not None
            sampled = in_order(batch.rollout.action_mask) if of_tokens else None
            energy = None if old.energy is None else in_order(old.energy)
            advantages = group_advantages(objective, rewards, sampled, energy, group_size=group_size)
            advantages = deal(advantages, batch.packing)
            return found | {"advantages": add_teacher(advantages, old, mask, weight=teacher) if teacher else advantages}
        assert old.values is not None
        of_tokens = jax.vmap(partial(token_rewards, kl_in_reward=kl_in_reward))(own, old, mask)
        estimate = partial(gae, gamma=objective.critic.gamma, lam=objective.critic.lam)
        plain = jax.vmap(estimate)(of_tokens, old.values, mask)
        found["returns"] = jnp.where(mask, plain + old.values, 0)
        advantages = whitened(plain, mask) if objective.critic.whiten else plain
        return found | {"advantages": add_teacher(advantages, old, mask, weight=teacher) if teacher else advantages}

    def experience(objective: Objective, batch: Batch, rewards: Rewards) -> Batch:
        return dataclasses.replace(batch, **fields(objective, batch, rewards))

    return experience


def group_advantages(
    objective: Objective,
    rewards: Rewards,
    sampled: Bool[Array, "B T"] | None = None,
    energy: Float[Array, "B T"] | None = None,
    *,
    group_size: int,
) -> Float[Array, " B"] | Float[Array, "B T"]:
    """Return a critic-free objective's advantages.

    Per token with a `turn_discount` or `by_energy`, which need the action mask `sampled`, the latter also each token's
    `energy`, or with step rewards. These are rewards of turns with a `turn_discount`, otherwise they are compared by
    themselves and added.
    """
    assert objective.advantage is not None
    if objective.turn_discount is not None:
        assert sampled is not None
        of_tokens: Any = jnp.zeros(sampled.shape) if rewards.of_steps is None else rewards.of_steps
        total: Any = rewards.total
        ends: Any = rewards.turn_ends
        settings: dict[str, Any] = {"discount": objective.turn_discount, "advantage": objective.advantage}
        return group_turns(of_tokens, total, sampled, ends, group_size=group_size, **settings)
    given: tuple[Any, ...] = (rewards.by_name if objective.by_reward else rewards.total,)
    if objective.by_energy:
        assert sampled is not None and energy is not None
        given = (*given, energy, sampled)
    advantages = objective.advantage(*given, group_size=group_size)
    if rewards.of_steps is None:
        return advantages
    each: tuple[Any, ...] = rewards.of_steps, rewards.steps
    return advantages.reshape(len(advantages), -1) + group_steps(*each, group_size=group_size)


def add_teacher(
    advantages: Float[Array, "M Q"] | Float[Array, "M Q T"],
    old: OldPolicy,
    mask: Bool[Array, "M Q T"],
    *,
    weight: float,
) -> Float[Array, "M Q T"]:
    """Return Â_t − weight·(log π_old(y_t) − log π_T(y_t)): on-policy distillation by policy gradient.

    In expectation over y_t the added part's gradient is −weight·∇KL(π_θ ‖ π_T) at each sampled prefix, the reverse KL
    of MiniLLM (arXiv 2306.08543) and GKD (arXiv 2306.13649); what a token changes in later prefixes is left out.
    """
    assert old.teacher_logprobs is not None
    apart = jax.vmap(partial(kl, estimator="k1"))(old.logprobs, old.teacher_logprobs, mask)
    return (advantages if advantages.ndim == mask.ndim else advantages[..., None]) - weight * apart


def token_rewards(
    rewards: Rewards, old: OldPolicy, mask: Bool[Array, "Q T"], *, kl_in_reward: float
) -> Float[Array, "Q T"]:
    """Return each token's reward, for GAE.

    The total goes to the last token, a step's reward to the step's end, minus β·(log π_old − log π_ref) everywhere.
    """
    T = mask.shape[1]
    last = (T - 1 - jnp.argmax(mask[:, ::-1], axis=1))[:, None] == jnp.arange(T)[None]
    earned = jnp.where(last & mask, rewards.total[:, None], 0.0)
    if rewards.of_steps is not None:
        earned += rewards.of_steps
    if kl_in_reward:
        assert old.reference_logprobs is not None
        earned -= kl_in_reward * kl(old.logprobs, old.reference_logprobs, mask, estimator="k1")
    return earned
