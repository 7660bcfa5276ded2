"""Reward shaping before advantages are computed, and the responses that carry gradient."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float

from gspo_jax.rewards.shaping import overlong
from gspo_jax.run.scored import Scored


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
        return fill_failures(scored.total, self.group_size) + self.overlong(scored)

    def trainable_rows(self, scored: Scored) -> Bool[np.ndarray, " B"]:
        """True for responses that carry gradient: scored, not padding of a dynamic batch, not filtered out."""
        return scored.learn & ~scored.truncated if self.drop_truncated else scored.learn


def fill_failures(rewards: Float[np.ndarray, " B"], group_size: int) -> Float[np.ndarray, " B"]:
    """Rewards with NaN, of a response that could not be scored, replaced by the mean of its group's scored responses.

    The replaced response gets advantage zero and leaves the group's mean unchanged; the standard deviation shrinks a
    little.

    Raises:
      RuntimeError: no response of the batch could be scored.
    """
    valid = np.isfinite(rewards).reshape(-1, group_size)
    if not valid.any():
        raise RuntimeError("none of the batch's responses could be scored; check the reward functions")
    grouped = np.where(valid, rewards.reshape(-1, group_size), 0)
    means = grouped.sum(axis=1, keepdims=True) / np.maximum(valid.sum(axis=1, keepdims=True), 1)
    return np.where(valid, grouped, means).reshape(-1).astype(np.float32)
