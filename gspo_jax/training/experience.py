"""From rewards to what an update learns from: masks, advantages, returns and mismatch corrections."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from gspo_jax.objectives import Objective
from gspo_jax.objectives.advantages import gae, group_steps, whitened
from gspo_jax.objectives.mismatch import Correction
from gspo_jax.objectives.regularizers import kl
from gspo_jax.types import Experience, OldPolicy, Rollout


@struct.dataclass
class Rewards:
    """What the reward functions say of a batch, and which of its responses to learn from."""

    total: Float[Array, " B"]
    """Of each whole response; finite."""
    learn: Bool[Array, " B"]
    """False on responses that count in their group's mean but are not learned from."""
    of_tokens: Float[Array, "B T"] | None = None
    """Reward of the step that ends with each token; None without step rewards."""
    steps: Bool[Array, "B T"] | None = None
    """True where a step ends; None without step rewards."""


ExperienceFn = Callable[[Rollout, OldPolicy, Rewards], Experience]


def make_experience(
    objective: Objective, *, group_size: int, correction: Correction | None, kl_in_reward: float
) -> ExperienceFn:
    """An `experience(rollout, old, rewards)`.

    Args:
      objective: its advantages are used; those of an objective with a critic come from GAE.
      group_size: rows of a group, adjacent.
      correction: of the mismatch between sampler and trainer; None for none.
      kl_in_reward: β of the k1 estimate of KL(old‖reference) that every token's reward is lowered by; needs a critic.
    """
    work = jax.jit(
        partial(_work, objective=objective, group_size=group_size, correction=correction, kl_in_reward=kl_in_reward)
    )

    def experience(rollout: Rollout, old: OldPolicy, rewards: Rewards) -> Experience:
        return Experience(rollout, old=old, **work(rollout.action_mask, rollout.logprobs, old, rewards))

    return experience


def _work(
    mask: Bool[Array, "B T"],
    sampler_logprobs: Float[Array, "B T"],
    old: OldPolicy,
    rewards: Rewards,
    *,
    objective: Objective,
    group_size: int,
    correction: Correction | None,
    kl_in_reward: float,
) -> dict[str, Any]:
    """The fields of an Experience that are computed here."""
    mask = mask & rewards.learn[:, None]
    found: dict[str, Any] = {"mask": mask}
    if correction is not None:
        found["correction"] = correction(old.logprobs, sampler_logprobs, mask)
    if objective.critic is not None:
        assert old.values is not None
        of_tokens = token_rewards(rewards, old, mask, kl_in_reward=kl_in_reward)
        plain = gae(of_tokens, old.values, mask, gamma=objective.critic.gamma, lam=objective.critic.lam)
        found["returns"] = jnp.where(mask, plain + old.values, 0)
        return found | {"advantages": whitened(plain, mask) if objective.critic.whiten else plain}
    assert objective.advantage is not None
    advantages = objective.advantage(rewards.total, group_size=group_size)
    if rewards.of_tokens is not None:
        assert rewards.steps is not None
        advantages = advantages[:, None] + group_steps(rewards.of_tokens, rewards.steps, group_size=group_size)
    return found | {"advantages": advantages}


def token_rewards(
    rewards: Rewards, old: OldPolicy, mask: Bool[Array, "B T"], *, kl_in_reward: float
) -> Float[Array, "B T"]:
    """The reward of every token, as a critic's GAE takes it: 0 but where one is earned.

    A response's total is earned by its last token, a step's reward by the token that ends it, and every token pays
    β·(log π_old − log π_ref).
    """
    T = mask.shape[1]
    last = (T - 1 - jnp.argmax(mask[:, ::-1], axis=1))[:, None] == jnp.arange(T)[None]
    earned = jnp.where(last & mask, rewards.total[:, None], 0.0)
    if rewards.of_tokens is not None:
        earned += rewards.of_tokens
    if kl_in_reward:
        assert old.reference_logprobs is not None
        earned -= kl_in_reward * kl(old.logprobs, old.reference_logprobs, mask, estimator="k1")
    return earned
