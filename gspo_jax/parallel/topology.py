"""TPU slices described without having them: compile for a slice ahead of time, on any machine that has libtpu.

    TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu ALLOW_MULTIPLE_LIBTPU_LOAD=1 python ...

and in there `with jax.set_mesh(topology_mesh("v5p:4x4x4", sizes)): lower(f, *shapes).compile()`. Nothing can run.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from gspo_jax.parallel.mesh import AXES, mesh_sizes
from gspo_jax.types import UserError, choices

ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
"""What must stand in the environment before jax is imported: no look-up of a TPU's host, none taken, libtpu shared."""

_MEGACORE = {"v4": "v4", "v5p": "v5"}
"""Generations whose chips are one device of two cores in a 3D torus, with libtpu's name for each."""

_SINGLE = {"v5e": "v5e", "v6e": "v6e"}
"""Generations in a 2D torus."""


def describe(name: str) -> list[Any]:
    """The devices of a slice such as "v5p:4x4x4" or "v6e:16x16".

    A side wraps around to a torus where the real slice does: at multiples of 4 in three dimensions, at 16 in two. Left
    open, a gather over the whole slice would compile as something slower.

    Raises:
      UserError: the name is none that libtpu knows.
    """
    generation, _, shape = name.partition(":")
    known = {**_MEGACORE, **_SINGLE}
    if generation not in known:
        raise UserError(f"unknown TPU generation {generation!r}; {choices(generation, known)}")
    sides = shape.split("x")
    rank = 3 if generation in _MEGACORE else 2
    if len(sides) != rank or not all(side.isdigit() and int(side) for side in sides):
        example = "4x4x4" if rank == 3 else "4x4"
        raise UserError(f"topology {name!r} does not give {rank} sides; write it as {generation}:{example}")
    full = 4 if rank == 3 else 16
    wrap = tuple(int(side) % full == 0 for side in sides) + (False,) * (3 - rank)
    return topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{known[generation]}:{'x'.join(sides + ['1'] * (3 - rank))}",
        wrap=wrap,
        chip_config_name="megacore" if generation in _MEGACORE else "default",
        chips_per_host_bounds=(2, 2, 1),
    ).devices


def topology_mesh(name: str, sizes: Mapping[str, int]) -> Mesh:
    """A mesh with the project's axes over a described slice, neighbours on an axis being neighbours in the torus.

    Raises:
      UserError: an unknown slice, or sizes that do not make up its number of devices.
    """
    devices = describe(name)
    shape = mesh_sizes(sizes, len(devices))
    # An axis of 8 on 4x4x4 takes one side and half of another.
    grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    assert grid.size == math.prod(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def lower(f: Callable[..., Any], *shapes: Any) -> jax.stages.Lowered:
    """`jax.jit(f)` lowered for TPU from shapes (`jax.ShapeDtypeStruct` with shardings), for the mesh in scope."""
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=("tpu",))
