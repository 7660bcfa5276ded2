"""The atlas of gates: gain and gradient weight of every objective against the importance ratio, in one figure.

    python -m gspo_jax.atlas [--out=docs/objectives]

Draws `atlas.png`, one panel per objective at its defaults: the gain above, the gradient weight (the factor on Â·∇log π)
below, for Â = +1 and Â = −1. Everything is computed from the catalogue's code by automatic differentiation, so a new
objective appears by itself. Responses are one token long, so the token ratio is also the sequence ratio.
"""

import inspect
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.objectives import Objective, catalogue, make
from gspo_jax.objectives.surrogates import Batch
from gspo_jax.reporting.drawing import GREY, PALETTE, Parser, picture
from gspo_jax.types import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OLD_PROBABILITY = 0.1
"""Value of π_old for the token; it matters only for gains that contain log π_θ itself."""
SHIFT = 0.8
"""Router shift of the second pair of curves, for objectives that use it; the first pair has 1."""
TIGHT_BOUND = 0.05
"""Bound below which an objective is drawn in a window around 1 scaled to its bounds."""
STEPS = 1601
COLORS = {1.0: PALETTE[0], -1.0: PALETTE[1]}
COLUMNS, WIDTH, HEAD, ROW = 4, 15.0, 1.25, 3.5
"""Panels per row; then inches: width of the figure, height of its headline, height of a row."""
HEADING: dict[str, Any] = {"weight": "bold", "fontsize": 18, "va": "top"}
HOW_TO_READ = (
    "Above: the gain, less its value at ratio 1. Below: the gradient weight, the factor on Â·∇log π. Shaded: gated.\n"
    "Computed from the code, at its defaults, for responses of one token, whose ratio is the sequence ratio too; "
    f"where a gain contains log π_θ itself, π_old is {OLD_PROBABILITY:g}."
)


class Gate(NamedTuple):
    """Curves of one objective at N ratios, for one sign of the advantage."""

    ratios: np.ndarray
    """Importance ratios, [N]."""
    gain: np.ndarray
    """Gain of a one-token response, [N]."""
    weight: np.ndarray
    """Gradient weight d gain / d log π_θ, divided by the advantage, [N]."""
    gated: np.ndarray
    """True where the objective reports the token as gated, [N]; `weight` shows the effect on the gradient."""


def gate(objective: Objective, ratios: np.ndarray, *, advantage: float, router_shift: float = 1.0) -> Gate:
    """Evaluate an objective on one-token responses with the given importance ratios."""
    old = jnp.full((len(ratios), 1), np.log(OLD_PROBABILITY))
    logprobs = old + jnp.log(jnp.asarray(ratios))[:, None]

    def gain(logprobs: jax.Array) -> tuple[jax.Array, Any]:
        result = objective.surrogate(
            Batch(
                logprobs=logprobs,
                old_logprobs=old,
                mask=jnp.broadcast_to(True, old.shape),
                advantages=jnp.full(old.shape, advantage),
                router_shift=jnp.full(old.shape, router_shift),
            )
        )
        return result.gain.sum(), result

    gradient, result = jax.grad(gain, has_aux=True)(logprobs)
    columns = (result.gain, gradient / advantage, result.gated_low | result.gated_high)
    return Gate(ratios, *(np.asarray(column)[:, 0] for column in columns))


def window(objective: Objective) -> tuple[float, float]:
    """Return the range of ratios to draw: 0 to 2 or past the last gate, or a window around 1 if bounds are tight."""
    bounds = objective.bounds.values()
    if bounds and max(bounds) < TIGHT_BOUND:
        return 1 - 2.5 * max(bounds), 1 + 2.5 * max(bounds)
    wide = np.linspace(0, 16, STEPS)[1:]
    starts = [start for sign in COLORS for start, _ in gated_spans(gate(objective, wide, advantage=sign))]
    return 0.0, max(2.0, 1 + 1.25 * (max(starts, default=1.0) - 1))


