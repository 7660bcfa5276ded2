"""TPU slices that are not attached, for ahead-of-time compilation on any machine with libtpu.

`with jax.set_mesh(topology_mesh("v5p:4x4x4", sizes)): lower(f, *shapes).compile()`. The result cannot run.
"""

import dataclasses
import importlib.util
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh
from jaxtyping import Int

from gspo_jax import installs
from gspo_jax.errors import UserError, choices
from gspo_jax.parallel import processes
from gspo_jax.parallel.mesh import make_mesh


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peak figures of a jax device, from each generation's page on docs.cloud.google.com/tpu.

    A device is a chip or, on tpu7x, a chiplet: one of a chip's two, with a TensorCore, half of the chip's memory and of
    its other figures. Elsewhere in this package "chip" means a device.
    """

    flops: float
    """Bfloat16 flops per second."""
    bandwidth: float
    """HBM bytes per second."""
    memory: int
    """HBM that the compiler grants a program, by its out-of-memory message."""
    links: float
    """Bytes per second sent over all ICI links together, a chiplet's half of its chip's."""
    dcn: float
    """Bytes per second sent between slices: a chip's share of its host's network."""
    clock: float
    """Cycles per second: peak flops over matrix-unit flops per cycle."""
    cores: int = 1
    """TensorCores, which share a kernel's parallel grid dimensions."""
    chiplets: int = 1
    """Devices of a chip."""
    rank: int = 3
    """Dimensions of the torus."""

    @property
    def tensor_cores(self) -> int:
        """TensorCores of a whole chip, which Cloud TPU's names count if there are several."""
        return self.cores * self.chiplets


_GIB = 2**30
CHIPS = {
    "v4": Chip(275e12, 1.2e12, int(30.75 * _GIB), 300e9, 6.25e9, 1.05e9, cores=2),
    "v5e": Chip(197e12, 0.82e12, int(15.75 * _GIB), 200e9, 3.125e9, 1.5e9, rank=2),
    "v5p": Chip(459e12, 2.765e12, int(95.74 * _GIB), 600e9, 6.25e9, 1.75e9, cores=2),
    "v6e": Chip(918e12, 1.638e12, int(31.25 * _GIB), 400e9, 12.5e9, 1.75e9, rank=2),
    "tpu7x": Chip(2307e12 / 2, 7.38e12 / 2, int(94.74 * _GIB), 600e9 / 2, 12.5e9 / 2, 2.2e9, chiplets=2),
}

KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
"""Generations by jax's device kind."""

CLOUD_KINDS = {
    "v5litepod": "v5e",
    "ct4p-hightpu": "v4",
    "ct5lp-hightpu": "v5e",
    "ct5p-hightpu": "v5p",
    "ct6e-standard": "v6e",
    "tpu7x-standard": "tpu7x",
}
"""Generations by Cloud TPU's names, if different, and by those of GKE's machines."""

_LIBTPU_KINDS = {"v5p": "v5"}
"""libtpu's names of generations, if different."""


def generation(name: str) -> str:
    """Return a slice's generation, "v5p" for "v5p:4x4x4".

    Raises:
      UserError: it is unknown, or an accelerator type such as "v5p-8".
    """
    known = name.partition(":")[0]
    if known in CHIPS:
        return known
    if (found := of_type(known)) is not None:
        kind, chips = found
        cores = CHIPS[kind].tensor_cores
        counted = f"TensorCores, {cores} to a chip" if known.endswith(f"-{cores * chips}") and cores > 1 else "chips"
        sides = "x".join("XYZ"[: CHIPS[kind].rank])
        write = of_chips(kind, chips) or f"{kind}:{sides} with sides whose product is {chips}"
        raise UserError(
            f"{known} is {chips} chip{'s' * (chips > 1)} (its number counts {counted}); write the slice as {write}"
        )
    raise UserError(f"unknown TPU generation {known!r}; {choices(known, CHIPS)}")


