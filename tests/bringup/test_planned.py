"""What `plan` says of programs that ran: costs by the names that a trace has, compiled ahead of time for a TPU.

JAX_PLATFORMS=cpu python -m tests.bringup.test_planned v5e:2x2
"""

import json
import pathlib
import sys
import tempfile

import jax
import pytest

from gspo_jax.bringup import planned, programs, recipe, shapes
from gspo_jax.engine import build
from gspo_jax.planning import programs as programs_lib
from gspo_jax.planning import rates, topology
from gspo_jax.planning.ahead import compile_ahead
from gspo_jax.profiling.operations import Operation, operations_of
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import make_meshes
from gspo_jax.setup.players import make_stop_rule
from tests import ahead

NAMES = ("update", "sample_decode")


def figures(target: str) -> dict:
    """Return, of two programs, seconds by `planned` and `executed`, and the share of their names in the text.

    What `first` would run on the slice is checked, too, as `plan` does it.
    """
    mesh = topology.topology_mesh(target, {"fsdp": -1, "expert": 2})
    whole = recipe.get_config(target.replace(":", "-"))
    make_meshes(whole, check(whole), topology.topology_mesh(target, dict(whole.mesh)))
    work = programs.workload_of(pathlib.Path(), shapes.SMALL, "cpu", mesh.size)
    config, found = work.config, {}
    stop = make_stop_rule(config, eos_ids=(), pad_id=0)
    engine = build(config, shapes.SMALL, make_meshes(config, shapes.SMALL, mesh), stop, memory=2**34)
    setting = planned.setting_of(engine, rates.assumed(topology.generation(target)))
    with tempfile.TemporaryDirectory() as cache, jax.set_mesh(mesh):
        for name in NAMES:
            pieces = []
            for program in programs_lib.make(name, engine):
                with jax.set_mesh(program.mesh):
                    lowered = program.trace().lower(lowering_platforms=("tpu",))
                pieces.append(compile_ahead(lowered, key="test", cache=pathlib.Path(cache)))
            text = max((piece.text for piece in pieces), key=len)
            costs, seconds = planned.costs_of(text, name, setting)
            named = operations_of(text)
            ran = [cost.operation.rpartition(" ")[2] for cost in costs.operations if cost.times]
            seen = [Operation("jit_update", each, "", 1e-3, 0.1, 2.0) for each in ran[:50]]
            lost = planned.worst(name, costs, setting.rates, seen) if name == "update" else []
            found[name] = {
                "seconds": seconds,
                "executed": costs.executed(setting.rates),
                "known": sum(each in named for each in ran) / len(ran),
                "lost": len(lost),
                "measured": [one["measured_s"] for one in lost[:1]],
            }
    return found


@pytest.mark.slow
@ahead.needs_libtpu
def test_costs_by_the_names_of_a_trace() -> None:
    found = ahead.figures("tests.bringup.test_planned", "v5e:2x2")
    for name in NAMES:
        assert 1e-6 < found[name]["executed"] <= found[name]["seconds"] < 1, "one step, or one update, of a small model"
        assert found[name]["known"] == 1
    assert found["update"]["lost"] == 50 and found["update"]["measured"] == [5e-4]


if __name__ == "__main__":
    print(json.dumps(figures(sys.argv[1])))
