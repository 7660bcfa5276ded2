"""The picture of a report: a legend, then panels and differences, or dot plots for many groups."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gspo_jax.drawing import GREY, picture, text_width, wrap
from gspo_jax.studies.dots import NAME as ROW_NAME
from gspo_jax.studies.dots import Dots, apart, compare, draw_dots
from gspo_jax.studies.looks import Look
from gspo_jax.studies.panel_lines import MAX_LINES
from gspo_jax.studies.panels import MAX_VALUE_LABELS, Lines, Panel, last_step
from gspo_jax.studies.runs import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class PictureLayout:
    """Layout of a picture, in inches."""

    columns: int
    """Panels per row."""
    column: float
    dots: int
    """Dot plots of many groups per row."""

    @property
    def width(self) -> float:
        """Width of the picture."""
        return self.columns * self.column


PAGE, PHONE = PictureLayout(columns=3, column=3.87, dots=4), PictureLayout(columns=1, column=4.4, dots=2)
"""Layouts for a page, and for phones, where a picture is 390 pixels wide."""
MARGIN, ROW = 0.2, 3.2
"""Edges, and height of a row."""
DOTS_HEAD, DOTS_ROW, DOTS_FOOT, GAP = 0.5, 0.23, 0.6, 0.3
"""Dot plots of many groups: heights of title, row and ticks, and space between plots."""
MAX_NAME = 1.4
SAMPLE = 0.42
NAME, NOTE = 15.0, 11.0
"""In points."""


def draw(
    groups: Sequence[Group],
    shown: Sequence[tuple[Panel, Lines]],
    path: str | os.PathLike[str],
    *,
    base: Group,
    note: str = "",
    layout: PictureLayout = PAGE,
) -> None:
    """Draw panels from `panels.choose`, and differences from the group `base`, into a PNG.

    `note` follows the explanation.
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


def _draw_many(figure: "Figure", dots: Sequence[Dots], head: float, layout: PictureLayout) -> None:
    groups = [group for group, _ in dots[0].rows] if dots else []
    names = _names_width(groups)
    wide = (layout.width - names - 2 * MARGIN + GAP) / layout.dots
    for place, one in enumerate(dots):
        row, column = divmod(place, layout.dots)
        left, top = MARGIN + names + 0.1 + wide * column, head + row * _dots_height(groups) + DOTS_HEAD
        axes = _axes(figure, left, top, wide - GAP - 0.1, DOTS_ROW * len(groups))
        draw_dots(axes, one, names=0.0 if column else names)


def _dots_height(groups: Sequence[Group]) -> float:
    return DOTS_HEAD + DOTS_ROW * len(groups) + DOTS_FOOT


def _names_width(groups: Sequence[Group]) -> float:
    return min(MAX_NAME, max([text_width(group.label, ROW_NAME, "bold") for group in groups], default=0.0))


def _how_to_read(groups: Sequence[Group], shown: Sequence[tuple[Panel, Lines]], dots: Sequence[Dots]) -> str:
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


def _flow(groups: Sequence[Group], layout: PictureLayout) -> Iterator[tuple[Group, float, int]]:
    left, row = MARGIN, 0
    for group in groups:
        width = text_width(_name(group, groups), NAME, "bold") + (SAMPLE + 0.1 if len(groups) > 1 else 0)
        if left > MARGIN and left + width > layout.width - MARGIN:
            left, row = MARGIN, row + 1
        yield group, left, row
        left += width + 0.3


def _name(group: Group, groups: Sequence[Group]) -> str:
    return group.label if len(groups) > MAX_VALUE_LABELS else group.caption


def _legend_entry(figure: "Figure", name: str, look: Look, left: float, top: float, *, sample: bool) -> None:
    from matplotlib.lines import Line2D

    if sample:
        x, y = (left, left + SAMPLE / 2, left + SAMPLE), 1 - (top + 0.13) / figure.get_figheight()
        style = look.line(linewidth=2.2, markersize=6.5, markevery=[1])
        figure.add_artist(Line2D([at / figure.get_figwidth() for at in x], [y] * 3, **style))
        left += SAMPLE + 0.1
    _text(figure, left, top, name, color=look.color, weight="bold", fontsize=NAME)


def _rows(widths: Sequence[int], layout: PictureLayout) -> tuple[list[tuple[float, float, float]], float]:
    """Return places (left, distance from the headline, width) of panels, and the total height."""
    places, cell = [], 0
    for wanted in widths:
        width = min(wanted, layout.columns)
        if cell % layout.columns + width > layout.columns:
            cell += -cell % layout.columns
        places.append((cell % layout.columns * layout.column, cell // layout.columns * ROW, width * layout.column))
        cell += width
    return places, -(-cell // layout.columns) * ROW


def _axes(figure: "Figure", left: float, top: float, width: float, height: float) -> "Axes":
    wide, high = figure.get_size_inches()
    return figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))


def _text(figure: "Figure", left: float, top: float, text: str, **style: object) -> None:
    wide, high = figure.get_size_inches()
    figure.text(left / wide, 1 - top / high, text, va="top", **style)  # type: ignore[arg-type]
