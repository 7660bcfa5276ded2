"""Executed times beside the TPU compiler's own estimates (`estimated_cycles`), for the operations that have both."""

from typing import Any

from gspo_jax.planning.costs import Cost, Costs
from gspo_jax.planning.memory import shortened
from gspo_jax.planning.setting import Setting

SHOWN = 0.015
"""Least part of the time, by either count, of operations that are listed by themselves."""
APART = 1.5
"""Ratio of the two counts from which a line says why."""


def compared(costs: Costs, setting: Setting) -> dict[str, Any]:
    """Return seconds as executed and by the compiler's estimate, by scope, opcode and what bounds the operation.

    Operations that take the least time by both counts share one line. The compiler estimates fusions and copies. It has
    no estimate for Pallas kernels, collectives, asynchronous copies and sorts: they execute `without_estimate_s`.
    """
    lines: dict[tuple[str, ...], _Line] = {}
    without = 0.0
    for cost in costs.operations:
        if cost.cycles is None:
            without += cost.times * cost.seconds(setting.rates)
            continue
        key = shortened(cost.scope), cost.operation.partition(" ")[0], _bound(cost, setting)
        if key[2] == "latency" and cost.cycles / setting.chip.clock < APART * setting.rates.operation:
            key = "small operations", "", "latency"
        lines.setdefault(key, _Line(*key)).add(cost, setting)
    executed, estimated = (sum(getattr(x, of) for x in lines.values()) for of in ("executed", "estimated"))
    rest = _Line("all others", "", "")
    for key, line in list(lines.items()):
        if line.executed < SHOWN * executed and line.estimated < SHOWN * estimated:
            rest.join(lines.pop(key))
    ordered = sorted(lines.values(), key=lambda line: -max(line.executed, line.estimated))
    return {
        "executed_s": executed,
        "estimated_s": estimated,
        "without_estimate_s": without,
        "lines": [line.facts() for line in [*ordered, rest]],
    }


class _Line:
    """Sums over operations that have scope, opcode and bound in common."""

    def __init__(self, scope: str, opcode: str, bound: str):
        self.scope, self.opcode, self.bound = scope, opcode, bound
        self.count = self.executed = self.estimated = self.flops = self.bytes = 0.0

    def add(self, cost: Cost, setting: Setting) -> None:
        """Add an operation with an estimate."""
        self.count += cost.times
        self.executed += cost.times * cost.seconds(setting.rates)
        self.estimated += cost.times * (cost.cycles or 0.0) / setting.chip.clock
        self.flops += cost.times * cost.executed.flops
        self.bytes += cost.times * cost.executed.bytes

    def join(self, other: "_Line") -> None:
        """Add another line."""
        self.count += other.count
        self.executed += other.executed
        self.estimated += other.estimated

    def facts(self) -> dict[str, Any]:
        """Return the line as it is written."""
        return {
            "scope": self.scope,
            "opcode": self.opcode,
            "bound": self.bound,
            "count": round(self.count),
            "executed_s": self.executed,
            "estimated_s": self.estimated,
            "why": self.why(),
        }

    def why(self) -> str:
        """Return what the estimate assumes, if the counts are `APART`: its throughput, or work that moves no bytes."""
        if not self.opcode or 1 / APART < self.estimated / max(self.executed, 1e-12) < APART:
            return ""
        if self.bound == "latency":
            return "work on vectors, or strided reads, that bytes do not show"
        if self.bound == "compute":
            return f"estimated at {self.flops / self.estimated / 1e12:.0f} Tflop/s"
        return f"estimated at {self.bytes / self.estimated / 1e12:.2f} TB/s" + (
            ", a change of layout" if self.opcode == "copy" else ""
        )


def _bound(cost: Cost, setting: Setting) -> str:
    """Whether compute, memory or latency bounds an operation."""
    rates = setting.rates
    bounds = {
        "compute": cost.executed.flops / rates.flops,
        "memory": cost.executed.bytes / rates.bandwidth,
        "latency": rates.operation if cost.waits == "operation" else 0.0,
    }
    return max(bounds, key=lambda bound: bounds[bound])
