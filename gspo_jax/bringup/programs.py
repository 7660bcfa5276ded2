"""Stage: how fast a run is. The programs of an iteration with random weights, timed, traced and beside `plan`."""

import dataclasses
import math
import statistics
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import psutil
from ml_collections import ConfigDict

from gspo_jax import workload
from gspo_jax.bench import PARTS, Iterations
from gspo_jax.bringup import planned, shapes
from gspo_jax.bringup.rates import FILE as RATES
from gspo_jax.bringup.stages import FAILED, OK, WARNING, Given, Result
from gspo_jax.doctor import Finding
from gspo_jax.engine import Engine
from gspo_jax.limited import quoted
from gspo_jax.models import huggingface, random_weights
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.published import find
from gspo_jax.parallel import hosts, processes
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.mesh import shard_bytes
from gspo_jax.planning import rates as rates_lib
from gspo_jax.planning.calibration import generation, kind_of
from gspo_jax.planning.topology import CHIPS
from gspo_jax.profiling.phases import PhaseTraces, Span
from gspo_jax.workload import Workload

Kind = TypeVar("Kind", bound=Iterations)
PROFILE = "profile"
EXPERT_SHARDS = 4
"""Most shards of experts."""
REPEATS = 3
APART, FAR = 1.5, 3.0
"""Times measured over planned, from which a program is doubtful, and wrong."""
NAMED = {"cpu": 0.6, "gpu": 0.3, "tpu": 0.9}
"""Least share of the devices' time with a name. Simulated devices wait for cores in between, GPUs for launches."""
TRACED_S = 1.0
"""Seconds of each phase that are traced. A decode of a large model has a million events in five."""
LEARNING_RATES = {"float32": 1e-2, "bfloat16": 1e-3}
"""Of a small and of a large model."""
SIZES = {
    "cpu": {"group": 4, "prompt_length": 16, "new_tokens": 32, "dtype": "float32"},
    "accelerator": {"group": 8, "prompt_length": 128, "new_tokens": 256, "dtype": "bfloat16"},
}


class Learned(Workload):
    """A benchmark's workload with a learning rate for random weights."""

    @property
    def config(self) -> ConfigDict:
        """Config of such a run."""
        config = super().config
        config.optimizer.learning_rate = LEARNING_RATES[self.dtype]
        return config


@dataclasses.dataclass(frozen=True)
class Tried:
    """A model and a workload to try this machine with."""

    work: Workload
    model: ModelConfig
    says: str
    memory: float
    """Bytes of a device."""


