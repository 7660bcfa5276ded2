"""The bias meter: E_μ[∇ log π(y_t)], what a constant advantage would move, which is 0 if tokens are sampled from π.

With a sampler μ that differs from the policy π a policy gradient has this drift whatever the rewards are
(arXiv 2609.20807). The mean score m of N tokens is b + noise, so |m|² is no estimate of |b|². Products of different
blocks of groups are: with sums G_j of the scores of n_j tokens,

    |b|² ≈ Σ_{j≠k} ⟨G_j, G_k⟩ / Σ_{j≠k} n_j n_k    unbiased, of either sign
    V ≈ Σ_j n_j |G_j / n_j − m|² / (J − 1)    N · variance of m, a response's tokens being dependent or not

over all parameters, from sketches (training/sketch.py). |b|² / V has no unit. At its inverse, in tokens, the bias of a
gradient is as large as its noise. On the host, in float64.
"""

import itertools
import math
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from gspo_jax.engine import Engine
from gspo_jax.estimates import RESAMPLES, student_interval
from gspo_jax.parallel import hosts
from gspo_jax.rollout.sampling import SamplingParams, truncate
from gspo_jax.setup import learning
from gspo_jax.training.sketch import SketchFn, make_expected_sketch
from gspo_jax.types import Batch, Weights

BLOCKS = 8
"""Blocks of whole groups, or one per mini-batch if these are more."""
FEWEST = 3
"""Fewest blocks that have tokens; with less there is no interval."""
SEED = 0


class Bias(NamedTuple):
    """|b|², the squared length of a token's mean score, with its interval and V."""

    squared: float
    low: float
    high: float
    """Ends of Student's interval of `squared`, from jackknife values over blocks, at `estimates.COVERAGE`."""
    variance: float
    """V."""
    p: float
    """Share of all flips of the blocks' signs with `squared` no smaller, at least 1 / 2^(J − 1): a test of b = 0, exact
    if a block's sum is as likely as its negative."""

    def over(self, variance: float) -> "Bias":
        """Return this in units of a variance."""
        squared, low, high, own = (x / variance for x in self[:4])
        return Bias(squared, low, high, own, self.p)


class Measured(NamedTuple):
    """Sums over the sampled tokens of J blocks, with sketches of k numbers."""

    gradients: Float[np.ndarray, "J tensors k"]
    head: Float[np.ndarray, "J k"]
    values: Float[np.ndarray, " J"]
    tokens: Int[np.ndarray, " J"]

    @property
    def bias(self) -> Bias:
        """The bias over all parameters."""
        return estimate(self.gradients.reshape(len(self.tokens), -1), self.tokens)

    @property
    def by_tensor(self) -> list[Bias]:
        return [estimate(self.gradients[:, tensor], self.tokens) for tensor in range(self.gradients.shape[1])]

    @property
    def of_head(self) -> Bias:
        return estimate(self.head, self.tokens)


def estimate(sums: Float[np.ndarray, "J k"], tokens: Int[np.ndarray, " J"]) -> Bias:
    """Return the bias from blocks' sums of scores; NaN with tokens in fewer than FEWEST blocks."""
    own = tokens > 0
    sums, tokens, count = sums[own].astype(np.float64), tokens[own].astype(np.float64), int(own.sum())
    if count < FEWEST:
        return Bias(*[math.nan] * 5)
    different = ~np.eye(count, dtype=bool)
    products, pairs = (np.where(different, x, 0) for x in (sums @ sums.T, np.outer(tokens, tokens)))
    product, pair = products.sum(), pairs.sum()
    squared = product / pair
    without = (product - 2 * products.sum(axis=1)) / (pair - 2 * pairs.sum(axis=1))
    low, high = student_interval(count * squared - (count - 1) * without)
    apart = sums / tokens[:, None] - sums.sum(axis=0) / tokens.sum()
    variance = (tokens * (apart**2).sum(axis=1)).sum() / (count - 1)
    signs = _signs(count)
    flipped = ((signs @ products) * signs).sum(axis=1)
    p = (flipped >= product - 1e-9 * np.abs(products).sum()).mean()
    return Bias(float(squared), low, high, float(variance), float(p))


def _signs(count: int) -> Float[np.ndarray, "S J"]:
    """Return all flips of J signs but for a common one, or RESAMPLES random ones after none."""
    if 2 ** (count - 1) <= RESAMPLES:
        return np.array([(1, *others) for others in itertools.product((1, -1), repeat=count - 1)], float)
    drawn = np.random.default_rng(SEED).choice((1.0, -1.0), size=(RESAMPLES, count))
    return np.concatenate([np.ones((1, count)), drawn])


def of_sampled(engine: Engine, weights: Weights, batch: Batch) -> Measured:
    """Measure a batch's sampled tokens under `weights`, which must not have learned from them.

    Takes as many forward and backward passes over the batch as there are blocks per mini-batch.
    """
    return measure(partial(engine.programs.sketch, weights, batch), engine, batch)


def measure(of_block: SketchFn, engine: Engine, batch: Batch) -> Measured:
    """Return what `of_block(index, part, parts)` finds in every block of a packed batch, on every host."""
    count, groups = engine.minibatches, batch.packing.size // engine.config.sampling.group_size
    parts = min(groups, -(-BLOCKS // count))
    with jax.set_mesh(engine.meshes.trainer):
        found = [hosts.allgather(of_block(i, part, parts)) for i in range(count) for part in range(parts)]
    gradients, head, values, tokens = (
        np.stack(xs) for xs in zip(*((x.gradients, x.head, x.value, x.tokens) for x in found), strict=True)
    )
    blocks, tensors = gradients.shape[:2]
    return Measured(gradients.reshape(blocks, tensors, -1), head.reshape(blocks, -1), values, tokens)


def of_expected(
    engine: Engine, weights: Weights, batch: Batch, other: Weights, experts: Int[Array, "M Q N L K"], of_block: SketchFn
) -> Measured:
    """Measure what another policy's next tokens would do to `weights`, on a batch's prefixes; see `expected_sketch`."""
    return measure(partial(of_block, weights, batch, other=other, experts=experts), engine, batch)


def expected_sketch(engine: Engine, sampling: SamplingParams | None = None) -> SketchFn:
    """Build the program of `of_expected`, exact in the next token; with `sampling` the other policy is truncated."""

    def kept(logits: Array) -> Array:
        assert sampling is not None
        return truncate(logits, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)

    with jax.set_mesh(engine.meshes.trainer):
        scoring = learning.make_scoring(engine.config)
        return make_expected_sketch(
            engine.policy.graph, scoring, replay=engine.config.routing.replay, kept=sampling and kept
        )


def metrics(found: Measured) -> dict[str, float]:
    """Return the bias of sampled tokens, keyed as in metrics.jsonl."""
    bias = found.bias
    share = bias.over(bias.variance)
    return {
        "noise/bias": share.squared,
        "noise/bias_low": share.low,
        "noise/bias_high": share.high,
        "noise/bias_p": share.p,
        "noise/bias_tokens": tokens_to_dominate(share),
        "noise/score_std": math.sqrt(bias.variance),
    }


def tokens_to_dominate(share: Bias) -> float:
    """Return at how many tokens a mean score's bias is its standard deviation; NaN if |b|² is not positive."""
    return 1 / share.squared if share.squared > 0 else math.nan
