"""TPU slices described without having them: compile for a slice ahead of time, on any machine that has libtpu.

`with jax.set_mesh(topology_mesh("v5p:4x4x4", sizes)): lower(f, *shapes).compile()`. Nothing can run.
"""

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from gspo_jax.parallel.mesh import make_mesh
from gspo_jax.types import UserError, choices

ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
"""What libtpu reads when it is loaded: not to look for a TPU's host, to be shared, and to be silent."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a chip of a generation can do. Source: the pages of docs.cloud.google.com/tpu on each generation."""

    flops: float
    """Peak per second, in bfloat16."""
    bandwidth: float
    """Bytes per second between its main memory and its cores."""
    memory: int
    """Bytes of main memory that the compiler grants a program."""
    links: float
    """Bytes per second that it can send to its neighbours, over all links together."""


_GIB = 2**30
CHIPS = {
    "v4": Chip(275e12, 1.2e12, int(30.75 * _GIB), 300e9),
    "v5e": Chip(197e12, 0.82e12, int(15.75 * _GIB), 200e9),
    "v5p": Chip(459e12, 2.765e12, int(95.74 * _GIB), 600e9),
    "v6e": Chip(918e12, 1.638e12, int(31.25 * _GIB), 400e9),
}
"""By generation. The memory is what the compiler names when a program does not fit."""

_MEGACORE = {"v4": "v4", "v5p": "v5"}
"""Generations whose chips are one device of two cores in a 3D torus, with libtpu's name for each."""

_SINGLE = {"v5e": "v5e", "v6e": "v6e"}
"""Generations in a 2D torus."""


def generation(name: str) -> str:
    """ "v5p" of "v5p:4x4x4"; raises a UserError for one that there is not."""
    known = name.partition(":")[0]
    if known not in CHIPS:
        raise UserError(f"unknown TPU generation {known!r}; {choices(known, CHIPS)}")
    return known


def describe(name: str, *, slices: int = 1) -> list[Any]:
    """The devices of a slice such as "v5p:4x4x4" or "v6e:16x16", or of several.

    A side wraps around to a torus where the real slice does: at multiples of 4 in three dimensions, at 16 in two. Left
    open, a gather over the whole slice would compile as something slower.

    Raises:
      UserError: the name is none that libtpu knows, or libtpu is not installed.
    """
    kind, sides = generation(name), name.partition(":")[2].split("x")
    known = {**_MEGACORE, **_SINGLE}
    rank = 3 if kind in _MEGACORE else 2
    if len(sides) != rank or not all(side.isdigit() and int(side) for side in sides):
        example = "4x4x4" if rank == 3 else "4x4"
        raise UserError(f"topology {name!r} does not give {rank} sides; write it as {kind}:{example}")
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("libtpu, the TPU's compiler, is not installed; pip install 'gspo_jax[tpu]'")
    full = 4 if rank == 3 else 16
    wrap = tuple(int(side) % full == 0 for side in sides) + (False,) * (3 - rank)
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    return topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{known[kind]}:{'x'.join(sides + ['1'] * (3 - rank))}",
        wrap=wrap,
        chip_config_name="megacore" if kind in _MEGACORE else "default",
        chips_per_host_bounds=(2, 2, 1),
        num_slices=slices,
    ).devices


def topology_mesh(name: str, sizes: Mapping[str, int], *, slices: int = 1) -> Mesh:
    """The mesh that a run would make on a described slice, or several: see `mesh.make_mesh`.

    Raises:
      UserError: an unknown slice, or sizes that do not make up its number of devices.
    """
    return make_mesh(sizes, describe(name, slices=slices))


def lower(f: Callable[..., Any], *shapes: Any) -> jax.stages.Lowered:
    """`jax.jit(f)` lowered for TPU from shapes (`jax.ShapeDtypeStruct` with shardings), for the mesh in scope."""
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=("tpu",))
