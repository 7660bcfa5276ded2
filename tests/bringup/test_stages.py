"""Verdicts of the stages from their figures, and their records."""

import dataclasses
import json
import math
import pathlib
import types
from typing import Any

import jax
import numpy as np
import pytest

from gspo_jax.bringup import catalogue, machine, page, programs, rates, shapes, stages, training
from gspo_jax.bringup.rates import Expected
from gspo_jax.bringup.stages import FAILED, OK, WARNING, Given, Record
from gspo_jax.doctor import Finding
from gspo_jax.models.published import find
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.planning.topology import CHIPS

GIVEN = Given(pathlib.Path("first"), 10.0, "", 8)


def record(name: str, *findings: Finding, **machine: Any) -> Record:
    return Record(name, 1.5, list(findings), {"x": 1}, machine)


def test_stages_fit_into_the_minutes() -> None:
    assert 0.9 < sum(stage.share for stage in catalogue.STAGES) <= 1
    assert len({stage.name for stage in catalogue.STAGES}) == len(catalogue.STAGES)


def test_what_is_asked_survives_the_wire() -> None:
    assert Given.read(GIVEN.wire) == GIVEN


def test_records(tmp_path: pathlib.Path) -> None:
    assert stages.read(tmp_path, "rates") is None
    kept = record("rates", Finding("links", WARNING, "slow", "Look."), Finding("memory", OK, "fast"), devices="8 x cpu")
    kept.write(tmp_path)
    assert stages.read(tmp_path, "rates") == kept
    assert [file.name for file in (tmp_path / "stages").iterdir()] == ["rates.json"]
    (tmp_path / "stages" / "rates.json").write_text(json.dumps({"stage": "rates"}))
    assert stages.read(tmp_path, "rates") is None, "a damaged record is none"
    stages.forget(tmp_path, "rates")
    stages.forget(tmp_path, "rates")


def test_a_record_is_as_bad_as_its_worst_finding() -> None:
    fine, doubtful, wrong = (Finding("a", state, "b") for state in (OK, WARNING, FAILED))
    assert record("x").state == OK
    assert record("x", fine, doubtful).state == WARNING
    assert record("x", doubtful, wrong, fine).state == FAILED


def test_the_page_begins_with_what_failed() -> None:
    titles = {"machine": "What is here", "rates": "How fast it is", "kernels": "Kernels"}
    found = [
        record("machine", Finding("memory", WARNING, "little memory"), Finding("jax", OK, "0.12")),
        record("rates", Finding("devices", FAILED, "device 3 is slow", "Replace it.")),
    ]
    assert page.verdict(titles, found) == [
        "- **Failed**: How fast it is: devices: device 3 is slow",
        "- **Doubtful**: What is here: memory: little memory",
        "- **Not run**: Kernels",
    ]
    text = page.page(titles, found, rates="first/rates.json")
    assert text.splitlines()[2] == "- **Failed**: How fast it is: devices: device 3 is slow"
    assert "- failed: devices: device 3 is slow. Replace it." in text and "--rates=first/rates.json" in text
    assert page.verdict({"machine": "What is here"}, [record("machine")]) == ["All 1 stages hold."]


@pytest.mark.parametrize(
    ("kind", "sides", "links"),
    [
        ("TPU v5 lite", (2, 4, 1), 100e9),  # two of four
        ("TPU v5", (2, 2, 1), 200e9),  # two of six
        ("TPU v5", (4, 4, 4), 600e9),
        ("TPU v6 lite", (1, 1, 1), None),
    ],
)
def test_links_are_those_of_a_corner(kind: str, sides: tuple[int, int, int], links: float | None) -> None:
    devices = [
        types.SimpleNamespace(device_kind=kind, platform="tpu", coords=at, core_on_chip=0) for at in np.ndindex(sides)
    ]
    found = rates.expected(devices[0], devices)
    assert (found["links"].rate if "links" in found else None) == links


@pytest.mark.parametrize("share, state", [(1.1, OK), (0.5, OK), (0.49, WARNING), (0.2, WARNING), (0.1, FAILED)])
def test_a_rate_beside_the_expected_one(share: float, state: str) -> None:
    found = rates.judged("memory", share * 8e11, Expected(8e11, "published peak of v5e"))
    assert found.state == state and f"{share:.0%} of 8e+11 (published peak of v5e)" in found.found
    assert bool(found.remedy) == (state != OK)


