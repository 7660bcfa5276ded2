"""Measurement of `rates.Rates` on the attached devices.

All are timed as the difference between a long and a short device loop, which cancels start and fetch times. What the
devices do not have stays as assumed: links of a single device, other slices, and anywhere but on a TPU kernels and the
compiler's estimates.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel import processes
from gspo_jax.planning.hlo import Module
from gspo_jax.planning.rates import FIGURES, LATENCIES, Rates, assumed
from gspo_jax.planning.topology import CHIPS, KINDS, torus_of

SIDES = {"cpu": (512, 1024, 2048), "accelerator": (2048, 4096, 8192)}
"""Sides of the square matrices."""
LOOP_S = 0.2
"""Minimum of the long loop."""
LARGE = {"cpu": 2**24, "accelerator": 2**28}
"""float32 elements for main memory. More than fits on chip."""
SENT = {"cpu": 2**18, "accelerator": 2**24}
"""float32 elements that each device sends, at most."""
GATHERED = 2**29
"""Most float32 elements that a device gets of all together."""
SMALL = (8, 128)
"""Array shape that takes only the latency."""
UNROLLED = 16
"""Small operations or kernels per loop turn."""
GRID = 4096
"""Grid steps of the longer kernel."""


def kind_of(device: Any) -> str:
    """Return "cpu", or "accelerator" for any other device."""
    return "cpu" if device.platform == "cpu" else "accelerator"


def matmul_flops_per_s(mesh: Mesh, dtype: str) -> float:
    """Measure matmul FLOP/s of all devices together: median over sizes."""
    count = mesh.devices.size

    def multiply(_: Any, x: tuple[Any, Any]) -> tuple[Any, Any]:
        rows, matrix = x
        return rows @ matrix, matrix

    def rate(side: int) -> float:
        shape = (count, side, side)

        def make() -> tuple[Any, Any]:
            return jnp.ones(shape, dtype), jnp.full(shape, 1 / side, dtype)  # a product keeps the rows as they are

        return 2 * count * side**3 / _on_each(mesh, multiply, make)

    return statistics.median(rate(side) for side in SIDES[kind_of(mesh.devices.flat[0])])


def per_turn(turn: Callable[[Any, Any], Any], x: Any, *, least_s: float | None = None, together: bool = False) -> float:
    """Return the seconds per turn of `x = turn(i, x)` in a device loop that takes at least `least_s`, or LOOP_S.

    `together`: devices of all processes run it, as often as the first one's clock says.
    """

    @jax.jit
    def loop(turns: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, turns, turn, x)

    def timed(turns: int) -> float:
        jax.block_until_ready(loop(turns, x))
        seconds = []
        for _ in range(3):
            begun = time.perf_counter()
            jax.block_until_ready(loop(turns, x))
            seconds.append(time.perf_counter() - begun)
        return min(seconds)

    turns, short = 4, timed(1)
    long = timed(turns)

    def enough(seconds: float) -> bool:
        return seconds >= (LOOP_S if least_s is None else least_s) + short

    while not (processes.ask_first(partial(enough, long)) if together else enough(long)):
        turns *= 2
        long = timed(turns)
    return (long - short) / (turns - 1)


def bandwidth(device: Any) -> float:
    """Measure a device's main-memory bytes per second."""
    x = jax.device_put(jnp.zeros(LARGE[kind_of(device)], jnp.float32), device)
    return 2 * x.nbytes / per_turn(lambda _, x: x + 1, x)


def operation_latency(device: Any) -> float:
    """Measure the seconds of a tiny operation in main memory.

    The operations of a turn depend on each other. A barrier prevents fusion.
    """
    rows = LARGE[kind_of(device)] // SMALL[1] // SMALL[0]
    x = jax.device_put(jnp.zeros((rows, *SMALL), jnp.float32), device)

    def turn(i: Any, x: Any) -> Any:
        for step in range(UNROLLED):
            at = (i * UNROLLED + step) % (rows - 1)
            new = jax.lax.dynamic_index_in_dim(x, at) + 1
            x = jax.lax.optimization_barrier(jax.lax.dynamic_update_slice_in_dim(x, new, at + 1, 0))
        return x

    return per_turn(turn, x) / UNROLLED


