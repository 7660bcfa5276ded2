"""Picture of an iteration: phases in sequence, decode slots in use, and waits."""

import os
from typing import TYPE_CHECKING

import numpy as np

from gspo_jax.drawing import GREY, PALETTE, picture
from gspo_jax.planning.iteration import PHASES, Iteration, Recipe, typical

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 13.0, 7.2
"""Inches."""
COLORS: dict[str, str] = dict(
    zip(PHASES, (PALETTE[6], PALETTE[5], PALETTE[0], PALETTE[4], PALETTE[3], PALETTE[2]), strict=True)
)
WAITING = "#d9d9d9"
"""Colour of time without work."""
SHOWN = 0.005
"""Minimum share of an iteration for a bar."""


def draw(run: Recipe, mean: Iteration, lengths: str, where: str, path: str | os.PathLike[str]) -> None:
    """Draw a run's most typical iteration to a PNG file.

    `lengths` and `where` describe responses and slice. The note gives the `mean`.
    """
    iteration = typical(run, mean)
    with picture(path, width=WIDTH, height=HEIGHT) as figure:
        strip, slots = figure.add_axes((0.07, 0.735, 0.90, 0.085)), figure.add_axes((0.07, 0.435, 0.90, 0.245))
        waits = figure.add_axes((0.07, 0.08, 0.90, 0.255))
        spans = _spans(iteration)
        end = max(end for _, _, end in spans)
        for axes in (strip, slots):
            axes.set_xlim(0, end)
        _phases(strip, spans)
        _slots(slots, iteration, [begin for name, begin, _ in spans if name == "decode"])
        _waits(waits, iteration)
        title = f"One iteration on {where}: {iteration.seconds:.0f} s"
        figure.text(0.015, 0.975, title, weight="bold", fontsize=17, va="top")
        note = (
            f"Of {len(mean.sampled)} simulated, the one nearest to their mean, {mean.seconds:.0f} s. "
            f"Response lengths {lengths}. Projected from programs compiled ahead of time, not measured."
        )
        figure.text(0.015, 0.915, note, color=GREY, fontsize=11, va="top")


def _spans(iteration: Iteration) -> list[tuple[str, float, float]]:
    """Return (phase, begin, end), with prefill and decode once per sampling call."""
    (batch,) = iteration.sampled
    calls, seconds, at = batch.calls, iteration.by_phase, 0.0
    parts = [("reshard", seconds["reshard"])]
    for call in calls:
        parts += [("prefill", seconds["prefill"] / iteration.counts["sampling_calls"]), ("decode", call.seconds)]
    parts += [(phase, seconds[phase]) for phase in ("reward", "score", "update")]
    found = []
    for name, length in parts:
        found.append((name, at, at + length))
        at += length
    return found


def _phases(axes: "Axes", spans: list[tuple[str, float, float]]) -> None:
    total = spans[-1][2]
    for name, begin, end in spans:
        axes.barh(0, end - begin, left=begin, height=1.0, color=COLORS[name], edgecolor="white", linewidth=0.8)
        if end - begin > 0.09 * total:
            text = f"{name} {end - begin:.0f} s"
            axes.text((begin + end) / 2, 0, text, ha="center", va="center", color="white", weight="bold")
    axes.set_ylim(-0.5, 0.5)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(labelbottom=False)
    axes.set_title("Phases")


def _slots(axes: "Axes", iteration: Iteration, begins: list[float]) -> None:
    (batch,) = iteration.sampled
    most = 0.0
    for number, (call, begin) in enumerate(zip(batch.calls, begins, strict=True)):
        times = begin + np.append(call.times, call.seconds)
        width, in_use = (np.append(y, 0.0) for y in (call.width, call.in_use))
        labels = ("idle", "in use") if number == 0 else ("", "")
        axes.fill_between(times, width, step="post", color=WAITING, label=labels[0])
        axes.fill_between(times, in_use, step="post", color=COLORS["decode"], label=labels[1])
        most = max(most, width.max())
    axes.set_ylim(0, 1.12 * most)
    axes.set_xlabel("seconds")
    axes.legend(frameon=False, fontsize=10, loc="upper right")
    axes.set_title(f"Decode slots, of {most:,.0f}")


def _waits(axes: "Axes", iteration: Iteration) -> None:
    shown = [phase for phase in PHASES if iteration.by_phase[phase] >= SHOWN * iteration.seconds]
    for y, phase in enumerate(shown):
        lost = {why: s for why, s in iteration.waits.get(phase, {}).items() if s > SHOWN * iteration.seconds}
        left = iteration.by_phase[phase] - sum(lost.values())
        axes.barh(y, left, height=0.62, color=COLORS[phase])
        for seconds in lost.values():
            axes.barh(y, seconds, left=left, height=0.62, color=WAITING, edgecolor="white", linewidth=0.8)
            left += seconds
        text = ", ".join([f"{left:.0f} s", *(f"{why} {s:.0f}" for why, s in lost.items())])
        axes.annotate(text, (left, y), (5, 0), textcoords="offset points", va="center", fontsize=10)
    axes.set_xlim(0, 1.3 * max(iteration.by_phase.values()))
    axes.set_yticks(range(len(shown)), shown)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("seconds")
    rest = {phase: s for phase, s in iteration.by_phase.items() if phase not in shown and s}
    left_out = f"; not shown: {', '.join(rest)}, {sum(rest.values()):.1f} s" if rest else ""
    axes.set_title(f"Work, and in grey what is none{left_out}")
