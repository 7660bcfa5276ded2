"""Routing replay: a forward pass reuses the experts that an earlier pass over the same tokens chose.

R2 (arXiv 2507.18071, section 5.3) replays the old policy's routes, recorded when scoring old log-probs; R3 (arXiv
2510.11370) the sampler's. The router keeps learning: expert weights are its current scores at the replayed experts,
renormalised and scaled as those of its own choice. A sigmoid router's bias and groups then have no part in a token.
"""

from typing import Literal

from jaxtyping import Array, Int

from gspo_jax.types import RouterRecord

Replay = Literal["none", "r2", "r3"]


def experts_to_replay(replay: Replay, sampler: RouterRecord, old: RouterRecord | None) -> Int[Array, "L B N K"] | None:
    """Return the experts to replay, -1 where not recorded; None if nothing is replayed.

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
    return record.experts
