"""The panels of each report page, and the functions that draw them from the lines of groups of runs.

Up to MAX_LINES groups share a panel; more are compared by dot plots (dots.py). Layout and headline of the picture are
up to pictures.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_jax.reporting.drawing import FAINT, GREY, label_ends, mix, percent
from gspo_jax.reporting.runs import (
    RESOLUTION,
    Curve,
    Group,
    benchmarks,
    curve,
    describe,
    first_and_last,
    list_curve,
    reward_functions,
    tail_mean,
    tail_mean_by_minibatch,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LINES = 6
"""Up to this many lines share a panel."""
MAX_VALUE_LABELS = 3
"""Up to this many groups have their final values at the ends of their lines; more have their names there."""
UPDATES = "optimizer updates"
"""Label of an x axis that shows time."""


@dataclass(frozen=True)
class Line:
    """A group's line in a panel."""

    x: np.ndarray
    """[N]."""
    y: np.ndarray
    """[N]; mean over the runs."""
    rows: np.ndarray
    """[R, N]; the line of each run, or of each part that `names` tells; NaN where it has no value."""
    final: float
    """The number at its end, as in tables: the last evaluation, or the mean over the last tenth of the iterations."""
    error: np.ndarray | None = None
    """[N]; standard error of a single run."""
    names: Sequence[str] = ()
    """Names of the rows if they are parts of a group's metric, such as its mini-batches."""

    @property
    def is_smoothed(self) -> bool:
        """True if the line is that of a single run, smoothed."""
        return len(self.rows) == 1 and not np.array_equal(self.rows[0], self.y)

    @property
    def is_zero(self) -> bool:
        """True if all values are 0."""
        return not np.nan_to_num(self.rows).any()


def evaluations(group: Group, metric: str) -> Line | None:
    """Return the evaluations of a group; those of a single run with their standard error."""
    found = curve(group, metric)
    if found is None:
        return None
    error = curve(group, f"{metric}_stderr") if len(found.raw) == 1 else None
    known = error is not None and np.array_equal(error.steps, found.steps)
    mean = found.raw.mean(axis=0)
    band = error.raw[0] if error is not None and known else None
    return Line(found.steps, mean, found.raw, final=float(mean[-1]), error=band)


def over_time(group: Group, metric: str) -> Line | None:
    """Return a metric's smoothed line. Rows: the smoothed lines of several runs, or a single run as logged."""
    found = curve(group, metric)
    if found is None:
        return None
    rows = found.raw if len(found.raw) == 1 else found.smooth
    return Line(found.steps, found.smooth.mean(axis=0), rows, final=float(first_and_last(found, metric)[1].mean()))


def by_minibatch(group: Group, metric: str) -> Line | None:
    """Return a metric's last tenth by mini-batch; None if an iteration has only one."""
    found = [values for run in group.each() if (values := tail_mean_by_minibatch(run, metric))]
    shared = sorted(set.intersection(*map(set, found))) if found else []
    rows = [[values[number] for number in shared] for values in found]
    return _profile(np.array(shared), rows) if len(shared) > 1 else None


def by_layer(group: Group, metric: str) -> Line | None:
    """Return the last tenth of a metric that is logged by layer."""
    found = [layers for run in group.each() if (layers := list_curve(run, metric)) is not None]
    rows = [[tail_mean(layer) for layer in values.T] for _, values in found]
    return _profile(np.arange(len(rows[0])), rows) if rows else None


def _profile(x: np.ndarray, rows: Sequence[Sequence[float]]) -> Line:
    mean = np.mean(rows, axis=0)
    return Line(x, mean, np.array(rows), final=float(mean[-1]))


def minibatches_over_time(group: Group, metric: str) -> Line | None:
    """Return a group's smoothed line of each mini-batch, or of five with the first and the last if there are many."""
    numbers = sorted(tail_mean_by_minibatch(group, metric))
    if len(numbers) > MAX_LINES:
        numbers = [numbers[round(i * (len(numbers) - 1) / 4)] for i in range(5)]
    columns = [curve(group, metric, minibatch=number) for number in numbers]
    found = {str(i): column for i, column in zip(numbers, columns, strict=True) if column is not None}
    return _parts(found) if len(found) > 1 else None


def layers_over_time(group: Group, metric: str) -> Line | None:
    """Return a group's smoothed line of each layer."""
    found = list_curve(group, metric)
    if found is None:
        return None
    steps, values = found
    mean = values.mean(axis=1)
    return Line(steps, mean, values.T, final=float(mean[-1]), names=[str(i) for i in range(values.shape[1])])


def layers_by_minibatch(group: Group, metric: str) -> Line | None:
    """Return the last tenth of a group's metric by layer, over the mini-batches; None if an iteration has only one."""
    found = list_curve(group, metric)
    if found is None:
        return None
    by_layer = [tail_mean_by_minibatch(group, f"{metric}/{layer}") for layer in range(found[1].shape[1])]
    numbers = sorted(by_layer[0])
    rows = np.array([[values[number] for number in numbers] for values in by_layer])
    return _profile(np.array(numbers), rows.tolist()) if len(numbers) > 1 else None


