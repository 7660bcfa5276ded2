"""Dot plots with a row per group of runs: results, and differences from a baseline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_jax.drawing import GREY, fitting, in_two_lines, percent, wrap
from gspo_jax.studies.paired import Estimate, differences
from gspo_jax.studies.runs import Group, describe, final, quality, results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = tuple[Group, Estimate | None]
"""A group and its row's content, None for an empty row."""
NAME, TITLE, UNIT = 10.0, 12.0, 10.0
"""In points. Long texts are smaller."""
ROW, TICK = 0.6, 0.75
"""Inches: maximum distance of rows, minimum distance of ticks."""


@dataclass(frozen=True)
class Dots:
    """A dot plot."""

    title: str
    unit: str
    rows: Sequence[Row]
    is_share: bool
    """True for shares, written in per cent."""
    is_paired: bool = False
    """True for differences, with a line at 0."""


def apart(groups: Sequence[Group], base: Group) -> list[Dots]:
    """Return a dot plot of the differences from `base` for each result with any interval."""
    others = [group for group in groups if group is not base]
    return [dots for name in results(groups) if (dots := _apart(others, base, name)) is not None]


def compare(groups: Sequence[Group], base: Group, metrics: Sequence[str]) -> list[Dots]:
    """Return dot plots of each metric's final values, and of differences from `base` in results.

    All share their rows, the best group first. The baseline's differences are empty.
    """
    ranked = sorted(groups, key=lambda group: (-_final(group, quality(groups)), group.label))
    found = []
    for name in metrics:
        metric, ends = describe(name), [list(final(group, name).values()) for group in ranked]
        rows = [(group, _mean(values)) for group, values in zip(ranked, ends, strict=True)]
        found.append(Dots(metric.title, metric.unit, rows, metric.is_share))
        if name in results(groups) and (dots := _apart(ranked, base, name)) is not None:
            found.append(dots)
    return found


def _apart(groups: Sequence[Group], base: Group, name: str) -> Dots | None:
    rows = [(group, own.get(name)) for group, own in zip(groups, differences(groups, base), strict=True)]
    found = [estimate for _, estimate in rows if estimate is not None and estimate.seeds > 1]
    if not any(any(estimate.each) for estimate in found):
        return None
    metric = describe(name)
    unit = f"{'points' if metric.is_share else 'difference'} from {base.label}"
    return Dots(f"Δ {metric.title}", unit, rows, metric.is_share, is_paired=True)


def _final(group: Group, name: str) -> float:
    return float(np.mean(list(final(group, name).values()) or [-np.inf]))


def _mean(values: Sequence[float]) -> Estimate | None:
    return Estimate(float(np.mean(values)), np.nan, np.nan, tuple(values)) if values else None


def draw_dots(axes: "Axes", dots: Dots, *, names: float) -> None:
    """Draw a dot plot. `names` is the width of row names in inches, 0 to leave them out."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    wide = axes.bbox.width / axes.figure.dpi
    lines = wrap(dots.title, wide, TITLE, "bold")
    axes.set_title("\n".join(lines), fontsize=min(fitting(line, TITLE, wide, "bold") for line in lines))
    axes.set_xlabel(dots.unit, fontsize=fitting(dots.unit, UNIT, wide))
    if dots.is_paired:
        axes.axvline(0, color=GREY, linewidth=1)
    draw_rows(axes, dots.rows, names=names)
    axes.xaxis.set_major_locator(MaxNLocator(max(1, int(wide / TICK)), steps=[1, 2, 2.5, 5, 10]))
    if dots.is_share:
        points = FuncFormatter(lambda x, _: f"{100 * x:.3g}".replace("-", "−"))
        axes.xaxis.set_major_formatter(points if dots.is_paired else percent)


def draw_rows(axes: "Axes", rows: Sequence[Row], *, names: float) -> None:
    """Draw each row's mean and interval, with its seeds as small dots below."""
    for place, (group, estimate) in enumerate(rows):
        if estimate is None:
            continue
        look = group.look
        axes.plot(estimate.each, [place + 0.26] * estimate.seeds, "o", color=look.color, alpha=0.5, markersize=3)
        face = "white" if look.hollow else look.color
        style: dict[str, Any] = {"color": look.color, "marker": look.marker, "markerfacecolor": face, "markersize": 5.5}
        error = None
        if np.isfinite(estimate.low):
            error = [[estimate.mean - estimate.low], [estimate.high - estimate.mean]]
        axes.errorbar([estimate.mean], [place], xerr=error, capsize=2.5, linestyle="none", **style)
    margin = 0.5 + max(0.0, axes.bbox.height / axes.figure.dpi / ROW - len(rows)) / 2
    axes.set_ylim(len(rows) - 1 + margin, -margin)
    labels = [in_two_lines(group.label, NAME, names, "bold") if names else "" for group, _ in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.tick_params(axis="y", length=0)
    for text, label, (group, _) in zip(axes.get_yticklabels(), labels, rows, strict=True):
        size = fitting(label, NAME, names, "bold") if names else NAME
        text.set(color=group.look.color, weight="bold", fontsize=size)
