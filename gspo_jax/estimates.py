"""Estimates from samples of a policy: mean, pass@k and majority@k, with intervals over problems.

Intervals resample problems, because samples of one problem are dependent. Samples that could not be judged are left out
of their problem, and problems without judged samples out of the benchmark.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

RESAMPLES = 2000
"""Bootstrap draws for an interval."""
ENUMERATED = 2000
"""Maximum k-subsets of a problem's samples to enumerate for its majority."""
SUBSETS = 200
"""Random k-subsets if there are more."""
COVERAGE = 0.95
"""Coverage probability of an interval."""


def pass_at(k: int, right: Int[np.ndarray, " P"], samples: Int[np.ndarray, " P"]) -> Float[np.ndarray, " P"]:
    """Return the unbiased P(any of k samples is right) of each problem: 1 − C(n − c, k) / C(n, k).

    arXiv 2107.03374. `right` is c and `samples` n. NaN if n < k.
    """
    found = [
        math.nan if n < k else 1 - math.comb(n - c, k) / math.comb(n, k)
        for c, n in zip(right.tolist(), samples.tolist(), strict=True)
    ]
    return np.asarray(found, float)


def majority_at(k: int, answers: Sequence[str | None], right: Bool[np.ndarray, " n"], *, seed: int) -> float:
    """Return P(the most frequent answer among k samples of a problem is right). NaN with fewer than k.

    The exact mean over all k-subsets, or over SUBSETS random ones of more than ENUMERATED. Ties are broken at random. A
    sample without an answer, None, has no vote. An answer is right if any of its samples is. With k = 1 each sample
    counts as judged.
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
    """Return the interval that contains the mean of all problems of this kind with probability COVERAGE.

    Percentile bootstrap over problems, with percentiles corrected for a sample's smaller spread (T. Hesterberg, The
    American Statistician 69, 2015, section 5.3). NaN are left out. With fewer than two values the interval is the mean.
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
    """Return Student's t interval of the mean with probability COVERAGE, for few values such as seeds.

    With fewer than two values the interval is the mean.
    """
    mean, count = float(values.mean()), len(values)
    if count < 2:
        return mean, mean
    half = _student((1 + COVERAGE) / 2, count - 1) * float(values.std(ddof=1)) / math.sqrt(count)
    return mean - half, mean + half


def proportion_interval(count: int, total: int) -> tuple[float, float]:
    """Return Clopper and Pearson's interval of a probability, `count` of `total` seen, with at least COVERAGE.

    4 of 5 leave [0.28, 0.99].
    """
    from scipy import stats

    tail = (1 - COVERAGE) / 2
    low = 0.0 if count == 0 else float(stats.beta.ppf(tail, count, total - count + 1))
    high = 1.0 if count == total else float(stats.beta.ppf(1 - tail, count + 1, total - count))
    return low, high


def student_p(values: Float[np.ndarray, " n"]) -> float:
    """Return the two-sided p-value of Student's t test that the mean is 0. NaN if fewer than two, or all equal."""
    from scipy import stats

    if len(values) < 2 or np.ptp(values) < 1e-9:
        return math.nan
    t = float(values.mean()) / (float(values.std(ddof=1)) / math.sqrt(len(values)))
    return 2 * float(stats.t.sf(abs(t), len(values) - 1))


def sign_flip_p(values: Float[np.ndarray, " n"]) -> float:
    """Return the exact two-sided p-value of paired differences: the share of all 2^n signs with as large a mean.

    It assumes only that each difference is as likely to have the other sign. The smallest that n differences can have
    is 2^(1 − n): 0.0625 for five, 0.002 for ten. At most 20 values.
    """
    signs = np.array(list(itertools.product((1, -1), repeat=len(values))))
    sums = np.abs(signs @ values)
    return float((sums >= abs(float(values.sum())) - 1e-12).mean())


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's step-down method, which bounds the chance of any false rejection.

    S. Holm, Scandinavian Journal of Statistics 6, 1979. NaN stays, and counts as no comparison.
    """
    known = sorted((value, number) for number, value in enumerate(p) if not math.isnan(value))
    adjusted, largest = [math.nan] * len(p), 0.0
    for rank, (value, number) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * value))
        adjusted[number] = largest
    return adjusted


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _student(probability: float, degrees: int) -> float:
    """Return a quantile of Student's t distribution."""
    from scipy import stats  # a dependency of jax

    return float(stats.t.ppf(probability, degrees))
