"""Measurement of `rates.Rates` on the attached devices.

All but matmuls are timed as the difference between a long and a short device loop, which cancels start and fetch times.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspo_jax.errors import UserError
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.planning.rates import Rates, assumed
from gspo_jax.planning.topology import CHIPS, KINDS

SIDES = {"cpu": (512, 1024, 2048), "accelerator": (2048, 4096, 8192)}
"""Sides of the square matrices."""
MATMUL_S = 0.3
"""Seconds per matrix size."""
LOOP_S = 0.2
"""Minimum of the long loop."""
LARGE = {"cpu": 2**24, "accelerator": 2**28}
"""float32 elements for main memory. More than fits on chip."""
SENT = {"cpu": 2**18, "accelerator": 2**24}
"""float32 elements that each device sends."""
SMALL = (8, 128)
"""Array shape that takes only the latency."""
UNROLLED = 16
"""Small operations per loop turn."""


def kind_of(device: Any) -> str:
    """Return "cpu", or "accelerator" for any other device."""
    return "cpu" if device.platform == "cpu" else "accelerator"


def matmul_flops_per_s(mesh: Mesh, dtype: str) -> float:
    """Measure matmul FLOP/s of all devices together: best time per size, median over sizes."""
    count, rates = mesh.devices.size, []
    multiply = jax.jit(jnp.matmul)
    spread = NamedSharding(mesh, PartitionSpec(mesh_lib.AXES))
    for side in SIDES[kind_of(mesh.devices.flat[0])]:
        rows = jax.device_put(jnp.ones((count * side, side), dtype), spread)
        matrix = jax.device_put(jnp.ones((side, side), dtype), mesh_lib.replicated(mesh))
        jax.block_until_ready(multiply(rows, matrix))  # compiles
        seconds, end = [], time.perf_counter() + MATMUL_S
        while len(seconds) < 3 or time.perf_counter() < end:
            begun = time.perf_counter()
            jax.block_until_ready(multiply(rows, matrix))
            seconds.append(time.perf_counter() - begun)
        rates.append(2 * count * side**3 / min(seconds))
    return statistics.median(rates)


def per_turn(turn: Callable[[Any, Any], Any], x: Any) -> float:
    """Return the seconds per turn of `x = turn(i, x)` in a device loop."""

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
    while (long := timed(turns)) < LOOP_S + short:
        turns *= 2
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


def _on_each(mesh: Mesh, body: Callable[[Any, Any], Any], elements: tuple[int, ...]) -> float:
    """Return the seconds per turn of `x = body(turn, x)` on each device's x [1, *elements]."""
    spec = PartitionSpec(mesh_lib.AXES)
    spread = NamedSharding(mesh, spec)
    x = jax.device_put(jnp.ones((mesh.devices.size, *elements), jnp.float32), spread)
    with jax.set_mesh(mesh):
        return per_turn(jax.shard_map(body, in_specs=(PartitionSpec(), spec), out_specs=spec), x)


def collective_latency(mesh: Mesh) -> float:
    """Measure the seconds of a small all-reduce over all devices."""

    def body(_: Any, x: Any) -> Any:
        return jax.lax.pcast(jax.lax.psum(x, mesh_lib.AXES), mesh_lib.AXES, to="varying") / mesh.devices.size

    return _on_each(mesh, body, SMALL)


def links(mesh: Mesh) -> float:
    """Measure the bytes per second that a device sends in a large all-gather."""
    elements = SENT[kind_of(mesh.devices.flat[0])]

    def body(turn: Any, x: Any) -> Any:
        whole = jax.lax.all_gather(x, mesh_lib.AXES, axis=0, tiled=True)
        return jax.lax.dynamic_slice_in_dim(whole, turn % mesh.devices.size, 1)  # not known ahead, so all is gathered

    return (mesh.devices.size - 1) * 4 * elements / _on_each(mesh, body, (elements,))


def generation(device: Any) -> str:
    """Return a device's generation, such as v5p, or its kind if unknown."""
    kind: str = device.device_kind
    return KINDS.get(kind, kind)


def measure(mesh: Mesh) -> Rates:
    """Measure the attached devices. A single device keeps assumed link figures.

    Raises:
      UserError: there is one device, without assumed figures.
    """
    device, count = mesh.devices.flat[0], mesh.devices.size
    kind, here = generation(device), f"measured on {count} x {device.device_kind}"
    if count == 1 and kind not in CHIPS:
        raise UserError(f"one device of kind {kind!r} has no links to measure; attach at least two")
    dtype = "float32" if device.platform == "cpu" else "bfloat16"
    found = {
        "flops": matmul_flops_per_s(mesh, dtype) / count,
        "bandwidth": bandwidth(device),
        "operation": operation_latency(device),
    }
    if count > 1:
        found |= {"links": links(mesh), "collective": collective_latency(mesh)}
    sources = dict.fromkeys(found, here)
    for name in {"links", "collective"} - found.keys():
        found[name], sources[name] = getattr(assumed(kind), name), assumed(kind).sources[name]
    sources["efficiency"] = "assumed: measured rates are attained, and nothing is known of losses beyond them"
    return Rates(**found, efficiency=1.0, sources=sources)
