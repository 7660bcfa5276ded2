"""The picture of a report: a legend, then panels in rows, or for many groups a grid of small panels each.

What the panels show is up to panels.py.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gspo_jax.reporting.drawing import GREY, picture, text_width, wrap
from gspo_jax.reporting.looks import Look
from gspo_jax.reporting.panels import MAX_LINES, MAX_VALUE_LABELS, Lines, Panel, draw_small, last_step
from gspo_jax.reporting.runs import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Layout:
    """A picture's layout; lengths are in inches."""

    columns: int
    """Panels side by side."""
    column: float
    """Width of a column."""
    small: int
    """Small panels side by side."""

    @property
    def width(self) -> float:
        """Width of the picture."""
        return self.columns * self.column


PAGE, PHONE = Layout(columns=3, column=3.87, small=6), Layout(columns=1, column=4.4, small=3)
"""The layout for a page, and the one whose texts can be read on a phone, where a picture is 390 pixels wide."""
MARGIN, ROW = 0.2, 3.2
"""Space at the edges, and height of a row of panels."""
SMALL_HEAD, SMALL_ROW, SMALL_FOOT, SMALL_LEFT, GAP = 0.75, 1.3, 0.3, 0.68, 0.26
"""Height of the title above small panels, of a row of them, of the ticks below; space on their left, and between."""
SAMPLE = 0.42
"""Length of the sample of a group's line in the legend."""
NAME, NOTE = 15.0, 11.0
"""Sizes of the texts of the legend and of the notes below it, in points."""


def draw(
    groups: Sequence[Group],
    shown: Sequence[tuple[Panel, Lines]],
    path: str | os.PathLike[str],
    *,
    note: str = "",
    layout: Layout = PAGE,
) -> None:
    """Draw panels, as `panels.choose` returns them, into a PNG; `note` is written below how to read them."""
    small = len(groups) > MAX_LINES
    legend = [] if small else list(_flow(groups, layout))
    rows = legend[-1][2] + 1 if legend else 0
    how = _how_to_read(groups, shown) if shown else ""
    notes = [line for text in (how, note) for line in wrap(text, layout.width - 2 * MARGIN, NOTE)]
    head = 0.12 + 0.36 * rows + 0.23 * len(notes) + 0.1
    places, body = (_grids if small else _rows)(shown, layout)
    with picture(path, width=layout.width, height=head + body + 0.1) as figure:
        for group, left, row in legend:
            _legend_entry(figure, _name(group, groups), group.look, left, 0.12 + 0.36 * row, sample=len(groups) > 1)
        for line, text in enumerate(notes):
            _text(figure, MARGIN, 0.16 + 0.36 * rows + 0.23 * line, text, color=GREY, fontsize=NOTE)
        for (panel, lines), (left, top, width) in zip(shown, places, strict=True):
            if small:
                _draw_grid(figure, panel, lines, head + top, last_step(groups), layout)
                continue
            room = 1.5 if panel.label else 0.98 if len(groups) > MAX_VALUE_LABELS else 0.7
            axes = _axes(figure, left + 0.84, head + top + 0.32, width - 0.84 - room, ROW - 1.0)
            panel.draw(axes, lines, panel, last_step(groups))


def _how_to_read(groups: Sequence[Group], shown: Sequence[tuple[Panel, Lines]]) -> str:
    """Say what the lines and bands of panels are."""
    seeds = {len(group.runs) for group in groups}
    how = ["one small panel per group, the others in grey behind it"] if len(groups) > MAX_LINES else []
    if len(groups) > MAX_LINES and any(panel.from_start for panel, _ in shown):
        how.append("dashed or grey across: before training")
    if max(seeds) > 1:
        counted = "–".join(str(count) for count in sorted({min(seeds), max(seeds)}))
        how.append(f"thin: each run, thick: mean of {counted} runs, smoothed except for accuracy")
    single = [line for _, lines in shown for group, line in lines if len(group.runs) == 1]
    if any(line.is_smoothed for line in single):
        how.append("thin: each iteration, thick: smoothed")
    if any(line.error is not None for line in single):
        how.append("band: standard error of the evaluation")
    if any(len({run.rows[-1]["step"] for run in group.runs}) > 1 for group in groups):
        how.append("lines of a group end where its shortest run does")
    return "  ·  ".join(how)