def sizes_of(devices: int, slices: int) -> dict[str, int]:
    """Return the axes of the mesh of so many devices in so many slices."""
    return {"data": slices, "fsdp": -1, "expert": math.gcd(devices // slices, EXPERT_SHARDS)}


def chosen(name: str, kind: str, memory: float, mesh: shapes.AnyMesh) -> tuple[ModelConfig, str]:
    """Return the shape of a name, or one that fits into a device's memory, and what it is called."""
    if name:
        return find(name), name
    if kind == "cpu":
        return shapes.SMALL, "a small mixture of experts"
    model = shapes.fitting(memory, mesh)
    return model, shapes.SHAPE + shapes.described(model, find(shapes.SHAPE))


def workload_of(folder: Path, model: ModelConfig, kind: str, devices: int, slices: int = 1) -> Learned:
    """Return the iterations that are timed."""
    mesh = sizes_of(devices, slices)
    if not model.is_routed or model.num_experts % mesh["expert"]:
        del mesh["expert"]
    sizes: dict[str, Any] = {"prompts": 2 * devices, "minibatches": 2, "devices": devices} | SIZES[kind]
    return Learned(model=folder, mesh=mesh, repeats=REPEATS, **sizes)


@contextmanager
def trying(given: Given) -> Iterator[Tried]:
    """Choose a model and a workload, in a folder of this process's own."""
    device, devices, slices = jax.local_devices()[0], jax.device_count(), mesh_lib.count_slices(jax.devices())
    mesh = mesh_lib.make_mesh(sizes_of(devices, slices))
    memory = hosts.memory_of(mesh) or psutil.virtual_memory().available * processes.count() / devices
    model, says = chosen(given.model, kind_of(device), memory, mesh)
    with tempfile.TemporaryDirectory(prefix="gspo_jax-first-") as name:
        folder = Path(name)
        huggingface.write_config(folder, model, np.dtype(np.float32))
        random_weights.write(folder, 0)
        work = workload_of(folder, model, kind_of(device), devices, slices)
        yield Tried(work, work.check(), says, memory)


def over_memory(engine: Engine, tried: Tried) -> list[Finding]:
    """Return a finding if weights and optimizer alone do not fit."""
    needed = shard_bytes((engine.placed_state, engine.copied))
    if needed <= tried.memory:
        return []
    text = (
        f"{tried.says} does not fit: weights and optimizer take {needed / 1e9:.1f} GB of a device, which has "
        f"{tried.memory / 1e9:.1f} GB"
    )
    return [Finding("memory", FAILED, text, "Give a smaller --model, or more devices.")]


def with_iterations(given: Given, kind: type[Kind], use: Callable[[Kind, Tried], Result]) -> Result:
    """Return what `use` finds with begun iterations, or that the model or one of its programs does not fit."""
    with trying(given) as tried:
        mesh = mesh_lib.make_mesh(tried.work.mesh)
        with jax.set_mesh(mesh):
            iterations = kind(tried.work, tried.model, mesh, begin=False)
            if found := over_memory(iterations.engine, tried):
                return found, {"model": tried.says}
            try:
                iterations.begin_state()
                return use(iterations, tried)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                text = f"a program of {tried.says} is over memory: {str(error).splitlines()[0][:200]}"
                return [Finding("memory", FAILED, text, "Give a smaller --model.")], {"model": tried.says}


def run(given: Given) -> Result:
    """Time an iteration's programs, trace them, and compare them with `plan`."""
    return with_iterations(given, Iterations, partial(measured, given))


def measured(given: Given, iterations: Iterations, tried: Tried) -> Result:
    """Time and trace iterations."""
    work = tried.work
    compiled = iterations.run(0)
    seen, stats = [], []
    for number in range(1, 1 + work.repeats):
        seen.append(iterations.run(number))
        stats.append(iterations.stats)
    seconds = {part: statistics.median(one[part] for one in seen) for part in (*PARTS, "iteration")}
    each = {
        "update": seconds["update"] / work.minibatches,
        "score": seconds["score"],
        "sample_prefill": statistics.median(one.prefill_s for one in stats),
        "sample_decode": statistics.median(one.decode_s for one in stats) / stats[-1].steps,
    }
    least = workload.flops(tried.model, work)
    figures: dict[str, Any] = {
        "model": tried.says,
        "parameters": shapes.parameters(tried.model),
        "workload": {**vars(work), "model": tried.says, "mesh": dict(work.mesh)},
        "seconds": seconds,
        "first_iteration_s": compiled["iteration"],
        "tokens_per_s": work.tokens["iteration"] / seconds["iteration"],
        "flops_per_s": least["iteration"] / seconds["iteration"],
        "each_s": each,
    }
    text = f"{tried.says}: {seconds['iteration']:.2f} s an iteration, {figures['tokens_per_s']:,.0f} tokens/s"
    findings = [Finding("programs", OK, text)]
    found, figures["traces"] = traced(iterations, 1 + work.repeats, given)
    findings += found
    kind = generation(jax.devices()[0])
    if kind in CHIPS and processes.is_first():
        file = given.out / RATES  # which the others may not have
        rates = rates_lib.read(file, generation=kind) if file.exists() else rates_lib.assumed(kind)
        try:
            figures["planned"] = beside = planned.beside(iterations.engine, each, rates, iterations.traces)
            findings += [judged(name, *times) for name, times in beside["seconds"].items()]
        except Exception as error:  # the times are worth keeping without it
            traceback.print_exc()
            text = f"no comparison: {type(error).__name__}: {quoted(error)}"
            findings.append(Finding("plan", WARNING, text, "See log.txt beside this page."))
    return findings, figures


def traced(iterations: Iterations, number: int, given: Given) -> Result:
    """Trace one more iteration, and say which share of the devices' time has a name."""
    iterations.traces = PhaseTraces(
        given.out / PROFILE, Span(number + 1, number + 1), process=processes.number(), seconds=TRACED_S
    )
    iterations.run(number)
    iterations.traces.conclude()
    seen = iterations.traces.seen
    running = sum(one.running_s for one in seen.values())
    joined = sum(one.running_s * one.joined for one in seen.values()) / running if running else 0.0
    text = f"{joined:.1%} of the devices' time is in operations of known programs" if running else "none has a device"
    state = OK if joined >= NAMED[jax.devices()[0].platform] else WARNING
    remedy = "" if state == OK else f"See {PROFILE}/operations.md; the rest is between operations."
    return [Finding("traces", state, text, remedy)], {name: one.facts(5) for name, one in seen.items()}


def judged(name: str, measured_s: float, planned_s: float) -> Finding:
    """Compare a program's time with the planned one."""
    ratio = measured_s / planned_s
    text = f"{measured_s * 1e3:.2f} ms, {ratio:.2f} times the {planned_s * 1e3:.2f} ms of plan"
    if 1 / APART <= ratio <= APART:
        return Finding(f"plan of {name}", OK, text)
    state = WARNING if 1 / FAR <= ratio <= FAR else FAILED
    return Finding(
        f"plan of {name}", state, text, "See which operations take longer, under `planned` in the record of this stage."
    )
