"""Looks of groups of runs in all figures: colour and marker by objective, line pattern by replay.

Readers with red-green blindness can tell any two colours of OBJECTIVES apart. No two share a marker.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo_jax.drawing import mix


@dataclass(frozen=True)
class Look:
    """Look of a line and its name."""

    color: str
    marker: str
    hollow: bool = False
    """True for an outlined marker."""
    pattern: Any = "solid"
    """matplotlib's line style."""

    def line(self, **more: Any) -> dict[str, Any]:
        """Return matplotlib's properties of the line and its marker, and `more`."""
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
    "dro": Look("#EB8250", "p", hollow=True),
    "tbpo": Look("#3750CD", "d"),
    "minpro": Look("#00A5FF", "d", hollow=True),
}
OTHERS = (
    *(Look("#332288", "P"), Look("#CC6677", "h"), Look("#117733", "*")),
    *(Look("#999933", "P", hollow=True), Look("#882255", "h", hollow=True), Look("#44AA99", "*", hollow=True)),
)
"""Looks of other objectives, and of runs that differ in something else."""
PATTERNS = ("solid", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
"""Line patterns of an objective's variants, darker each time."""
REPLAYS = ("none", "r2", "r3", "r3w")
"""Routing replays, in pattern order."""


def looks(groups: Sequence[tuple[str, str | None, str]]) -> list[Look]:
    """Return the look of each group of a figure, given as (label, objective, routing replay).

    Groups that differ in objective and replay have the objective's colour and marker and the replay's pattern in every
    figure. If groups of several objectives also differ in other settings, patterns follow their order. Groups of one
    objective, or of an unknown one (None), have looks by label.
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
    """Return an objective's variant number `place`: darker, with its own pattern."""
    place %= len(PATTERNS)
    return replace(look, color=mix(look.color, "#000000", 0.3 * place), pattern=PATTERNS[place])


def _by_name(names: Sequence[str]) -> dict[str, Look]:
    """Return a look of OTHERS for each name, the same in all figures unless another name has taken it."""
    found: dict[str, Look] = {}
    for name in sorted(names):
        start = zlib.crc32(name.encode())
        order = [OTHERS[(start + i) % len(OTHERS)] for i in range(len(OTHERS))]
        free = [look for look in order if look not in found.values()]
        found[name] = (free or order)[0]
    return found
