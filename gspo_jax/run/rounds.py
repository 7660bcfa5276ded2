"""DAPO's dynamic sampling: rounds of sampling until a batch has enough groups to learn from.

https://arxiv.org/abs/2503.14476
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Int

from gspo_jax.parallel import hosts
from gspo_jax.rollout.episodes import group_rows
from gspo_jax.run.scored import Responses, Rewarded, Round, Scored


class Rounds:
    """Collects groups round by round, dropping those with nothing to learn from, until a batch is full.

    With a limit of one round nothing is dropped: the batch is the first round.
    """

    def __init__(self, *, groups: int, group_size: int, limit: int, keeps: Callable[[Scored], Bool[np.ndarray, " P"]]):
        """A batch has `groups` groups that `keeps` is True for; after `limit` rounds, dropped groups fill it up."""
        self._groups, self._group_size, self._limit, self._keeps = groups, group_size, limit, keeps
        self._rounds: list[Round] = []
        self._judged: list[Bool[np.ndarray, " P"]] = []  # of the first rounds

    @property
    def sampled(self) -> int:
        """Responses sampled so far."""
        return sum(len(each.responses.texts) for each in self._rounds)

    @property
    def failures(self) -> int:
        """Responses sampled so far that could not be scored."""
        return sum(int(np.isnan(rewarded.total).sum()) for rewarded in self._rewarded())

    @property
    def full(self) -> bool:
        """True if sampling is over: enough groups are kept, or no rounds are left.

        With a limit of several rounds, this waits for the rewards of the round before.
        """
        return len(self._rounds) == self._limit or (self._limit > 1 and int(self._kept().sum()) >= self._groups)

    def add(self, sampled: Round) -> None:
        """Add a round of responses, whose rewards may still be on their way."""
        self._rounds.append(sampled)

    def batch(self, mesh: Mesh) -> Responses:
        """The first groups kept; if there are too few, dropped ones fill the batch but carry no gradient."""
        if self._limit == 1:
            return self._rounds[0].responses
        rows, _ = self._chosen()
        responses = (each.responses for each in self._rounds)
        rounds = [dataclasses.replace(each, rollout=hosts.allgather(each.rollout)) for each in responses]
        batch = jax.tree.map(lambda *parts: np.concatenate(parts)[rows], *rounds)
        return dataclasses.replace(batch, rollout=hosts.shard_rows(mesh, batch.rollout))

    def scored(self, batch: Responses) -> Scored:
        """The batch with its rewards; waits for them."""
        if self._limit == 1:
            return Scored.of(batch, self._rounds[0].wait())
        rows, worth = self._chosen()
        rewarded = jax.tree.map(lambda *parts: np.concatenate(parts)[rows], *self._rewarded())
        return Scored.of(batch, dataclasses.replace(rewarded, learn=rewarded.learn & worth))

    def metrics(self) -> dict[str, float]:
        """Sampling effort of the batch, by metric name; empty with a limit of one round."""
        if self._limit == 1:
            return {}
        kept = self._kept()
        return {
            "dynamic/rounds": len(self._rounds),
            "dynamic/dropped": float(1 - kept.mean()),
            "dynamic/filled": max(0.0, 1 - float(kept.sum()) / self._groups),
            "dynamic/reward_mean": float(np.nanmean(np.concatenate([each.total for each in self._rewarded()]))),
        }

    def reward_metrics(self) -> dict[str, float]:
        """How the reward functions kept up, by metric name; times are those of this process."""
        scores = [each.scores for each in self._rounds]
        seconds = sum(each.seconds for each in scores)
        found = {"throughput/answers_per_s": sum(len(each.total) for each in scores) / seconds}
        without = [each.without_worker for each in self._rewarded() if each.without_worker is not None]
        if without:
            queued = [wait for each in scores for wait in each.queued_s]
            found["timing/queue_s"] = sum(queued) / max(1, len(queued))
            found["reward/without_worker"] = float(np.concatenate(without).mean())
        return found

    def _rewarded(self) -> list[Rewarded]:
        return [each.wait() for each in self._rounds]

    def _chosen(self) -> tuple[Int[np.ndarray, " B"], Bool[np.ndarray, " B"]]:
        """The rows of the batch among those of all rounds, and whether each is worth learning from."""
        kept = self._kept()
        groups = np.concatenate([np.flatnonzero(kept), np.flatnonzero(~kept)])[: self._groups]
        return group_rows(groups, self._group_size), np.repeat(kept[groups], self._group_size)

    def _kept(self) -> Bool[np.ndarray, " N"]:
        """True for each of the N groups so far that there is something to learn from."""
        for each in self._rounds[len(self._judged) :]:
            self._judged.append(self._keeps(Scored.of(each.responses, each.wait())))
        return np.concatenate([np.zeros(0, bool), *self._judged])
