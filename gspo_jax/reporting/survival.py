"""Which runs collapse and when, what groups of runs reach, and how far each is from a baseline, seed by seed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from gspo_jax import estimates
from gspo_jax.reporting.runs import Group, collapse, curve, tail_mean
from gspo_jax.types import UserError


@dataclass(frozen=True)
class Course:
    """The rewards that one run reached, and when it collapsed, if it did."""

    seed: int | None
    iterations: int
    collapsed: int | None
    """Iteration of its collapse, counted from 1; None if it did not collapse."""
    final: float
    """Mean reward of the last tenth of its iterations."""
    mean: float
    """Mean reward of all its iterations."""


@dataclass(frozen=True)
class Difference:
    """A mean difference from the baseline over the seeds that both have, with its interval (probability COVERAGE)."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.seeds > 1 and not self.low <= 0 <= self.high


def course(group: Group) -> Course:
    """Read the course of a group of one run."""
    (run,) = group.runs
    found = curve(group, "reward/mean")
    if found is None:
        raise UserError(f"{run.folder} has no reward/mean yet; wait for the run's first iteration, or leave it out")
    rewards = found.raw[0]
    seed = None if run.config is None else run.config.get("seed")
    return Course(seed, len(rewards), collapse(rewards), tail_mean(rewards), float(rewards.mean()))


def surviving(courses: Sequence[Course], iterations: int) -> Float[np.ndarray, " N+1"]:
    """Share of the runs that have not collapsed by the end of each iteration, from 0.

    A run that ended without a collapse, before others did, leaves the count: the Kaplan-Meier estimate.
    """
    share = np.ones(iterations + 1)
    for at in range(1, iterations + 1):
        watched = sum(one.collapsed >= at if one.collapsed is not None else one.iterations >= at for one in courses)
        lost = sum(one.collapsed == at for one in courses)
        share[at] = share[at - 1] * (1 - lost / watched if watched else 1)
    return share


def difference(courses: Sequence[Course], baseline: Sequence[Course], field: str) -> Difference:
    """Return the mean difference of `field` between the runs of two groups that have the same seed."""
    others = {one.seed: getattr(one, field) for one in baseline}
    values = np.array([getattr(one, field) - others[one.seed] for one in courses if one.seed in others])
    if not len(values):
        return Difference(math.nan, math.nan, math.nan, 0)
    return Difference(float(values.mean()), *estimates.student_interval(values), len(values))