def _parts(found: Mapping[str, Curve]) -> Line:
    """Return a line with the mean of each curve over the runs as rows."""
    steps = np.unique(np.concatenate([column.steps for column in found.values()]))
    rows = np.full((len(found), len(steps)), np.nan)
    for row, column in zip(rows, found.values(), strict=True):
        row[np.isin(steps, column.steps)] = column.smooth.mean(axis=0)
    mean = np.nanmean(rows, axis=0)
    return Line(steps, mean, rows, final=float(mean[-1]), names=list(found))


Lines = Sequence[tuple[Group, Line]]


def draw_lines(axes: "Axes", lines: Lines, panel: "Panel", last: int) -> None:
    """Draw each group's line, thick, over the lines of its runs, thin, and label its end."""
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


def _draw_line(axes: "Axes", group: Group, line: Line, panel: "Panel", *, first: float, alone: bool) -> None:
    """Draw one group; `first` is where its markers begin, as a share of the distance between two."""
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
    """Draw the parts of a single group's metric, the later the darker, each labelled at its end."""
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
    """Return the label of the x axis, which says what parts of several runs are."""
    return f"{panel.x} (mean of {len(group.runs)} runs)" if len(group.runs) > 1 else panel.x


def _shades(group: Group) -> Any:
    """Return a colour map from almost white through the group's colour to a dark one."""
    from matplotlib.colors import LinearSegmentedColormap

    color = group.look.color
    shades = [mix(color, "#FFFFFF", 0.95), mix(color, "#FFFFFF", 0.5), color, mix(color, "#000000", 0.6)]
    return LinearSegmentedColormap.from_list("shades", shades)


def _accuracy_label(group: Group, line: Line, alone: bool) -> str:
    """Return the label of a group's final accuracy; for a single group also its gain and the range over its seeds."""
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
    """Format the range of some accuracies: "18.0–26.1%", or "18.0%" if it has no width."""
    low, high = (_write_accuracy(float(share)) for share in (shares.min(), shares.max()))
    return f"{low.removesuffix('%')}–{high}" if low != high else high


def _write_accuracy(share: float) -> str:
    return describe("eval/accuracy").label(share)


def _mark_start(axes: "Axes", lines: Sequence[Line]) -> None:
    """Mark what the runs had before their first update: a line if it was the same for all, or the range of it."""
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
    """A panel: one metric, how it is read from a group and how it is drawn."""

    metric: str
    title: str
    unit: str
    """Label of the y axis; units that start with "share" are formatted in per cent."""
    read: Callable[[Group, str], Line | None] = over_time
    """Reads a group's line; None if its runs do not have it."""
    draw: Callable[["Axes", Lines, "Panel", int], None] = draw_lines
    x: str = UPDATES
    """Label of the x axis."""
    alone: "Panel | None" = None
    """The panel that takes this one's place for a single group."""
    only_alone: bool = False
    """True if it is shown for a single group alone."""
    label: Callable[[Group, Line, bool], str] | None = None
    """Returns the label of a line's end, given whether it is the only one; None for names or values."""
    width: int = 1
    """Width in columns of the page."""
    log: bool = False
    """True for a logarithmic y axis if the lines span more than a decade."""
    from_zero: bool = True
    """True for a linear y axis that begins at 0."""
    from_start: bool = False
    """True if lines begin before the first update, which is marked."""

    @property
    def is_share(self) -> bool:
        """True if the values are shares, 0 to 1."""
        return self.unit.startswith("share")

    @property
    def is_scalar(self) -> bool:
        """True if it shows one number at a time, which a dot plot can show too."""
        return self.read in (over_time, evaluations)

    def write(self, value: float) -> str:
        """Format a value with the digits of a table."""
        return describe(self.metric.removesuffix("_per_layer")).label(value)

    def lines(self, groups: Sequence[Group]) -> Lines:
        """Return the groups that have a line, with it."""
        return [(group, line) for group in groups if (line := self.read(group, self.metric)) is not None]


def choose(groups: Sequence[Group], page: str) -> tuple[list[tuple[Panel, Lines]], str]:
    """Return the panels of a page that have something to show, with their lines; and a sentence naming the others."""
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
    """Return the panels of a page: also one for each reward function, after the reward, and for each benchmark."""
    found = []
    for panel in PANELS[page]:
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


def _finish(axes: "Axes", panel: Panel, lines: Sequence[Line], last: int) -> None:
    """Set title, axis labels, limits and ticks, to fit all lines."""
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
    elif max(abs(low), abs(high)) < 5e-3:  # otherwise ticks get many digits, or a common factor overlaps the title
        axes.yaxis.set_major_formatter(_compact)


def _heights(line: Line) -> tuple[np.ndarray, ...]:
    """Return all values of a line, its runs and its error."""
    return (line.y, line.rows) if line.error is None else (line.rows, line.y - line.error, line.y + line.error)


def _log_scale(axes: "Axes", points: np.ndarray) -> None:
    """Set a logarithmic y axis around the points, of at most six decades; zeros of a line fall outside it."""
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
