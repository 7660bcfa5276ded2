"""A two-sided test of the sampler's own draws, on the devices that will sample.

Of V equally likely tokens every range of ids is drawn as often as its size says. 2^17 draws show it if a compiler
rounds logits plus noise to bfloat16, as many ties then go to low ids. They do not show rounding that favours no id, nor
the ties of float32: its noise has 2^23 levels, so that in 0.9% of the draws of Qwen3's tokens two are equal, and 0.2%
too many come from the lower half. Draws that are too even are as wrong as draws that are too uneven.

Truncation (top-k, top-p, min-p) keeps all of equally likely tokens, so its draws are these; tests/rollout checks
it against small distributions.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from gspo_jax.rollout.sampling import SamplingParams, draw

VOCABULARY = 151_936
"""Tokens to draw from: Qwen3's vocabulary."""
ROWS = 64
"""Draws in a call."""
PARTS = 64
"""Equal ranges of ids whose draws are counted."""
LEAST = 1e-4
"""Draws fail below this p-value. As the key is fixed, so is the result of a right sampler on a backend."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Two-sided p-values of a number of draws."""

    draws: int
    halves: float
    """P-value of the draws in the lower half of the ids: normal approximation to the binomial distribution."""
    parts: float
    """P-value of the draws by equal ranges of ids: chi-squared. Small for counts that are too uneven or too even."""

    @property
    def right(self) -> bool:
        """True if neither p-value is below `LEAST`."""
        return min(self.halves, self.parts) >= LEAST

    def __str__(self) -> str:
        halves, parts = f"p {self.halves:.2g} by halves", f"{self.parts:.2g} by {PARTS} parts"
        return f"{self.draws:,} draws of {VOCABULARY:,} equally likely tokens: {halves}, {parts}"


def try_draws(count: int) -> Verdict:
    """Draw `count` tokens, a multiple of 64, with the sampler's `draw`, and judge how they spread over the ids."""

    @jax.jit
    def drawn(key: Key[Array, ""], logits: Float[Array, "B V"]) -> Int[Array, " B"]:
        return draw(jax.random.split(key, ROWS), logits, SamplingParams()).tokens

    # As an argument, so that the compiler adds the noise to logits that it does not know.
    logits = jnp.zeros((ROWS, VOCABULARY), jnp.float32)
    tokens = [drawn(key, logits) for key in jax.random.split(jax.random.key(0), count // ROWS)]
    return judge(np.bincount(np.concatenate(tokens) // (VOCABULARY // PARTS), minlength=PARTS))


def judge(counts: Int[np.ndarray, " parts"]) -> Verdict:
    """Return the p-values of counts of draws from equally likely parts, an even number of them."""
    n, parts = int(counts.sum()), len(counts)
    deviation = (int(counts[: parts // 2].sum()) - n / 2) / math.sqrt(n / 4)
    chi_squared = float(((counts - n / parts) ** 2).sum() / (n / parts))
    tails = [f((parts - 1) / 2, chi_squared / 2) for f in (jax.scipy.special.gammainc, jax.scipy.special.gammaincc)]
    return Verdict(n, math.erfc(abs(deviation) / math.sqrt(2)), 2 * min(map(float, tails)))
