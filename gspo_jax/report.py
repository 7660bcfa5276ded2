"""Plots and tables from one or many run folders: `python -m gspo_jax.report RUN [RUN …] [--out=DIR] [--json=FILE]`.

Writes `report.png` and the self-contained `report.html`, to RUN/report for one run and to --out for several. Runs that
share their whole config but the seed are drawn as one line (mean) with a band (minimum to maximum). A run that still
goes on can be reported. Reads files only: no model, no device. What is computed from them is training/runs.py's.
"""

import argparse
import base64
import difflib
import html
import json
import os
import string
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from rich.console import Console

from gspo_jax.training.metrics import read_samples
from gspo_jax.training.progress import duration, make_table
from gspo_jax.training.runs import (
    SUMMARY,
    Curve,
    Group,
    Run,
    curve,
    differences,
    facts,
    group_runs,
    load_run,
    vectors,
)
from gspo_jax.types import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GREY = "#222222", "#6b6b6b"
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


def draw(groups: Sequence[Group], path: Path) -> None:
    """Draws all panels that there are numbers for into one PNG."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UserError(f"{error}: the report needs matplotlib; pip install 'gspo_jax[report]'") from None

    panels: list[tuple[int, Callable[..., None], tuple[str, ...]]]
    panels = [(1, draw_curves, panel) for panel in PANELS if any(curve(group, panel[0]) for group in groups)]
    if any(curve(group, "eval/accuracy") for group in groups):
        panels.insert(0, (2, draw_accuracy, ()))
    if any(curve(group, "routing/flip_rate", minibatch=1) for group in groups):
        panels.append((1, draw_minibatches, ()))
    if any(vectors(group, "routing/flip_rate_per_layer") for group in groups):
        panels.append((1, draw_layers, ()))
    rows = -(-max(3, sum(width for width, _, _ in panels)) // 3)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, HEAD + rows * ROW))
        cell = 0
        for width, draw_panel, arguments in panels:
            axes = figure.add_axes(_place(cell, width, figure.get_figheight()))
            draw_panel(axes, groups, *arguments)
            cell += width
        _headline(figure, groups)
        figure.savefig(path, dpi=150)


def _place(cell: int, width: int, height: float) -> tuple[float, float, float, float]:
    """Returns left, bottom, width, height of a panel's axes, with room for labels; the wide panel has longer ones."""
    left = WIDTH / 3 * (cell % 3) + 0.84
    right = WIDTH / 3 * (cell % 3 + width) - (0.62 if width == 1 else 1.5)
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
        axes.fill_between(found.steps, low, high, color=group.color, alpha=0.18, linewidth=0)
        axes.plot(found.steps, mean, "o-", color=group.color, linewidth=2.2, markersize=5)
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
        if len(found.raw) == 1:
            axes.plot(found.steps, found.raw[0], color=group.color, linewidth=1, alpha=0.45)
        else:
            low, high = found.smooth.min(axis=0), found.smooth.max(axis=0)
            axes.fill_between(found.steps, low, high, color=group.color, alpha=0.18, linewidth=0)
        mean = found.smooth.mean(axis=0)
        axes.plot(found.steps, mean, color=group.color, linewidth=2.2)
        ends.append((float(mean[-1]), _number(float(mean[-1]), share=share), group.color))
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
            axes.plot(*zip(*known, strict=True), "o-", color=group.color, linewidth=2.2, markersize=5)
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
    for group in groups:
        found = vectors(group, "routing/flip_rate_per_layer")
        if found is not None:
            profile = [_late(column) for column in found[1].T]
            axes.plot(range(1, len(profile) + 1), profile, "o-", color=group.color, linewidth=2.2, markersize=5)
    _finish(axes, title, "share of chosen experts", [], share=True, x="layer (last tenth of the run)")
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
    low, high = axes.get_ylim()
    order = sorted(ends)
    for (_, text, color), y in zip(order, _apart([(y - low) / (high - low) for y, _, _ in order]), strict=True):
        axes.text(1.02, y, text, transform=axes.transAxes, color=color, va="center", weight="bold", fontsize=10.5)


