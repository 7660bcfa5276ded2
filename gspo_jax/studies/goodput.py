"""Where the wall-clock time of a run went."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

PARTS = {
    "sampling": ("reshard", "sample"),
    "scoring": ("score",),
    "updates": ("update",),
    "waiting": ("data", "reward"),
    "evaluating": ("evaluate",),
    "saving": ("save",),
    "starting": ("start",),
    "measuring": ("measure", "profile"),
}
"""Phases of `timing/PHASE_s`, by what they are for."""
OUTSIDE = ("evaluate", "save", "start")
"""Phases outside of `timing/iteration_s`."""
HOW_TO_READ = (
    "Waiting: for prompts and rewards. Other: what no phase of an iteration has. Compiling is a part of the others. "
    "Outside of iterations, a process's last evaluation and checkpoint, its imports, and the time in which none ran "
    "are not counted."
)


def goodput(rows: Iterable[Mapping[str, Any]]) -> dict[str, float] | None:
    """Return a run's seconds and the shares of `PARTS`, "other" and "compiling" in them. None without times."""
    seconds: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if (name.startswith("timing/") or name == "compile/seconds") and isinstance(value, (int, float)):
                seconds[name] = seconds.get(name, 0.0) + (value if math.isfinite(value) else 0.0)

    def spent(*phases: str) -> float:
        return sum(seconds.get(f"timing/{phase}_s", 0.0) for phase in phases)

    total = spent("iteration", *OUTSIDE)
    if not total:
        return None
    parts = {name: spent(*phases) for name, phases in PARTS.items()}
    parts["other"] = max(0.0, total - sum(parts.values()))
    parts["compiling"] = seconds.get("compile/seconds", 0.0)
    return {"seconds": total, **{name: value / total for name, value in parts.items()}}
