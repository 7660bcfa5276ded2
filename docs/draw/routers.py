"""The figure and the tables of docs/evidence/routers.md: what one update does to the routes of each arm of the study.

All but one table are of the responses that the update has not learned from.

    python docs/draw/routers.py runs/routers-noise [--page=docs/evidence/routers.md] [--out=docs/evidence/routers]

Reads `ARM-SEED/noise.json` of every arm of configs/routers.py and every seed there is. Writes `routers.png`,
`routers-narrow.png` for phones, and the tables between `<!-- table: NAME -->` and `<!-- end -->` on the page.
`bash launch/evidence.sh routers` makes all runs and then runs this.
"""

import math
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_jax import estimates, foreign
from gspo_jax.drawing import INK, PALETTE, Head, percent, picture, text_width
from gspo_jax.errors import UserError
from gspo_jax.parser import Parser
from gspo_jax.planning.show import markdown_table
from gspo_jax.studies.pages import replaced
from gspo_jax.studies.paired import Estimate, difference

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Facts = Mapping[str, Any]
"""What `noise.json` says after the update, of all responses or of those that are `unseen`."""
Seeds = Mapping[int | None, Facts]


@dataclass(frozen=True)
class Arm:
    """An arm of the study."""

    label: str
    base: str
    """Arm from which it differs in one thing; "" for the testbed's own."""
    color: str


ROUTER, BIAS, LAYERS = PALETTE[0], PALETTE[1], PALETTE[2]
ARMS: Mapping[str, Arm] = {
    "renormalised": Arm("softmax, renormalised", "", INK),
    "softmax": Arm("softmax", "renormalised", ROUTER),
    "sigmoid": Arm("sigmoid, bias 0", "renormalised", ROUTER),
    "bias": Arm("sigmoid with bias", "sigmoid", BIAS),
    "moving": Arm("bias that moves", "bias", BIAS),
    "groups": Arm("bias, groups", "bias", BIAS),
    "shared": Arm("bias, shared expert", "bias", BIAS),
    "linear_0": Arm("Qwen3-Next, none linear", "renormalised", LAYERS),
    "linear_1": Arm("1 linear layer of 4", "linear_0", LAYERS),
    "linear_2": Arm("2 linear layers of 4", "linear_0", LAYERS),
    "linear_3": Arm("3 linear layers of 4", "linear_0", LAYERS),
}
"""Arms in the order of the page."""
TESTBED = "renormalised"


@dataclass(frozen=True)
class Measure:
    """A number of the study."""

    title: str
    unit: str
    of: Callable[[Facts], float]
    is_share: bool = True
    """True for shares, whose differences are in points. Others are compared by their ratio."""


MEASURES = (
    Measure("Flips", "share of chosen experts", lambda facts: facts["flip_rate"]),
    Measure("Tokens changed", "another expert in any layer", lambda facts: facts["tokens_changed"]),
    Measure("Router KL", "nats per layer", lambda facts: facts["router_kl"], False),
    Measure("Variance, tokens", "of the log-ratio, nats²", lambda facts: facts["token"]["whole"], False),
    Measure("Routes' share, tokens", "of that variance", lambda facts: facts["token"]["share"]),
    Measure("Routes' share, responses", "of their means' variance", lambda facts: facts["sequence"]["share"]),
)
FIRST_AND_LAST = "Flips in the first, the last layer"
LAYOUTS = {"routers.png": 3, "routers-narrow.png": 1}
"""Panels per row of each picture."""
NAMES, COLUMN, ROW = 2.3, 3.2, 3.9
"""Inches: width of the names, width of a panel, height of a row of panels."""
HEADLINE = "What one update does to the routes, by router"


def means(arms: Mapping[str, Seeds]) -> list[str]:
    """Return the table of each arm's means over the seeds, geometric unless of shares, with Student's 95% intervals."""
    rows = []
    for name, seeds in arms.items():
        cells = [_mean(measure, list(map(measure.of, seeds.values()))) for measure in MEASURES]
        by_layer = np.mean([facts["flip_rate_per_layer"] for facts in seeds.values()], axis=0)
        rows.append([ARMS[name].label, str(len(seeds)), *cells, f"{by_layer[0]:.2%}, {by_layer[-1]:.1%}"])
    return markdown_table(["", "seeds", *(measure.title for measure in MEASURES), FIRST_AND_LAST], rows)


def apart(arms: Mapping[str, Seeds], base: Callable[[str], str]) -> list[str]:
    """Return the table of differences, seed by seed, of each arm that has a base here."""
    rows = [
        [ARMS[name].label, ARMS[base(name)].label, *(_apart(measure, arms, name, base(name)) for measure in MEASURES)]
        for name in arms
        if base(name) in arms and base(name) != name
    ]
    return markdown_table(["", "against", *(measure.title for measure in MEASURES)], rows)


def _mean(measure: Measure, values: Sequence[float]) -> str:
    mean, *span = _interval(measure, values)
    how = (lambda x: f"{100 * x:.3g}%".replace("-", "−")) if measure.is_share else (lambda x: f"{x:.1e}")
    return f"{how(mean)} [{', '.join(map(how, span))}]" if len(values) > 1 else how(mean)


def _interval(measure: Measure, values: Sequence[float]) -> tuple[float, float, float]:
    """Return a mean, geometric unless of shares, and its interval."""
    found = np.array(values) if measure.is_share else np.log(values)
    mean, (low, high) = float(found.mean()), estimates.student_interval(found)
    return (mean, low, high) if measure.is_share else (math.exp(mean), math.exp(low), math.exp(high))


