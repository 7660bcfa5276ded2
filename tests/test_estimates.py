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


def test_the_majority_of_some_is_the_mean_over_subsets():
    answers, right = "aaabbc", [1, 1, 1, 0, 0, 0]
    subsets = [[answers[i] for i in chosen] for chosen in itertools.permutations(range(6), 3)]

    def share(drawn):
        most = max(map(drawn.count, drawn))
        first = {a for a in drawn if drawn.count(a) == most}
        return ("a" in first) / len(first)

    expected = np.mean([share(drawn) for drawn in subsets])
    found = np.mean([majority(answers, right, 3, seed) for seed in range(20)])
    assert found == pytest.approx(expected, abs=0.02)
    assert majority(answers, right, 1) == pytest.approx(0.5, abs=0.1)
    assert math.isnan(majority(answers, right, 7))


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
