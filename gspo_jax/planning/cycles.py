"""Executed times beside the TPU compiler's own estimates, for the operations that have both."""

from typing import Any, NamedTuple

from gspo_jax.parallel.costs import Cost, Costs
from gspo_jax.planning.memory import shortened
from gspo_jax.planning.setting import Setting

SHOWN = 0.005
"""Least part of the time, by either count, of the operations that are listed by themselves."""
OTHERS = "others"


class _Key(NamedTuple):
    """What operations that share a line have in common."""

    scope: str
    bound: str


def compared(costs: Costs, setting: Setting) -> dict[str, Any]:
    """Return seconds as executed and by the compiler's estimates, by scope and by what bounds the operation.

    `estimated_s` counts only the operations for which the compiler has an estimate: none for Pallas kernels,
    collectives, asynchronous copies and sorts, whose executed time is `without_estimate_s`.
    """
    lines: dict[_Key, list[float]] = {}
    without = 0.0
    for cost in costs.operations:
        seconds = cost.times * cost.seconds(setting.rates)
        if cost.cycles is None:
            without += seconds
            continue
        line = lines.setdefault(_Key(shortened(cost.scope) or "(no scope)", _bound(cost, setting)), [0.0, 0.0, 0.0])
        for i, value in enumerate((cost.times, seconds, cost.times * cost.cycles / setting.chip.clock)):
            line[i] += value
    total = [sum(line[i] for line in lines.values()) for i in (1, 2)]
    shown = {key: line for key, line in lines.items() if any(line[i + 1] > SHOWN * total[i] for i in (0, 1))}
    rest = [sum(line[i] for key, line in lines.items() if key not in shown) for i in range(3)]
    ordered = sorted(shown.items(), key=lambda item: -max(item[1][1:]))
    return {
        "executed_s": total[0],
        "estimated_s": total[1],
        "without_estimate_s": without,
        "lines": [
            {"scope": key.scope, "bound": key.bound, "count": round(n), "executed_s": ours, "estimated_s": theirs}
            for key, (n, ours, theirs) in [*ordered, (_Key(OTHERS, ""), rest)]
        ],
    }


def _bound(cost: Cost, setting: Setting) -> str:
    """Whether compute, memory or latency bounds an operation."""
    rates = setting.rates
    bounds = {
        "compute": cost.executed.flops / rates.flops,
        "memory": cost.executed.bytes / rates.bandwidth,
        "latency": rates.operation if cost.waits == "operation" else 0.0,
    }
    return max(bounds, key=lambda bound: bounds[bound])
