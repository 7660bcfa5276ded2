"""Reward shaping before advantages are computed, the responses that carry gradient, and the groups that do."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float

from gspo_jax.objectives import Objective
from gspo_jax.objectives.advantages import group_centered
from gspo_jax.rewards.shaping import differ, fill_failures, overlong
from gspo_jax.run.scored import Scored
from gspo_jax.training.experience import Rewards, group_advantages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shaping:
    """DAPO's length shaping (arXiv 2503.14476), and substitute rewards for responses that could not be scored."""

    group_size: int
    """Adjacent responses to one prompt, G."""
    limit: int
    """Maximum response length in tokens."""
    penalty: float
    """Weight of the soft overlong punishment; 0 for none."""
    cache: int
    """Number of tokens before the limit over which the punishment grows."""
    drop_truncated: bool
    """Exclude responses cut off at the limit from learning."""

    def overlong(self, scored: Scored) -> Float[np.ndarray, " B"]:
        """The weighted overlong punishment of each response, at most 0."""
        if not self.penalty:
            return np.zeros(len(scored.lengths), np.float32)
        return np.float32(self.penalty) * overlong(scored.lengths, limit=self.limit, cache=self.cache)

    def rewards(self, scored: Scored) -> Float[np.ndarray, " B"]:
        """Finite rewards from which advantages are computed."""
        return fill_failures(scored.total + self.overlong(scored), group_size=self.group_size)

    def trainable_rows(self, scored: Scored) -> Bool[np.ndarray, " B"]:
        """True for responses that carry gradient: scored, not padding of a dynamic batch, not filtered out."""
        return scored.learn & ~scored.truncated if self.drop_truncated else scored.learn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filter:
    """The filter of DAPO's dynamic sampling (arXiv 2503.14476): which groups there is something to learn from."""

    objective: Objective
    """The objective whose advantages decide."""
    shaping: Shaping
    """The rewards that it sees."""
    reward: str
    """Reward function whose scores have to differ, too; empty for none."""

    def keeps(self, scored: Scored) -> Bool[np.ndarray, " P"]:
        """True for groups with a trainable response whose advantage is not 0, and with different scores of `reward`.

        A critic's advantages are not known yet, and the centred rewards stand in for them. A group that `reward` gives
        no score to, because it is not asked about it, is judged by its advantages alone.
        """
        G = self.shaping.group_size
        kept = self._learns(scored).reshape(-1, G).any(axis=1)
        if not self.reward:
            return kept
        scores = scored.by_name[self.reward]
        return kept & (differ(scores, group_size=G) | np.isnan(scores).reshape(-1, G).all(axis=1))

    def _learns(self, scored: Scored) -> Bool[np.ndarray, " B"]:
        """True for trainable responses with an advantage, of one of their tokens at least, that is not 0."""
        trainable = self.shaping.trainable_rows(scored)
        if not trainable.any():  # and there may be no reward at all
            return trainable
        objective = self.objective
        if objective.critic is not None:
            objective = dataclasses.replace(objective, advantage=group_centered)
        columns: tuple[Any, ...] = self.shaping.rewards(scored), trainable, scored.step_rewards, scored.steps
        rewards = Rewards(*columns)
        advantages = np.asarray(_advantages(objective, rewards, group_size=self.shaping.group_size))
        if advantages.ndim == 1:
            return trainable & (advantages != 0)
        tokens = np.arange(advantages.shape[1]) < scored.lengths[:, None]
        return trainable & (tokens & (advantages != 0)).any(axis=1)


_advantages = partial(jax.jit, static_argnames=("objective", "group_size"))(group_advantages)
