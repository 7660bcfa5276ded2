"""What samples of every problem say of a policy: mean, pass@k and majority@k, with intervals over problems.

Problems are the units: samples of one problem are not independent of each other, so intervals come from drawing
problems anew. A sample that could not be judged is left out of its problem, and a problem without any out of the
benchmark.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

RESAMPLES = 2000
"""Draws of problems for an interval."""
ENUMERATED = 2000
"""Most subsets of k samples of a problem that are all looked at for its majority."""
SUBSETS = 200
"""Draws of k samples, where there are more."""
COVERAGE = 0.95
"""Probability with which an interval contains the truth."""


def pass_at(k: int, right: Int[np.ndarray, " P"], samples: Int[np.ndarray, " P"]) -> Float[np.ndarray, " P"]:
    """Probability that at least one of k samples of each problem is right: 1 − C(n − c, k) / C(n, k), unbiased.

    From arXiv 2107.03374. `right` are c of `samples` n; NaN where there are fewer than k.
    """
    found = [
        math.nan if n < k else 1 - math.comb(n - c, k) / math.comb(n, k)
        for c, n in zip(right.tolist(), samples.tolist(), strict=True)
    ]
    return np.asarray(found, float)


def majority_at(k: int, answers: Sequence[str | None], right: Bool[np.ndarray, " n"], *, seed: int) -> float:
    """Probability that the most frequent answer among k samples of a problem is right; NaN if there are fewer than k.

    The mean over all subsets of k samples, which is exact, or over SUBSETS random ones of more than ENUMERATED. Among
    answers that are as frequent, one is drawn: with a right one among two, the probability is a half. A sample without
    an answer, None, has no vote. An answer is right if any of its samples is.
    With k = 1 each sample counts as it was judged.
    """
    if len(answers) < k:
        return math.nan
    if k == 1:
        return float(right.mean())
    known = {answer: number for number, answer in enumerate(dict.fromkeys(a for a in answers if a is not None))}
    if not known:
        return 0.0
    votes = np.asarray([len(known) if answer is None else known[answer] for answer in answers], int)
    is_right = np.zeros(len(known), bool)
    is_right[votes[right & (votes < len(known))]] = True
    if math.comb(len(votes), k) <= ENUMERATED:
        drawn = votes[np.array(list(itertools.combinations(range(len(votes)), k)))]
    else:
        drawn = np.random.default_rng(seed).permuted(np.tile(votes, (SUBSETS, 1)), axis=1)[:, :k]
    counts = (drawn[:, :, None] == np.arange(len(known))).sum(axis=1)
    most = counts.max(axis=1, keepdims=True)
    first = (counts == most) & (most > 0)
    return float(((first * is_right).sum(axis=1) / np.maximum(first.sum(axis=1), 1)).mean())


def interval(values: Float[np.ndarray, " P"], *, seed: int) -> tuple[float, float]:
    """Interval that contains the mean of all problems of this kind with probability COVERAGE, from those at hand.

    The percentile bootstrap over problems, at percentiles that make up for a sample's spread being less than its
    population's, as T. Hesterberg advises for few values (The American Statistician 69, 2015, section 5.3). NaN are
    left out; with fewer than two values the interval is the mean.
    """
    values = values[np.isfinite(values)]
    count = len(values)
    if count < 2:
        mean = float(values.mean()) if count else math.nan
        return mean, mean
    draws = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    means = values[draws].mean(axis=1)
    tail = _normal(-math.sqrt(count / (count - 1)) * _student((1 + COVERAGE) / 2, count - 1))
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def student_interval(values: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Interval of the mean by Student's t with probability COVERAGE; for too few values for a bootstrap, such as seeds.

    With fewer than two values the interval is the mean.
    """
    mean, count = float(values.mean()), len(values)
    if count < 2:
        return mean, mean
    half = _student((1 + COVERAGE) / 2, count - 1) * float(values.std(ddof=1)) / math.sqrt(count)
    return mean - half, mean + half


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _student(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution."""
    from scipy import stats  # jax needs it too

    return float(stats.t.ppf(probability, degrees))
