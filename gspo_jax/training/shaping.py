"""Reward shaping, the responses that carry gradient, and the filter of dynamic sampling."""

import dataclasses
from functools import partial

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from gspo_jax.errors import ScoringFailed, UserError
from gspo_jax.objectives import Objective
from gspo_jax.objectives.advantages import group_centered
from gspo_jax.parallel import hosts
from gspo_jax.training.experience import group_advantages
from gspo_jax.types import Batch, Rewards

OVERLONG = "overlong"
"""Name of the weighted length punishment among the rewards."""


def overlong(lengths: Int[np.ndarray, " B"], *, limit: int, cache: int) -> Float[np.ndarray, " B"]:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4), in [−1, 0], float32.

        0 for n ≤ limit − cache;  ((limit − cache) − n) / cache for n ≤ limit;  −1 beyond

    Raises:
      UserError: `cache` is outside 1..limit.
    """
    if not 1 <= cache <= limit:
        raise UserError(f"overlong.cache is {cache}; use 1 to {limit}, the maximum response length")
    return np.clip((limit - cache - lengths) / cache, -1, 0).astype(np.float32)


def differ(values: Float[np.ndarray, " B"], *, group_size: int) -> Bool[np.ndarray, " P"]:
    """Return True for groups with differing values, ignoring NaN."""
    groups = values.reshape(-1, group_size)
    valid = np.isfinite(groups)
    return np.where(valid, groups, -np.inf).max(axis=1) > np.where(valid, groups, np.inf).min(axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shaping:
    """DAPO's length shaping (arXiv 2503.14476), and rewards for unscored responses."""

    group_size: int
    limit: int
    """Maximum response length in tokens."""
    penalty: float
    """Weight of the punishment; 0 for none."""
    cache: int
    """Tokens before the limit over which it grows."""
    drop_truncated: bool
    """Exclude responses cut off at the limit."""

    def overlong(self, batch: Batch) -> Float[np.ndarray, " B"]:
        """Return each response's weighted punishment, at most 0."""
        if not self.penalty:
            return np.zeros(len(batch.lengths), np.float32)
        return np.float32(self.penalty) * overlong(batch.lengths, limit=self.limit, cache=self.cache)

    def trainable(self, batch: Batch) -> Bool[np.ndarray, " B"]:
        """Return True for responses that carry gradient: scored, not padding of a dynamic batch, not filtered out."""
        learn = batch.rewards.learn
        return learn & ~batch.truncated if self.drop_truncated else learn

    def rewards(self, batch: Batch) -> Rewards:
        """Return shaped rewards, NaN without a score, and the responses that carry gradient.

        Raises:
          ScoringFailed: no response of the batch could be scored.
        """
        earned, shaped = batch.rewards, self.overlong(batch)
        total = earned.total + shaped
        if not np.isfinite(total).any():
            raise ScoringFailed("none of the batch's responses could be scored; check the reward functions")
        by_name = earned.by_name | ({OVERLONG: shaped} if self.penalty else {})
        return dataclasses.replace(
            earned,
            total=total,
            by_name=by_name,
            learn=self.trainable(batch),
            without_worker=None,
            turn_ends=batch.turn_ends,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filter:
    """Group filter of DAPO's dynamic sampling (arXiv 2503.14476)."""

    objective: Objective
    shaping: Shaping
    reward: str
    """Reward function with scores that must differ too; empty for none."""

    def keeps(self, batch: Batch) -> Bool[np.ndarray, " P"]:
        """Return True for groups with a trainable response of non-zero advantage and differing scores of `reward`.

        Centred rewards stand in for advantages that are only known later, of a critic or by energy. A group without
        scores of `reward` is judged by advantages alone.
        """
        G = self.shaping.group_size
        kept = self._learns(batch).reshape(-1, G).any(axis=1)
        if not self.reward:
            return kept
        scores = batch.rewards.by_name[self.reward]
        return kept & (differ(scores, group_size=G) | np.isnan(scores).reshape(-1, G).all(axis=1))

    def _learns(self, batch: Batch) -> Bool[np.ndarray, " B"]:
        trainable = self.shaping.trainable(batch)
        if not trainable.any():  # there may be no reward at all
            return trainable
        objective = self.objective
        if objective.critic is not None or objective.by_energy:
            objective = dataclasses.replace(objective, advantage=group_centered, by_energy=False)
        rewards = self.shaping.rewards(batch)
        sampled = None if objective.turn_discount is None else hosts.allgather(batch.rollout.action_mask)
        advantages = np.asarray(_advantages(objective, rewards, sampled, group_size=self.shaping.group_size))
        if advantages.ndim == 1:
            return trainable & (advantages != 0)
        tokens = np.arange(advantages.shape[1]) < batch.lengths[:, None]
        return trainable & (tokens & (advantages != 0)).any(axis=1)


_advantages = partial(jax.jit, static_argnames=("objective", "group_size"))(group_advantages)
