"""Traced phases: which iterations, what is written, and what is said of it."""

import gzip
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from gspo_jax.errors import UserError
from gspo_jax.profiling import operations, phases
from gspo_jax.profiling.phases import PhaseTraces, Span, check_span, read_span


@pytest.mark.parametrize("text, span", [("3", Span(3, 3)), ("3:5", Span(3, 5)), ("1:1", Span(1, 1))])
def test_span(text: str, span: Span) -> None:
    assert read_span(text) == span


@pytest.mark.parametrize("text", ["", "3-5", ":", "3:", ":5", "a", "1:2:3", "-1", "٣", "9" * 10])
def test_no_span(text: str) -> None:
    with pytest.raises(UserError, match="such as 3 or 3:5"):
        read_span(text)


@pytest.mark.parametrize("text", ["0", "0:2", "5:3"])
def test_span_that_is_not_counted(text: str) -> None:
    with pytest.raises(UserError, match=f"--profile is {text}; iterations are counted from 1"):
        read_span(text)


def test_span_beyond_a_run() -> None:
    with pytest.raises(UserError, match="for iterations 7 to 8, and the run has 6; use at most 6"):
        check_span(Span(7, 8), done=0, iterations=6)
    with pytest.raises(UserError, match="for iteration 2, and 4 are done; use 5 or a later one"):
        check_span(Span(2, 2), done=4, iterations=6)
    check_span(Span(2, 9), done=4, iterations=6)
    check_span(Span(2, 2), done=6, iterations=6)  # a finished run says that it is


@jax.jit
def traced_step(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 40, lambda _, x: jnp.tanh(x @ x), x)


def work() -> None:
    traced_step(jnp.ones((200, 200))).block_until_ready()


def test_traces(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "MOST", 3)
    traces = PhaseTraces(tmp_path, Span(2, 2))
    work()
    for iteration in (1, 2, 3):
        traces.begin(iteration)
        for phase, works in (("sample", False), ("data", False), ("sample", True), ("sample", False), ("update", True)):
            traces.stop()
            traces.start(phase)
            assert traces.running == (iteration == 2 and phase != "data")
            if works:
                work()
        traces.stop()
        if iteration == 1:
            assert traces.conclude() == []
        elif iteration == 2:
            (line,) = traces.conclude()
            assert f"{tmp_path}/operations.md" in line and f"xprof --logdir={tmp_path}" in line
    assert traces.conclude() == []
    sessions = tmp_path / "plugins/profile"
    assert {path.name for path in sessions.iterdir()} == {"iteration-2-sample", "iteration-2-update"}
    assert json.loads(gzip.decompress((sessions / "iteration-2-update/process-0.trace.json.gz").read_bytes()))
    found = json.loads((tmp_path / "operations.json").read_text())
    assert found.keys() == {"iteration-2-sample", "iteration-2-update"}
    update = found["iteration-2-update"]
    assert update["joined"] > 0.5 and update["running_s"] <= update["seconds"]
    assert len(update["operations"]) <= 3
    assert update["operations"][0]["program"] == "jit_traced_step"
    page = (tmp_path / "operations.md").read_text()
    assert "## iteration-2-update" in page and "| `jit_traced_step` |" in page


def test_a_long_phase_is_traced_in_part(tmp_path: pathlib.Path) -> None:
    trace = phases.Trace(seconds=0.05)
    work()
    jnp.zeros(1).block_until_ready()
    trace._timer.join()
    seconds, seen = trace.stop(tmp_path, name="process-0")
    assert 0.05 <= seconds < 5
    assert seen.devices and (tmp_path / "process-0.xplane.pb").exists()


def test_a_phase_without_work_leaves_nothing(tmp_path: pathlib.Path) -> None:
    traces = PhaseTraces(tmp_path / "profile", Span(1, 1))
    traces.begin(1)
    traces.start("sample")
    traces.stop()
    assert traces.conclude() == [] and not (tmp_path / "profile").exists()


def test_a_folder_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "profile").write_text("")
    traces = PhaseTraces(tmp_path / "profile", Span(1, 1))
    traces.begin(1)
    traces.start("update")
    work()
    with pytest.raises(OSError):
        traces.stop()
    traces.start("reshard")
    work()
    with pytest.raises(OSError):  # the profiler is free again
        traces.stop()


def test_a_trace_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no such plane")

    monkeypatch.setattr(operations, "read", fails)
    traces = PhaseTraces(tmp_path / "profile", Span(1, 1))
    traces.begin(1)
    traces.start("update")
    work()
    with pytest.raises(OSError, match="it could not be read: RuntimeError: no such plane"):
        traces.stop()


def test_beside_another_trace_of_the_process(tmp_path: pathlib.Path) -> None:
    """It is lost, and said to be, when its phase ends: no process stops sooner than another."""
    with jax.profiler.trace(str(tmp_path / "other")):
        traces = PhaseTraces(tmp_path / "profile", Span(1, 1))
        traces.begin(1)
        traces.start("update")
        assert traces.running
        work()
        with pytest.raises(OSError, match="one profile"):
            traces.stop()
    assert list((tmp_path / "other").rglob("*.xplane.pb"))
