"""When runs collapse, and what they reach."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from gspo_jax.errors import UserError
from gspo_jax.studies.runs import Group, collapse, curve, tail_mean


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


def course(group: Group) -> Course:
    """Return the course of a group of one run."""
    (run,) = group.runs
    found = curve(group, "reward/mean")
    if found is None:
        raise UserError(f"{run.folder} has no reward/mean yet; wait for the run's first iteration, or leave it out")
    rewards = found.raw[0]
    return Course(run.seed, len(rewards), collapse(rewards), tail_mean(rewards), float(rewards.mean()))


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