def _apart(measure: Measure, arms: Mapping[str, Seeds], name: str, base: str) -> str:
    own, other = (
        {seed: measure.of(facts) if measure.is_share else math.log(measure.of(facts)) for seed, facts in seeds.items()}
        for seeds in (arms[name], arms[base])
    )
    found = difference(own, other)
    if found is None or found.seeds == 1:
        return "–"
    text = _points(found) if measure.is_share else _times(found)
    return f"**{text}**" if found.is_clear else text


def _points(found: Estimate) -> str:
    mean, low, high = (f"{100 * x:+.2f}".replace("-", "−") for x in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]"


def _times(found: Estimate) -> str:
    mean, low, high = (f"{float(f'{math.exp(x):.2g}'):g}" for x in (found.mean, found.low, found.high))
    return f"×{mean} [{low}, {high}]"


def draw(arms: Mapping[str, Seeds], path: Path, *, columns: int) -> None:
    """Draw one picture."""
    width = columns * COLUMN + NAMES
    count = max(map(len, arms.values()))
    note = (
        "Random models of equal size, 24 layers of 64 experts; responses that the update has not learned from. Dots: "
        f"up to {count} seeds. Bars: 95% intervals of their mean (Student's t)."
    )
    head = Head(HEADLINE, note, width=width)
    height = head.height + -(-len(MEASURES) // columns) * ROW
    with picture(path, width=width, height=height) as figure:
        for cell, measure in enumerate(MEASURES):
            left, top = NAMES + COLUMN * (cell % columns), head.height + ROW * (cell // columns) + 0.4
            size = (COLUMN - 0.35) / width, (ROW - 1.1) / height
            axes = figure.add_axes((left / width, 1 - (top + ROW - 1.1) / height, *size))
            _panel(axes, arms, measure, named=cell % columns == 0)
        head.write(figure)


def _panel(axes: "Axes", arms: Mapping[str, Seeds], measure: Measure, *, named: bool) -> None:
    from matplotlib.ticker import NullFormatter

    for place, (name, seeds) in enumerate(arms.items()):
        values, color = [measure.of(facts) for facts in seeds.values()], ARMS[name].color
        mean, low, high = _interval(measure, values)
        axes.plot(values, [place + 0.25] * len(values), "o", color=color, alpha=0.5, markersize=3)
        error = [[mean - low], [high - mean]]
        axes.errorbar([mean], [place], xerr=error, color=color, marker="o", markersize=5, capsize=2.5)
    axes.set(title=measure.title)
    axes.set_xlabel(measure.unit, fontsize=10)
    axes.set_ylim(len(arms) - 0.4, -0.6)
    axes.set_yticks(range(len(arms)), [ARMS[name].label if named else "" for name in arms])
    axes.tick_params(axis="y", length=0)
    for text, name in zip(axes.get_yticklabels(), arms, strict=True):
        size = min(10.0, 10.0 * (NAMES - 0.25) / text_width(ARMS[name].label, 10.0, "bold"))
        text.set(color=ARMS[name].color, weight="bold", fontsize=size)
    if measure.is_share:
        axes.set_xlim(min(0.0, axes.get_xlim()[0]), 1.03 * axes.get_xlim()[1])
        axes.xaxis.set_major_formatter(percent)
    else:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())


def read(folder: Path) -> dict[str, Seeds]:
    """Return each arm's facts after one update, by seed.

    Arms without any are left out.

    Raises:
      UserError: the testbed's own router has none, or a file is not of this study.
    """
    arms: dict[str, dict[int | None, Facts]] = {}
    for name in ARMS:
        arms[name] = {}
        for path in sorted(folder.glob(f"{name}-*/noise.json")):
            seed = re.fullmatch(rf"{name}-(\d+)", path.parent.name)
            if seed is not None:
                arms[name][int(seed[1])] = _facts(path)
    if not arms[TESTBED]:
        raise UserError(f"{folder} has no {TESTBED}-SEED/noise.json; make it with bash launch/evidence.sh routers")
    return {name: seeds for name, seeds in arms.items() if seeds}


def _facts(path: Path) -> Facts:
    try:
        facts: Any = foreign.read_json(path, inside=path.parent, remedy="")
        (after,) = facts["after"]
        _ = [measure.of(of) for measure in MEASURES for of in (after, after["unseen"])]
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(f"{path} is not of one update of this study; remove it, and make it again") from None
    return after


def parser() -> Parser:
    """Build the command-line parser."""
    parser = Parser("python docs/draw/routers.py", str(__doc__).partition("\n\n")[2].partition("\n\n")[2])
    parser.add_argument("folder", metavar="DIR", help="folder of the study's measurements")
    parser.add_argument("--page", metavar="PAGE", default="docs/evidence/routers.md", help="page with the tables")
    parser.add_argument("--out", metavar="DIR", default="docs/evidence/routers", help="folder for the two pictures")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return parser().run(_command, arguments)


def _command(given: Namespace) -> None:
    every, out, page = read(Path(given.folder)), Path(given.out), Path(given.page)
    arms = {name: {seed: facts["unseen"] for seed, facts in seeds.items()} for name, seeds in every.items()}
    tables = {
        "means": means(arms),
        "all responses": means(every),
        "from the testbed": apart(arms, lambda _: TESTBED),
        "one change": apart(arms, lambda name: ARMS[name].base),
    }
    try:
        text = page.read_text(encoding="utf-8")
        for name, lines in tables.items():
            text = replaced(text, name, lines)
        page.write_text(text, encoding="utf-8")
        out.mkdir(parents=True, exist_ok=True)
        for name, columns in LAYOUTS.items():
            draw(arms, out / name, columns=columns)
    except OSError as error:
        raise UserError(f"cannot write to {error.filename}: {error.strerror}; choose another --page or --out") from None
    for name, lines in tables.items():
        print(f"{name}\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
