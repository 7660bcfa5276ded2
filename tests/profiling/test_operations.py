"""Traces read back: times of operations without what runs inside them, by program, on every platform's layout."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from gspo_jax.profiling import operations
from gspo_jax.profiling.operations import operations_of, read

TEXT = """HloModule jit_step, is_scheduled=true

%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %add.1 = f32[8]{0} add(%p, %p), metadata={op_name="jit(step)/while/body/add" stack_frame_id=3}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0), metadata={op_name="weights[\\'head\\']"}
  ROOT %while.2 = f32[8]{0} while(%x), body=%body, metadata={op_name="jit(step)/while"}
}
"""


def event(name: str, begun: float, ended: float, **stats: Any) -> Any:
    return types.SimpleNamespace(name=name, start_ns=begun, duration_ns=ended - begun, stats=list(stats.items()))


def trace(**planes: dict[str, list[Any]]) -> Any:
    def plane(name: str, lines: dict[str, list[Any]]) -> Any:
        made = [types.SimpleNamespace(name=line, events=events) for line, events in lines.items()]
        return types.SimpleNamespace(name=name, lines=made)

    return types.SimpleNamespace(planes=[plane(name.replace("_", ":"), lines) for name, lines in planes.items()])


def on_cpu(name: str, begun: float, ended: float, *, device: int = 0, run: int = 1) -> Any:
    return event(name, begun, ended, hlo_op=name, hlo_module="jit_step", device_ordinal=device, run_id=run)


def test_scopes_of_a_program() -> None:
    scopes = {"p": "", "add.1": "jit(step)/while/body/add", "x": "weights['head']", "while.2": "jit(step)/while"}
    assert operations_of(TEXT) == scopes


def test_threads_of_a_cpu() -> None:
    first = [on_cpu("while.2", 0, 100), on_cpu("add.1", 10, 40), on_cpu("add.1", 50, 90), event("end: add.1", 90, 91)]
    second = [on_cpu("add.1", 60, 70, device=1), event("$python", 0, 500)]
    seen = read(trace(host={"a": first, "b": second}), {"jit_step": operations_of(TEXT)})
    assert seen.devices == 2
    assert seen.running_s == pytest.approx((100 + 10) / 2 * 1e-9)
    assert seen.joined == pytest.approx((30 + 40 + 10) / 110), "the loop's own time has no operation"
    add, loop = seen.operations
    assert (add.name, add.times, add.scope) == ("add.1", 1.5, "jit(step)/while/body/add")
    assert add.seconds == pytest.approx(40e-9) and add.share == pytest.approx(80 / 110)
    assert (loop.name, loop.times) == ("while.2", 0.5) and loop.seconds == pytest.approx(15e-9)


def test_runs_of_a_program_are_apart() -> None:
    events = [on_cpu("add.1", 0, 10, run=1), on_cpu("add.1", 20, 25, run=1), on_cpu("add.1", 90, 100, run=2)]
    seen = read(trace(host={"a": events}), {"jit_step": operations_of(TEXT)})
    assert seen.running_s == pytest.approx((25 + 10) * 1e-9)
    assert seen.joined == pytest.approx(25 / 35)


def test_unknown_programs_are_not_joined() -> None:
    seen = read(trace(host={"a": [on_cpu("add.1", 0, 10)]}), {})
    assert seen.joined == 0 and seen.operations[0].scope == ""


def test_a_tpu() -> None:
    programs = [event("jit_step(123)", 0, 50), event("jit_other(4)", 60, 80)]
    work = [event("%while.2 = f32[8] while(...)", 0, 50), event("add.1", 10, 40), event("%add.1 = f32[8]", 60, 80)]
    lines = {"XLA Modules": programs, "XLA Ops": work, "Async XLA Ops": [event("copy-start", 0, 80)]}
    seen = read(trace(**{"/device_TPU_0": lines}), {"jit_step": operations_of(TEXT)})
    assert [(one.program, one.name) for one in seen.operations] == [
        ("jit_step", "add.1"),
        ("jit_step", "while.2"),
        ("jit_other", "add.1"),
    ]
    assert seen.devices == 1 and seen.joined == pytest.approx(30 / 70)


def test_queues_of_gpus() -> None:
    def kernel(begun: float, ended: float) -> Any:
        return event("loop_add", begun, ended, hlo_op="add.1", hlo_module="jit_step")

    planes = {f"/device_GPU_{i}": {"Stream #13": [kernel(0, 10)], "Stream #14": [kernel(5, 20)]} for i in range(2)}
    seen = read(trace(**planes), {"jit_step": operations_of(TEXT)})
    assert seen.devices == 2 and seen.running_s == pytest.approx(20e-9) and seen.joined == 1
    assert seen.operations[0].times == 2


def test_this_process_knows_its_programs() -> None:
    @jax.jit
    def named_step(x: jax.Array) -> jax.Array:
        return jnp.sin(x) @ x

    named_step(jnp.ones((4, 4)))
    scopes = operations.compiled_programs()["jit_named_step"]
    assert any("sin" in scope for scope in scopes.values())
