"""Collapsed runs, and differences between groups of runs seed by seed.

    python -m gspo_jax.survival RUN RUN … --baseline=RUN --out=DIR
    python -m gspo_jax.survival docs/evidence/data/clipping.csv --baseline=grpo --primary="gspo vs grpo" --out=DIR

RUN is the folder of a run, the record of a study (studies/records.py), or a `survival.json` that this command wrote,
from which only tables and intervals can be made anew. A run has collapsed once the mean reward of five iterations is
less than half of the highest such mean so far (`collapse` in studies/runs.py); `kept` in studies/survival.py has no
threshold. Runs that differ only in the seed are a group. Differences are from the group of --baseline, between runs of
the same seed, with 95% intervals over the seeds. Writes `survival.png`, `survival-narrow.png` for phones, `survival.md`
and `survival.json`.
"""

import json
import math
import sys
from argparse import Namespace
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_jax import estimates
from gspo_jax.drawing import GREY, Head, label_ends, picture
from gspo_jax.errors import UserError
from gspo_jax.parser import make_parser
from gspo_jax.studies import records
from gspo_jax.studies.dots import draw_rows
from gspo_jax.studies.looks import REPLAYS, looks
from gspo_jax.studies.paired import Estimate, difference, find, starts_differ, written
from gspo_jax.studies.runs import Group, RunData, group_runs, load_run
from gspo_jax.studies.survival import LEVEL, Course, by_luck, course, rule, surviving

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LAYOUTS = {"survival.png": 3, "survival-narrow.png": 1}
"""Panels per row of each picture."""
COLUMN, LABELS, ROW = 4.6, 1.25, 4.4
"""Inches: panel width with labels, label width, height."""
MEASURES = {"final": "Reward at the end", "mean": "Reward over the run", "kept": "Reward kept"}
DRAWN = ("final", "mean")
"""Measures with a panel."""
VERSUS = " vs "
"""Between the labels of a primary comparison."""

Observed = list[tuple[Group, list[Course]]]


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
        return self.collapsed_of({one.seed for one in self.courses})

    def collapsed_of(self, seeds: Container[int | None]) -> int:
        """Return the number of collapsed runs of some seeds."""
        return sum(one.collapsed is not None for one in self.courses if one.seed in seeds)


def observed(sources: Sequence[str]) -> Observed:
    """Return the groups of some run folders, records or survival.json, with each run's course.

    Raises:
      UserError: one cannot be read or has no rewards yet, or a survival.json is not alone.
    """
    if any(source.endswith(".json") for source in sources):
        if len(sources) > 1:
            raise UserError("a survival.json has whole groups; give it alone")
        return stored(Path(sources[0]))
    runs: list[RunData] = []
    for source in {Path(source).resolve(): source for source in sources}.values():
        runs += records.load(Path(source)) if source.endswith(".csv") else [load_run(source)]
    return [(group, [course(one) for one in group.each()]) for group in group_runs(runs)]


