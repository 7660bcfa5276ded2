"""Rewards that look at a response's length and not at its text."""

import numpy as np
from jaxtyping import Float, Int

from gspo_jax.types import UserError


def overlong(lengths: Int[np.ndarray, " B"], *, limit: int, cache: int) -> Float[np.ndarray, " B"]:
    """DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4): a penalty that grows before a response is cut.

        0 for n ≤ limit − cache;  ((limit − cache) − n) / cache up to limit;  −1 beyond

    Args:
      lengths: tokens of each response, n.
      limit: tokens at which the penalty is complete, L_max.
      cache: tokens before `limit` over which it grows, L_cache, 1..limit.

    Returns:
      float32, −1..0, to be added to the reward.

    Raises:
      UserError: `cache` is not in 1..limit.
    """
    if not 1 <= cache <= limit:
        raise UserError(f"the overlong cache {cache} is not in 1..{limit}, the length limit; choose one that is")
    return np.clip((limit - cache - lengths) / cache, -1, 0).astype(np.float32)
