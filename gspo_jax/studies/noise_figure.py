"""The pictures and the table of `gspo_jax.noise`, of one run or of several in one figure.

    python -m gspo_jax.studies.noise_figure runs/12/noise runs/24/noise --out=docs/routing

Reads `noise.json` of each folder, or copies of it given by name. Writes `noise.png`, `noise-narrow.png` for phones, and
`noise.md`.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_jax import foreign
from gspo_jax.drawing import PALETTE, Head, picture
from gspo_jax.errors import UserError
from gspo_jax.parser import Parser

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Facts = dict[str, Any]
"""Content of `noise.json`."""
LAYOUTS = {"noise.png": 4, "noise-narrow.png": 1}
"""Panels per row of each picture."""
COLUMN, ROW = 3.9, 3.4
"""Column width and row height, in inches."""
FEW = 30
"""Tokens of the smallest class that is drawn: the mean square of a few says nothing."""
HEADLINE = "How much of the importance ratio's noise is routing"
HOW_TO_READ = (
    "Log-ratio = part of the weights (the old policy's routes are replayed) + part of the routes. Share of the routes: "
    "their covariance with the log-ratio, over its variance, above 100% where the parts oppose each other; bars are "
    "95% intervals over prompts. Lower row: after the most updates. Mean squares are of the routes' part, in nats², of "
    f"classes with {FEW} tokens or more."
)


def labels(runs: Sequence[Facts]) -> list[str]:
    """Return the runs' names: their sizes, and what else differs."""
    others: dict[str, Callable[[Facts], str]] = {
        "learning_rate": lambda facts: f"learning rate {facts['learning_rate']:g}",
        "router": lambda facts: f"routers {facts['router']}",
        "sampler": lambda facts: f"{facts['sampler'] or 'precise'} sampler",
    }
    differing = [say for field, say in others.items() if len({facts[field] for facts in runs}) > 1]
    return [
        f"{facts['layers']} layers, {facts['experts_per_token']} of {facts['experts']} experts"
        + "".join(f", {say(facts)}" for say in differing)
        for facts in runs
    ]


