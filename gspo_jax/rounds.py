"""Scored responses, and DAPO's dynamic sampling: rounds that go on until a batch is worth learning from.

https://arxiv.org/abs/2503.14476
"""

import dataclasses

import jax
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, Shaped

from gspo_jax.parallel import hosts
from gspo_jax.rollout.episodes import group_rows
from gspo_jax.types import Rollout


@struct.dataclass
class Scored:
    """A batch of responses with their rewards: the rollout on the devices, all else on the host of every process."""

    rollout: Rollout
    texts: Shaped[np.ndarray, " B"]
    """The prompt of each response."""
    lengths: Int[np.ndarray, " B"]
    """Tokens of each response, an environment's included."""
    drawn: Int[np.ndarray, " B"]
    """Those of them that the policy drew."""
    truncated: Bool[np.ndarray, " B"]
    """Responses that met their limit without an EOS."""
    turns: Int[np.ndarray, " B"]
    """Turns of the policy."""
    stale_tokens: Int[np.ndarray, " B"]
    """Tokens sampled by policies older than the current one."""
    records: Shaped[np.ndarray, " B"]
    """What the data says of each prompt, such as its answer."""
    total: Float[np.ndarray, " B"]
    """The weighted sum of the reward functions; NaN where one failed, or one of step rewards."""
    by_name: dict[str, Float[np.ndarray, " B"]]
    """Each reward function's own scores, and of step-reward functions the mean per step; NaN where there is none."""
    learn: Bool[np.ndarray, " B"]
    """False on responses that are not learned from."""
    step_rewards: Float[np.ndarray, "B T"] | None = None
    """At the token that ends a step, the weighted reward of that step, 0 elsewhere; None without step rewards."""
    steps: Bool[np.ndarray, "B T"] | None = None
    """True where a step ends; None without step rewards."""

    def contrast(self, group_size: int) -> Bool[np.ndarray, " P"]:
        """Whether the responses of each group have different rewards; those that could not be scored do not count."""
        groups = self.total.reshape(-1, group_size)
        scored = np.isfinite(groups)
        high = np.where(scored, groups, -np.inf).max(axis=1)
        return high > np.where(scored, groups, np.inf).min(axis=1)


class Rounds:
    """Collects groups round by round, dropping those whose rewards are all equal, until there are enough.

    With a limit of one round nothing is dropped: the batch is what was sampled.
    """

    def __init__(self, *, groups: int, group_size: int, limit: int):
        """`groups` make a batch; after `limit` rounds it is filled up with groups that were dropped."""
        self._groups, self._group_size, self._limit = groups, group_size, limit
        self._rounds: list[Scored] = []

    @property
    def sampled(self) -> int:
        """Responses so far."""
        return sum(len(scored.total) for scored in self._rounds)

    @property
    def failures(self) -> int:
        """Responses so far that could not be scored."""
        return sum(int(np.isnan(scored.total).sum()) for scored in self._rounds)

    @property
    def full(self) -> bool:
        """Whether sampling is over: the groups are together, or the rounds are spent."""
        return len(self._rounds) == self._limit or (self._limit > 1 and int(self._kept().sum()) >= self._groups)

    def add(self, scored: Scored) -> None:
        """One more round."""
        self._rounds.append(scored)

    def batch(self, mesh: Mesh) -> Scored:
        """The first groups with contrast; where there are too few, others whose responses are not learned from."""
        if self._limit == 1:
            return self._rounds[0]
        kept = self._kept()
        groups = np.concatenate([np.flatnonzero(kept), np.flatnonzero(~kept)])[: self._groups]
        rows = group_rows(groups, self._group_size)
        rounds = [dataclasses.replace(scored, rollout=hosts.everywhere(scored.rollout)) for scored in self._rounds]
        batch = jax.tree.map(lambda *parts: np.concatenate(parts)[rows], *rounds)
        worth = np.repeat(kept[groups], self._group_size)
        return dataclasses.replace(batch, rollout=hosts.to_rows(mesh, batch.rollout), learn=batch.learn & worth)

    def metrics(self) -> dict[str, float]:
        """How much was sampled for the batch; nothing with a limit of one round."""
        if self._limit == 1:
            return {}
        kept = self._kept()
        return {
            "dynamic/rounds": len(self._rounds),
            "dynamic/dropped": float(1 - kept.mean()),
            "dynamic/filled": max(0.0, 1 - float(kept.sum()) / self._groups),
            "dynamic/reward_mean": float(np.nanmean(np.concatenate([scored.total for scored in self._rounds]))),
        }

    def _kept(self) -> Bool[np.ndarray, " N"]:
        """Of every group so far, whether its rewards differ."""
        return np.concatenate([np.zeros(0, bool), *(scored.contrast(self._group_size) for scored in self._rounds)])
