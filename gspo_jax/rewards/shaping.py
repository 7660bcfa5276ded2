"""Reward shaping that is independent of the text: by length, and of responses without a score."""

import numpy as np
from jaxtyping import Bool, Float, Int

from gspo_jax.errors import UserError


def overlong(lengths: Int[np.ndarray, " B"], *, limit: int, cache: int) -> Float[np.ndarray, " B"]:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4), which grows towards the length limit.

        0 for n ≤ limit − cache;  ((limit − cache) − n) / cache for n ≤ limit;  −1 beyond

    Args:
      lengths: tokens of each response, n.
      limit: tokens at which the punishment reaches −1, L_max.
      cache: tokens before `limit` over which it grows, L_cache, in 1..limit.

    Returns:
      Punishments in [−1, 0], float32, to be added to the rewards.

    Raises:
      UserError: `cache` is outside 1..limit.
    """
    if not 1 <= cache <= limit:
        raise UserError(f"overlong.cache is {cache}; use 1 to {limit}, the maximum response length")
    return np.clip((limit - cache - lengths) / cache, -1, 0).astype(np.float32)


def fill_failures(rewards: Float[np.ndarray, " B"], *, group_size: int) -> Float[np.ndarray, " B"]:
    """Rewards with NaN, of a response that could not be scored, replaced by the mean of its group's scored responses.

    The replaced response gets advantage zero and leaves the group's mean unchanged; the standard deviation shrinks a
    little. Of equal rewards the mean is exactly the same reward, so that all advantages of the group are exactly zero.
    A group without any reward gets zeros.

    Raises:
      RuntimeError: no response of the batch could be scored.
    """
    groups = rewards.reshape(-1, group_size)
    valid = np.isfinite(groups)
    if not valid.any():
        raise RuntimeError("none of the batch's responses could be scored; check the reward functions")
    first = np.take_along_axis(np.where(valid, groups, 0), valid.argmax(axis=1)[:, None], axis=1).astype(np.float64)
    apart = np.where(valid, groups - first, 0).sum(axis=1, keepdims=True)
    means = first + apart / np.maximum(valid.sum(axis=1, keepdims=True), 1)
    return np.where(valid, groups, means).reshape(-1).astype(np.float32)


def differ(values: Float[np.ndarray, " B"], *, group_size: int) -> Bool[np.ndarray, " P"]:
    """True for groups whose responses have different values, ignoring those without one, NaN."""
    groups = values.reshape(-1, group_size)
    valid = np.isfinite(groups)
    return np.where(valid, groups, -np.inf).max(axis=1) > np.where(valid, groups, np.inf).min(axis=1)
