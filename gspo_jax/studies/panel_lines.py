"""What a panel shows of a group of runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gspo_jax.studies.runs import (
    Curve,
    Group,
    curve,
    first_and_last,
    list_curve,
    tail_mean,
    tail_mean_by_minibatch,
)

MAX_LINES = 6
"""Maximum lines per panel. Dot plots (dots.py) compare more groups."""


@dataclass(frozen=True)
class PanelLine:
    """A group's line in a panel."""

    x: np.ndarray
    """[N]."""
    y: np.ndarray
    """[N], mean over runs."""
    rows: np.ndarray
    """[R, N], the line of each run, or of each part in `names`. NaN where missing."""
    final: float
    """Last evaluation, or mean over the last tenth of the iterations."""
    error: np.ndarray | None = None
    """[N], standard error of a single run."""
    names: Sequence[str] = ()
    """Names of rows that are parts, such as mini-batches."""

    @property
    def is_smoothed(self) -> bool:
        """True for the smoothed line of a single run."""
        return len(self.rows) == 1 and not np.array_equal(self.rows[0], self.y)

    @property
    def is_zero(self) -> bool:
        """True if all values are 0."""
        return not np.nan_to_num(self.rows).any()


def evaluations(group: Group, metric: str) -> PanelLine | None:
    """Return a group's evaluations, with standard errors for a single run."""
    found = curve(group, metric)
    if found is None:
        return None
    error = curve(group, f"{metric}_stderr") if len(found.raw) == 1 else None
    known = error is not None and np.array_equal(error.steps, found.steps)
    mean = found.raw.mean(axis=0)
    band = error.raw[0] if error is not None and known else None
    return PanelLine(found.steps, mean, found.raw, final=float(mean[-1]), error=band)


def over_time(group: Group, metric: str) -> PanelLine | None:
    """Return a metric's smoothed line. Rows: smoothed lines of several runs, or a single run as logged."""
    found = curve(group, metric)
    if found is None:
        return None
    rows = found.raw if len(found.raw) == 1 else found.smooth
    return PanelLine(found.steps, found.smooth.mean(axis=0), rows, final=float(first_and_last(found, metric)[1].mean()))


def by_minibatch(group: Group, metric: str) -> PanelLine | None:
    """Return a metric's last tenth by mini-batch, None if an iteration has only one."""
    found = [values for run in group.each() if (values := tail_mean_by_minibatch(run, metric))]
    shared = sorted(set.intersection(*map(set, found))) if found else []
    rows = [[values[number] for number in shared] for values in found]
    return _profile(np.array(shared), rows) if len(shared) > 1 else None


def by_layer(group: Group, metric: str) -> PanelLine | None:
    """Return the last tenth of a metric logged by layer."""
    found = [layers for run in group.each() if (layers := list_curve(run, metric)) is not None]
    rows = [[tail_mean(layer) for layer in values.T] for _, values in found]
    return _profile(np.arange(len(rows[0])), rows) if rows else None


def _profile(x: np.ndarray, rows: Sequence[Sequence[float]]) -> PanelLine:
    mean = np.mean(rows, axis=0)
    return PanelLine(x, mean, np.array(rows), final=float(mean[-1]))


def minibatches_over_time(group: Group, metric: str) -> PanelLine | None:
    """Return a smoothed line per mini-batch, or of five if there are many."""
    numbers = sorted(tail_mean_by_minibatch(group, metric))
    if len(numbers) > MAX_LINES:
        numbers = [numbers[round(i * (len(numbers) - 1) / 4)] for i in range(5)]
    columns = [curve(group, metric, minibatch=number) for number in numbers]
    found = {str(i): column for i, column in zip(numbers, columns, strict=True) if column is not None}
    return _parts(found) if len(found) > 1 else None


def layers_over_time(group: Group, metric: str) -> PanelLine | None:
    """Return a smoothed line per layer."""
    found = list_curve(group, metric)
    if found is None:
        return None
    steps, values = found
    mean = values.mean(axis=1)
    return PanelLine(steps, mean, values.T, final=float(mean[-1]), names=[str(i) for i in range(values.shape[1])])


def layers_by_minibatch(group: Group, metric: str) -> PanelLine | None:
    """Return a metric's last tenth by layer over mini-batches, None if an iteration has only one."""
    found = list_curve(group, metric)
    if found is None:
        return None
    by_layer = [tail_mean_by_minibatch(group, f"{metric}/{layer}") for layer in range(found[1].shape[1])]
    numbers = sorted(by_layer[0])
    rows = np.array([[values[number] for number in numbers] for values in by_layer])
    return _profile(np.array(numbers), rows.tolist()) if len(numbers) > 1 else None


def _parts(found: Mapping[str, Curve]) -> PanelLine:
    steps = np.unique(np.concatenate([column.steps for column in found.values()]))
    rows = np.full((len(found), len(steps)), np.nan)
    for row, column in zip(rows, found.values(), strict=True):
        row[np.isin(steps, column.steps)] = column.smooth.mean(axis=0)
    mean = np.nanmean(rows, axis=0)
    return PanelLine(steps, mean, rows, final=float(mean[-1]), names=list(found))
