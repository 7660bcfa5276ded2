"""The panels of each report page, and functions that draw the lines of groups of runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_jax.drawing import FAINT, GREY, label_ends, mix, percent
from gspo_jax.studies.panel_lines import (
    MAX_LINES,
    PanelLine,
    by_layer,
    by_minibatch,
    evaluations,
    layers_by_minibatch,
    layers_over_time,
    minibatches_over_time,
    over_time,
)
from gspo_jax.studies.runs import (
    RESOLUTION,
    Group,
    benchmarks,
    describe,
    quality,
    reward_functions,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_VALUE_LABELS = 3
"""More groups have names instead of final values at the ends of their lines."""
UPDATES = "optimizer updates"


Lines = Sequence[tuple[Group, PanelLine]]


def draw_lines(axes: "Axes", lines: Lines, panel: "Panel", last: int) -> None:
    """Draw each group's line over the thin lines of its runs, and label its end."""
    alone, names = len(lines) == 1, len(lines) > MAX_VALUE_LABELS
    ends = []
    for place, (group, line) in enumerate(lines):
        _draw_line(axes, group, line, panel, first=place / len(lines), alone=alone)
        label = panel.label(group, line, alone) if panel.label else group.label if names else panel.write(line.final)
        ends.append((float(line.y[-1]), label, group.look.color))
    _finish(axes, panel, [line for _, line in lines], last)
    if panel.from_start:
        _mark_start(axes, [line for _, line in lines])
    label_ends(axes, ends, size=10.5)


def _draw_line(axes: "Axes", group: Group, line: PanelLine, panel: "Panel", *, first: float, alone: bool) -> None:
    color = group.look.color
    if line.error is not None:
        axes.fill_between(line.x, line.y - line.error, line.y + line.error, color=color, alpha=0.15, linewidth=0)
    for row in line.rows if len(line.rows) > 1 or line.is_smoothed else ():
        axes.plot(line.x, row, color=color, linewidth=0.9, alpha=0.55 if alone else 0.35, zorder=1.8)
    every = max(1, round(len(line.x) / 6))
    look = group.look.line(linewidth=2.2 if alone else 1.9, markersize=5.5)
    if every > 1:
        look |= {"marker": ""} if alone else {"markevery": (int(first * every), every)}
    axes.plot(line.x, line.y, label=group.label, **look)


def draw_parts(axes: "Axes", lines: Lines, panel: "Panel", last: int) -> None:
    """Draw the parts of a single group's metric, later ones darker, labelled at their ends."""
    ((group, line),) = lines
    colors = _shades(group)(np.linspace(0.25, 1, len(line.names)))
    ends = []
    for row, name, color in zip(line.rows, line.names, colors, strict=True):
        known = np.isfinite(row)
        axes.plot(line.x[known], row[known], color=color, linewidth=1.8, label=name)
        ends.append((float(row[known][-1]), name, color))
    _finish(axes, panel, [line], last)
    axes.set_xlabel(_x_label(group, panel))
    label_ends(axes, ends, size=10.5)


def draw_map(axes: "Axes", lines: Lines, panel: "Panel", last: int) -> None:
    """Draw the parts of a single group's metric as a heat map over time."""
    from matplotlib.ticker import MaxNLocator

    ((group, line),) = lines
    if panel.x == UPDATES:  # a column ends at its update
        edges = np.concatenate([[2 * line.x[0] - line.x[1] if len(line.x) > 1 else 0], line.x])
    else:
        edges = np.arange(len(line.x) + 1) - 0.5
    borders = np.arange(len(line.rows) + 1) - 0.5
    mesh = axes.pcolormesh(edges, borders, line.rows, cmap=_shades(group), vmin=0, vmax=line.rows.max())
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.03, fraction=0.04, aspect=30, format=percent)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=9.5, length=0)
    axes.grid(False)
    axes.set(title=panel.title, ylabel="layer", xlabel=_x_label(group, panel))
    axes.set_xlim(*((0, last) if panel.x == UPDATES else (edges[0], edges[-1])))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def _x_label(group: Group, panel: "Panel") -> str:
    return f"{panel.x} (mean of {len(group.runs)} runs)" if len(group.runs) > 1 else panel.x


def _shades(group: Group) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    color = group.look.color
    shades = [mix(color, "#FFFFFF", 0.95), mix(color, "#FFFFFF", 0.5), color, mix(color, "#000000", 0.6)]
    return LinearSegmentedColormap.from_list("shades", shades)


def _accuracy_label(group: Group, line: PanelLine, alone: bool) -> str:
    first, last = line.rows[:, 0], line.rows[:, -1]
    final = _write_accuracy(line.final)
    if not alone:
        return f"{final} {group.label}" if len(group.label) <= 10 else final
    lines = [final]
    if len(line.x) > 1:
        lines.append(f"{100 * float((last - first).mean()):+.1f} points")
    if len(last) > 1:
        lines.append(f"seeds {_format_range(last)}")
    return "\n".join(lines)


