"""The picture of a report: a legend, then panels and differences in rows, or for many groups dot plots alone.

What the panels show is up to panels.py, and what the dot plots show to dots.py.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gspo_jax.reporting.dots import NAME as ROW_NAME
from gspo_jax.reporting.dots import Dots, apart, compare, draw_dots
from gspo_jax.reporting.drawing import GREY, picture, text_width, wrap
from gspo_jax.reporting.looks import Look
from gspo_jax.reporting.panels import MAX_LINES, MAX_VALUE_LABELS, Lines, Panel, last_step
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
    dots: int
    """Dot plots of many groups side by side."""

    @property
    def width(self) -> float:
        """Width of the picture."""
        return self.columns * self.column


PAGE, PHONE = Layout(columns=3, column=3.87, dots=4), Layout(columns=1, column=4.4, dots=2)
"""The layout for a page, and the one whose texts can be read on a phone, where a picture is 390 pixels wide."""
MARGIN, ROW = 0.2, 3.2
"""Space at the edges, and height of a row of panels."""
DOTS_HEAD, DOTS_ROW, DOTS_FOOT, GAP = 0.5, 0.23, 0.6, 0.3
"""Height of the title above dot plots of many groups, of a row of dots, of the ticks below; space between plots."""
MAX_NAME = 1.4
"""Most width of the names of rows of dots."""
SAMPLE = 0.42
"""Length of the sample of a group's line in the legend."""
NAME, NOTE = 15.0, 11.0
"""Sizes of the texts of the legend and of the notes below it, in points."""


def draw(
    groups: Sequence[Group],
    shown: Sequence[tuple[Panel, Lines]],
    path: str | os.PathLike[str],
    *,
    base: Group,
    note: str = "",
    layout: Layout = PAGE,
) -> None:
    """Draw panels, as `panels.choose` returns them, and differences from the group `base` into a PNG.

    `note` is written below how to read them.
    """
    many = len(groups) > MAX_LINES
    dots = compare(groups, base, [panel.metric for panel, _ in shown]) if many else apart(groups, base)
    legend = [] if many else list(_flow(groups, layout))
    rows = legend[-1][2] + 1 if legend else 0
    how = _how_to_read(groups, shown, dots) if shown else ""
    notes = [line for text in (how, note) for line in wrap(text, layout.width - 2 * MARGIN, NOTE)]
    head = 0.12 + 0.36 * rows + 0.23 * len(notes) + 0.1
    if many:
        body = -(-len(dots) // layout.dots) * _dots_height(groups)
    else:
        places, body = _rows([panel.width for panel, _ in shown] + [1] * len(dots), layout)
    with picture(path, width=layout.width, height=head + body + 0.1) as figure:
        for group, left, row in legend:
            _legend_entry(figure, _name(group, groups), group.look, left, 0.12 + 0.36 * row, sample=len(groups) > 1)
        for line, text in enumerate(notes):
            _text(figure, MARGIN, 0.16 + 0.36 * rows + 0.23 * line, text, color=GREY, fontsize=NOTE)
        if many:
            _draw_many(figure, dots, head, layout)
            return
        for (panel, lines), (left, top, width) in zip(shown, places, strict=False):
            room = 1.5 if panel.label else 0.98 if len(groups) > MAX_VALUE_LABELS else 0.8
            axes = _axes(figure, left + 0.84, head + top + 0.32, width - 0.84 - room, ROW - 1.0)
            panel.draw(axes, lines, panel, last_step(groups))
        names = _names_width(groups)
        for one, (left, top, width) in zip(dots, places[len(shown) :], strict=True):
            axes = _axes(figure, left + names + 0.3, head + top + 0.32, width - names - 0.6, ROW - 1.0)
            draw_dots(axes, one, names=names)


def _draw_many(figure: "Figure", dots: Sequence[Dots], head: float, layout: Layout) -> None:
    """Draw the dot plots of many groups side by side, named at the left."""
    groups = [group for group, _ in dots[0].rows] if dots else []
    names = _names_width(groups)
    wide = (layout.width - names - 2 * MARGIN + GAP) / layout.dots
    for place, one in enumerate(dots):
        row, column = divmod(place, layout.dots)
        left, top = MARGIN + names + 0.1 + wide * column, head + row * _dots_height(groups) + DOTS_HEAD
        axes = _axes(figure, left, top, wide - GAP - 0.1, DOTS_ROW * len(groups))
        draw_dots(axes, one, names=0.0 if column else names)


def _dots_height(groups: Sequence[Group]) -> float:
    """Return the height of a dot plot of many groups, with title and ticks."""
    return DOTS_HEAD + DOTS_ROW * len(groups) + DOTS_FOOT


def _names_width(groups: Sequence[Group]) -> float:
    """Return the width of the names of rows of dots."""
    return min(MAX_NAME, max([text_width(group.label, ROW_NAME, "bold") for group in groups], default=0.0))


def _how_to_read(groups: Sequence[Group], shown: Sequence[tuple[Panel, Lines]], dots: Sequence[Dots]) -> str:
    """Say what lines, bands, numbers and dots are."""
    seeds, many = {len(group.runs) for group in groups}, len(groups) > MAX_LINES
    how, lines = [], [] if many else [line for _, found in shown for _, line in found]
    if max(seeds) > 1 and not many:
        counted = "–".join(str(count) for count in sorted({min(seeds), max(seeds)}))
        how.append(f"thin: each run, thick: mean of {counted} runs, smoothed except for accuracy")
    if any(line.is_smoothed for line in lines):
        how.append("thin: each iteration, thick: smoothed")
    if any(line.error is not None for line in lines):
        how.append("band: standard error of the evaluation")
    if many:
        how.append("large: mean of a group's runs, small: each seed")
    if many or len(groups) <= MAX_VALUE_LABELS:
        what = "reached" if many else "numbers at the ends of lines, as in the table"
        how.append(f"{what}: the last evaluation, or the mean over the last tenth of the iterations")
    if dots and any(one.is_paired for one in dots):
        how.append("Δ: differences between runs of one seed, their mean with its 95% interval, and each seed below it")
    if any(len({run.rows[-1]["step"] for run in group.runs}) > 1 for group in groups):
        how.append("a group ends where its shortest run does")
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


def _rows(widths: Sequence[int], layout: Layout) -> tuple[list[tuple[float, float, float]], float]:
    """Return the places of panels of these widths in columns, and the height of all.

    A place is a distance from the left and from the headline, and a width.
    """
    places, cell = [], 0
    for wanted in widths:
        width = min(wanted, layout.columns)
        if cell % layout.columns + width > layout.columns:
            cell += -cell % layout.columns
        places.append((cell % layout.columns * layout.column, cell // layout.columns * ROW, width * layout.column))
        cell += width
    return places, -(-cell // layout.columns) * ROW


def _axes(figure: "Figure", left: float, top: float, width: float, height: float) -> "Axes":
    """Add axes at a distance from the picture's upper left corner, in inches."""
    wide, high = figure.get_size_inches()
    return figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))


def _text(figure: "Figure", left: float, top: float, text: str, **style: object) -> None:
    """Write a text at a distance from the picture's upper left corner, in inches."""
    wide, high = figure.get_size_inches()
    figure.text(left / wide, 1 - top / high, text, va="top", **style)  # type: ignore[arg-type]
