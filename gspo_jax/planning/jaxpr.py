"""Flops of a traced program before compilation, with loop bodies times trip counts."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gspo_jax.kernels.scopes import AT_MOST, RARELY


def product_flops(jaxpr: Any, devices: int = 1, *, filled: Mapping[str, float] | None = None) -> float:
    """Return the flops of all matmuls, and of Pallas kernels with a cost estimate, over all devices.

    A matmul inside `jax.shard_map` runs once per shard. `devices`: shards per product of this jaxpr. Data-dependent
    loops count the trips declared by their scope (`scopes.at_most`), else 1, or 0 in the scope `scopes.RARELY`.
    `filled`: see `costs.CostedProgram`.
    """

    def inside(jaxpr: Any, devices: int = devices) -> float:
        return product_flops(jaxpr, devices, filled=filled)

    total = 0.0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            (inner, _), _ = parameters["dimension_numbers"]
            left = equation.invars[0].aval.shape
            out = math.prod(equation.outvars[0].aval.shape)
            total += 2.0 * devices * out * math.prod(left[d] for d in inner)
        elif name == "pallas_call":
            estimate, kernel = parameters["cost_estimate"], str(parameters.get("name", ""))
            share = next((f for begin, f in (filled or {}).items() if kernel.startswith(begin)), 1.0)
            total += share * devices * (estimate.flops if estimate is not None else 0)
        elif name == "shard_map":
            sizes = parameters["mesh"].shape
            cut = parameters.get("newly_manual_axes", parameters.get("manual_axes"))  # its name before jax 0.12
            shards = math.prod(sizes[axis] for axis in cut)
            total += inside(parameters["jaxpr"], devices * shards)
        elif name == "cond":
            branches = (b for b in parameters["branches"] if not any(map(_rare, b.jaxpr.eqns)))
            total += max(map(inside, branches))
        else:
            times = _trips(name, equation)
            total += times * sum(map(inside, _inner_jaxprs(parameters)))
    return total


def _rare(equation: Any) -> bool:
    return RARELY in str(equation.source_info.name_stack).split("/")


def _trips(name: str, equation: Any) -> int:
    if name == "scan":
        return equation.params["length"]
    if name == "while":
        if _rare(equation):
            return 0
        trips = re.findall(AT_MOST, str(equation.source_info.name_stack))
        return int(trips[-1]) if trips else 1
    return 1


def _inner_jaxprs(parameters: dict[str, Any]) -> Iterator[Any]:
    for value in parameters.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, "eqns") or hasattr(one, "jaxpr"):
                yield one
