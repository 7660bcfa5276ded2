"""When runs collapse, what they reach and keep, and which counts of collapses tell arms apart."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from gspo_jax.errors import UserError
from gspo_jax.studies.runs import Group, collapse, curve, moving_means, tail_mean

LEVEL = 0.05
"""Largest chance that any arm meets a rule of `rule` by luck."""


@dataclass(frozen=True)
class Course:
    """Rewards that a run reached, and when it collapsed."""

    seed: int | None
    iterations: int
    collapsed: int | None
    """Iteration of its collapse, from 1. None if it did not collapse."""
    final: float
    """Mean reward of the last tenth of its iterations."""
    mean: float
    kept: float | None = None
    """See `kept`; None where only the other numbers of a run are left."""


def course(group: Group) -> Course:
    """Return the course of a group of one run."""
    (run,) = group.runs
    found = curve(group, "reward/mean")
    if found is None:
        raise UserError(f"{run.folder} has no reward/mean yet; wait for the run's first iteration, or leave it out")
    rewards = found.raw[0]
    reached = tail_mean(rewards), float(rewards.mean()), kept(rewards)
    return Course(run.seed, len(rewards), collapse(rewards), *reached)


def kept(rewards: Float[np.ndarray, " N"]) -> float:
    """Return the share of its best reward so far that a run holds, mean over its iterations: 1 if it never falls.

    Rewards are means of five iterations, as in `collapse`, but nothing is counted against a threshold, and every
    iteration of a rise counts 1, however high it leads. 0 if there was no reward.
    """
    means = moving_means(rewards)
    best = np.maximum.accumulate(means)
    return float(np.divide(means, best, out=np.zeros_like(means), where=best > 0).mean())


def surviving(courses: Sequence[Course], iterations: int) -> Float[np.ndarray, " N+1"]:
    """Return the share of runs without a collapse by the end of each iteration, from 0.

    A run that ends earlier without a collapse leaves the count: the Kaplan-Meier estimate.
    """
    share = np.ones(iterations + 1)
    for at in range(1, iterations + 1):
        watched = sum(one.collapsed >= at if one.collapsed is not None else one.iterations >= at for one in courses)
        lost = sum(one.collapsed == at for one in courses)
        share[at] = share[at - 1] * (1 - lost / watched if watched else 1)
    return share


def by_luck(seeds: int, arms: int, *, least: int, most: int) -> float:
    """Return the chance that a baseline collapses on `least` seeds or more and some of the arms on `most` or fewer.

    All collapse equally often, each on each seed with probability p: P(X ≥ least)·(1 − P(X > most)^arms), X binomial,
    at the p that makes it largest.
    """
    from scipy import stats  # a dependency of jax

    p = np.linspace(0, 1, 1001)
    lost = stats.binom.sf(least - 1, seeds, p)
    return float((lost * (1 - stats.binom.sf(most, seeds, p) ** arms)).max())


def rule(seeds: int, arms: int) -> int | None:
    """Return the largest k for "the baseline collapses on all seeds but k or more, the arm on at most k".

    The rule is met `by_luck` by any of the arms with a chance of at most LEVEL. None if even k = 0 is more likely.
    """
    allowed = [k for k in range(seeds // 2) if by_luck(seeds, arms, least=seeds - k, most=k) <= LEVEL]
    return max(allowed, default=None)
