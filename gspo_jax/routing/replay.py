"""Routing replay: a forward pass reuses the experts that an earlier pass over the same tokens chose.

R2 (arXiv 2507.18071, section 5.3) replays the routes of the old policy, recorded when the trainer scores the old
log-probs; R3 (arXiv 2510.11370) replays those of the sampler. Only the choice of experts is replayed: their weights are
the current router's scores at these experts, renormalised, so the router keeps learning.
"""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Int

from gspo_jax.types import RouterRecord

Replay = Literal["none", "r2", "r3"]
"""Source of the routes that the trainer replays: none, the old policy (R2), or the sampler (R3)."""

REPLAYS: tuple[Replay, ...] = get_args(Replay)


def experts_to_replay(replay: Replay, sampler: RouterRecord, old: RouterRecord | None) -> Int[Array, "L B N K"] | None:
    """Return the experts to replay, -1 where the record has none; None if nothing is replayed.

    Raises:
      ValueError: R2 is requested without a record of the old policy's routes.
    """
    if replay == "none":
        return None
    record = old if replay == "r2" else sampler
    if record is None:
        raise ValueError(
            "r2 replays the routes of the old policy, but none were recorded; let the trainer recompute them"
        )
    return jnp.moveaxis(record.experts, 2, 0)
