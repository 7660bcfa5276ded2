"""Weak scaling from plans: flops, traffic, memory and time per chip on slices of several sizes, in one figure.

    python docs/draw/scaling.py PLAN PLAN … [--program=update] [--out=docs/scaling]

Each PLAN is a file written by `python -m gspo_jax.plan --json=PLAN`; all should have the same work per chip. Writes
`scaling.png`, `scaling-narrow.png` for phones and the table `scaling.md`. Times are ahead-of-time projections, not
measurements; see plan.py.
"""

import dataclasses
import json
import math
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_jax import foreign
from gspo_jax.drawing import INK, PALETTE, Head, picture
from gspo_jax.errors import UserError
from gspo_jax.parser import Parser

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LAYOUTS = {"scaling.png": 3, "scaling-narrow.png": 1}
"""Panels per row of each picture; on a phone, three side by side would be too small to read."""
COLUMN, ROW = 4.3, 3.65
"""Inches: width of a column, height of a row."""
HOW_TO_READ = "Read off programs compiled for these slices. Times are bounds and projections, not measured."
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
"""Collectives shown by name; all others are summed up as `OTHERS`."""
OTHERS = "others"
COLORS: Mapping[str, str] = dict(zip((*KINDS, OTHERS), PALETTE, strict=False))
"""Colour of each kind of collective."""


@dataclasses.dataclass(frozen=True)
class Point:
    """Per-chip figures of one run of a program on a slice."""

    chips: int
    """Number of chips of the slice."""
    topology: str
    """Slice, such as v5p:4x4x4."""
    mesh: str
    """Mesh axes of size above 1, formatted."""
    flops: float
    """Flops per chip."""
    sent: Mapping[str, float]
    """Bytes sent per chip, by kind of collective."""
    peak: float
    """Peak memory in bytes, resident state included."""
    fits: bool
    """True if the program fits a chip's memory."""
    executed: float
    """Time that is executed, in seconds."""
    projected: tuple[float, float] | None
    """Lower and upper projected seconds; None if the plan has no projection."""


