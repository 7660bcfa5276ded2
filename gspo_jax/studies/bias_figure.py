"""The pictures and the table of `gspo_jax.bias`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_jax.drawing import PALETTE, Head, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Facts = Mapping[str, Any]
"""Content of `bias.json`."""
LAYOUTS = {"bias.png": 3, "bias-narrow.png": 1}
"""Panels per row of each picture."""
COLUMN, ROW, LABELS = 4.6, 3.2, 1.45
"""Column width, row height and room for labels, in inches."""
HEADLINE = "The bias that sampler-trainer mismatch gives a policy gradient, by source"
HOW_TO_READ = (
    "Bias b: the mean score of a token, 0 if tokens are sampled from the trainer's policy. V: the variance of a mean "
    "score times its tokens, so with V / |b|² tokens a gradient's bias is as large as its noise. Bars are 95% "
    "intervals over prompts. Estimates that are not positive are left out."
)
LEAST, LEAST_KL = 1e-12, 1e-9
"""Of |b|² / V, and of a KL in nats, that is shown: below is rounding."""
KINDS = {"head": "head", "embed": "embedding", "router": "router", "norm": "norms", "attention": "attention"}
"""Words in a tensor's name and what it belongs to, the first that fits."""
REST = "feed-forward"


def table(facts: Facts) -> str:
    """Format the sources as a markdown table."""
    lines = [
        "| source | KL(q ‖ π), nats per token | bias: \\|b\\|² / V | p | tokens at which bias equals noise "
        "| its part in the head |",
        "|---|---|---|---|---|---|",
    ]
    for one in facts["sources"]:
        low, high = one["interval"]
        cells = [one["source"], "" if one["kl"] is None else _number(one["kl"], LEAST_KL)]
        cells += [f"{_number(one['bias'])} [{_number(low)}, {_number(high)}]"]
        cells += [f"{one['p']:.2g}" if abs(one["bias"]) > LEAST else ""]
        cells += [f"{one['tokens_to_dominate']:,.0f}" if one["bias"] > LEAST else "", _number(one["head"]["bias"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _number(value: float, least: float = LEAST) -> str:
    return "0" if abs(value) < least else f"{value:.1e}"


def draw_all(facts: Facts, folder: Path) -> None:
    """Draw the pictures for a page and for a phone."""
    for name, columns in LAYOUTS.items():
        draw(facts, folder / name, columns=columns)


def draw(facts: Facts, path: Path, *, columns: int) -> None:
    """Draw one picture."""
    panels = [
        ("Bias over noise", "|b|² / V", _biases),
        ("KL(q ‖ π)", "nats per token", _divergences),
        ("Where it is, all sources", "share of |b|²", _parts),
    ]
    width = columns * COLUMN
    head = Head(HEADLINE, HOW_TO_READ, width=width)
    height = head.height + -(-len(panels) // columns) * ROW
    with picture(path, width=width, height=height) as figure:
        for cell, (name, x, fill) in enumerate(panels):
            left, top = COLUMN * (cell % columns) + LABELS, head.height + ROW * (cell // columns) + 0.4
            size = (COLUMN - LABELS - 0.25) / width, (ROW - 1.1) / height
            axes = figure.add_axes((left / width, 1 - (top + ROW - 1.1) / height, *size))
            axes.set(title=name, xlabel=x)
            fill(axes, facts)
        head.write(figure)


def _biases(axes: "Axes", facts: Facts) -> None:
    points = {
        one["source"]: (
            one["bias"],
            [[one["bias"] - max(one["interval"][0], LEAST)], [one["interval"][1] - one["bias"]]],
        )
        for one in facts["sources"]
        if one["bias"] > LEAST
    }
    _rows(axes, facts)
    for source, (value, error) in points.items():
        place = _places(facts)[source]
        axes.errorbar(value, place, xerr=error, color=PALETTE[0], marker="o", capsize=3)
    axes.set_xscale("log")
    if points:
        axes.set_xlim(left=min(value for value, _ in points.values()) / 30)


def _divergences(axes: "Axes", facts: Facts) -> None:
    _rows(axes, facts)
    shown = {one["source"]: one["kl"] for one in facts["sources"] if (one["kl"] or 0) > LEAST_KL}
    axes.plot(list(shown.values()), [_places(facts)[source] for source in shown], "o", color=PALETTE[1])
    axes.set_xscale("log")


def _parts(axes: "Axes", facts: Facts) -> None:
    (one,) = (one for one in facts["sources"] if one["source"] == "all")
    parts = dict.fromkeys((*KINDS.values(), REST), 0.0)
    for tensor, bias in one["by_tensor"].items():
        parts[next((kind for word, kind in KINDS.items() if word in tensor), REST)] += bias
    whole = sum(parts.values()) or 1.0
    axes.barh(range(len(parts)), [part / whole for part in parts.values()], color=PALETTE[2])
    axes.set_yticks(range(len(parts)), list(parts))
    axes.invert_yaxis()


def _places(facts: Facts) -> dict[str, int]:
    return {one["source"]: row for row, one in enumerate(facts["sources"])}


def _rows(axes: "Axes", facts: Facts) -> None:
    places = _places(facts)
    axes.set_yticks(list(places.values()), list(places))
    axes.set_ylim(len(places) - 0.5, -0.5)