def gated_spans(found: Gate) -> list[tuple[float, float]]:
    """Return the first and last ratio of each gated interval."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], found.gated.astype(int), [0]])))
    ratios = [float(ratio) for ratio in found.ratios]
    return [(ratios[first], ratios[end - 1]) for first, end in zip(edges[::2], edges[1::2], strict=True)]


def draw(path: Path) -> None:
    """Draw all objectives of the catalogue, in their order of definition, into one PNG."""
    names = sorted(catalogue.__all__, key=lambda name: getattr(catalogue, name).__code__.co_firstlineno)
    height = HEAD + -(-len(names) // COLUMNS) * ROW
    wide, high = WIDTH / COLUMNS - 0.8, (ROW - 1.15) / 2
    with picture(path, width=WIDTH, height=height) as figure:
        for cell, name in enumerate(names):
            left, top = WIDTH / COLUMNS * (cell % COLUMNS) + 0.62, height - HEAD - ROW * (cell // COLUMNS) - 0.5
            upper, lower = (
                figure.add_axes((left / WIDTH, bottom / height, wide / WIDTH, high / height))
                for bottom in (top - high, top - 2 * high - 0.12)
            )
            draw_objective(upper, lower, name)
            if cell % COLUMNS == 0:
                for axes, label in ((upper, "gain"), (lower, "gradient weight")):
                    axes.set_ylabel(label, fontsize=10)
                    axes.yaxis.set_label_coords(-0.4 / wide, 0.5)
            if cell + COLUMNS >= len(names):
                lower.set_xlabel("importance ratio")
        _headline(figure, height)


def draw_objective(upper: "Axes", lower: "Axes", name: str) -> None:
    """Draw the gain, relative to its value at ratio 1, into the upper and the gradient weight into the lower axes."""
    from matplotlib.ticker import MaxNLocator

    objective = make(name)
    low, high = window(objective)
    ratios = np.linspace(low, high, STEPS)[1 if low == 0 else 0 :]  # 0 has no log
    gains: list[np.ndarray] = []
    for sign, width in ((-1.0, 4.5), (1.0, 1.8)):  # where both coincide, the wider line stays visible
        found = gate(objective, ratios, advantage=sign)
        for shift in (1.0, SHIFT) if objective.router_shift else (1.0,):
            curves = gate(objective, ratios, advantage=sign, router_shift=shift)
            at_one = gate(objective, np.ones(1), advantage=sign, router_shift=shift).gain
            look: dict[str, Any] = {"color": COLORS[sign]}
            look |= {"linewidth": width} if shift == 1 else {"linewidth": width / 2, "linestyle": (0, (3, 1.5))}
            upper.plot(ratios, curves.gain - at_one, **look)
            gains.append((curves.gain - at_one)[STEPS // 20 :])  # the log of a ratio near 0 would dwarf the rest
            lower.plot(ratios, _with_gaps(curves.weight), **look)
        _mark_gates(upper, lower, found, sign)
    for axes in (upper, lower):
        axes.axvline(1, color=GREY, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0.5)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))
        axes.tick_params(labelsize=9.5, length=0)
        if low > 0:
            ticks = [(low + 1) / 2, 1.0, (1 + high) / 2]
            axes.set_xticks(ticks, [_ratio(tick) for tick in ticks])
        axes.set_xlim(low, high)
    upper.tick_params(labelbottom=False)
    bottom, top = min(gain.min() for gain in gains), max(gain.max() for gain in gains)
    upper.set_ylim(bottom - 0.06 * (top - bottom), top + 0.06 * (top - bottom))
    lower.set_ylim(-0.1, 1.05 * max(2.0, lower.dataLim.y1))
    upper.set_title(name, pad=19)
    upper.text(0, 1.05, _composition(objective), transform=upper.transAxes, color=GREY, fontsize=9.5)
    bounds = {"transform": upper.transAxes, "color": GREY, "fontsize": 9.5, "ha": "right"}
    upper.text(1, 1.2, _settings(objective), **bounds)


def _with_gaps(weight: np.ndarray) -> np.ndarray:
    """Return the weights with NaN where a gate opens or shuts, so that no steep line is drawn there."""
    broken = weight.astype(float)
    broken[:-1][np.abs(np.diff(weight)) > 0.2] = np.nan
    return broken


def _mark_gates(upper: "Axes", lower: "Axes", found: Gate, sign: float) -> None:
    """Shade the gated ratios and label the effect on the gradient there."""
    for start, end in gated_spans(found):
        for axes in (upper, lower):
            axes.axvspan(start, end, color=COLORS[sign], alpha=0.12, linewidth=0, zorder=0)
        above = end == found.ratios[-1]
        there = found.weight[(found.ratios >= start) & (found.ratios <= end)]
        effect = "cut" if not there.any() else "capped" if np.ptp(there) < 1e-3 else "damped"
        place: dict[str, Any] = {"transform": lower.transAxes, "color": COLORS[sign], "fontsize": 9.5, "weight": "bold"}
        if above:
            lower.text(0.98, 0.31 if sign > 0 else 0.14, f"{effect} above {_ratio(start)}", ha="right", **place)
        else:
            lower.text(0.02, 0.84, f"{effect} below {_ratio(end)}", **place)


def _ratio(ratio: float) -> str:
    """Format a ratio compactly: 1.2, 1 + 4e-4."""
    if 0 < abs(ratio - 1) < TIGHT_BOUND:
        digits, _, power = f"{abs(ratio - 1):.0e}".partition("e")
        return f"1 {'+' if ratio > 1 else '−'} {digits}e{int(power)}"
    return f"{ratio:.2f}".rstrip("0").rstrip(".")


def _composition(objective: Objective) -> str:
    """Name the token weights and the advantage estimator of an objective."""
    weights: Any = objective.weights
    if isinstance(weights, partial):
        given = ", ".join(f"{key}={value:g}" for key, value in weights.keywords.items() if value is not None)
        name = weights.func.__name__ + (f"({given})" if given else "")
    else:
        name = weights.__name__
    return f"{name}, {'gae' if objective.advantage is None else objective.advantage.__name__}"


def _settings(objective: Objective) -> str:
    """Format the bounds of an objective, or its other numeric defaults if it has no bounds."""
    signature = inspect.signature(getattr(catalogue, objective.name))
    softness = {key: p.default for key, p in signature.parameters.items() if isinstance(p.default, float)}
    shown = ", ".join(f"{key} {value:g}" for key, value in (objective.bounds or softness).items())
    return (shown or "no gate") + (f", dashed: shift {SHIFT}" if objective.router_shift else "")


def _headline(figure: Any, height: float) -> None:
    """Write the title, the colour legend and the reading guide."""
    figure.text(0.012, 1 - 0.15 / height, "What each objective makes of the importance ratio", **HEADING)
    left = 0.012
    for text, color in (("Â = +1", COLORS[1.0]), ("Â = −1", COLORS[-1.0]), (HOW_TO_READ, GREY)):
        bold = "bold" if color != GREY else "normal"
        style = {"color": color, "weight": bold, "fontsize": 11.5, "va": "top", "linespacing": 1.35}
        written = figure.text(left, 1 - 0.58 / height, text, **style)
        left = written.get_window_extent().x1 / figure.bbox.width + 0.012


def parser() -> Parser:
    """Build the command-line parser."""
    parser = Parser("python -m gspo_jax.atlas", str(__doc__).rpartition("\n\n")[2])
    parser.add_argument("--out", metavar="DIR", default="docs/objectives", help="folder for atlas.png")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        out = Path(parser().parse_args(arguments).out)
        jax.config.update("jax_platforms", "cpu")  # only a figure is drawn, so don't wait for an accelerator
        try:
            out.mkdir(parents=True, exist_ok=True)
            draw(out / "atlas.png")
        except OSError as error:
            raise UserError(f"atlas.png cannot be written to {out}: {error.strerror}; choose another --out") from None
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(out / "atlas.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
