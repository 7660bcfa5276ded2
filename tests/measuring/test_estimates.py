"""Estimates from samples: against closed forms, enumeration, and simulated benchmarks whose truth is known."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from gspo_jax import estimates


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([i < right for i in range(n)], k))
        expected = Fraction(sum(map(any, subsets)), len(subsets))
        (found,) = estimates.pass_at(k, np.array([right]), np.array([n]))
        assert found == pytest.approx(float(expected), abs=1e-12)


def test_pass_at_k_needs_k_samples():
    assert np.isnan(estimates.pass_at(3, np.array([2]), np.array([2]))).all()


def majority(answers, right, k, seed=0):
    return estimates.majority_at(k, list(answers), np.array(right, bool), seed=seed)


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        ("aab", [1, 1, 0], 1),
        ("aab", [0, 0, 1], 0),
        ("aabb", [1, 1, 0, 0], 0.5),
        ("abc", [0, 1, 0], 1 / 3),
        (["a", None, None, None], [1, 0, 0, 0], 1),  # no answer is no vote
        ([None, None], [0, 0], 0),
        ("aaabb", [0, 0, 1, 0, 0], 1),  # two forms of one answer, of which one was found right
    ],
)
def test_the_majority_of_all_samples(answers, right, expected):
    assert majority(answers, right, len(right)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answers", "right"),
    [
        ("aaabbc", [1, 1, 1, 0, 0, 0]),
        ("abcdef", [0, 0, 1, 0, 0, 0]),
        ("aabbccdd", [1, 1, 1, 1, 0, 0, 0, 0]),  # two forms of the right answer
        (["a", "a", None, "b", None, "b", "b"], [1, 1, 0, 0, 0, 0, 0]),
        ("aaaaaaab", [0, 0, 0, 0, 0, 0, 0, 1]),
    ],
)
def test_the_majority_of_some_is_the_mean_over_subsets(answers, right):
    """Exactly, with any seed, as long as there are few subsets; of one sample it is the share of right ones."""
    is_right = {answer for answer, verdict in zip(answers, right, strict=True) if verdict}

    def share(drawn):
        votes = [answer for answer in drawn if answer is not None]
        first = {answer for answer in votes if votes.count(answer) == max(map(votes.count, votes))}
        return Fraction(len(first & is_right), max(len(first), 1))

    for k in range(1, len(right) + 1):
        subsets = [share(drawn) for drawn in itertools.combinations(answers, k)]
        for seed in (0, 1):
            assert majority(answers, right, k, seed) == pytest.approx(float(sum(subsets) / len(subsets)), abs=1e-12)
    assert majority(answers, right, 1) == pytest.approx(np.mean(right), abs=1e-12)
    assert math.isnan(majority(answers, right, len(right) + 1))


@pytest.mark.parametrize(
    ("answers", "right"),
    [(["3", "3"], [1, 0]), ([None, "3"], [1, 0]), ([None, None], [1, 1]), (list("ab") * 2000, [1, 0] * 2000)],
    ids=["judged otherwise", "without an announced answer", "without any", "many"],
)
def test_the_majority_of_one_sample_is_its_verdict(answers, right):
    assert majority(answers, right, 1) == np.mean(right)


def test_the_majority_of_many_subsets_is_estimated():
    """Half of 32 samples are right, so of 3 at least two are with probability one half."""
    answers, right = "ab" * 16, [1, 0] * 16
    found = np.array([majority(answers, right, 3, seed) for seed in range(20)])
    assert found.std() > 0 and found.mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("problems", [30, pytest.param(164, marks=pytest.mark.slow)])
def test_intervals_contain_the_truth_as_often_as_they_say(problems):
    """Of 1000 benchmarks, 8 samples of problems of random difficulty, 93 to 97% have it in the interval."""
    random, a, b = np.random.default_rng(problems), 0.8, 1.6
    covered = 0
    for seed in range(1000):
        chance = random.beta(a, b, size=problems)
        values = random.binomial(8, chance) / 8
        low, high = estimates.interval(values, seed=seed)
        covered += low <= a / (a + b) <= high
    assert 930 <= covered <= 970


def test_an_interval_of_one_problem_is_its_value():
    assert estimates.interval(np.array([0.5, math.nan]), seed=0) == (0.5, 0.5)
    assert np.isnan(estimates.interval(np.array([math.nan]), seed=0)).all()