def _flow(groups: Sequence[Group], layout: Layout) -> Iterator[tuple[Group, float, int]]:
    """Yield the place of each group in the legend: distance from the left edge, and row."""
    left, row = MARGIN, 0
    for group in groups:
        width = text_width(_name(group, groups), NAME, "bold") + (SAMPLE + 0.1 if len(groups) > 1 else 0)
        if left > MARGIN and left + width > layout.width - MARGIN:
            left, row = MARGIN, row + 1
        yield group, left, row
        left += width + 0.3


def _name(group: Group, groups: Sequence[Group]) -> str:
    """Return a group's name in the legend: with its number of runs if there is room."""
    return group.label if len(groups) > MAX_VALUE_LABELS else group.caption


def _legend_entry(figure: "Figure", name: str, look: Look, left: float, top: float, *, sample: bool) -> None:
    """Write a group's name in its colour, after a sample of its line."""
    from matplotlib.lines import Line2D

    if sample:
        x, y = (left, left + SAMPLE / 2, left + SAMPLE), 1 - (top + 0.13) / figure.get_figheight()
        style = look.line(linewidth=2.2, markersize=6.5, markevery=[1])
        figure.add_artist(Line2D([at / figure.get_figwidth() for at in x], [y] * 3, **style))
        left += SAMPLE + 0.1
    _text(figure, left, top, name, color=look.color, weight="bold", fontsize=NAME)


def _rows(shown: Sequence[tuple[Panel, Lines]], layout: Layout) -> tuple[list[tuple[float, float, float]], float]:
    """Return each panel's distance from the left and from the headline, its width, and the height of all."""
    places, cell = [], 0
    for panel, _ in shown:
        width = min(panel.width, layout.columns)
        if cell % layout.columns + width > layout.columns:
            cell += -cell % layout.columns
        places.append((cell % layout.columns * layout.column, cell // layout.columns * ROW, width * layout.column))
        cell += width
    return places, -(-cell // layout.columns) * ROW


def _grids(shown: Sequence[tuple[Panel, Lines]], layout: Layout) -> tuple[list[tuple[float, float, float]], float]:
    """Return the places of grids of small panels, like `_rows`."""
    places, top = [], 0.0
    for _, lines in shown:
        places.append((0.0, top, layout.width))
        top += SMALL_HEAD + -(-len(lines) // layout.small) * SMALL_ROW + SMALL_FOOT
    return places, top


def _draw_grid(figure: "Figure", panel: Panel, lines: Lines, top: float, last: int, layout: Layout) -> None:
    """Draw a small panel per line, with the same axes; ticks are labelled at the left and at the bottom."""
    _text(figure, MARGIN, top + 0.05, panel.title, weight="bold", fontsize=13)
    axes_are = f"y: {panel.unit}, x: {panel.x}"
    size = 10 * min(1.0, (layout.width - 2 * MARGIN) / text_width(axes_are, 10))
    _text(figure, MARGIN, top + 0.29, axes_are, color=GREY, fontsize=size)
    wide = (layout.width - SMALL_LEFT - MARGIN / 2 + GAP) / layout.small
    for place in range(len(lines)):
        row, column = divmod(place, layout.small)
        left = SMALL_LEFT + wide * column
        axes = _axes(figure, left, top + SMALL_HEAD + SMALL_ROW * row, wide - GAP, SMALL_ROW - 0.34)
        draw_small(axes, lines, place, panel, last)
        axes.tick_params(labelleft=column == 0, labelbottom=place + layout.small >= len(lines))


def _axes(figure: "Figure", left: float, top: float, width: float, height: float) -> "Axes":
    """Add axes at a distance from the picture's upper left corner, in inches."""
    wide, high = figure.get_size_inches()
    return figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))


def _text(figure: "Figure", left: float, top: float, text: str, **style: object) -> None:
    """Write a text at a distance from the picture's upper left corner, in inches."""
    wide, high = figure.get_size_inches()
    figure.text(left / wide, 1 - top / high, text, va="top", **style)  # type: ignore[arg-type]