def _apart(heights: Sequence[float], gap: float = 0.08) -> list[float]:
    """Moves ascending label heights (0 to 1) so far apart that they can be read, and none above the axes."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    ceiling = 1.0
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return placed


def _headline(figure: Any, groups: Sequence[Group]) -> None:
    """Writes who is drawn, in their colours, and how to read the lines."""
    height, left = figure.get_figheight(), 0.02
    size = min(17.0, 900 / sum(len(group.caption) + 3 for group in groups))
    for group in groups:
        style = {"color": group.color, "weight": "bold", "fontsize": size, "va": "top"}
        text = figure.text(left, 1 - 0.15 / height, group.caption, **style)
        left = text.get_window_extent().x1 / figure.bbox.width + 0.02
    how = []
    if any(len(group.runs) > 1 for group in groups):
        how.append("line: mean of the seeds, band: minimum to maximum")
    if any(len(group.runs) == 1 for group in groups):
        how.append("thin line: each iteration, thick line: smoothed, band: standard error of the evaluation")
    if any(len({run.rows[-1]["step"] for run in group.runs}) > 1 for group in groups):
        how.append("lines of a group end where its shortest run does")
    figure.text(0.02, 1 - 0.52 / height, "  ·  ".join(how), color=GREY, fontsize=11, va="top")


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


PAGE = string.Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title><style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
p, caption { color: #6b6b6b; text-align: left; } img { width: 100%; }
table { border-collapse: collapse; width: 100%; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #e8e8e8; vertical-align: top; }
th { font-weight: 600; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
small { color: #6b6b6b; } code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
</style></head><body>
<h1>$title</h1><p>$written</p>
$parts
</body></html>
""")


def page(groups: Sequence[Group], found: Sequence[Mapping[str, Any]], png: bytes) -> str:
    """Returns the HTML page: picture, numbers, runs, differences, samples, config; nothing is loaded from elsewhere."""
    picture = f'<img alt="curves of the runs" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
    numbers = _html_table(_number_rows(found)) + (
        "<p>Held-out accuracy: first and last evaluation. The others: mean of the first and of the last tenth of the "
        "iterations. In brackets: minimum and maximum over the seeds.</p>"
    )
    firsts = [group.runs[0] for group in groups]  # the settings within a group are the same
    parts = [("", picture), ("Numbers", numbers), ("Runs", _html_table(_run_rows(found)))]
    labels = [group.label for group in groups]
    differing = [{"setting": name, **dict(zip(labels, x, strict=True))} for name, x in differences(firsts).items()]
    if differing:
        parts.append(("Settings that differ", _html_table(differing)))
    parts += [(f"Samples: {group.label}", shown) for group in groups if (shown := _samples(group.runs[0]))]
    settings = [{"setting": name, "value": value} for name, value in (firsts[0].config or {}).items()]
    if settings:
        opened = f"<details><summary>all settings of {html.escape(str(firsts[0].folder))}</summary>"
        parts.append(("Config", opened + _html_table(settings) + "</details>"))
    body = "\n".join(f"<h2>{html.escape(title)}</h2>{part}" if title else part for title, part in parts)
    title = html.escape(" · ".join(group.caption for group in groups))
    return PAGE.substitute(title=title, written=f"drawn {time.strftime('%Y-%m-%d %H:%M')}", parts=body)


def _number_rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    rows = []
    for name, (title, unit, digits) in SUMMARY.items():
        for group in found:
            if name in group["metrics"]:
                several = len(group["runs"]) > 1
                who = {"runs": group["label"]} if len(found) > 1 else {}
                ends = group["metrics"][name]
                cells = {
                    key: _range(ends[key], digits, several, key == "change") for key in ("initial", "final", "change")
                }
                rows.append({"metric": f"{title}, {unit}", **who, **cells})
    return rows


def _range(value: Mapping[str, float], digits: int, several: bool, signed: bool) -> str:
    how = f"{'+' if signed else ''},.{digits}f"
    text = f"{value['mean']:{how}}"
    return f"{text} [{value['min']:{how}}, {value['max']:{how}}]" if several else text