def of_type(name: str) -> tuple[str, int] | None:
    """Return generation and chips of an accelerator type, or None: ("v5e", 8) for "v5e-8" and "v5litepod-8".

    Types of generations with two TensorCores a chip count these, others chips, as do GKE's machines,
    "ct5lp-hightpu-8t".
    """
    match = re.fullmatch(r"(?:tpu-)?(\w+|\w+-\w+(?=-\d+t))-(\d+)t?", name.lower())
    if match is None:
        return None
    kind, count = CLOUD_KINDS.get(match[1], match[1]), int(match[2])
    cores = CHIPS[kind].tensor_cores if match[1] in CHIPS else 1
    return (kind, count // cores) if kind in CHIPS and count and count % cores == 0 else None


def of_chips(kind: str, chips: int) -> str | None:
    """Return the slice of a power of two of chips, "v5p:2x4x4" for 32, with Cloud TPU's sides, else None."""
    rank = CHIPS[kind].rank
    sides = sorted(2 ** ((chips.bit_length() - 1 + i) // rank) for i in range(rank))  # as equal as can be
    if math.prod(sides) != chips:
        return None
    return f"{kind}:{'x'.join(map(str, [s for s in sides if s > 1] + [s for s in sides if s == 1]))}"


def describe(name: str, *, slices: int = 1) -> list[Any]:
    """Return the devices of slices such as "v5p:4x4x4" or "v6e:16x16".

    Sides wrap around as in real slices, at multiples of 4 in 3D and 16 in 2D. Otherwise whole-slice all-gathers would
    compile to something slower.

    Raises:
      UserError: the topology is unknown or malformed, or libtpu is missing.
    """
    kind, sides = generation(name), _sides(name)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"libtpu, the TPU compiler, is not installed; run {installs.of_extra('tpu')}")
    processes.use_libtpu_alone()
    hosts = tuple(math.gcd(2, side) for side in sides[:2])  # a host has 2x2 chips; a slice of one chip has fewer
    try:
        return topologies.get_topology_desc(
            platform="tpu",
            topology_name=f"{_LIBTPU_KINDS.get(kind, kind)}:{'x'.join(map(str, sides))}",
            wrap=wraps(kind, sides),
            chip_config_name="megacore" if CHIPS[kind].cores > 1 else "default",
            chips_per_host_bounds=(*hosts, 1),
            num_slices=slices,
        ).devices
    except jax.errors.JaxRuntimeError as error:
        text = str(error).partition("\n")[0][:200]
        raise UserError(
            f"libtpu knows no topology {name!r} ({text}); choose another, such as {kind}:{_example(kind)}"
        ) from error


def _example(kind: str) -> str:
    return "x".join("4" * CHIPS[kind].rank)


def _sides(name: str) -> tuple[int, int, int]:
    """Return a slice's three sides; the third is 1 in 2D.

    Raises:
      UserError: the topology is malformed.
    """
    kind, sides = generation(name), name.partition(":")[2].split("x")
    rank = CHIPS[kind].rank
    if len(sides) != rank or not all(side.isdigit() and int(side) for side in sides):
        raise UserError(f"topology {name!r} does not have {rank} positive sides; write it as {kind}:{_example(kind)}")
    x, y, z = (int(side) for side in [*sides, "1"][:3])
    return x, y, z


def wraps(kind: str, sides: Sequence[int]) -> tuple[bool, ...]:
    """Return which sides wrap around. A fourth, of the devices of a chip, does not."""
    full = 4 if kind in CHIPS and CHIPS[kind].rank == 3 else 16
    return tuple(side % full == 0 for side in sides)


@dataclasses.dataclass(frozen=True)
class Torus:
    """Devices of a slice, by their number in a program."""

    coordinates: Int[np.ndarray, "devices sides"]
    sides: tuple[int, ...]
    wraps: tuple[bool, ...]
    """True for sides whose ends are linked."""

    @property
    def corner_links(self) -> int:
        """Links of a chip in a corner to others of the slice."""
        return sum(1 + wraps for side, wraps in zip(self.sides[:3], self.wraps[:3], strict=True) if side > 1)

    def hops(self, groups: Sequence[Sequence[int]]) -> int:
        """Return the most links on a shortest way between two devices of a group."""
        return max((self._diameter(tuple(group)) for group in groups), default=0)

    def _diameter(self, group: tuple[int, ...]) -> int:
        at = self.coordinates[list(group)]
        apart = np.zeros((len(at), len(at)), int)
        for axis, (side, wraps) in enumerate(zip(self.sides, self.wraps, strict=True)):
            along = abs(at[:, None, axis] - at[None, :, axis])
            apart += np.minimum(along, side - along) if wraps else along
        return int(apart.max(initial=0))


def coordinates(devices: Iterable[Any]) -> Int[np.ndarray, "devices 4"]:
    """Return the chips' places in their slice and the devices' in their chips, one link apart."""
    return np.array([(*device.coords, device.core_on_chip) for device in devices])


def torus_of(kind: str, devices: Sequence[Any]) -> Torus:
    """Return the torus of attached devices of a generation, which are a whole slice."""
    at = coordinates(devices)
    sides = tuple((at.max(axis=0) + 1).tolist())
    return Torus(at, sides, wraps(kind, sides))


def torus(name: str, mesh: Mesh) -> Torus:
    """Return the torus of the slice, or of each of several, with devices in the mesh's order."""
    kind = generation(name)
    sides = (*_sides(name), CHIPS[kind].chiplets)
    return Torus(coordinates(mesh.devices.flat), sides, wraps(kind, sides))


def counted(kind: str, devices: int) -> str:
    """Return the number of devices in words: "64 chips", or "8 chiplets of 4 chips"."""
    chips = devices // CHIPS[kind].chiplets
    whole = f"{chips} chip{'s' * (chips > 1)}"
    return whole if chips == devices else f"{devices} chiplets of {whole}"


def topology_mesh(name: str, sizes: Mapping[str, int], *, slices: int = 1) -> Mesh:
    """Return a run's mesh on described slices.

    Raises:
      UserError: the slice is unknown, or the sizes do not fit it.
    """
    return make_mesh(sizes, describe(name, slices=slices))


def lower(f: Callable[..., Any], *shapes: Any) -> jax.stages.Lowered:
    """Lower `jax.jit(f)` for TPU and the mesh in scope, from shapes with shardings."""
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=("tpu",))