def _format_range(shares: np.ndarray) -> str:
    low, high = (_write_accuracy(float(share)) for share in (shares.min(), shares.max()))
    return f"{low.removesuffix('%')}–{high}" if low != high else high


def _write_accuracy(share: float) -> str:
    return describe("eval/accuracy").label(share)


def _mark_start(axes: "Axes", lines: Sequence[PanelLine]) -> None:
    starts = np.concatenate([line.rows[:, 0] for line in lines if line.x[0] == 0] or [[]])
    if not starts.size:
        return
    low, high = float(starts.min()), float(starts.max())
    if low == high:
        axes.axhline(low, color=GREY, linewidth=1, linestyle=(0, (3, 3)), zorder=1)
    else:
        axes.axhspan(low, high, color=FAINT, alpha=0.6, linewidth=0, zorder=0.5)
    below = low > 0.15 * axes.get_ylim()[1]
    place = {"xy": (1, low if below else high), "xycoords": axes.get_yaxis_transform(), "ha": "right"}
    place |= {"textcoords": "offset points", "xytext": (-4, -4 if below else 4), "va": "top" if below else "bottom"}
    axes.annotate(f"before training {_format_range(starts)}", color=GREY, fontsize=10, **place)


@dataclass(frozen=True)
class Panel:
    """One metric, how it is read from a group, and how it is drawn."""

    metric: str
    title: str
    unit: str
    """Label of the y axis. Units that start with "share" are shown in per cent."""
    read: Callable[[Group, str], PanelLine | None] = over_time
    """Reads a group's line, None if its runs lack it."""
    draw: Callable[["Axes", Lines, "Panel", int], None] = draw_lines
    x: str = UPDATES
    alone: "Panel | None" = None
    """Replacement for a single group."""
    only_alone: bool = False
    """True if shown only for a single group."""
    label: Callable[[Group, PanelLine, bool], str] | None = None
    """Labels a line's end, given whether it is the only one. None: names or values."""
    width: int = 1
    """In columns of the page."""
    log: bool = False
    """True for a logarithmic y axis if lines span more than a decade."""
    from_zero: bool = True
    """True for a linear y axis from 0."""
    from_start: bool = False
    """True if lines begin before the first update, which is marked."""

    @property
    def is_share(self) -> bool:
        """True for shares, 0 to 1."""
        return self.unit.startswith("share")

    @property
    def is_scalar(self) -> bool:
        """True for one number at a time, which dot plots can show too."""
        return self.read in (over_time, evaluations)

    def write(self, value: float) -> str:
        """Format a value with a table's digits."""
        return describe(self.metric.removesuffix("_per_layer")).label(value)

    def lines(self, groups: Sequence[Group]) -> Lines:
        """Return the groups that have a line, with the line."""
        return [(group, line) for group in groups if (line := self.read(group, self.metric)) is not None]


def choose(groups: Sequence[Group], page: str) -> tuple[list[tuple[Panel, Lines]], str]:
    """Return a page's panels with something to show, with their lines, and a sentence naming the others."""
    shown, missing = [], {"always 0": [], "0 to rounding": [], "no values": [], "too many groups": []}
    for panel in _panels(groups, page):
        if panel.only_alone and len(groups) > 1:
            continue
        if len(groups) > MAX_LINES and not panel.is_scalar:
            missing["too many groups"].append(panel.title)
            continue
        panel = panel.alone if panel.alone is not None and len(groups) == 1 else panel
        lines = panel.lines(groups)
        if not lines:
            missing["no values"].append(panel.title)
        elif all(line.is_zero for _, line in lines):
            missing["0 to rounding" if panel.metric in RESOLUTION else "always 0"].append(panel.title)
        else:
            shown.append((panel, lines))
    why = [f"{', '.join(names)} ({reason})" for reason, names in missing.items() if names]
    return shown, f"Left out: {'; '.join(why)}." if why else ""


def _panels(groups: Sequence[Group], page: str) -> list["Panel"]:
    found = []
    for panel in PANELS[page]:
        if panel is _ACCURACY and quality(groups) == "eval/reward":
            panel = _HELD_OUT_REWARD
        found.append(panel)
        if panel is _REWARD:
            found += [replace(_REWARD, metric=name, title=describe(name).title) for name in reward_functions(groups)]
    taken = benchmarks(groups)
    return [*found, *(replace(_ACCURACY, metric=name, title=describe(name).title, width=1) for name in taken)]


