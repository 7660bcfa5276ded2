"""Experience for the updates: masks, advantages, returns and mismatch corrections, from rewards and log-probs."""

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
    """Rewards of a batch, and the responses that carry gradient."""

    total: Float[Array, " B"]
    """Reward of each whole response; finite."""
    learn: Bool[Array, " B"]
    """True for responses that carry gradient; the others only count in their group's baseline."""
    of_tokens: Float[Array, "B T"] | None = None
    """Reward of the step that each token ends, 0 elsewhere; None without step rewards."""
    steps: Bool[Array, "B T"] | None = None
    """True where a step ends; None without step rewards."""


ExperienceFn = Callable[[Objective, Rollout, OldPolicy, Rewards], Experience]
"""(objective, rollout, old policy, rewards) -> experience, with advantages."""


def make_experience(*, group_size: int, correction: Correction | None, kl_in_reward: float) -> ExperienceFn:
    """A function `experience(objective, rollout, old, rewards)` whose computation is jitted.

    Advantages are the objective's: group-based ones from the rewards, or GAE for an objective with a critic.

    Args:
      group_size: adjacent rows of one group.
      correction: importance weights for sampler–trainer mismatch; None for none.
      kl_in_reward: β of the k1 estimate of KL(old‖reference) subtracted from every token's reward; needs a critic.
    """
    work = jax.jit(
        partial(_work, group_size=group_size, correction=correction, kl_in_reward=kl_in_reward), static_argnums=0
    )

    def experience(objective: Objective, rollout: Rollout, old: OldPolicy, rewards: Rewards) -> Experience:
        return Experience(rollout, old=old, **work(objective, rollout.action_mask, rollout.logprobs, old, rewards))

    return experience


def _work(
    objective: Objective,
    mask: Bool[Array, "B T"],
    sampler_logprobs: Float[Array, "B T"],
    old: OldPolicy,
    rewards: Rewards,
    *,
    group_size: int,
    correction: Correction | None,
    kl_in_reward: float,
) -> dict[str, Any]:
    """The computed fields of an Experience, by name."""
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
    return found | {"advantages": group_advantages(objective, rewards, group_size=group_size)}


def group_advantages(
    objective: Objective, rewards: Rewards, *, group_size: int
) -> Float[Array, " B"] | Float[Array, "B T"]:
    """Advantages that an objective without a critic makes of the rewards of groups; per token with step rewards."""
    assert objective.advantage is not None
    advantages = objective.advantage(rewards.total, group_size=group_size)
    if rewards.of_tokens is None:
        return advantages
    assert rewards.steps is not None
    return advantages[:, None] + group_steps(rewards.of_tokens, rewards.steps, group_size=group_size)


def token_rewards(
    rewards: Rewards, old: OldPolicy, mask: Bool[Array, "B T"], *, kl_in_reward: float
) -> Float[Array, "B T"]:
    """Reward of each token, for GAE.

    A response's total reward goes to its last token, a step's reward to the token that ends the step, and
    β·(log π_old − log π_ref) is subtracted from every token's reward.
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
