"""Executed times compared with the TPU compiler's estimates (`estimated_cycles`)."""

import operator
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

from gspo_jax.planning.cost_records import Cost, Costs
from gspo_jax.planning.memory import shortened
from gspo_jax.planning.setting import Setting

SHOWN = 0.015
"""Minimum share of the time for a line of its own."""
APART = 1.5
"""Ratio of the two counts that needs a reason."""


def compared(costs: Costs, setting: Setting) -> dict[str, Any]:
    """Return executed and estimated seconds by scope, opcode and bound.

    Small operations share one line. Pallas kernels, collectives, asynchronous copies and sorts have no estimate.
    """
    groups: dict[tuple[str, str, str], list[Cost]] = {}
    without = 0.0
    for cost in costs.operations:
        if cost.cycles is None:
            without += cost.times * cost.seconds(setting.rates)
            continue
        key = shortened(cost.scope), cost.operation.partition(" ")[0], cost.bound(setting.rates)
        if key[2] == "latency":
            key = "small operations", "", "latency"
        groups.setdefault(key, []).append(cost)
    lines = [_line(*key, own, setting) for key, own in groups.items()]
    executed, estimated = (sum(line[of] for line in lines) for of in ("executed_s", "estimated_s"))
    few = [line for line in lines if line["executed_s"] < SHOWN * executed and line["estimated_s"] < SHOWN * estimated]
    rest = {of: _added(line[of] for line in few) for of in ("count", "executed_s", "estimated_s")}
    shown = sorted(
        (line for line in lines if line not in few), key=lambda line: -max(line["executed_s"], line["estimated_s"])
    )
    shown.append({"scope": "all others", "opcode": "", "bound": "", **rest, "why": ""})
    return {
        "executed_s": executed,
        "estimated_s": estimated,
        "without_estimate_s": without,
        "lines": [line | {"count": round(line["count"])} for line in shown],
    }


def _line(scope: str, opcode: str, bound: str, costs: Sequence[Cost], setting: Setting) -> dict[str, Any]:
    executed = _added(c.times * c.seconds(setting.rates) for c in costs)
    estimated = _added(c.times * (c.cycles or 0.0) / setting.chip.clock for c in costs)
    why = ""
    if opcode and estimated and not 1 / APART < estimated / max(executed, 1e-12) < APART:
        if bound == "compute":
            why = f"estimated at {_added(c.times * c.executed.flops for c in costs) / estimated / 1e12:.0f} Tflop/s"
        else:
            why = f"estimated at {_added(c.times * c.executed.bytes for c in costs) / estimated / 1e12:.2f} TB/s"
            why += ", a change of layout" if opcode == "copy" else ""
    found = {"scope": scope, "opcode": opcode, "bound": bound, "count": _added(c.times for c in costs)}
    return {**found, "executed_s": executed, "estimated_s": estimated, "why": why}


def _added(values: Iterable[float]) -> float:
    """Return the values' sum, the same in every version of Python: from 3.12 on `sum` compensates for rounding."""
    return reduce(operator.add, values, 0.0)
