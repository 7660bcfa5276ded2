"""DAPO's dynamic sampling: rounds of sampling until a batch has enough groups to learn from.

https://arxiv.org/abs/2503.14476
"""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool

from gspo_jax.parallel import hosts
from gspo_jax.rollout.episodes import group_rows
from gspo_jax.run.scored import Scored


class Rounds:
    """Collects groups round by round, dropping those whose rewards are all equal, until a batch is full.

    With a limit of one round nothing is dropped: the batch is the first round.
    """

    def __init__(self, *, groups: int, group_size: int, limit: int):
        """A batch has `groups` groups; after `limit` rounds, dropped groups fill it up."""
        self._groups, self._group_size, self._limit = groups, group_size, limit
        self._rounds: list[Scored] = []

    @property
    def sampled(self) -> int:
        """Responses sampled so far."""
        return sum(len(scored.total) for scored in self._rounds)

    @property
    def failures(self) -> int:
        """Responses sampled so far that could not be scored."""
        return sum(int(np.isnan(scored.total).sum()) for scored in self._rounds)

    @property
    def full(self) -> bool:
        """True if sampling is over: enough groups have contrast, or no rounds are left."""
        return len(self._rounds) == self._limit or (self._limit > 1 and int(self._kept().sum()) >= self._groups)

    def add(self, scored: Scored) -> None:
        """Add a round of scored responses."""
        self._rounds.append(scored)

    def batch(self, mesh: Mesh) -> Scored:
        """The first groups with contrast; if there are too few, dropped ones fill the batch but carry no gradient."""
        if self._limit == 1:
            return self._rounds[0]
        kept = self._kept()
        groups = np.concatenate([np.flatnonzero(kept), np.flatnonzero(~kept)])[: self._groups]
        rows = group_rows(groups, self._group_size)
        rounds = [dataclasses.replace(scored, rollout=hosts.allgather(scored.rollout)) for scored in self._rounds]
        batch = jax.tree.map(lambda *parts: np.concatenate(parts)[rows], *rounds)
        worth = np.repeat(kept[groups], self._group_size)
        return dataclasses.replace(batch, rollout=hosts.shard_rows(mesh, batch.rollout), learn=batch.learn & worth)

    def metrics(self) -> dict[str, float]:
        """Sampling effort of the batch, by metric name; empty with a limit of one round."""
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
        """True for each of the N groups so far whose rewards differ."""
        return np.concatenate([np.zeros(0, bool), *(scored.contrast(self._group_size) for scored in self._rounds)])
