"""The atlas of gates: gain and gradient weight of every objective against the importance ratio, in one figure.

    python docs/draw/atlas.py [--out=docs/objectives]

Draws `atlas.png`, and `atlas-narrow.png` for phones, with one panel per objective at its defaults, in the colour that
it has in every figure: the gain above, the gradient weight (the factor on Â·∇log π) below, for Â = +1 and Â = −1.
Everything is computed from the catalogue's code by automatic differentiation, so a new objective appears by itself.
Responses are one token long, so the token ratio is also the sequence ratio.
"""

import inspect
import itertools
import sys
import textwrap
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.drawing import GREY, Head, mix, picture
from gspo_jax.errors import UserError
from gspo_jax.objectives import Objective, catalogue, make
from gspo_jax.objectives.surrogates import TokenBatch
from gspo_jax.parser import Parser
from gspo_jax.studies.looks import Look, looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OLD_PROBABILITY = 0.1
"""Value of π_old for the token; it matters only for gains that contain log π_θ itself."""
SHIFT = 0.8
"""Router shift of the second pair of curves, for objectives that use it; the first pair has 1."""
TIGHT_BOUND = 0.05
"""Bound below which an objective is drawn in a window around 1 scaled to its bounds."""
STEPS = 1601
SIGNS = {-1.0: "Â = −1", 1.0: "Â = +1"}
"""Advantages that are drawn, with their names, in the order of drawing."""
LAYOUTS = {"atlas.png": 4, "atlas-narrow.png": 1}
"""Panels per row of each picture; on a phone, four side by side would be too small to read."""
COLUMN, ROW = 3.75, 3.5
"""Inches: width of a column, height of a row."""
SETTINGS = 31
"""Characters of an objective's bounds that fit on a line beside its name."""
HEADLINE = "What each objective makes of the importance ratio"
HOW_TO_READ = (
    "Above: the gain, less its value at ratio 1. Below: the gradient weight, the factor on Â·∇log π. Thin and dark: "
    "Â = +1, wide and light: Â = −1. Shaded: gated. Computed from the code, at its defaults, for responses of one "
    f"token, whose ratio is the sequence ratio too; where a gain contains log π_θ itself, π_old is {OLD_PROBABILITY:g}."
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
            TokenBatch(
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
    starts = [start for sign in SIGNS for start, _ in gated_spans(gate(objective, wide, advantage=sign))]
    return 0.0, max(2.0, 1 + 1.25 * (max(starts, default=1.0) - 1))


def gated_spans(found: Gate) -> list[tuple[float, float]]:
    """Return the first and last ratio of each gated interval."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], found.gated.astype(int), [0]])))
    ratios = [float(ratio) for ratio in found.ratios]
    return [(ratios[first], ratios[end - 1]) for first, end in zip(edges[::2], edges[1::2], strict=True)]


class Drawn(NamedTuple):
    """An objective and its curves, ready to draw."""

    objective: Objective
    window: tuple[float, float]
    gates: Mapping[tuple[float, float], Gate]
    """(advantage, router shift) -> curves, with the gain relative to its value at ratio 1."""


def evaluate(name: str) -> Drawn:
    """Evaluate an objective of the catalogue on the ratios of its window."""
    objective = make(name)
    low, high = window(objective)
    ratios = np.linspace(low, high, STEPS)[1 if low == 0 else 0 :]  # 0 has no log
    gates = {}
    for sign, shift in itertools.product(SIGNS, (1.0, SHIFT) if objective.router_shift else (1.0,)):
        found = gate(objective, np.append(ratios, 1.0), advantage=sign, router_shift=shift)
        gates[sign, shift] = Gate(ratios, found.gain[:-1] - found.gain[-1], found.weight[:-1], found.gated[:-1])
    return Drawn(objective, (low, high), gates)


def draw(path: Path, drawn: Mapping[str, Drawn], *, columns: int) -> None:
    """Draw objectives into one PNG."""
    names = list(drawn)
    width = columns * COLUMN
    head = Head(HEADLINE, HOW_TO_READ, width=width)
    height = head.height + -(-len(names) // columns) * ROW
    wide, high = COLUMN - 0.8, (ROW - 1.15) / 2
    with picture(path, width=width, height=height) as figure:
        for cell, (name, look) in enumerate(zip(names, looks([(name, name, "none") for name in names]), strict=True)):
            left, top = COLUMN * (cell % columns) + 0.62, height - head.height - ROW * (cell // columns) - 0.5
            upper, lower = (
                figure.add_axes((left / width, bottom / height, wide / width, high / height))
                for bottom in (top - high, top - 2 * high - 0.12)
            )
            draw_objective(upper, lower, drawn[name], look)
            if cell % columns == 0:
                for axes, label in ((upper, "gain"), (lower, "gradient weight")):
                    axes.set_ylabel(label, fontsize=10)
                    axes.yaxis.set_label_coords(-0.4 / wide, 0.5)
            if cell + columns >= len(names):
                lower.set_xlabel("importance ratio")
        head.write(figure)


def draw_objective(upper: "Axes", lower: "Axes", drawn: Drawn, look: Look) -> None:
    """Draw the gain, relative to its value at ratio 1, into the upper and the gradient weight into the lower axes."""
    from matplotlib.ticker import MaxNLocator

    objective, (low, high), gates = drawn
    for (sign, shift), found in gates.items():
        width, color = (4.5, mix(look.color, "#FFFFFF", 0.55)) if sign < 0 else (1.8, look.color)  # both stay visible
        style: dict[str, Any] = {"color": color}
        style |= {"linewidth": width} if shift == 1 else {"linewidth": width / 2, "linestyle": (0, (3, 1.5))}
        upper.plot(found.ratios, found.gain, **style)
        lower.plot(found.ratios, _with_gaps(found.weight), **style)
        if shift == 1:
            _mark_gates(upper, lower, found, sign, look.color)
    upper.plot([1], [0], **look.line(markersize=7))
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
    gains = np.concatenate([found.gain[STEPS // 20 :] for found in gates.values()])  # the log of 0 would dwarf the rest
    bottom, top = gains.min(), gains.max()
    upper.set_ylim(bottom - 0.06 * (top - bottom), top + 0.06 * (top - bottom))
    lower.set_ylim(-0.1, 1.05 * max(2.0, lower.dataLim.y1))
    upper.set_title(objective.name, pad=19, color=look.color)
    upper.text(0, 1.05, _composition(objective), transform=upper.transAxes, color=GREY, fontsize=9.5)
    bounds = {"transform": upper.transAxes, "color": GREY, "fontsize": 9.5, "ha": "right"}
    upper.text(1, 1.2, textwrap.fill(_settings(objective), SETTINGS), **bounds)


def _with_gaps(weight: np.ndarray) -> np.ndarray:
    """Return the weights with NaN where a gate opens or shuts, so that no steep line is drawn there."""
    broken = weight.astype(float)
    broken[:-1][np.abs(np.diff(weight)) > 0.2] = np.nan
    return broken


def _mark_gates(upper: "Axes", lower: "Axes", found: Gate, sign: float, color: str) -> None:
    """Shade the gated ratios and label the effect on the gradient there."""
    for start, end in gated_spans(found):
        for axes in (upper, lower):
            axes.axvspan(start, end, color=color, alpha=0.1, linewidth=0, zorder=0)
        above = end == found.ratios[-1]
        there = found.weight[(found.ratios >= start) & (found.ratios <= end)]
        effect = "cut" if not there.any() else "capped" if np.ptp(there) < 1e-3 else "damped"
        place: dict[str, Any] = {"transform": lower.transAxes, "color": color, "fontsize": 9.5, "weight": "bold"}
        effect = f"{SIGNS[sign]}: {effect}"
        if above:
            lower.text(0.98, 0.31 if sign > 0 else 0.14, f"{effect} above {_ratio(start)}", ha="right", **place)
        else:
            lower.text(0.02, 0.84 if sign < 0 else 0.67, f"{effect} below {_ratio(end)}", **place)


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
    """Format the bounds of an objective, or its other numeric defaults if it has none; lines may break after commas."""
    signature = inspect.signature(getattr(catalogue, objective.name))
    softness = {key: p.default for key, p in signature.parameters.items() if isinstance(p.default, float)}
    shown = ", ".join(f"{key}\u00a0{value:g}" for key, value in (objective.bounds or softness).items())
    return (shown or "no gate") + (f", dashed:\u00a0shift\u00a0{SHIFT}" if objective.router_shift else "")


def parser() -> Parser:
    """Build the command-line parser."""
    parser = Parser("python docs/draw/atlas.py", str(__doc__).rpartition("\n\n")[2])
    parser.add_argument("--out", metavar="DIR", default="docs/objectives", help="folder for the two pictures")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return parser().run(_command, arguments)


def _command(given: Namespace) -> None:
    out = Path(given.out)
    jax.config.update("jax_platforms", "cpu")  # only a figure is drawn, so don't wait for an accelerator
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = sorted(catalogue.__all__, key=lambda name: getattr(catalogue, name).__code__.co_firstlineno)
        drawn = {name: evaluate(name) for name in names}  # in their order of definition
        for file, columns in LAYOUTS.items():
            draw(out / file, drawn, columns=columns)
    except OSError as error:
        raise UserError(f"the atlas cannot be written to {out}: {error.strerror}; choose another --out") from None
    print(*(out / name for name in LAYOUTS), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
