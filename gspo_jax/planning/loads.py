"""Expert loads of routers with preferences.

An expert is chosen in proportion to exp(skew · z), z standard normal, drawn anew for each layer. With a skew of 0.25
the hottest of 128 experts has twice the mean. Pairs are independent, although a token's experts differ. Each draw is a
layer, in which all shards of an expert group wait for the busiest.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

SKEW = 0.25
"""Default standard deviation of preferences."""
DRAWS = 256
"""Layers drawn."""


class Loads(NamedTuple):
    """Pairs of a token and an expert at each expert."""

    pairs: Int[np.ndarray, "draws shards E"]
    """By shard of an expert group, and expert that it holds."""

    @property
    def busiest(self) -> Int[np.ndarray, "draws E"]:
        """Loads of each draw's shard with the most pairs."""
        most = self.pairs.sum(axis=2).argmax(axis=1)
        return np.take_along_axis(self.pairs, most[:, None, None], axis=1)[:, 0]

    def passes(self, room: int) -> float:
        """Return the mean number of passes after the first that the busiest shard takes through buffers of `room`."""
        return float(np.maximum(-(-self.busiest.sum(axis=1) // room) - 1, 0).mean())

    def parts(self, rows: int) -> float:
        """Return the mean number of parts of up to `rows` of an expert's pairs, on the shard with the most."""
        return float((-(-self.pairs // rows)).sum(axis=2).max(axis=1).mean())

    def part(self, room: int, *, first: bool) -> Int[np.ndarray, "draws E"]:
        """Return the busiest shards' sorted pairs in the first buffer of `room`, or those of a further pass.

        Draws are those that take such a pass. Further passes are alike: the second stands for all.
        """
        ends = self.busiest.cumsum(axis=1)
        begin = 0 if first else room
        ends = ends[ends[:, -1] > begin]
        return np.diff(np.clip(ends - begin, 0, room), axis=1, prepend=0)


@functools.lru_cache(maxsize=256)
def draw(per_shard: float, experts: int, shards: int, *, skew: float) -> Loads:
    """Return loads of `per_shard` pairs per shard on average, of `experts` experts over `shards` shards."""
    random = np.random.default_rng(0)
    preferences = np.exp(skew * random.standard_normal((DRAWS, experts)))
    shares = preferences / preferences.sum(axis=1, keepdims=True)
    pairs = random.multinomial(round(per_shard * shards), shares)
    return Loads(pairs.reshape(DRAWS, shards, math.ceil(experts / shards)))
