"""Reward shaping by response length, independent of the text."""

import numpy as np
from jaxtyping import Float, Int

from gspo_jax.types import UserError


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