def stored(path: Path) -> Observed:
    """Return what a survival.json has."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        own = [(one["label"], [dict(run) for run in one["runs"]]) for one in content]
        folders = [[Path(run.pop("folder")) for run in runs] for _, runs in own]
        courses = [[Course(**run) for run in runs] for _, runs in own]
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(f"{path} is not what survival writes; give run folders or a record") from None
    if not own:
        raise UserError(f"{path} has no runs; give run folders or a record")
    named = [(label, *_named(label)) for label, _ in own]
    groups = [
        Group(
            label, look, [RunData(place, [], {"seed": one.seed}, "") for place, one in zip(places, each, strict=True)]
        )
        for (label, *_), look, places, each in zip(named, looks(named), folders, courses, strict=True)
    ]
    return list(zip(groups, courses, strict=True))


def _named(label: str) -> tuple[str, str]:
    """Return objective and replay of a label such as "grpo, r2"."""
    first, *others = label.split(", ")
    return first, next((word for word in others if word in REPLAYS[1:]), "none")


def compare(found: Observed, baseline: str) -> list[Arm]:
    """Return every group with its differences from the group of `baseline`.

    Raises:
      UserError: no run is the baseline.
    """
    base = find([group for group, _ in found], baseline)
    (against,) = (courses for group, courses in found if group is base)
    return [Arm(group, own, {} if group is base else between(own, against), group is base) for group, own in found]


def between(courses: Sequence[Course], others: Sequence[Course]) -> dict[str, Estimate]:
    """Return the differences of runs of one seed, by measure."""
    found = {name: difference(_by_seed(courses, name), _by_seed(others, name)) for name in MEASURES}
    return {name: one for name, one in found.items() if one is not None}


def _by_seed(courses: Sequence[Course], measure: str) -> dict[int | None, float]:
    values = {one.seed: getattr(one, measure) for one in courses}
    return {seed: value for seed, value in values.items() if value is not None}


def table(arms: Sequence[Arm]) -> str:
    """Format a markdown table. A difference is bold if its p-value, adjusted for all of the table, is at most LEVEL."""
    measures = measured(arms)
    names = [title for name in measures for title in (MEASURES[name].lower(), "difference", "p, exact", "p, Holm")]
    head = ["runs", "seeds", "collapsed", "at iteration", *names]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    of_all = adjusted(arms)
    for number, arm in enumerate(arms):
        at = ", ".join(str(one.collapsed) for one in arm.courses if one.collapsed is not None)
        low, high = estimates.proportion_interval(arm.collapsed, len(arm.courses))
        cells = [arm.group.label, str(len(arm.courses)), f"{arm.collapsed} [{low:.0%}, {high:.0%}]", at or "–"]
        for name in measures:
            values = [getattr(one, name) for one in arm.courses]
            cells.append(f"{np.mean(values):.3f} [{min(values):.3f}, {max(values):.3f}]")
            if arm.is_baseline:
                cells += ["baseline", "", ""]
                continue
            own, p = arm.differences.get(name), of_all.get((number, name), math.nan)
            text = written(own)
            cells.append(f"**{text}**" if p <= LEVEL else text)
            cells += ["–" if own is None else _p(own.p), _p(p)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def measured(arms: Sequence[Arm]) -> list[str]:
    """Return the measures that all runs have."""
    return [name for name in MEASURES if all(getattr(one, name) is not None for arm in arms for one in arm.courses)]


def adjusted(arms: Sequence[Arm]) -> dict[tuple[int, str], float]:
    """Return the p-values of Student's t by arm and measure, adjusted by Holm's method for all of them."""
    keys = [(number, name) for number, arm in enumerate(arms) for name in arm.differences]
    adjusted = estimates.holm([arms[number].differences[name].student_p for number, name in keys])
    return dict(zip(keys, adjusted, strict=True))


def _p(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2g}"


def notes(arms: Sequence[Arm]) -> str:
    """Say how the table is to be read, which arms prevent the collapse by the calibrated rule, and what weakens it."""
    others = [arm for arm in arms if not arm.is_baseline]
    (base,) = (arm for arm in arms if arm.is_baseline)
    compared = sum(len(arm.differences) for arm in others)
    text = [
        "Collapsed: with Clopper and Pearson's 95% interval. Rewards: mean, least and largest. Differences: of runs of "
        "one seed, mean with its 95% interval by Student's t. p, exact: share of all signs of these differences with "
        "as large a mean, at least 2^(1 − seeds). p, Holm: by Student's t, adjusted for the table's "
        f"{compared} comparisons; bold at {LEVEL:.0%}.",
    ]
    if "kept" in measured(arms):
        text.append("Reward kept: mean over iterations of the reward over its best so far, both in means of five.")
    seeds = set.intersection(*({one.seed for one in arm.courses} for arm in arms))
    if len(seeds) > 1 and others:
        text.append(_ruled(base, others, seeds))
    if starts_differ([arm.group for arm in arms], base.group):
        text.append("Not all runs of one seed began from the same policy: their evaluations before training differ.")
    if mixed := mixed_seeds([run for arm in arms for run in arm.group.runs]):
        text.append(f"Runs of seeds {', '.join(map(str, mixed))} are of several kinds of machine or versions of jax.")
    return "\n".join(f"\n{line}" for line in text) + "\n"


def _ruled(base: Arm, others: Sequence[Arm], common: set[int | None]) -> str:
    seeds, collapsed = len(common), {arm.group.label: arm.collapsed_of(common) for arm in (base, *others)}
    k = rule(seeds, len(others))
    if k is None:
        chance = by_luck(seeds, len(others), least=seeds, most=0)
        return (
            f"No count of {seeds} seeds tells whether an arm prevents the collapse: of {len(others)} arms that "
            f"collapse as often as {base.group.label}, one would be at 0 beside its {seeds} with a "
            f"chance of up to {chance:.0%}."
        )
    chance = by_luck(seeds, len(others), least=seeds - k, most=k)
    lost = collapsed.pop(base.group.label)
    met = [label for label, count in collapsed.items() if lost >= seeds - k and count <= k]
    return (
        f"Prevents the collapse: {base.group.label} collapses on at least {seeds - k} of {seeds} seeds, the arm on at "
        f"most {k} (met by chance by any of {len(others)} arms: up to {chance:.1%}). Here: {', '.join(met) or 'none'}."
    )


def mixed_seeds(runs: Sequence[RunData]) -> list[int]:
    """Return the seeds whose runs are known to differ in machine or version of jax."""
    made: dict[int, set[tuple[str | None, str | None]]] = {}
    for run in runs:
        if run.seed is not None and run.versions:
            made.setdefault(run.seed, set()).add((run.versions.get("machine"), run.versions.get("jax")))
    return sorted(seed for seed, kinds in made.items() if len(kinds) > 1)


def primary_table(found: Observed, pairs: Sequence[str], margin: float | None) -> str:
    """Format the primary comparisons, `LABEL vs LABEL`: exact p-values, adjusted by Holm's method for these alone.

    Raises:
      UserError: a pair is no pair of labels.
    """
    by_label = {group.label: courses for group, courses in found}
    rows: list[tuple[str, str, Estimate]] = []
    for pair in pairs:
        one, _, other = pair.partition(VERSUS)
        if unknown := [name for name in (one, other) if name not in by_label]:
            raise UserError(f"--primary={pair!r} names {unknown[0]!r}; use LABEL{VERSUS}LABEL of {', '.join(by_label)}")
        rows += [(pair, name, own) for name, own in between(by_label[one], by_label[other]).items()]
    head = ["primary comparison", "measure", "seeds", "difference", "p, exact", "p, Holm"]
    head += [] if margin is None else [f"within ±{margin:g}"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    of_all = estimates.holm([own.p if name == "final" else math.nan for _, name, own in rows])
    for (pair, name, own), p in zip(rows, of_all, strict=True):
        cells = [pair, MEASURES[name].lower(), str(own.seeds), written(own), _p(own.p)]
        cells.append(_p(p) if name == "final" else "secondary")
        cells += [] if margin is None else ["yes" if own.is_within(margin) else "not shown"]
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
            "differences": {
                name: {"mean": one.mean, "low": one.low, "high": one.high, "seeds": one.seeds, "p": one.p}
                for name, one in arm.differences.items()
            },
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
    panels = [_survival, *(lambda axes, arms, name=name: _forest(axes, arms, name) for name in DRAWN)]
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
    label_ends(axes, ends, size=10, room=LABELS - 0.2)


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
    found, out = observed(given.runs), Path(given.out)
    arms = compare(found, given.baseline)
    text = table(arms) + notes(arms)
    if given.margin is not None and given.primary is None:
        raise UserError(f"--margin={given.margin:g} is of primary comparisons; name them by --primary, or leave it out")
    if given.primary is not None:
        pairs = [pair.strip() for pair in given.primary.split(";")]
        text = f"{primary_table(found, pairs, given.margin)}\n{text}"
    out.mkdir(parents=True, exist_ok=True)
    (out / "survival.md").write_text(text, encoding="utf-8")
    (out / "survival.json").write_text(json.dumps(facts(arms), indent=2) + "\n", encoding="utf-8")
    for name, columns in LAYOUTS.items():
        draw(arms, out / name, columns=columns)
    print(text, end="")


if __name__ == "__main__":
    sys.exit(main())
