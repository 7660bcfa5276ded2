"""Collapsed runs, and differences between groups of runs seed by seed.

    python -m gspo_jax.survival RUN RUN … --baseline=RUN --out=DIR

A run has collapsed once the mean reward of five iterations is less than half of the highest such mean so far
(`collapse` in studies/runs.py). Runs that differ only in the seed are a group. Differences are from the group of
--baseline, between runs of the same seed, with 95% intervals over the seeds. Writes `survival.png`,
`survival-narrow.png` for phones, `survival.md` and `survival.json`.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_jax.drawing import GREY, Head, label_ends, picture
from gspo_jax.parser import make_parser
from gspo_jax.studies.dots import draw_rows
from gspo_jax.studies.paired import Estimate, difference, find, in_markdown
from gspo_jax.studies.runs import Group, group_runs, load_run
from gspo_jax.studies.survival import Course, course, surviving

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LAYOUTS = {"survival.png": 3, "survival-narrow.png": 1}
"""Panels per row of each picture."""
COLUMN, LABELS, ROW = 4.6, 1.25, 4.4
"""Inches: panel width with labels, label width, height."""
MEASURES = {"final": "Reward at the end", "mean": "Reward over the run"}


@dataclass(frozen=True)
class Arm:
    """A group of runs and its comparison."""

    group: Group
    courses: list[Course]
    differences: dict[str, Estimate]
    """Differences from the baseline, by measure. Empty for the baseline itself, or without a common seed."""
    is_baseline: bool

    @property
    def collapsed(self) -> int:
        """Number of collapsed runs."""
        return sum(one.collapsed is not None for one in self.courses)


def compare(groups: Sequence[Group], baseline: str) -> list[Arm]:
    """Return every group with its differences from the group of `baseline`.

    Raises:
      UserError: no run is the baseline, or one has no rewards yet.
    """
    base = find(groups, baseline)
    courses = [[course(one) for one in group.each()] for group in groups]
    against = courses[groups.index(base)]
    arms = []
    for group, own in zip(groups, courses, strict=True):
        found = {name: difference(_by_seed(own, name), _by_seed(against, name)) for name in MEASURES}
        known = {name: one for name, one in found.items() if one is not None and group is not base}
        arms.append(Arm(group, own, known, group is base))
    return arms


def _by_seed(courses: Sequence[Course], measure: str) -> dict[int | None, float]:
    return {one.seed: getattr(one, measure) for one in courses}


def table(arms: Sequence[Arm]) -> str:
    """Format a markdown table. Differences with intervals that exclude 0 are bold."""
    lines = [
        "| runs | seeds | collapsed | at iteration | reward at the end | difference "
        "| reward over the run | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm in arms:
        at = ", ".join(str(one.collapsed) for one in arm.courses if one.collapsed is not None)
        cells = [arm.group.label, str(len(arm.courses)), str(arm.collapsed), at or "–"]
        for name in MEASURES:
            values = [getattr(one, name) for one in arm.courses]
            cells.append(f"{np.mean(values):.3f} [{min(values):.3f}, {max(values):.3f}]")
            cells.append("baseline" if arm.is_baseline else in_markdown(arm.differences.get(name)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def facts(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Return the table's facts for programs."""
    return [
        {
            "label": arm.group.label,
            "collapsed": arm.collapsed,
            "runs": [
                {"folder": str(run.folder)} | asdict(one) for run, one in zip(arm.group.runs, arm.courses, strict=True)
            ],
            "differences": {name: asdict(one) | {"seeds": one.seeds} for name, one in arm.differences.items()},
        }
        for arm in arms
    ]


def draw(arms: Sequence[Arm], path: Path, *, columns: int) -> None:
    """Draw survival and differences."""
    runs = sum(len(arm.courses) for arm in arms)
    headline = f"{sum(arm.collapsed for arm in arms)} of {runs} runs collapsed"
    how_to_read = (
        "Collapsed: the mean reward of five iterations fell below half of its highest so far. Differences are between "
        "runs of one seed: their mean with its 95% interval, and each seed below it."
    )
    width = columns * COLUMN
    head = Head(headline, how_to_read, width=width)
    panels = [_survival, *(lambda axes, arms, name=name: _forest(axes, arms, name) for name in MEASURES)]
    height = head.height + -(-len(panels) // columns) * ROW
    with picture(path, width=width, height=height) as figure:
        head.write(figure)
        for cell, fill in enumerate(panels):
            left = COLUMN * (cell % columns) + (0.75 if fill is _survival else LABELS)
            top = head.height + ROW * (cell // columns) + 0.4
            wide = COLUMN - LABELS - (0.75 if fill is _survival else 0.2)
            size = wide / width, (ROW - 1.1) / height
            fill(figure.add_axes((left / width, 1 - (top + ROW - 1.1) / height, *size)), arms)


def _survival(axes: "Axes", arms: Sequence[Arm]) -> None:
    from matplotlib.ticker import PercentFormatter

    last = max(one.iterations for arm in arms for one in arm.courses)
    axes.set(title="Runs that have not collapsed", xlabel="iterations", xlim=(0, last), ylim=(-0.03, 1.03))
    ends = []
    for arm in arms:
        share, look = surviving(arm.courses, last), arm.group.look
        axes.step(np.arange(last + 1), share, where="post", color=look.color, linestyle=look.pattern, linewidth=1.8)
        ends.append((float(share[-1]), arm.group.label, look.color))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    label_ends(axes, ends, size=10)


def _forest(axes: "Axes", arms: Sequence[Arm], name: str) -> None:
    (base,) = (arm.group for arm in arms if arm.is_baseline)
    axes.set(title=MEASURES[name], xlabel=f"difference from {base.label}")
    axes.axvline(0, color=GREY, linewidth=1)
    rows = [(arm.group, arm.differences.get(name)) for arm in arms if not arm.is_baseline]
    draw_rows(axes, rows, names=LABELS - 0.15)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return make_parser("survival").run(_command, arguments)


def _command(given: Namespace) -> None:
    unique = list({Path(folder).resolve(): folder for folder in given.runs}.values())
    arms = compare(group_runs([load_run(folder) for folder in unique]), given.baseline)
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    text = table(arms)
    (out / "survival.md").write_text(text, encoding="utf-8")
    (out / "survival.json").write_text(json.dumps(facts(arms), indent=2) + "\n", encoding="utf-8")
    for name, columns in LAYOUTS.items():
        draw(arms, out / name, columns=columns)
    print(text, end="")


if __name__ == "__main__":
    sys.exit(main())
