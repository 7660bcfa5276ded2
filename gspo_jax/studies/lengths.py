"""How the ratio's noise falls with the number of tokens that it is averaged over: a table and a picture.

    python -m gspo_jax.studies.lengths docs/evidence/data/length/*.json --out=docs/evidence/length

Each file is a `noise.json` of `gspo_jax.noise`. Files that differ only in the cold start are a group. For the weights'
part, the routes' and the whole log-ratio, a is the exponent of Var ∝ n^−a, by least squares on logarithms: 1 if a
response's tokens are independent, 0 if they move as one. Bounds that fit at one length fit at another if they scale as
n^(−a/2). Writes `lengths.png`, `lengths-narrow.png` for phones, and `lengths.md`.
"""

import math
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gspo_jax import estimates
from gspo_jax.drawing import PALETTE, Head, picture
from gspo_jax.errors import UserError
from gspo_jax.parser import Parser
from gspo_jax.studies.noise_figure import Facts, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = {"weights": "weights", "routes": "routes", "whole": "log-ratio"}
LAYOUTS = {"lengths.png": 3, "lengths-narrow.png": 1}
"""Panels per row of each picture."""
COLUMN, ROW = 3.9, 3.4
"""Column width and row height, in inches."""


class Kind(NamedTuple):
    """Facts that the files of a group share."""

    layers: int
    router: str
    sampler: str
    updates: int

    @property
    def label(self) -> str:
        """Name in table and picture."""
        after = f"{self.updates} update{'s' if self.updates > 1 else ''}" if self.updates else f"{self.sampler} sampler"
        return f"{self.layers} layers, routers {self.router}, {after}"


def by_kind(runs: Sequence[Facts]) -> dict[Kind, list[list[Facts]]]:
    """Return the variances by length of each kind's cold starts; measurements without any variance are left out."""
    found: dict[Kind, list[list[Facts]]] = {}
    for facts in runs:
        for one in facts["after"]:
            lengths = [each for each in one["by_length"] if each["whole"] > 0]
            if len(lengths) > 1:
                kind = Kind(facts["layers"], facts["router"], facts["sampler"], one["updates"])
                found.setdefault(kind, []).append(lengths)
    return dict(sorted(found.items()))


def exponent(lengths: Sequence[Mapping[str, Any]], part: str) -> float:
    """Return a of Var ∝ n^−a; NaN if a part has no variance at two lengths."""
    known = [(math.log(one["tokens"]), math.log(one[part])) for one in lengths if one[part] > 0]
    if len(known) < 2:
        return math.nan
    x, y = np.array(known).T
    return -float(np.polyfit(x, y, 1)[0])


def table(kinds: Mapping[Kind, Sequence[Sequence[Facts]]]) -> str:
    """Format the exponents, with intervals over cold starts, and the effective tokens of each length."""
    lengths = sorted({one["tokens"] for starts in kinds.values() for own in starts for one in own})
    head = ["policy", "cold starts", *(f"a, {name}" for name in PARTS.values())]
    head += [f"effective tokens of {n}" for n in lengths]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for kind, starts in kinds.items():
        cells = [kind.label, str(len(starts))]
        cells += [_written(np.array([exponent(own, part) for own in starts])) for part in PARTS]
        for n in lengths:
            effective = [one["effective_tokens"] for own in starts for one in own if one["tokens"] == n]
            cells.append(f"{np.mean(effective):.0f}" if effective else "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _written(values: np.ndarray) -> str:
    values = values[np.isfinite(values)]
    if not len(values):
        return "–"
    low, high = estimates.student_interval(values)
    return f"{values.mean():.2f} [{low:.2f}, {high:.2f}]" if len(values) > 1 else f"{values.mean():.2f}"


def draw(kinds: Mapping[Kind, Sequence[Sequence[Facts]]], path: Path, *, columns: int) -> None:
    """Draw the variance of each part by length, a panel per number of updates and part."""
    counts = sorted({kind.updates for kind in kinds})
    panels = [(count, part) for count in counts for part in PARTS]
    families = sorted({kind[:2] for kind in kinds})
    colors = {family: PALETTE[number % len(PALETTE)] for number, family in enumerate(families)}
    names = [(f"{layers} layers, routers {router}", colors[layers, router]) for layers, router in families]
    width = columns * COLUMN
    how = (
        "Variance of the mean log-ratio over a response's first tokens, of the responses that have as many. Lines: "
        "cold starts. Dotted: 1/n, as of independent tokens. 0 updates: sampler and trainer with the same weights."
    )
    head = Head("How the ratio's noise falls with length", how, width=width, names=names)
    height = head.height + -(-len(panels) // columns) * ROW
    with picture(path, width=width, height=height) as figure:
        for cell, (count, part) in enumerate(panels):
            left, top = COLUMN * (cell % columns) + 0.75, head.height + ROW * (cell // columns) + 0.4
            size = (COLUMN - 0.95) / width, (ROW - 1.1) / height
            axes = figure.add_axes((left / width, 1 - (top + ROW - 1.1) / height, *size))
            axes.set(title=f"{PARTS[part].capitalize()}, {count} update{'' if count == 1 else 's'}", xlabel="tokens")
            own = {kind: starts for kind, starts in kinds.items() if kind.updates == count}
            _lines(axes, own, part, colors)
        head.write(figure)


def _lines(axes: "Axes", kinds: Mapping[Kind, Sequence[Sequence[Facts]]], part: str, colors: Mapping[Any, str]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for kind, starts in kinds.items():
        for own in starts:
            known = [(one["tokens"], one[part]) for one in own if one[part] > 0]
            if known:
                x, y = np.array(known).T
                axes.plot(x, y, color=colors[kind[:2]], marker="o", markersize=3, linewidth=1)
                axes.plot(x, y[0] * x[0] / x, color=colors[kind[:2]], linestyle=":", linewidth=0.7)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser("python -m gspo_jax.studies.lengths", str(__doc__).partition("\n\n")[2])
    parser.add_argument("files", nargs="+", metavar="FILE", help="noise.json of gspo_jax.noise")
    parser.add_argument("--out", default="lengths", metavar="DIR", help="folder for the files; %(default)s by default")
    return parser.run(_command, arguments)


def _command(given: Namespace) -> None:
    kinds, out = by_kind([read(Path(file)) for file in given.files]), Path(given.out)
    if not kinds:
        raise UserError("no file has a variance at two lengths; measure longer responses, or after updates")
    out.mkdir(parents=True, exist_ok=True)
    for name, columns in LAYOUTS.items():
        draw(kinds, out / name, columns=columns)
    (out / "lengths.md").write_text(table(kinds), encoding="utf-8")
    print(table(kinds), end="")


if __name__ == "__main__":
    sys.exit(main())
