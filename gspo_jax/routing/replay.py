"""Routing replay: a forward pass reuses the experts that an earlier pass over the same tokens chose.

R2 (arXiv 2507.18071, section 5.3) replays the old policy's routes, recorded when scoring old log-probs; R3 (arXiv
2510.11370) the sampler's. The router keeps learning: expert weights are its current scores at the replayed experts,
renormalised and scaled as those of its own choice. A sigmoid router's bias and groups then have no part in a token.

R3 with weights, "r3w", also replays what the sampler weighed its experts by, rebuilt from the router log-probs that it
recorded. These weights are constants: through a replayed token the objective gives the router no gradient, where R2 and
R3 keep the trainer's own weights, which do learn. Balance and z-loss still move it. A token without a record is routed
and weighed by the trainer's router, which learns from it.
"""

from typing import Literal

from jaxtyping import Array, Float, Int

from gspo_jax.types import RouterRecord

Replay = Literal["none", "r2", "r3", "r3w"]
OF_SAMPLER = ("r3", "r3w")
"""Replays of the sampler's record."""
Replayed = tuple[Int[Array, "L B N K"] | None, Float[Array, "L B N K"] | None]


def to_replay(replay: Replay, sampler: RouterRecord, old: RouterRecord | None) -> Replayed:
    """Return the experts to replay, -1 where not recorded, and the router log-probs to weigh them by; None if neither.

    Raises:
      ValueError: the record that is to be replayed was not made.
    """
    if replay == "none":
        return None, None
    record = sampler if replay in OF_SAMPLER else old
    if record is None:
        raise ValueError(
            "r2 replays the routes of the old policy, but none were recorded; let the trainer recompute them"
        )
    if replay != "r3w":
        return record.experts, None
    if record.logprobs is None:
        raise ValueError("r3w replays the weights of the sampler's experts, but it recorded no router log-probs")
    return record.experts, record.logprobs