def _on_each(mesh: Mesh, body: Callable[[Any, Any], Any], make: Callable[[], Any]) -> float:
    """Return the seconds per turn of `x = body(turn, x)` on each device's part of x = make(), [devices, …]."""
    spec = PartitionSpec(mesh_lib.AXES)
    with jax.set_mesh(mesh):
        x = jax.jit(make, out_shardings=NamedSharding(mesh, spec))()
        return per_turn(jax.shard_map(body, in_specs=(PartitionSpec(), spec), out_specs=spec), x, together=True)


def groups(mesh: Mesh) -> list[Mesh]:
    """Return the mesh as groups of 2, 4, … and of all devices of a slice along `fsdp`, neighbours in its order."""
    devices = sorted(mesh.devices.flat, key=slice_of) if (slices := _slices(mesh)) > 1 else list(mesh.devices.flat)
    count = len(devices) // slices
    sizes = sorted({2**i for i in range(1, count.bit_length()) if count % 2**i == 0} | {count} - {1})
    grid = np.array(devices, dtype=object)
    return [Mesh(grid.reshape(-1, size, 1, 1), mesh_lib.AXES, axis_types=mesh.axis_types) for size in sizes]


def sent(split: Mesh) -> int:
    """Return the float32 elements that each device sends to its group along `fsdp` in a large all-gather."""
    return min(SENT[kind_of(split.devices.flat[0])], GATHERED // split.shape["fsdp"])


def gathering(split: Mesh, elements: tuple[int, ...]) -> float:
    """Measure the seconds of an all-gather along `fsdp` of so many float32 elements of each device."""

    def body(turn: Any, x: Any) -> Any:
        whole = jax.lax.all_gather(x, "fsdp", axis=0, tiled=True)
        return jax.lax.dynamic_slice_in_dim(whole, turn % split.shape["fsdp"], 1)  # not known ahead: all is gathered

    return _on_each(split, body, lambda: jnp.ones((split.devices.size, *elements), jnp.float32))


def bytes_per_s(split: Mesh) -> float:
    """Measure the bytes per second that a device sends along `fsdp` in a large all-gather."""
    elements = sent(split)
    return (split.shape["fsdp"] - 1) * 4 * elements / gathering(split, (elements,))


def collective_latencies(mesh: Mesh) -> tuple[float, float]:
    """Measure the seconds of a small all-gather between neighbours, and of each further link on its longest way.

    A least-squares line through the groups of `groups`.
    """
    splits = groups(mesh)
    hops = [_longest_way(split.devices[0].flat, splits[-1].devices[0].flat) for split in splits]
    seconds = [gathering(split, SMALL) for split in splits]
    if len(set(hops)) == 1:
        return seconds[-1], 0.0
    hop, first = np.polyfit(np.array(hops) - 1, seconds, 1)
    return max(float(first), 0.0), max(float(hop), 0.0)


def _longest_way(group: Iterable[Any], devices: Iterable[Any]) -> int:
    """Return the most links between two of a group's devices: on the torus of a TPU slice, else in a ring."""
    members, every = list(group), list(devices)
    if every[0].platform != "tpu":
        return len(members) // 2
    return torus_of(generation(every[0]), every).hops([[every.index(device) for device in members]])


def kernel_overheads(device: Any, *, interpret: bool = False) -> tuple[float, float]:
    """Measure the seconds of a Pallas kernel that does nothing, and of a grid step more.

    Every step has the same block, which is read and written once.
    """

    def seconds(steps: int) -> float:
        call = pl.pallas_call(
            lambda _, out: out.__setitem__(..., jnp.ones_like(out)),
            out_shape=jax.ShapeDtypeStruct(SMALL, jnp.float32),
            grid=(steps,),
            in_specs=[pl.BlockSpec(SMALL, lambda i: (0, 0))],
            out_specs=pl.BlockSpec(SMALL, lambda i: (0, 0)),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
            interpret=interpret,
        )

        def turn(_: Any, x: Any) -> Any:
            for _ in range(UNROLLED):
                x = call(x)
            return x

        return per_turn(turn, jax.device_put(jnp.ones(SMALL, jnp.float32), device)) / UNROLLED

    launch, long = seconds(1), seconds(GRID)
    step = max(long - launch, 0.0) / (GRID - 1)
    return max(launch - step, 0.0), step


def cycle(device: Any) -> float | None:
    """Measure the seconds per cycle that the compiler estimates for work on vectors; None without an estimate."""
    x = jax.device_put(jnp.full((1024, SMALL[1]), 0.5, jnp.float32), device)

    def work(x: Any) -> Any:
        for _ in range(4 * UNROLLED):
            x = jnp.tanh(x) + 0.25
        return x

    text = jax.jit(work).lower(x).compile().as_text() or ""
    found = (operation.cycles for inside in Module(text).computations.values() for operation in inside.values())
    estimated = sum(cycles for cycles in found if cycles)
    return per_turn(lambda _, x: jax.lax.optimization_barrier(work(x)), x) / estimated if estimated else None


def between_slices(mesh: Mesh) -> float | None:
    """Measure the bytes per second that a device sends to other slices; None if there are none."""
    devices = sorted(mesh.devices.flat, key=slice_of)
    slices = len(set(map(slice_of, devices)))
    if slices == 1 or len(devices) % slices:
        return None
    across = np.array(devices, dtype=object).reshape(slices, -1).T
    return bytes_per_s(Mesh(across.reshape(*across.shape, 1, 1), mesh_lib.AXES, axis_types=mesh.axis_types))


def slice_of(device: Any) -> int:
    """Return the index of a device's TPU slice, or of its host elsewhere."""
    return getattr(device, "slice_index", 0)


def _slices(mesh: Mesh) -> int:
    """Return the number of TPU slices, 1 if they differ in size."""
    slices = mesh_lib.count_slices(mesh.devices.flat)
    return 1 if mesh.devices.size % slices else slices


def generation(device: Any) -> str:
    """Return a device's generation, such as v5p, or its kind if unknown."""
    kind: str = device.device_kind
    return KINDS.get(kind, kind)


def measure(mesh: Mesh) -> Rates:
    """Measure the attached devices. What they do not have keeps its assumed figure.

    All processes call it; what concerns one device is measured on one of this process's.
    """
    device, count = mesh.local_devices[0], mesh.devices.size
    kind, here = generation(device), f"measured on {count} x {device.device_kind}"
    dtype = "float32" if device.platform == "cpu" else "bfloat16"
    found = {
        "flops": matmul_flops_per_s(mesh, dtype) / count,
        "bandwidth": bandwidth(device),
        "operation": operation_latency(device),
    }
    if splits := groups(mesh):
        found["links"] = bytes_per_s(splits[-1])
        found["collective"], found["hop"] = collective_latencies(mesh)
    if (dcn := between_slices(mesh)) is not None:
        found["dcn"] = dcn
    if device.platform == "tpu":
        found["launch"], found["grid_step"] = kernel_overheads(device)
        if (seconds := cycle(device)) is not None:
            found["cycle"] = seconds
    sources = dict.fromkeys(found, here)
    others: dict[str, tuple[float, str]]
    if kind in CHIPS:
        published = assumed(kind)
        others = {name: (getattr(published, name), published.sources[name]) for name in FIGURES}
    else:
        others = dict.fromkeys(LATENCIES, (0.0, f"a {kind} has none that is measured"))
        others["links"] = found["bandwidth"], "as memory: a device alone sends nothing"
        others["dcn"] = found.get("links", found["bandwidth"]), "as links: there are no slices"
    others["efficiency"] = 1.0, "assumed: measured rates are attained, and nothing is known of losses beyond them"
    for name in others.keys() - found.keys():
        found[name], sources[name] = others[name]
    return Rates(**found, sources=sources)