_FLIPS_OVER_TIME = Panel(
    "routing/flip_rate", "Flip rate by mini-batch", "share of chosen experts", minibatches_over_time, draw_parts
)
_LAYERS_OVER_TIME = Panel(
    "routing/flip_rate_per_layer", "Flip rate by layer", "share of chosen experts", layers_over_time, draw_map
)
_ACCURACY = Panel(
    "eval/accuracy",
    "Held-out accuracy",
    "share of problems solved",
    evaluations,
    label=_accuracy_label,
    width=2,
    from_start=True,
)
_HELD_OUT_REWARD = Panel("eval/reward", "Held-out reward", "mean per response", evaluations, width=2, from_zero=False)
_REWARD = Panel("reward/mean", "Reward", "mean per response", from_zero=False)
_FLIPS = Panel("routing/flip_rate", "Routing flip rate", "share of chosen experts")
_FLIPS_BY_UPDATE = replace(
    _FLIPS_OVER_TIME, read=by_minibatch, draw=draw_lines, x="mini-batch (last tenth of the run)", alone=_FLIPS_OVER_TIME
)
_FLIPS_BY_LAYER = replace(
    _LAYERS_OVER_TIME, read=by_layer, draw=draw_lines, x="layer (last tenth of the run)", alone=_LAYERS_OVER_TIME
)
PANELS = {
    "training": (
        _ACCURACY,
        _REWARD,
        Panel("clip_fraction/token", "Clip fraction", "share of tokens"),
        _FLIPS,
        Panel("response_length/mean", "Response length", "tokens, mean"),
        Panel("actor/entropy", "Entropy", "nats per token"),
        _FLIPS_BY_UPDATE,
        _FLIPS_BY_LAYER,
    ),
    "routing": (
        _ACCURACY,
        _REWARD,
        _FLIPS,
        _FLIPS_BY_UPDATE,
        _FLIPS_BY_LAYER,
        replace(
            _LAYERS_OVER_TIME,
            title="Flip rate by layer and mini-batch",
            read=layers_by_minibatch,
            x="mini-batch (last tenth of the run)",
            only_alone=True,
        ),
        Panel("ratio/token_log_std", "Ratio spread, tokens", "std of log-ratio, nats", log=True),
        Panel("ratio/sequence_log_std", "Ratio spread, responses", "std of mean log-ratio", log=True),
        Panel("routing/router_kl", "Router KL, old to new", "nats", log=True),
        Panel("clip_fraction/token", "Clip fraction, tokens", "share of tokens", log=True),
        Panel("clip_fraction/sequence", "Clip fraction, responses", "share per response", log=True),
        Panel("mismatch/kl", "Sampler to trainer KL", "nats per token", log=True),
    ),
}
"""Panels of each page, row by row."""


def _finish(axes: "Axes", panel: Panel, lines: Sequence[PanelLine], last: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(title=panel.title, ylabel=panel.unit, xlabel=panel.x)
    axes.yaxis.set_label_coords(-0.6 * axes.figure.dpi / axes.bbox.width, 0.5)
    points = np.concatenate([np.ravel(values) for line in lines for values in _heights(line)])
    points = points[np.isfinite(points)]
    low, high = float(points.min()), float(points.max())
    positive = points[points > 0]
    log = panel.log and positive.size > 0 and high > 10 * positive.min()
    for line in axes.lines:
        line.set_clip_on(log)  # a line at 0 keeps its full width
    if log:
        _log_scale(axes, positive)
    elif panel.from_zero:
        axes.set_ylim(0, 1.1 * high if high > 0 else 1)
    else:
        margin = 0.08 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)
    if panel.x == UPDATES:
        axes.set_xlim(-0.02 * last, 1.02 * last)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    else:
        end = max(int(line.x[-1]) for line in lines)
        axes.set_xlim(-0.05 * end, 1.05 * end)
        axes.xaxis.set_major_locator(MaxNLocator(min(6, end + 1), integer=True))
    if not log:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if panel.is_share:
        axes.yaxis.set_major_formatter(percent)
    elif max(abs(low), abs(high)) < 5e-3:  # else many digits, or a factor over the title
        axes.yaxis.set_major_formatter(_compact)


def _heights(line: PanelLine) -> tuple[np.ndarray, ...]:
    return (line.y, line.rows) if line.error is None else (line.rows, line.y - line.error, line.y + line.error)


def _log_scale(axes: "Axes", points: np.ndarray) -> None:
    """Set a logarithmic y axis of at most six decades. Zeros of a line fall outside it."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = max(points.min(), 1e-6 * points.max()) / 1.6, points.max() * 1.6
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    between = (2.0, 5.0) if high < 30 * low else (3.0,) if high < 1000 * low else ()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, *between), numticks=6))
    axes.yaxis.set_major_formatter(_compact)
    axes.yaxis.set_minor_locator(NullLocator())


def last_step(groups: Sequence[Group]) -> int:
    """Return the last update of any run."""
    return max(1, *(run.rows[-1]["step"] for group in groups for run in group.runs))


def _compact(value: float, _: float) -> str:
    """Format a tick without zero padding: 0.02, 5e-4, 2.5e-12."""
    if not value or abs(value) >= 0.01:
        return f"{value:.3g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"