def _run_rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "folder": run["folder"],
            "seed": run["seed"],
            "updates": run["updates"],
            "skipped": run["skipped_updates"],
            "time": duration(run["seconds"]),
            "tokens/s": run["tokens_per_s"] and f"{run['tokens_per_s']:,.0f}",
            "command": run["command"],
        }
        for group in found
        for run in group["runs"]
    ]


def _samples(run: Run) -> str:
    """Shows completions of the first and the last step that kept some: the best, a middling and the worst of each."""
    samples = {step: rows for step, rows in read_samples(run.folder).items() if rows}
    shown = []
    for step in sorted({min(samples), max(samples)}) if samples else []:
        ordered = sorted(samples[step], key=lambda row: -(row["reward"] if row["reward"] is not None else -np.inf))
        for row in (ordered[i] for i in sorted({0, len(ordered) // 2, len(ordered) - 1})):
            texts = {name: str(row[name])[:1500] for name in ("prompt", "completion", "answer")}
            shown.append({"update": step, **texts, "reward": row["reward"]})
    return _html_table(shown, preformatted=("prompt", "completion", "answer")) if shown else ""


def _html_table(rows: Sequence[Mapping[str, Any]], preformatted: Sequence[str] = ("command",)) -> str:
    numeric = {
        name
        for name in rows[0]
        if name in ("initial", "final", "change", "time", "tokens/s") or _is_number(rows[0][name])
    }
    head = "".join(f"<th{' class=n' if name in numeric else ''}>{html.escape(name)}</th>" for name in rows[0])
    body = []
    for row in rows:
        cells = []
        for name in rows[0]:
            text = html.escape("–" if row[name] is None else str(row[name]))
            text = f"<pre>{text}</pre>" if name in preformatted else text
            cells.append(f"<td{' class=n' if name in numeric else ''}>{text}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f"<div class=wide><table><tr>{head}</tr>{''.join(body)}</table></div>"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def report(folders: Sequence[str | os.PathLike[str]], *, out: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Reports run folders; returns {png, html, groups: facts(...)}. `out` may be left out for one run: RUN/report."""
    unique = list({Path(folder).resolve(): folder for folder in folders}.values())
    if out is None and len(unique) > 1:
        raise UserError(f"{len(unique)} runs and no place for their report; add --out=DIR")
    groups = group_runs([load_run(folder) for folder in unique])
    found = facts(groups)
    target = Path(unique[0]) / "report" if out is None else Path(out)
    try:
        target.mkdir(parents=True, exist_ok=True)
        draw(groups, target / "report.png")
        text = page(groups, found, (target / "report.png").read_bytes())
        (target / "report.html").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the report cannot be written to {target}: {error.strerror}; choose another --out") from None
    return {"png": str(target / "report.png"), "html": str(target / "report.html"), "groups": found}


class _Parser(argparse.ArgumentParser):
    """argparse, with the nearest option named when one is mistyped."""

    def error(self, message: str) -> NoReturn:
        words = [word.partition("=")[0] for word in message.split() if word.startswith("-")]
        near = [
            match for word in words for match in difflib.get_close_matches(word, ["--out", "--json", "--help"], n=1)
        ]
        raise UserError(message + (f"; did you mean {near[0]}?" if near else ""))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = _Parser(
        prog="python -m gspo_jax.report", description=str(__doc__).partition("\n\n")[2], allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run (the --workdir of train)")
    parser.add_argument("--out", metavar="DIR", help="where the report goes; RUN/report for one run")
    parser.add_argument("--json", metavar="FILE", help="writes the same facts for programs")
    try:
        given = parser.parse_args(arguments)
        made = report(given.runs, out=given.out)
        if given.json is not None:
            Path(given.json).parent.mkdir(parents=True, exist_ok=True)
            Path(given.json).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    console.width = max(console.width, 80 if console.is_terminal else 120)
    console.print(make_table(_number_rows(made["groups"])))
    print(f"{made['png']}\n{made['html']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
