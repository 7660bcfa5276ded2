"""Shared parts of all pictures: style, colours, PNG files and line labels."""

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gspo_jax import installs
from gspo_jax.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, FAINT = "#222222", "#6b6b6b", "#c9c9c9"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")
"""Colour-blind safe. Objectives have their own in looks.py."""
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#bbbbbb",
    "axes.labelcolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8e8e8",
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "lines.solid_capstyle": "round",
}
POINTS_PER_INCH = 72


@contextmanager
def picture(path: str | os.PathLike[str], *, width: float, height: float) -> Iterator["Figure"]:
    """Yield a figure of `width` × `height` inches in the house style, saved to `path` as a PNG on exit.

    Raises:
      UserError: matplotlib is not installed.
    """
    check_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        yield figure
        figure.savefig(path, dpi=150)


def check_matplotlib() -> None:
    """Raise UserError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"{error}: pictures need matplotlib; run {installs.of_extra('report')}") from None


def mix(color: str, other: str, share: float) -> str:
    """Return `color` with a share of `other`. Colours are hexadecimal, "#0072B2"."""
    pairs = zip(*([int(text[i : i + 2], 16) for i in (1, 3, 5)] for text in (color, other)), strict=True)
    return "#" + "".join(f"{round((1 - share) * a + share * b):02X}" for a, b in pairs)


def percent(value: float, _: float) -> str:
    """Format an axis tick as a percentage."""
    return f"{100 * value:.3g}%"


@functools.cache
def text_width(text: str, size: float, weight: str = "normal") -> float:
    """Return a text's width in inches, without drawing it."""
    check_matplotlib()
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    path = TextPath((0, 0), text, prop=FontProperties(weight=weight, size=size))
    return float(path.vertices[:, 0].max(initial=0.0)) / POINTS_PER_INCH


def wrap(text: str, width: float, size: float, weight: str = "normal") -> list[str]:
    """Break a text into lines of at most `width` inches."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size, weight) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines if text else []


class Head:
    """Headline of a picture, a note, and coloured names, wrapped to its width."""

    def __init__(self, headline: str, note: str, *, width: float, names: Sequence[tuple[str, str]] = ()):
        self._lines: list[tuple[float, str, dict[str, Any]]] = []
        self.height = 0.15
        """Inches from the picture's top to the panels."""
        heading = {"weight": "bold", "fontsize": 14}
        self._add(wrap(headline, width - 0.4, 14, "bold"), 0.27, heading)
        self.height += 0.1
        self._add(wrap(note, width - 0.4, 11), 0.22, {"color": GREY, "fontsize": 11})
        for name, color in names:
            self._add([name], 0.22, {"color": color, "fontsize": 11, "weight": "bold"})
        self.height += 0.15

    def _add(self, texts: Sequence[str], line: float, style: dict[str, Any]) -> None:
        for text in texts:
            self._lines.append((self.height, text, style))
            self.height += line

    def write(self, figure: "Figure") -> None:
        """Write the texts into the picture."""
        width, height = figure.get_size_inches()
        for top, text, style in self._lines:
            figure.text(0.2 / width, 1 - top / height, text, va="top", **style)


def in_two_lines(label: str, size: float, width: float, weight: str = "normal") -> str:
    """Return a label, broken after the comma nearest its middle if it is wider than `width` inches."""
    commas = [i + 1 for i, letter in enumerate(label) if letter == ","]
    if not commas or text_width(label, size, weight) <= width:
        return label
    at = min(commas, key=lambda i: abs(2 * i - len(label)))
    return f"{label[:at]}\n{label[at:]}"


def fitting(label: str, size: float, width: float, weight: str = "normal") -> float:
    """Return the font size, at most `size`, at which each line of a label is at most `width` inches wide."""
    return min(size, *(size * width / text_width(line, size, weight) for line in label.split("\n")))


def label_ends(axes: "Axes", ends: Sequence[tuple[float, str, str]], *, size: float, room: float | None = None) -> None:
    """Write labels (y, text, colour) at the right ends of lines, without overlaps, in at most `room` inches."""
    wide, panel = (POINTS_PER_INCH / axes.figure.dpi * pixels for pixels in (axes.bbox.width, axes.bbox.height))
    if room is not None:
        ends = [(y, in_two_lines(text, size, room, "bold"), color) for y, text, color in ends]
        size = min([size, *(fitting(text, size, room, "bold") for _, text, _ in ends)])
    lines = max((text.count("\n") + 1 for _, text, _ in ends), default=1)
    size = min(size, panel / (1.2 * lines * max(1, len(ends))))
    near, far, text_at = 1 + 2 / wide, 1 + 7 / wide, 1 + 8 / wide
    order = sorted(ends)
    heights = [_axes_fraction(axes, y) for y, _, _ in order]
    for (_, text, color), end, y in zip(
        order, heights, spread_labels(heights, gap=1.2 * lines * size / panel), strict=True
    ):
        if abs(y - end) > 0.01:
            line = {"color": color, "linewidth": 0.8, "clip_on": False}
            axes.plot([near, far], [end, y], transform=axes.transAxes, **line)
        axes.text(text_at, y, text, transform=axes.transAxes, color=color, va="center", weight="bold", fontsize=size)


def _axes_fraction(axes: "Axes", y: float) -> float:
    point = (axes.get_xlim()[0], max(y, axes.get_ylim()[0]))
    return float(axes.transAxes.inverted().transform(axes.transData.transform(point))[1])


def spread_labels(heights: Sequence[float], *, gap: float) -> list[float]:
    """Spread ascending label heights (0 to 1) at least `gap` apart, inside the axes and off the title.

    Overlapping labels are centred on their mean.
    """
    blocks: list[list[float]] = []  # blocks of touching labels
    for height in heights:
        blocks.append([height])
        while len(blocks) > 1 and _lowest_label(blocks[-1], gap) < _lowest_label(blocks[-2], gap) + gap * len(
            blocks[-2]
        ):
            last = blocks.pop()
            blocks[-1] += last
    return [_lowest_label(block, gap) + gap * i for block in blocks for i in range(len(block))]


def _lowest_label(block: Sequence[float], gap: float) -> float:
    span = gap * (len(block) - 1)
    return max(0.0, min(sum(block) / len(block) - span / 2, 1.0 - gap / 2 - span))
