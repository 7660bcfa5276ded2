"""How groups of runs look in every figure: a colour and a marker for each objective, a line pattern for each replay.

Readers with red-green blindness can tell any two colours of OBJECTIVES apart, and no two share a marker.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo_jax.reporting.drawing import mix


@dataclass(frozen=True)
class Look:
    """The look of a line and of its name."""

    color: str
    marker: str
    hollow: bool = False
    """True if the marker is an outline."""
    pattern: Any = "solid"
    """matplotlib's line style."""

    def line(self, **more: Any) -> dict[str, Any]:
        """Return matplotlib's properties of the line, with its marker, and `more`."""
        face = "white" if self.hollow else self.color
        return {"color": self.color, "linestyle": self.pattern, "marker": self.marker, "markerfacecolor": face} | more


OBJECTIVES = {
    "gspo": Look("#0072B2", "o"),
    "gspo_token": Look("#6655FF", "o", hollow=True),
    "grpo": Look("#D55E00", "s"),
    "dr_grpo": Look("#FF3366", "s", hollow=True),
    "dapo": Look("#664400", "^"),
    "cispo": Look("#EE55EE", "^", hollow=True),
    "rspo": Look("#009E73", "D"),
    "gmpo": Look("#CC77AA", "D", hollow=True),
    "ppo": Look("#0000FF", "v"),
    "sapo": Look("#003399", "v", hollow=True),
    "reinforce": Look("#770066", "X"),
    "rloo": Look("#882233", "X", hollow=True),
    "dppo_tv": Look("#1E2901", "<"),
    "dppo_kl": Look("#5B002D", "<", hollow=True),
    "luspo": Look("#0819C4", ">"),
    "vespo": Look("#982A60", ">", hollow=True),
    "minirl": Look("#D60E31", "p"),
}
"""The look of each objective of the catalogue."""
OTHERS = (
    *(Look("#332288", "P"), Look("#CC6677", "h"), Look("#117733", "*")),
    *(Look("#999933", "P", hollow=True), Look("#882255", "h", hollow=True), Look("#44AA99", "*", hollow=True)),
)
"""Looks of all else: objectives outside the catalogue, and runs that differ in something else."""
PATTERNS = ("solid", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
"""Line patterns of the variants of an objective, which are darker each time."""
REPLAYS = ("none", "r2", "r3")
"""Routing replays, in the order of their patterns."""


def looks(groups: Sequence[tuple[str, str | None, str]]) -> list[Look]:
    """Return the look of each group of a figure, given as (label, objective, routing replay).

    Groups that differ in objective and replay have the objective's colour and marker and the replay's pattern, whatever
    else is in the figure. If groups of several objectives also differ in other settings, patterns follow their order;
    groups of one objective, or of an unknown one (None), have looks by their labels.
    """
    names = {objective for _, objective, _ in groups}
    distinct = len({group[1:] for group in groups}) == len(groups)
    if None in names or (len(names) == 1 and not distinct):
        by_label = _by_name([label for label, _, _ in groups])
        return [by_label[label] for label, _, _ in groups]
    known = OBJECTIVES | _by_name([name for name in names if name is not None and name not in OBJECTIVES])
    found, count = [], dict.fromkeys(names, 0)
    for _, name, replayed in groups:
        place = count[name] if not distinct else REPLAYS.index(replayed) if replayed in REPLAYS else 0
        count[name] += 1
        found.append(variant(known[str(name)], place))
    return found


def variant(look: Look, place: int) -> Look:
    """Return the look of an objective's variant number `place`: darker, and with a pattern of its own."""
    place %= len(PATTERNS)
    return replace(look, color=mix(look.color, "#000000", 0.3 * place), pattern=PATTERNS[place])


def _by_name(names: Sequence[str]) -> dict[str, Look]:
    """Return a look of OTHERS for each name: always the same one, unless another name of the figure has it already."""
    found: dict[str, Look] = {}
    for name in sorted(names):
        start = zlib.crc32(name.encode())
        order = [OTHERS[(start + i) % len(OTHERS)] for i in range(len(OTHERS))]
        free = [look for look in order if look not in found.values()]
        found[name] = (free or order)[0]
    return found
