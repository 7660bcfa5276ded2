"""What `plan` says of the programs that ran here, beside what they took."""

from collections.abc import Mapping
from typing import Any

from gspo_jax.engine import Engine
from gspo_jax.parallel.mesh import count_slices
from gspo_jax.planning import executed
from gspo_jax.planning.calibration import generation
from gspo_jax.planning.cost_records import Costs
from gspo_jax.planning.rates import Rates
from gspo_jax.planning.setting import Setting
from gspo_jax.planning.topology import CHIPS, torus_of
from gspo_jax.profiling.operations import Operation, compiled_texts
from gspo_jax.profiling.phases import PhaseTraces

PROGRAMS = {
    "jit_update": "update",
    "jit_old_policy": "score",
    "jit_prefill": "sample_prefill",
    "jit_decode": "sample_decode",
    "jit_advance_piece": "sample_decode",
}
"""Names in `plan` of compiled programs."""
WORST = 20
"""Operations listed."""


def setting_of(engine: Engine, rates: Rates) -> Setting:
    """Return the engine on the attached chips."""
    devices = list(engine.meshes.trainer.devices.flat)
    kind = generation(devices[0])
    return Setting(engine, CHIPS[kind], rates, torus=torus_of(kind, devices), slices=count_slices(devices))


def texts() -> dict[str, str]:
    """Return the compiled programs of this process by their names in `plan`, the longest of several."""
    found: dict[str, str] = {}
    for module, text in compiled_texts():
        if (name := PROGRAMS.get(module)) is not None:
            found[name] = max(found.get(name, ""), text, key=len)
    return found


def costs_of(text: str, name: str, setting: Setting) -> tuple[Costs, float]:
    """Return a program's costs and its planned seconds; of the decode loop, a step's."""
    program = executed.costed(setting, name, text)
    if name != "sample_decode":
        return program.costs(), program.elapsed(setting.rates)
    loops = zip(program.loops(), program.elapsed_loops(setting.rates), strict=True)
    return max(loops, key=lambda loop: loop[0].bytes)


def beside(engine: Engine, each_s: Mapping[str, float], rates: Rates, traces: PhaseTraces | None) -> dict[str, Any]:
    """Return measured and planned seconds of each program, and the operations whose times differ most."""
    setting, seconds, operations = setting_of(engine, rates), {}, []
    for name, text in texts().items():
        costs, planned_s = costs_of(text, name, setting)
        seconds[name] = each_s[name], planned_s
        if traces is not None:
            operations += worst(name, costs, rates, [one for seen in traces.seen.values() for one in seen.operations])
    operations.sort(key=lambda one: -one["lost_s"])
    return {"seconds": seconds, "operations": operations[:WORST]}


def worst(name: str, costs: Costs, rates: Rates, seen: list[Operation]) -> list[dict[str, Any]]:
    """Return the measured and executed seconds of a program's operations that the traces have."""
    counted = {cost.operation.rpartition(" ")[2]: cost.seconds(rates) for cost in costs.operations}
    return [
        {
            "program": name,
            "operation": one.name,
            "scope": one.scope,
            "measured_s": one.seconds / one.times,
            "executed_s": counted[one.name],
            "lost_s": one.seconds - one.times * counted[one.name],
        }
        for one in seen
        if PROGRAMS.get(one.program) == name and one.name in counted
    ]