def read(path: Path, program: str) -> Point:
    """Read a program's figures from a plan.

    Raises:
      UserError: the file is not a plan, or the program is missing from it or did not compile.
    """
    try:
        foreign.is_file(path)
        plan = json.loads(path.read_text(encoding="utf-8"))
        facts, mesh = plan["programs"], plan["mesh"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a plan ({error}); make one: python -m gspo_jax.plan --json={path}") from None
    if program not in facts:
        raise UserError(f"{path} has no program {program!r}, only {', '.join(facts)}; plan it, or choose one of these")
    found = facts[program]
    if "flops" not in found:
        raise UserError(f"{path}: {program} did not compile: it {found['warnings'][0]}; leave this plan out")
    sent: Counter[str] = Counter()
    for one in found["collectives"]:
        sent[one["kind"] if one["kind"] in KINDS else OTHERS] += one["bytes"]
    return Point(
        chips=math.prod(mesh.values()),
        topology=plan["topology"],
        mesh=", ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1),
        flops=found["flops"],
        sent=sent,
        peak=found["peak_bytes"] + found["resident_bytes"],
        fits=found["fits"],
        executed=found["seconds"]["executed"],
        projected=tuple(found["projected_step_s"]) if found["projected_step_s"] else None,
    )


def table(points: Sequence[Point], program: str) -> str:
    """Format the points as a markdown table."""
    first = points[0].flops
    lines = [
        f"| `{program}` on | mesh | Tflop per chip | against the first | GB sent per chip | of it all-reduced "
        "| memory, GB | executed, s | projected, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for p in points:
        projected = "–".join(f"{t:.2f}" for t in p.projected) if p.projected else "none"
        memory = f"{p.peak / 1e9:.1f}" + ("" if p.fits else " (does not fit)")
        cells = [
            f"{p.topology}, {p.chips} chips",
            p.mesh,
            f"{p.flops / 1e12:.2f}",
            f"{p.flops / first - 1:+.2%}",
            f"{sum(p.sent.values()) / 1e9:.1f}",
            f"{p.sent['all-reduce'] / 1e9:.1f}",
            memory,
            f"{p.executed:.2f}",
            projected,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(points: Sequence[Point], path: Path, program: str, *, columns: int = 3) -> None:
    """Draw three panels over the number of chips: flops and their change, bytes sent by kind, time."""
    width = columns * COLUMN
    note = f"In {program}, at the same work per chip. {HOW_TO_READ}"
    head = Head("What one chip does", note, width=width)
    height = head.height + -(-3 // columns) * ROW
    with picture(path, width=width, height=height) as figure:
        x = range(len(points))
        for cell, fill in enumerate((_flops, _sent, _times)):
            left, top = COLUMN * (cell % columns) + 0.65, head.height + ROW * (cell // columns) + 0.4
            size = (COLUMN - 0.8) / width, (ROW - 1.0) / height
            axes = figure.add_axes((left / width, 1 - (top + ROW - 1.0) / height, *size))
            axes.set_xticks(x, [str(p.chips) for p in points])
            axes.set_xlim(-0.6, len(points) - 0.4)
            axes.set_xlabel("chips")
            axes.grid(visible=False, axis="x")
            fill(axes, points)
        head.write(figure)


def _bars(axes: "Axes", heights: Sequence[float], label: str, *, below: Sequence[float], color: str) -> None:
    axes.bar(range(len(heights)), heights, 0.62, bottom=below, color=color, label=label)


def _label_above(axes: "Axes", x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), (0, 3), textcoords="offset points", ha="center", va="bottom", fontsize=10)


def _flops(axes: "Axes", points: Sequence[Point]) -> None:
    heights = [p.flops / 1e12 for p in points]
    _bars(axes, heights, "", below=[0.0] * len(points), color=PALETTE[0])
    for i, height in enumerate(heights):
        _label_above(axes, i, height, f"{height:.1f}\n{height / heights[0] - 1:+.2%}")
    axes.set_ylim(0, 1.25 * max(heights))
    axes.set_title("Tflop per chip")


def _sent(axes: "Axes", points: Sequence[Point]) -> None:
    shown = [kind for kind in (*KINDS, OTHERS) if any(p.sent[kind] > 0.005 * sum(p.sent.values()) for p in points)]
    below = [0.0] * len(points)
    for kind in shown:
        heights = [p.sent[kind] / 1e9 for p in points]
        _bars(axes, heights, kind, below=below, color=COLORS[kind])
        below = [a + b for a, b in zip(below, heights, strict=True)]
    for i, total in enumerate(below):
        _label_above(axes, i, total, f"{total:.0f}")
    axes.set_ylim(0, 1.4 * max(below))
    axes.legend(frameon=False, fontsize=10, loc="upper left", ncols=2)
    axes.set_title("GB sent per chip")


def _times(axes: "Axes", points: Sequence[Point]) -> None:
    for i, p in enumerate(points):
        axes.plot([i - 0.25, i + 0.25], [p.executed] * 2, color=INK, linewidth=2, label="" if i else "executed")
        if p.projected:
            low, high = p.projected
            axes.bar(i, high - low, 0.5, bottom=low, color=PALETTE[2], label="" if i else "projected")
            _label_above(axes, i, high, f"{low:.2f}–{high:.2f}")
    axes.set_ylim(0, 1.35 * max(p.projected[1] if p.projected else p.executed for p in points))
    axes.legend(frameon=False, fontsize=10, loc="lower left")
    axes.set_title("Seconds")


def parser() -> Parser:
    """Build the command-line parser."""
    parser = Parser("python docs/draw/scaling.py", str(__doc__).rpartition("\n\n")[2])
    parser.add_argument("plans", nargs="+", metavar="PLAN", help="file written by plan --json")
    parser.add_argument("--program", default="update", help="program of the plans to show")
    parser.add_argument("--out", metavar="DIR", default="docs/scaling", help="folder for the pictures and scaling.md")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return parser().run(_command, arguments)


def _command(given: Namespace) -> None:
    points = sorted((read(Path(path), given.program) for path in given.plans), key=lambda point: point.chips)
    out = Path(given.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, columns in LAYOUTS.items():
            draw(points, out / name, given.program, columns=columns)
        (out / "scaling.md").write_text(table(points, given.program), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}; choose another --out") from None
    print(table(points, given.program), end="")


if __name__ == "__main__":
    sys.exit(main())
