"""Distributions of response lengths for `bench --lengths` and `plan --lengths`.

`uniform:16:512` draws integers from 16 to 512 equally often. `lognormal:4096:0.8` has an arithmetic mean of 4096 tokens
and σ = 0.8 of the logarithm, so μ = ln(4096) − 0.8²/2, clipped to 1 and a run's limit.
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Int

from gspo_jax.errors import UserError

KINDS = ("uniform", "lognormal")


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Distribution of response lengths in tokens, from 1 to a limit."""

    text: str
    limit: int
    limit_name: str
    """Flag or field of the limit, for errors."""

    def __post_init__(self) -> None:
        kind, *parts = self.text.split(":")
        examples = f"uniform:16:{self.limit} or lognormal:{max(1, self.limit // 4)}:0.8"
        if kind not in KINDS or len(parts) != 2:
            raise UserError(f"--lengths is {self.text!r}; write it as {examples}")
        first, second = (_number(part) for part in parts)
        if kind == "uniform":
            if not all(part.isdigit() for part in parts):
                raise UserError(f"--lengths is {self.text!r}; write it as uniform:16:{self.limit}")
            if not 1 <= first <= second <= self.limit:
                says = f"does not lie in 1 to {self.limit}, which is {self.limit_name}"
                raise UserError(f"--lengths {self.text} {says}")
        elif not (1 <= first < math.inf and 0 <= second < math.inf):
            raise UserError(f"--lengths {self.text} needs a mean of at least 1 and a σ of at least 0; write {examples}")

    def draw(self, count: int, random: np.random.Generator) -> Int[np.ndarray, " count"]:
        """Draw the lengths of `count` responses."""
        kind, first, second = self.text.split(":")
        if kind == "uniform":
            return random.integers(int(first), int(second) + 1, count).astype(np.int32)
        mean, sigma = float(first), float(second)
        drawn = random.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
        return np.clip(np.rint(drawn), 1, self.limit).astype(np.int32)


def _number(text: str) -> float:
    """Return the number in a text, or NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan
