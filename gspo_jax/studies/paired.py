"""Differences of groups of runs from a baseline, seed by seed.

In a sweep, runs of one seed share the cold start and the order of problems. So most of a result's spread cancels in the
difference.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gspo_jax import estimates
from gspo_jax.errors import UserError
from gspo_jax.studies.runs import Group, RunData, describe, final, quality, results

MANY = 5
"""More comparisons than this need a warning that some intervals exclude 0 by chance."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, with its interval (probability COVERAGE)."""

    mean: float
    low: float
    high: float
    each: tuple[float, ...]

    @property
    def seeds(self) -> int:
        """Number of seeds."""
        return len(self.each)

    @property
    def is_flat(self) -> bool:
        """True if all seeds agree to the digit, as coarse accuracies may. This says nothing of their spread."""
        return self.seeds > 1 and self.high - self.low < 1e-9

    @property
    def is_clear(self) -> bool:
        """True if the interval has a width and excludes 0."""
        return self.seeds > 1 and not self.is_flat and not self.low <= 0 <= self.high

    @property
    def p(self) -> float:
        """Exact two-sided p-value by the signs of the differences; NaN with one seed."""
        return estimates.sign_flip_p(np.array(self.each)) if self.seeds > 1 else math.nan

    @property
    def student_p(self) -> float:
        """Two-sided p-value of Student's t test."""
        return estimates.student_p(np.array(self.each))

    def is_within(self, margin: float) -> bool:
        """True if the whole interval lies inside ±margin: equivalent, by two one-sided tests at (1 − COVERAGE) / 2.

        An interval that merely contains 0 says nothing of the kind.
        """
        return self.seeds > 1 and not self.is_flat and -margin < self.low and self.high < margin


def difference(values: Mapping[int | None, float], baseline: Mapping[int | None, float]) -> Estimate | None:
    """Return the difference from a baseline over common seeds, None without any."""
    each = np.array([value - baseline[seed] for seed, value in values.items() if seed is not None and seed in baseline])
    if not len(each):
        return None
    low, high = estimates.student_interval(each) if len(each) > 1 else (math.nan, math.nan)
    return Estimate(float(each.mean()), low, high, tuple(each.tolist()))


def find(groups: Sequence[Group], run: str | os.PathLike[str]) -> Group:
    """Return the group of a run's folder or of a label, `--baseline`.

    Raises:
      UserError: no run is the baseline.
    """
    place = Path(run).resolve()
    for group in groups:
        if group.label == str(run) or any(own.folder.resolve() == place for own in group.runs):
            return group
    raise UserError(f"--baseline={run} is none of the runs; name one of those that are compared")


def differences(groups: Sequence[Group], base: Group) -> list[dict[str, Estimate]]:
    """Return each group's differences from `base` by metric, if they share a seed."""
    reached = {name: final(base, name) for name in results(groups)}
    found = []
    for group in groups:
        own = {name: None if group is base else difference(final(group, name), reached[name]) for name in reached}
        found.append({name: one for name, one in own.items() if one is not None})
    return found


def how_to_read(groups: Sequence[Group], base: Group) -> str:
    """Say how differences are computed, and what weakens them in these runs."""
    text = (
        "Mean over seeds of the difference between the runs of one seed, and its 95% interval by Student's t over the "
        "seeds: bold if it has a width and leaves out 0, so that the sign of the difference is no chance of the seeds."
    )
    others = len(groups) - 1
    if others > MANY:
        text += f" Of {others} intervals about {0.05 * others:.1g} would leave out 0 even if nothing made a difference."
    if starts_differ(groups, base):
        text += " Not all runs of one seed began from the same policy: their evaluations before training differ."
    if len({run.rows[-1]["step"] for group in groups for run in group.runs}) > 1:
        text += " Runs have different numbers of updates, and each is compared at its own end."
    return text


def starts_differ(groups: Sequence[Group], base: Group) -> bool:
    """Return True if runs of one seed have different evaluations before their first update."""
    name = quality(groups)
    before = {run.seed: _before(run, name) for run in base.runs}
    runs = [run for group in groups for run in group.runs if run.seed in before]
    pairs = [(_before(run, name), before[run.seed]) for run in runs]
    return any(own != other for own, other in pairs if own is not None and other is not None)


def _before(run: RunData, name: str) -> float | None:
    return next((row.get(name) for row in run.rows if row["step"] == 0), None)


def written(found: Estimate | None, how: str = ".3f") -> str:
    """Format a difference with its interval."""
    if found is None:
        return "no seed in common"
    text = f"{found.mean:+{how}}"
    return f"{text} [{found.low:+{how}}, {found.high:+{how}}]" if found.seeds > 1 else f"{text}, one seed"


def in_markdown(found: Estimate | None, how: str = ".3f") -> str:
    """Format a difference for a markdown table, bold if the interval excludes 0."""
    text = written(found, how)
    return f"**{text}**" if found is not None and found.is_clear else text


def verdict(label: str, base: str, found: Estimate, *, of: str = "eval/accuracy") -> str:
    """Return the sentence on whether a group is more accurate than the baseline, or has the higher reward."""
    what = f"{describe(of).title} of {label} less that of {base}: {written(found)}"
    if found.seeds == 1:
        return f"{what}; it takes several to tell a difference from chance."
    if found.is_flat:
        return f"{what} over {found.seeds} seeds, the same for each: it takes more to know their spread."
    if found.is_clear:
        is_more, is_less = (
            ("is more accurate", "is less accurate") if of == "eval/accuracy" else ("earns more", "earns less")
        )
        return f"{what} over {found.seeds} seeds: {label} {is_more if found.mean > 0 else is_less}."
    return f"{what} over {found.seeds} seeds: the interval contains 0, so these runs do not tell which is better."