def test_a_slow_device_is_named() -> None:
    devices = [{"device": i, "flops": 1e14, "bandwidth": 8e11} for i in range(8)]
    assert [one.state for one in rates.compared(devices, 0.8)] == [OK]
    devices[3]["bandwidth"] /= 10
    (found,) = rates.compared(devices, 0.8)
    assert found.state == FAILED and found.found == "device 3 has 10% of the median device's bandwidth"
    assert rates.compared(devices[:1], 0.8)[0].state == OK


def test_less_memory_than_plan_counts_on() -> None:
    granted = CHIPS["v5e"].memory
    assert machine.memory_findings("v5e", [granted, None]) == []
    assert machine.memory_findings("cpu", [1]) == []
    (found,) = machine.memory_findings("v5e", [granted, granted // 2])
    assert found.state == WARNING and "a chip gives 8.5 GB, and plan counts on 16.9 GB of a v5e" in found.found


@pytest.mark.parametrize(
    "ratio, state", [(1.0, OK), (1.4, OK), (2.0, WARNING), (0.5, WARNING), (4.0, FAILED), (0.1, FAILED)]
)
def test_a_program_beside_the_plan(ratio: float, state: str) -> None:
    found = programs.judged("update", ratio * 0.01, 0.01)
    assert found.state == state and f"{ratio:.2f} times the 10.00 ms of plan" in found.found


@pytest.mark.parametrize(
    "kind, devices, says",
    [
        ("v5e", 1, " with 3 of 48 layers, 16 of 128 experts, 37984 of 151936 tokens"),
        ("v5e", 8, " with 3 of 48 layers, 75968 of 151936 tokens"),
        ("v5p", 32, ""),
    ],
)
def test_shapes_that_fit(kind: str, devices: int, says: str) -> None:
    memory, whole = CHIPS[kind].memory, find(shapes.SHAPE)
    sizes = mesh_lib.mesh_sizes(programs.sizes_of(devices, 1), devices)
    mesh = jax.sharding.AbstractMesh(sizes, mesh_lib.AXES)
    model = shapes.fitting(memory, mesh)
    assert shapes.described(model, whole) == says
    held = shapes.trained_bytes(model, mesh)
    assert 16 * shapes.parameters(model) / devices <= held <= shapes.SHARE * memory


def rows(**last: Any) -> list[dict[str, Any]]:
    first = {"update/skipped": 0.0, "actor/grad_norm": 0.4, "mismatch/kl": 1e-9, "ratio/sequence_log_max": 1e-8}
    own = {"update/skipped": 0.0, "actor/grad_norm": 0.4, "ratio/token_log_std": 0.1}
    own |= {"routing/flip_rate": 0.05, "routing/max_violation": 0.6} | last
    return [{"reward": 0.5 + i / 100, "first": dict(first), "last": dict(own)} for i in range(10)]


def states(found: list[Finding]) -> dict[str, str]:
    return {one.check: one.state for one in found}


def test_a_training_that_learns() -> None:
    found = training.judged(rows(), "float32", 10**9, 2e9)
    assert states(found) == dict.fromkeys(("mismatch", "ratios", "learning", "routing", "memory"), OK)
    assert "reward from 0.5200 to 0.5700 in 10 iterations" in {one.found for one in found}


def test_a_training_that_does_not() -> None:
    seen = rows(**{"ratio/token_log_std": 0.0, "routing/flip_rate": None})
    for row in seen:
        row["reward"] = 0.5
    seen[4]["first"] |= {"mismatch/kl": 0.2, "ratio/sequence_log_max": 0.1, "actor/grad_norm": math.nan}
    found = training.judged(seen, "bfloat16", None, 2e9)
    assert states(found) == {"updates": FAILED, "mismatch": FAILED, "ratios": FAILED, "learning": WARNING}
    assert "an update of iteration 5 is not finite" in {one.found for one in found}
    assert dataclasses.asdict(found[0])["remedy"]
