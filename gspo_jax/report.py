"""Plots and tables from run folders: `python -m gspo_jax.report RUN [RUN …] [--out=DIR] [--table=FILE] [--json=FILE]`.

Writes `report.png` and the self-contained `report.html`, to RUN/report for one run and to --out for several. Runs that
share their whole config but the seed are drawn as one line (mean) with a band (minimum to maximum); --table=FILE gives
each such group a row of a markdown table. A run that still goes on can be reported. Reads files only: no model, no
device. What is computed from them is training/runs.py's, what is written training/pages.py's.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from gspo_jax.training import pages
from gspo_jax.training.drawing import GREY, Parser, label_ends, picture
from gspo_jax.training.progress import make_table
from gspo_jax.training.runs import Curve, Group, curve, facts, group_runs, load_run, vectors
from gspo_jax.types import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = (
    ("reward/mean", "Reward", "mean per response"),
    ("clip_fraction/token", "Clip fraction", "share of tokens"),
    ("routing/flip_rate", "Routing flip rate", "share of chosen experts"),
    ("response_length/mean", "Response length", "tokens, mean"),
    ("actor/entropy", "Entropy", "nats per token"),
)
"""Metric, title, unit of the panels that show one line per group; shares are written in per cent."""
WIDTH, HEAD, ROW = 11.6, 0.8, 3.2
"""Inches: of the picture, of its headline, of one row of panels."""
MANY = 6
"""More groups than this are drawn without bands, thinner, and with their names beside their lines."""


def draw(groups: Sequence[Group], path: Path) -> None:
    """Draws all panels that there are numbers for into one PNG."""
    panels: list[tuple[int, Callable[..., None], tuple[str, ...]]]
    panels = [(1, draw_curves, panel) for panel in PANELS if any(curve(group, panel[0]) for group in groups)]
    if any(curve(group, "eval/accuracy") for group in groups):
        panels.insert(0, (2, draw_accuracy, ()))
    if any(curve(group, "routing/flip_rate", minibatch=1) for group in groups):
        panels.append((1, draw_minibatches, ()))
    if any(vectors(group, "routing/flip_rate_per_layer") for group in groups):
        panels.append((1, draw_layers, ()))
    rows = -(-max(3, sum(width for width, _, _ in panels)) // 3)
    with picture(path, width=WIDTH, height=HEAD + rows * ROW) as figure:
        cell = 0
        for width, draw_panel, arguments in panels:
            room = 1.5 if width == 2 else 0.98 if len(groups) > MANY else 0.62
            axes = figure.add_axes(_place(cell, width, room, figure.get_figheight()))
            draw_panel(axes, groups, *arguments)
            cell += width
        _headline(figure, groups)


def _place(cell: int, width: int, room: float, height: float) -> tuple[float, float, float, float]:
    """Returns left, bottom, width, height of a panel's axes, with inches of room for labels on its right."""
    left = WIDTH / 3 * (cell % 3) + 0.84
    right = WIDTH / 3 * (cell % 3 + width) - room
    top = height - HEAD - ROW * (cell // 3) - 0.32
    bottom = height - HEAD - ROW * (cell // 3 + 1) + 0.68
    return left / WIDTH, bottom / height, (right - left) / WIDTH, (top - bottom) / height


def draw_accuracy(axes: "Axes", groups: Sequence[Group]) -> None:
    """Draws held-out accuracy: one point per evaluation, from the cold start on, with what training added to it."""
    ends, starts = [], []
    for group in groups:
        found = curve(group, "eval/accuracy")
        if found is None:
            continue
        mean = found.raw.mean(axis=0)
        low, high = found.raw.min(axis=0), found.raw.max(axis=0)
        error = curve(group, "eval/accuracy_stderr")
        if len(found.raw) == 1 and error is not None and np.array_equal(error.steps, found.steps):
            low, high = mean - error.raw[0], mean + error.raw[0]
        if len(groups) <= MANY:
            axes.fill_between(found.steps, low, high, color=group.color, alpha=0.18, linewidth=0)
        axes.plot(found.steps, mean, "o-", **_line(group, groups))
        starts.append(mean[0])
        ends.append((float(mean[-1]), _accuracy_label(group, found, alone=len(groups) == 1), group.color))
    cold = float(np.mean(starts))
    axes.axhline(cold, color=GREY, linewidth=1, linestyle=(0, (3, 3)), zorder=1)
    _finish(axes, "Held-out accuracy", "share of problems solved", ends, last=_last_step(groups), share=True)
    below = cold > 0.15 * axes.get_ylim()[1]
    place = {"xy": (1, cold), "xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
    where = {"xytext": (-4, -4 if below else 4), "va": "top" if below else "bottom", "ha": "right"}
    axes.annotate(f"cold start {cold:.0%}", color=GREY, fontsize=10, **place, **where)


def _accuracy_label(group: Group, found: Curve, *, alone: bool) -> str:
    """Says where a group ends; for one that is alone also its lift and the range over its seeds."""
    first, last = found.raw[:, 0], found.raw[:, -1]
    if not alone:
        return f"{last.mean():.0%} {group.label}" if len(group.label) <= 12 else f"{last.mean():.0%}"
    lines = [f"{last.mean():.0%}"]
    if found.raw.shape[1] > 1:
        lines.append(f"{100 * (last - first).mean():+.0f} points")
    if len(last) > 1:
        lines.append(f"seeds {100 * last.min():.0f}–{last.max():.0%}")
    return "\n".join(lines)


def draw_curves(axes: "Axes", groups: Sequence[Group], name: str, title: str, unit: str) -> None:
    """Draws a metric: the smoothed line; for one run the raw line behind it, for several the band of their lines."""
    ends = []
    share = unit.startswith("share")
    for group in groups:
        found = curve(group, name)
        if found is None:
            continue
        if len(groups) <= MANY and len(found.raw) == 1:
            axes.plot(found.steps, found.raw[0], color=group.color, linewidth=1, alpha=0.45)
        elif len(groups) <= MANY:
            low, high = found.smooth.min(axis=0), found.smooth.max(axis=0)
            axes.fill_between(found.steps, low, high, color=group.color, alpha=0.18, linewidth=0)
        mean = found.smooth.mean(axis=0)
        axes.plot(found.steps, mean, **_line(group, groups))
        end = float(mean[-1])
        ends.append((end, group.label if len(groups) > MANY else _number(end, share=share), group.color))
    _finish(axes, title, unit, ends, last=_last_step(groups), share=share, from_zero=name != "reward/mean")


def draw_minibatches(axes: "Axes", groups: Sequence[Group]) -> None:
    """Draws the flip rate of each mini-batch: over time for one group, the profile of the last tenth for several."""
    count = 1 + max(int(row.get("minibatch") or 0) for group in groups for run in group.runs for row in run.rows)
    title, unit, ends = "Flip rate by mini-batch", "share of chosen experts", []
    if len(groups) == 1:
        for minibatch in range(count):
            found = curve(groups[0], "routing/flip_rate", minibatch=minibatch)
            if found is not None:
                mean, color = found.smooth.mean(axis=0), _shade(minibatch, count)
                axes.plot(found.steps, mean, color=color, linewidth=1.8)
                ends.append((float(mean[-1]), str(minibatch + 1), color))
        _finish(axes, title, unit, ends, last=_last_step(groups), share=True)
        return
    for group in groups:
        found = [curve(group, "routing/flip_rate", minibatch=minibatch) for minibatch in range(count)]
        known = [(i + 1, _late(column.raw.mean(axis=0))) for i, column in enumerate(found) if column is not None]
        if known:
            axes.plot(*zip(*known, strict=True), "o-", **_line(group, groups))
            ends += [(known[-1][1], group.label, group.color)] if len(groups) > MANY else []
    _finish(axes, title, unit, ends, share=True, x="mini-batch (last tenth of the run)")
    axes.set_xticks(range(1, count + 1))


def draw_layers(axes: "Axes", groups: Sequence[Group]) -> None:
    """Draws the flip rate of each layer: a map over time for one group, the profile of the last tenth for several."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import MaxNLocator

    title = "Flip rate by layer"
    if len(groups) == 1:
        found = vectors(groups[0], "routing/flip_rate_per_layer")
        assert found is not None  # draw() asked
        steps, values = found
        shades = LinearSegmentedColormap.from_list("shades", ["#f4f8fb", "#7fb2d6", "#0072B2", "#06304d"])
        edges = np.concatenate([[2 * steps[0] - steps[1] if len(steps) > 1 else 0], steps])
        borders = np.arange(values.shape[1] + 1) + 0.5
        mesh = axes.pcolormesh(edges, borders, values.T, cmap=shades, vmin=0, vmax=values.max() or 0.01)
        bar = axes.figure.colorbar(mesh, ax=axes, pad=0.03, fraction=0.04, aspect=30, format=_percent)
        bar.outline.set_visible(False)  # type: ignore[operator]
        bar.ax.tick_params(labelsize=9.5, length=0)
        axes.grid(False)
        axes.set(title=title, ylabel="layer", xlabel="optimizer updates")
        axes.set_xlim(0, _last_step(groups))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        return
    ends = []
    for group in groups:
        found = vectors(group, "routing/flip_rate_per_layer")
        if found is not None:
            profile = [_late(column) for column in found[1].T]
            axes.plot(range(1, len(profile) + 1), profile, "o-", **_line(group, groups))
            ends += [(profile[-1], group.label, group.color)] if len(groups) > MANY else []
    _finish(axes, title, "share of chosen experts", ends, share=True, x="layer (last tenth of the run)")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))


def _finish(
    axes: "Axes",
    title: str,
    unit: str,
    ends: Sequence[tuple[float, str, str]],
    *,
    last: int | None = None,
    share: bool = False,
    from_zero: bool = True,
    x: str = "optimizer updates",
) -> None:
    """Sets titles, limits and ticks, and writes the labels (y, text, colour) beside the ends of their lines."""
    from matplotlib.ticker import MaxNLocator

    axes.set(title=title, ylabel=unit, xlabel=x)
    axes.yaxis.set_label_coords(-0.6 / (axes.get_position().width * WIDTH), 0.5)
    low, high = axes.dataLim.intervaly
    for line in axes.lines:
        line.set_clip_on(False)  # a line at 0 is seen in full
    if from_zero:
        axes.set_ylim(0, 1.1 * high if high > 0 else 1)
    else:
        margin = 0.08 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)
    if last is not None:
        axes.set_xlim(-0.02 * last, 1.02 * last)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if share:
        axes.yaxis.set_major_formatter(_percent)
    label_ends(axes, ends, size=10.5 if len(ends) <= MANY else 9.5)


def _headline(figure: Any, groups: Sequence[Group]) -> None:
    """Writes who is drawn, in their colours, and how to read the lines."""
    height, left = figure.get_figheight(), 0.02
    many, seeds = len(groups) > MANY, {len(group.runs) for group in groups}
    names = [group.label if many else group.caption for group in groups]
    size = min(17.0, 1000 / sum(len(name) + 3 for name in names))
    for name, group in zip(names, groups, strict=True):
        style = {"color": group.color, "weight": "bold", "fontsize": size, "va": "top"}
        text = figure.text(left, 1 - 0.15 / height, name, **style)
        left = text.get_window_extent().x1 / figure.bbox.width + 0.02
    how = []
    if many:
        how.append(f"line: mean of {'–'.join(str(n) for n in sorted({min(seeds), max(seeds)}))} runs, smoothed")
    elif max(seeds) > 1:
        how.append("line: mean of the seeds, band: minimum to maximum")
    if not many and min(seeds) == 1:
        how.append("thin line: each iteration, thick line: smoothed, band: standard error of the evaluation")
    if any(len({run.rows[-1]["step"] for run in group.runs}) > 1 for group in groups):
        how.append("lines of a group end where its shortest run does")
    figure.text(0.02, 1 - 0.52 / height, "  ·  ".join(how), color=GREY, fontsize=11, va="top")


def _line(group: Group, groups: Sequence[Group]) -> dict[str, Any]:
    """How the line of one of the groups looks."""
    width = 2.2 if len(groups) <= MANY else 1.6
    return {"color": group.color, "linewidth": width, "markersize": 2.3 * width}


def _last_step(groups: Sequence[Group]) -> int:
    return max(1, *(run.rows[-1]["step"] for group in groups for run in group.runs), 1)


def _shade(i: int, count: int) -> str:
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    return to_hex(LinearSegmentedColormap.from_list("shades", ["#7fb2d6", "#0072B2", "#06304d"])(i / max(1, count - 1)))


def _late(values: np.ndarray) -> float:
    return float(values[-max(1, len(values) // 10) :].mean())


def _percent(value: float, _: float) -> str:
    return f"{100 * value:.3g}%"


def _number(value: float, *, share: bool = False) -> str:
    if share:
        return f"{value:.0%}" if value >= 0.1 else f"{100 * value:.2g}%"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def report(
    folders: Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str] | None = None,
    table: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Reports run folders; returns {png, html, groups: facts(...)}. `out` may be left out for one run: RUN/report.

    `table` is a markdown file to write, for several groups or one.
    """
    unique = list({Path(folder).resolve(): folder for folder in folders}.values())
    if out is None and len(unique) > 1:
        raise UserError(f"{len(unique)} runs and no place for their report; add --out=DIR")
    groups = group_runs([load_run(folder) for folder in unique])
    found = facts(groups)
    target = Path(unique[0]) / "report" if out is None else Path(out)
    try:
        target.mkdir(parents=True, exist_ok=True)
        draw(groups, target / "report.png")
        text = pages.page(groups, found, (target / "report.png").read_bytes())
        (target / "report.html").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the report cannot be written to {target}: {error.strerror}; choose another --out") from None
    if table is not None:
        command = pages.report_command(groups, out=str(target), table=str(table))
        _write(Path(table), pages.family_table(found, command=command))
    return {"png": str(target / "report.png"), "html": str(target / "report.html"), "groups": found}


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def parser() -> Parser:
    """The command's flags."""
    parser = Parser("python -m gspo_jax.report", str(__doc__).partition("\n\n")[2])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run (the --workdir of train)")
    parser.add_argument("--out", metavar="DIR", help="where the report goes; RUN/report for one run")
    parser.add_argument("--table", metavar="FILE", help="writes a markdown table, one row for each group of runs")
    parser.add_argument("--json", metavar="FILE", help="writes the same facts for programs")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    try:
        given = parser().parse_args(arguments)
        made = report(given.runs, out=given.out, table=given.table)
        if given.json is not None:
            _write(Path(given.json), json.dumps(made, indent=2) + "\n")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    console.width = max(console.width, 80 if console.is_terminal else 120)
    rows = pages.family_rows(made["groups"]) if len(made["groups"]) > MANY else pages.number_rows(made["groups"])
    console.print(make_table(rows))
    print("\n".join([made["png"], made["html"], *([given.table] if given.table else [])]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
