"""The panels of each report page, and the functions that draw them from the curves of groups of runs.

Layout and headline of the picture are up to report.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_jax.reporting.drawing import GREY, label_ends
from gspo_jax.reporting.runs import Curve, Group, curve, list_curve, tail_mean, tail_mean_by_minibatch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_BANDS = 6
"""Up to this many groups are drawn with bands; more are drawn without, and with thinner lines."""
MAX_VALUE_LABELS = 3
"""Up to this many groups have their final values at the ends of their lines; more have their names there."""


@dataclass(frozen=True)
class Panel:
    """A panel: one metric and the way it is drawn."""

    metric: str
    title: str
    unit: str
    """Label of the y axis; units that start with "share" are formatted in per cent."""
    draw: Callable[["Axes", Sequence[Group], "Panel"], None]
    read: Callable[[Group, str], Any] = curve
    """Reads the panel's data of a group; None if the runs do not have it."""
    width: int = 1
    """Width in columns of the page."""
    log: bool = False
    """True for a logarithmic y axis if the lines span more than a decade."""

    @property
    def is_share(self) -> bool:
        """True if the values are shares, 0 to 1."""
        return self.unit.startswith("share")


def draw_accuracy(axes: "Axes", groups: Sequence[Group], panel: Panel) -> None:
    """Draw held-out accuracy, one point per evaluation from the initial policy on, and label the gain from training."""
    ends, starts = [], []
    for group in groups:
        found = curve(group, panel.metric)
        if found is None:
            continue
        mean = found.raw.mean(axis=0)
        low, high = found.raw.min(axis=0), found.raw.max(axis=0)
        error = curve(group, "eval/accuracy_stderr")
        if len(found.raw) == 1 and error is not None and np.array_equal(error.steps, found.steps):
            low, high = mean - error.raw[0], mean + error.raw[0]
        if len(groups) <= MAX_BANDS:
            axes.fill_between(found.steps, low, high, **_band(group, groups))
        axes.plot(found.steps, mean, "o-", **_line(group, groups))
        starts.append(mean[0])
        ends.append((float(mean[-1]), _accuracy_label(group, found, alone=len(groups) == 1), group.color))
    cold = float(np.mean(starts))
    axes.axhline(cold, color=GREY, linewidth=1, linestyle=(0, (3, 3)), zorder=1)
    _finish(axes, panel, ends, last=last_step(groups))
    below = cold > 0.15 * axes.get_ylim()[1]
    place = {"xy": (1, cold), "xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
    where = {"xytext": (-4, -4 if below else 4), "va": "top" if below else "bottom", "ha": "right"}
    axes.annotate(f"cold start {cold:.0%}", color=GREY, fontsize=10, **place, **where)


def _accuracy_label(group: Group, found: Curve, *, alone: bool) -> str:
    """Return the label of a group's final accuracy; for a single group also its gain and the range over its seeds."""
    first, last = found.raw[:, 0], found.raw[:, -1]
    if not alone:
        return f"{last.mean():.0%} {group.label}" if len(group.label) <= 12 else f"{last.mean():.0%}"
    lines = [f"{last.mean():.0%}"]
    if found.raw.shape[1] > 1:
        lines.append(f"{100 * (last - first).mean():+.0f} points")
    if len(last) > 1:
        lines.append(f"seeds {100 * last.min():.0f}–{last.max():.0%}")
    return "\n".join(lines)


def draw_curves(axes: "Axes", groups: Sequence[Group], panel: Panel) -> None:
    """Draw a metric's smoothed line; behind it the raw line of a single run, or the band of several runs."""
    ends = []
    for group in groups:
        found = curve(group, panel.metric)
        if found is None:
            continue
        if len(groups) <= MAX_BANDS and len(found.raw) == 1:
            raw = {"linewidth": 1, "alpha": 0.45 if len(groups) <= MAX_VALUE_LABELS else 0.25}
            axes.plot(found.steps, found.raw[0], color=group.color, **raw)
        elif len(groups) <= MAX_BANDS:
            low, high = found.smooth.min(axis=0), found.smooth.max(axis=0)
            axes.fill_between(found.steps, low, high, **_band(group, groups))
        mean = found.smooth.mean(axis=0)
        axes.plot(found.steps, mean, **_line(group, groups))
        end = float(mean[-1])
        label = group.label if len(groups) > MAX_VALUE_LABELS else _format_value(end, share=panel.is_share)
        ends.append((end, label, group.color))
    _finish(axes, panel, ends, last=last_step(groups), from_zero=panel.metric != "reward/mean")


def draw_minibatches(axes: "Axes", groups: Sequence[Group], panel: Panel) -> None:
    """Draw a metric per mini-batch: over time for a single group, as a profile of the last tenth for several."""
    from matplotlib.ticker import MaxNLocator

    ends = []
    profiles = [tail_mean_by_minibatch(group, panel.metric) for group in groups]
    count = 1 + max(number for profile in profiles for number in profile)
    if len(groups) == 1:
        named = set(range(count)) if count <= 6 else {round(i * (count - 1) / 4) for i in range(5)}
        for number in profiles[0]:
            found = curve(groups[0], panel.metric, minibatch=number)
            assert found is not None  # the profile has this mini-batch
            mean, color = found.smooth.mean(axis=0), _minibatch_color(number, count)
            axes.plot(found.steps, mean, color=color, linewidth=1.8 if count <= 6 else 1.2)
            ends += [(float(mean[-1]), str(number + 1), color)] if number in named else []
        _finish(axes, panel, ends, last=last_step(groups))
        return
    for group, profile in zip(groups, profiles, strict=True):
        if profile:
            axes.plot([1 + number for number in profile], list(profile.values()), "o-", **_line(group, groups))
            ends += [(list(profile.values())[-1], group.label, group.color)] if len(groups) > MAX_VALUE_LABELS else []
    _finish(axes, panel, ends, x="mini-batch (last tenth of the run)")
    if count <= 6:
        axes.set_xticks(range(1, count + 1))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def draw_layers(axes: "Axes", groups: Sequence[Group], panel: Panel) -> None:
    """Draw a metric per layer: a heat map over time for a single group, a profile of the last tenth for several."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import MaxNLocator

    if len(groups) == 1:
        found = list_curve(groups[0], panel.metric)
        assert found is not None  # the page draws only panels whose data was found
        steps, values = found
        shades = LinearSegmentedColormap.from_list("shades", ["#f4f8fb", "#7fb2d6", "#0072B2", "#06304d"])
        edges = np.concatenate([[2 * steps[0] - steps[1] if len(steps) > 1 else 0], steps])
        borders = np.arange(values.shape[1] + 1) + 0.5
        mesh = axes.pcolormesh(edges, borders, values.T, cmap=shades, vmin=0, vmax=values.max() or 0.01)
        bar = axes.figure.colorbar(mesh, ax=axes, pad=0.03, fraction=0.04, aspect=30, format=_percent)
        bar.outline.set_visible(False)  # type: ignore[operator]
        bar.ax.tick_params(labelsize=9.5, length=0)
        axes.grid(False)
        axes.set(title=panel.title, ylabel="layer", xlabel="optimizer updates")
        axes.set_xlim(0, last_step(groups))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        return
    ends = []
    for group in groups:
        found = list_curve(group, panel.metric)
        if found is not None:
            profile = [tail_mean(column) for column in found[1].T]
            axes.plot(range(1, len(profile) + 1), profile, "o-", **_line(group, groups))
            ends += [(profile[-1], group.label, group.color)] if len(groups) > MAX_VALUE_LABELS else []
    _finish(axes, panel, ends, x="layer (last tenth of the run)")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))


_REWARD = Panel("reward/mean", "Reward", "mean per response", draw_curves)
_ACCURACY = Panel("eval/accuracy", "Held-out accuracy", "share of problems solved", draw_accuracy, width=2)
_FLIPS = Panel("routing/flip_rate", "Routing flip rate", "share of chosen experts", draw_curves)
_FLIPS_BY_UPDATE = Panel(
    "routing/flip_rate",
    "Flip rate by mini-batch",
    "share of chosen experts",
    draw_minibatches,
    read=partial(curve, minibatch=1),
)
_FLIPS_BY_LAYER = Panel(
    "routing/flip_rate_per_layer", "Flip rate by layer", "share of chosen experts", draw_layers, read=list_curve
)
PANELS = {
    "training": (
        _ACCURACY,
        _REWARD,
        Panel("clip_fraction/token", "Clip fraction", "share of tokens", draw_curves),
        _FLIPS,
        Panel("response_length/mean", "Response length", "tokens, mean", draw_curves),
        Panel("actor/entropy", "Entropy", "nats per token", draw_curves),
        _FLIPS_BY_UPDATE,
        _FLIPS_BY_LAYER,
    ),
    "routing": (
        _ACCURACY,
        _REWARD,
        _FLIPS,
        _FLIPS_BY_UPDATE,
        _FLIPS_BY_LAYER,
        Panel("ratio/token_log_std", "Ratio spread, tokens", "std of log-ratio, nats", draw_curves, log=True),
        Panel("ratio/sequence_log_std", "Ratio spread, responses", "std of mean log-ratio", draw_curves, log=True),
        Panel("routing/router_kl", "Router KL, old to new", "nats", draw_curves, log=True),
        Panel("clip_fraction/token", "Clip fraction, tokens", "share of tokens", draw_curves, log=True),
        Panel("clip_fraction/sequence", "Clip fraction, responses", "share per response", draw_curves, log=True),
        Panel("mismatch/kl", "Sampler to trainer KL", "nats per token", draw_curves, log=True),
    ),
}
"""Panels of each page, row by row; a panel without data is left out."""


def _finish(
    axes: "Axes",
    panel: Panel,
    ends: Sequence[tuple[float, str, str]],
    *,
    last: int | None = None,
    from_zero: bool = True,
    x: str = "optimizer updates",
) -> None:
    """Set title, axis labels, limits and ticks, and write the labels (y, text, colour) at the ends of their lines."""
    from matplotlib.ticker import MaxNLocator

    axes.set(title=panel.title, ylabel=panel.unit, xlabel=x)
    axes.yaxis.set_label_coords(-0.6 * axes.figure.dpi / axes.bbox.width, 0.5)
    low, high = axes.dataLim.intervaly
    for line in axes.lines:
        line.set_clip_on(False)  # a line at 0 keeps its full width
    points = _positive_values(axes)
    if panel.log and points.size and points.max() > 10 * points.min():
        _log_scale(axes, points)
    elif from_zero:
        axes.set_ylim(0, 1.1 * high if high > 0 else 1)
    else:
        margin = 0.08 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)
    if last is not None:
        axes.set_xlim(-0.02 * last, 1.02 * last)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if panel.is_share:
        axes.yaxis.set_major_formatter(_percent)
    elif max(abs(low), abs(high)) < 5e-3:  # otherwise ticks get many digits, or a common factor overlaps the title
        axes.yaxis.set_major_formatter(_compact)
    label_ends(axes, ends, size=10.5 if len(ends) <= MAX_BANDS else 9.5)


def _positive_values(axes: "Axes") -> np.ndarray:
    """Return the positive values of all lines."""
    points = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines])
    return points[np.isfinite(points) & (points > 0)]


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
    for line in axes.lines:
        line.set_clip_on(True)


def _band(group: Group, groups: Sequence[Group]) -> dict[str, Any]:
    """Return the style of a group's band."""
    return {"color": group.color, "alpha": 0.18 if len(groups) <= MAX_VALUE_LABELS else 0.08, "linewidth": 0}


def _line(group: Group, groups: Sequence[Group]) -> dict[str, Any]:
    """Return the style of a group's line."""
    width = 2.2 if len(groups) <= MAX_VALUE_LABELS else 1.9 if len(groups) <= MAX_BANDS else 1.6
    return {"color": group.color, "linewidth": width, "markersize": 2.3 * width}


def last_step(groups: Sequence[Group]) -> int:
    """Return the last update of any run."""
    return max(1, *(run.rows[-1]["step"] for group in groups for run in group.runs), 1)


def _minibatch_color(i: int, count: int) -> str:
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    return to_hex(LinearSegmentedColormap.from_list("shades", ["#7fb2d6", "#0072B2", "#06304d"])(i / max(1, count - 1)))


def _percent(value: float, _: float) -> str:
    return f"{100 * value:.3g}%"


def _compact(value: float, _: float) -> str:
    """Format a tick without zero padding: 0.02, 5e-4, 2.5e-12."""
    if not value or abs(value) >= 0.01:
        return f"{value:.3g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def _format_value(value: float, *, share: bool = False) -> str:
    if share:
        return f"{value:.0%}" if value >= 0.1 else f"{100 * value:.2g}%"
    if 0 < abs(value) < 1e-3:
        return _compact(float(f"{value:.0e}"), 0)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) >= 0.01 else f"{value:.2g}"
