"""DAPO's dynamic sampling: rounds until a batch has enough groups to learn from. https://arxiv.org/abs/2503.14476"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, Key

from gspo_jax.parallel.rows import merge_rows
from gspo_jax.rollout.episodes import Plays, group_rows
from gspo_jax.types import HOST_COLUMNS, Batch, Prompts, Rewards


class Rounds:
    """Plays rounds, each a whole batch, and keeps groups worth learning from until there are enough.

    After the last round, dropped groups fill the batch up without gradient. Between rounds one batch is on the
    devices, and two while they merge.
    """

    def __init__(
        self,
        player: Plays,
        score: Callable[[Batch], Rewards],
        keeps: Callable[[Batch], Bool[np.ndarray, " P"]],
        *,
        groups: int,
        group_size: int,
        limit: int,
        mesh: Mesh,
        enter: Callable[[str], None] = lambda phase: None,
    ):
        """Wrap a player.

        Args:
          score: returns a round's rewards.
          keeps: returns True for each rewarded group worth learning from.
          groups: per batch, and per round.
          limit: maximum rounds, at least 2.
          enter: hears "sample" and "reward" begin.
        """
        self._player, self._score, self._keeps, self._enter = player, score, keeps, enter
        self._groups, self._group_size, self._limit, self._mesh = groups, group_size, limit, mesh
        self.rewards: list[Rewards] = []
        """Rewards of each round of the newest batch."""
        self._kept: list[Bool[np.ndarray, " P"]] = []

    def play(self, prompts: Iterator[Prompts], key: Key[Array, ""], *, first: int = 0) -> Batch:
        """Return a rewarded batch: the first groups kept, then the first dropped ones if too few."""
        self.rewards, self._kept = [], []
        batch, worth = self._round(prompts, key, first)
        while sum(kept.sum() for kept in self._kept) < self._groups and len(self._kept) < self._limit:
            new, kept = self._round(prompts, key, first + len(self._kept) * len(batch.lengths))
            worth = np.concatenate([worth, kept])
            chosen = np.concatenate([np.flatnonzero(worth), np.flatnonzero(~worth)])[: self._groups]
            rows = group_rows(chosen, self._group_size)
            with jax.set_mesh(self._mesh):
                batch, worth = _merged(batch, new, rows), worth[chosen]
            del new  # or it would be there beside the next round
        learn = batch.rewards.learn & np.repeat(worth, self._group_size)
        return dataclasses.replace(batch, rewards=dataclasses.replace(batch.rewards, learn=learn))

    def _round(self, prompts: Iterator[Prompts], key: Key[Array, ""], first: int) -> tuple[Batch, np.ndarray]:
        self._enter("sample")
        batch = self._player.play(prompts, key, first=first)
        self._enter("reward")
        batch = dataclasses.replace(batch, rewards=self._score(batch))
        self.rewards.append(batch.rewards)
        self._kept.append(self._keeps(batch))
        return batch, self._kept[-1]

    def metrics(self) -> dict[str, Any]:
        kept = np.concatenate(self._kept)
        return {
            "dynamic/rounds": len(self._kept),
            "dynamic/dropped": float(1 - kept.mean()),
            "dynamic/filled": max(0.0, 1 - float(kept.sum()) / self._groups),
            "dynamic/reward_mean": float(np.nanmean(np.concatenate([rewards.total for rewards in self.rewards]))),
        }


_merge_rows = jax.jit(merge_rows, donate_argnums=0)


def _merged(batch: Batch, new: Batch, rows: Int[np.ndarray, " B"]) -> Batch:

    def chosen(one: Any, other: Any) -> Any:
        return jax.tree.map(lambda *parts: np.concatenate(parts)[rows], one, other)

    columns = {name: chosen(getattr(batch, name), getattr(new, name)) for name in HOST_COLUMNS}
    return dataclasses.replace(batch, rollout=_merge_rows(batch.rollout, new.rollout, rows), **columns)