def table(runs: Sequence[Facts]) -> str:
    """Format the splits as a markdown table."""
    lines = [
        "| policy | updates | flips | tokens: variance | weights | routes | 2·covariance | share of routes "
        "| responses: variance | share of routes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for facts, name in zip(runs, labels(runs), strict=True):
        for one in facts["after"]:
            low, high = one["flip_interval"]
            cells = [name, str(one["updates"]), f"{one['flip_rate']:.2%} [{low:.2%}, {high:.2%}]"]
            token, sequence = one["token"], one["sequence"]
            cells += [f"{token[part]:.2e}" for part in ("whole", "weights", "routes", "covariance")]
            cells += [_share(token), f"{sequence['whole']:.2e}", _share(sequence)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw_all(runs: Sequence[Facts], folder: Path) -> None:
    """Draw the pictures for a page and for a phone."""
    for name, columns in LAYOUTS.items():
        draw(runs, folder / name, columns=columns)


def draw(runs: Sequence[Facts], path: Path, *, columns: int) -> None:
    """Draw one picture."""
    panels = [
        ("Share of the routes, tokens", "updates", _share_of_routes("token")),
        ("Share of the routes, responses", "updates", _share_of_routes("sequence")),
        ("Routing flip rate", "updates", _by_updates(lambda one: (one["flip_rate"], one["flip_interval"]))),
        ("One layer's routes alone", "layer", _layers),
        ("By flipped experts of a token", "all layers, up to 8 or more", _squares_by("by_flips", "flips")),
        ("By rank of the flipped expert", "best rank in any layer", _squares_by("by_rank", "rank")),
        ("By its router probability", "largest, up to", _squares_by("by_probability", "up_to")),
        ("Share by position", "token of the response", _positions),
    ]
    if not all("by_layer" in facts["after"][-1] for facts in runs):
        panels = [panel for panel in panels if panel[2] is not _layers]
    width = columns * COLUMN
    colors = [PALETTE[number % len(PALETTE)] for number in range(len(runs))]
    head = Head(HEADLINE, HOW_TO_READ, width=width, names=list(zip(labels(runs), colors, strict=True)))
    height = head.height + -(-len(panels) // columns) * ROW
    with picture(path, width=width, height=height) as figure:
        for cell, (name, x, fill) in enumerate(panels):
            left, top = COLUMN * (cell % columns) + 0.75, head.height + ROW * (cell // columns) + 0.4
            size = (COLUMN - 0.95) / width, (ROW - 1.1) / height
            axes = figure.add_axes((left / width, 1 - (top + ROW - 1.1) / height, *size))
            axes.set(title=name, xlabel=x)
            for facts, color in zip(runs, colors, strict=True):
                fill(axes, facts, color)
            if not name.startswith("Share"):
                axes.set_ylim(bottom=0)
        head.write(figure)


def _share(split: Facts) -> str:
    if split["share"] is None:
        return "–"  # nothing varies: a share of nothing
    low, high = split["interval"]
    return f"{split['share']:.1%} [{low:.1%}, {high:.1%}]"


def _by_updates(point: Callable[[Facts], tuple[float | None, Sequence[float]]]) -> Callable[["Axes", Facts, str], None]:
    """Return a drawer of a share, with its interval, over the updates."""

    def fill(axes: "Axes", facts: Facts, color: str) -> None:
        from matplotlib.ticker import NullLocator

        points = [(one["updates"], *point(one)) for one in facts["after"]]
        known = [(x, share, interval) for x, share, interval in points if share is not None]
        _bars(axes, known, color)
        axes.set_xscale("symlog", base=2, linthresh=1)
        axes.set_xticks([x for x, *_ in points], [str(x) for x, *_ in points])
        axes.xaxis.set_minor_locator(NullLocator())
        _percent(axes)

    return fill


def _share_of_routes(level: str) -> Callable[["Axes", Facts, str], None]:
    return _by_updates(lambda one: (one[level]["share"], one[level]["interval"]))


def _bars(axes: "Axes", points: Sequence[tuple[float, float, Sequence[float]]], color: str, **style: Any) -> None:
    """Draw points (x, y, interval of y) with a line."""
    error = [[abs(y - interval[side]) for _, y, interval in points] for side in (0, 1)]
    x, values = [x for x, _, _ in points], [y for _, y, _ in points]
    axes.errorbar(x, values, yerr=error, color=color, **{"marker": "o", "capsize": 3} | style)


def _layers(axes: "Axes", facts: Facts, color: str) -> None:
    layers = facts["after"][-1]["by_layer"]
    points = [(number, one["routes"], one["interval"]) for number, one in enumerate(layers, start=1)]
    _bars(axes, points, color, markersize=4, capsize=1.5, elinewidth=0.8)
    axes.set_ylabel("variance, nats²", fontsize=10)


def _squares_by(section: str, key: str) -> Callable[["Axes", Facts, str], None]:

    def fill(axes: "Axes", facts: Facts, color: str) -> None:
        classes = facts["after"][-1].get(section, [])
        known = [(x, one["routes_squared"], one["interval"]) for x, one in enumerate(classes) if one["tokens"] >= FEW]
        _bars(axes, known, color)
        axes.set_xticks(range(len(classes)), [f"{one[key]:g}" for one in classes])

    return fill


def _positions(axes: "Axes", facts: Facts, color: str) -> None:
    parts = [one for one in facts["after"][-1]["by_position"] if one["tokens"] >= FEW and one["share"] is not None]
    _bars(axes, [((one["from"] + one["to"]) / 2, one["share"], one["interval"]) for one in parts], color)
    _percent(axes)


def _percent(axes: "Axes") -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))


def read(place: Path) -> Facts:
    """Read a folder of `gspo_jax.noise`, or a copy of its noise.json, or raise UserError."""
    file = place / "noise.json" if place.suffix != ".json" else place
    try:
        facts: Any = foreign.read_json(file, inside=file.parent, remedy="")
        table([facts])
        _ = facts["after"][-1]["by_position"][0]["interval"], facts["after"][-1]["by_length"]
    except (OSError, ValueError, LookupError, TypeError):
        command = f"python -m gspo_jax.noise --out={file.parent}"
        raise UserError(f"{place} has no noise.json of this version; measure one with {command}") from None
    return facts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser("python -m gspo_jax.studies.noise_figure", str(__doc__).partition("\n\n")[2])
    parser.add_argument("folders", nargs="+", metavar="DIR", help="what --out of gspo_jax.noise was, or its noise.json")
    parser.add_argument("--out", default="noise", metavar="DIR", help="folder for the figure; %(default)s by default")
    return parser.run(_command, arguments)


def _command(given: Namespace) -> None:
    runs, out = [read(Path(folder)) for folder in given.folders], Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    draw_all(runs, out)
    (out / "noise.md").write_text(table(runs), encoding="utf-8")
    print(table(runs), end="")


if __name__ == "__main__":
    sys.exit(main())
