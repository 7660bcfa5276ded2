"""Routing replay: a forward uses the experts that an earlier forward of the same tokens chose, not its own router's.

R2 (arXiv 2507.18071, section 5.3) replays the routes of the old policy, recorded by the trainer when it scores old
log-probs; R3 (arXiv 2510.11370) those of the sampler. Only the choice is replayed: the weights of the experts come
from the scores that the router gives them now, renormalised, and so the router goes on learning.
"""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Int

from gspo_jax.types import RouterRecord

Replay = Literal["none", "r2", "r3"]
"""Whose routes the trainer replays: nobody's, the old policy's, or the sampler's."""

REPLAYS: tuple[Replay, ...] = get_args(Replay)


def replayed(replay: Replay, sampler: RouterRecord, old: RouterRecord | None) -> Int[Array, "L B N K"] | None:
    """The experts to replay, -1 where none are known; None where nothing is replayed.

    Raises:
      ValueError: R2 without a record of the old policy.
    """
    if replay == "none":
        return None
    record = old if replay == "r2" else sampler
    if record is None:
        raise ValueError("r2 replays the routes of the old policy, and there is no record of them; recompute them")
    return jnp.moveaxis(record.experts, 2, 0)
