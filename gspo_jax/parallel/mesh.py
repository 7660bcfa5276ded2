"""The device mesh, and rules from logical to mesh axes.

Model code names logical axes ("batch", "heads", "expert"). Without a mesh in scope (`jax.set_mesh`) sharding
constraints are the identity.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from gspo_jax.errors import UserError

AXES = ("data", "fsdp", "expert", "tensor")

BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes of rows. Dispatch brings tokens to their experts over `expert`."""

Tree = TypeVar("Tree")

Rules = Mapping[str, tuple[str, ...]]

TRAINER: Rules = {
    "batch": BATCH_AXES,
    "layers": (),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "latent": ("fsdp",),
    "mlp": ("tensor",),
    "expert": ("expert",),
    "router": (),
    "rank": (),
}
"""Weights sharded over fsdp, expert and tensor."""

SAMPLER: Rules = {**TRAINER, "embed": (), "latent": ()}
"""Weights replicated over data and fsdp, so decode steps need no all-gathers."""


def divisors(n: int) -> list[int]:
    """Return the divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def mesh_sizes(sizes: Mapping[str, int], num_devices: int) -> tuple[int, ...]:
    """Resolve axis sizes. One may be -1, the rest.

    Raises:
      UserError: an axis is unknown, several sizes are -1, or the product is not `num_devices`.
    """
    if unknown := set(sizes) - set(AXES):
        raise UserError(f"unknown mesh axis {sorted(unknown)[0]!r}; the axes are {', '.join(AXES)}")
    shape = [int(sizes.get(axis, 1)) for axis in AXES]
    named = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
    if shape.count(-1) > 1 or any(size < 1 and size != -1 for size in shape):
        raise UserError(f"mesh {named} is invalid; sizes must be positive, with -1 (the rest) at most once")
    known = math.prod(size for size in shape if size != -1)
    if -1 in shape and num_devices % known == 0:
        shape[shape.index(-1)] = num_devices // known
    elif -1 in shape or known != num_devices:
        raise UserError(
            f"mesh {named} needs {'a multiple of ' if -1 in shape else ''}{known} devices but there are {num_devices}; "
            f"choose sizes whose product is {num_devices}, or set one axis to -1"
        )
    return tuple(shape)


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """Build a mesh over `devices` (default: all).

    On several TPU slices `data` spans the slices, so only gradients and the sampler's weights cross the data-center
    network.

    Raises:
      UserError: see `mesh_sizes`, or `data` is not a multiple of the number of slices.
    """
    devices = jax.devices() if devices is None else devices
    shape, axis_types = mesh_sizes(sizes, len(devices)), (AxisType.Auto,) * len(AXES)
    slices = count_slices(devices)
    # An axis of 8 on 4x4x4 takes one side and half of another.
    if slices < 2:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        check_slices(shape[0], slices)
        inner, outer = (shape[0] // slices, *shape[1:]), (slices, 1, 1, 1)
        grid = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=axis_types)


def count_slices(devices: Iterable[Any]) -> int:
    """Return the number of TPU slices that devices belong to, 1 of other kinds, which report every host as a slice."""
    return max(1, len({getattr(device, "slice_index", 0) for device in devices if device.platform == "tpu"}))


def reshaped(mesh: Mesh, sizes: Mapping[str, int]) -> Mesh:
    """Return a mesh of the same devices, in order, with other axis sizes. See `mesh_sizes`."""
    return Mesh(mesh.devices.reshape(mesh_sizes(sizes, mesh.size)), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_shards(sizes: Mapping[str, int]) -> int:
    """Return the number of batch shards for resolved axis sizes."""
    return math.prod(sizes[axis] for axis in BATCH_AXES)


def check_slices(data: int, slices: int) -> None:
    """Raise UserError unless every slice has the same number of whole shards of the axis `data`."""
    check_divides("mesh.data", data, "the number of slices", slices)


def check_divides(what: str, size: int, by: str, parts: int, *, above: int = 0) -> None:
    """Raise UserError with the nearest sizes over `above` unless `parts` divides `size`. `by` describes `parts`."""
    if size % parts:
        lower, higher = size - size % parts, size + parts - size % parts
        near = f"{lower} or {higher}" if lower > above else f"{higher}"
        raise UserError(f"{what} {size} is not divisible by {by} = {parts}; use {near}")


def spec(axes: Sequence[str | None], rules: Rules) -> PartitionSpec:
    """Return the PartitionSpec of logical axes (None: replicated)."""
    return PartitionSpec(*(rules[axis] or None if axis is not None else None for axis in axes))


def expert_axes(num_experts: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes of the trainer's experts, with `fsdp` if each shard then has whole experts.

    Whole experts are all-gathered as they lie in memory. Slices of every expert would need a relayout per layer.
    """
    whole = num_experts % (sizes["expert"] * sizes["fsdp"]) == 0
    return ("expert", "fsdp") if whole else ("expert",)


def spread_dimension(variable: nnx.Variable, rules: Rules, sizes: Mapping[str, int]) -> int | None:
    """Return the parameter dimension sharded over `expert` first, or None.

    It is the one declared to `spread`, if the mesh axes divide it, with `spread_in` "sampler" in the sampler alone.
    """
    dimension, size = variable.get_metadata("spread", None) or (None, 0)
    elsewhere = rules is not SAMPLER and variable.get_metadata("spread_in", None) == "sampler"
    if dimension is None or elsewhere or sizes["expert"] == 1:
        return None
    over = ("expert", *rules[variable.get_metadata("axes")[dimension]])
    return dimension if size % math.prod(sizes[axis] for axis in over) == 0 else None


def param_specs(params: Tree, rules: Rules, sizes: Mapping[str, int]) -> Tree:
    """Return each parameter's PartitionSpec from its logical axes.

    See `expert_axes` and `spread_dimension`.
    """

    def one(variable: nnx.Variable) -> nnx.Variable:
        axes, own = variable.get_metadata("axes"), rules
        if "expert" in axes and "fsdp" in rules["embed"]:
            over = expert_axes(variable.shape[axes.index("expert")], sizes)
            own = {**rules, "expert": over, "embed": tuple(axis for axis in rules["embed"] if axis not in over)}
        found = spec(axes, own)
        if (dimension := spread_dimension(variable, rules, sizes)) is not None:
            parts = axes_by_dimension(found)
            parts[dimension] = ("expert", *parts[dimension])
            found = PartitionSpec(*(part or None for part in parts))
        return variable.replace(found)

    return jax.tree.map(one, params, is_leaf=lambda x: isinstance(x, nnx.Variable))


def param_shardings(params: Tree, mesh: Mesh, rules: Rules = TRAINER) -> Tree:
    """Return each parameter's NamedSharding, from arrays or shapes."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), param_specs(params, rules, mesh.shape))


def placed(shapes: Any, shardings: Any) -> Any:
    """Attach shardings to shapes."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def shard_bytes(shapes: Any) -> int:
    """Return bytes per chip of sharded shapes."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of rows over the batch axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the fully replicated sharding."""
    return NamedSharding(mesh, PartitionSpec())


def has_mesh() -> bool:
    """Return True if a mesh of several devices is in scope.

    One device counts as none, because XLA's CPU backend would copy the result of a collective.
    """
    return jax.sharding.get_abstract_mesh().size > 1


def manual_axes() -> frozenset[str]:
    """Return the mesh's manual axes (`jax.shard_map`)."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Manual)


def sum_shards(x: Int[Array, "*n"], axes: Sequence[str]) -> Int[Array, "*n"]:
    """Return the sum over shards along those of `axes` that are manual."""
    axes = tuple(axis for axis in axes if axis in manual_axes())
    return jax.lax.psum(x, axes) if axes else x


def any_shard(here: Bool[Array, ""], axes: Sequence[str] = BATCH_AXES) -> Bool[Array, ""]:
    """Return True on every shard along `axes` if `here` is true on any."""
    return sum_shards(here.astype(jnp.int32), axes) > 0


def axes_by_dimension(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """Return the mesh axes of each dimension that a spec names."""
    return [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]


def without_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Return a spec without these mesh axes."""
    return PartitionSpec(
        *(tuple(axis for axis in part if axis not in axes) or None for part in axes_by_dimension(spec))
    )


def head_axis(heads: int) -> str | None:
    """Return the logical axis of cached heads. A single one, which all query heads read, is whole on every shard."""
    return "kv_heads" if heads > 1 else None


def varying(x: jax.Array, *axes: str) -> jax.Array:
    """Mark x as varying over manual axes, unless it already is."""
    new = tuple(axis for axis in axes if axis not in jax.typeof(x).manual_axis_type.varying)
    return jax.lax.pcast(x, new, to="varying") if new else x


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrain x's sharding by logical axes, except over manual mesh axes. The identity without a mesh."""
    if not has_mesh():
        return x
    return jax.lax.with_sharding_constraint(x, without_axes(spec(axes, TRAINER), manual_axes()))


def on_shards(run: Callable[..., Any], arrays: Any, axes: Any, out: Any) -> Any:
    """Run run(*arrays) on each shard, split by logical axes: XLA cannot split a kernel.

    Along manual mesh axes the arrays are split already.

    Args:
      axes: a tuple of logical axes for each of the arrays.
      out: logical axes of the result; a list of them for several results.
    """
    if not has_mesh() or not (automatic := set(AXES) - manual_axes()):
        return run(*arrays)

    def split(names: Any) -> Any:
        if isinstance(names, list):
            return tuple(map(split, names))
        return without_axes(spec(names, TRAINER), manual_axes())

    *parts, result = map(split, (*axes, out))
    # Kernels do not declare their varying mesh axes.
    layout = {"in_specs": tuple(parts), "out_specs": result, "check_vma": False}
    return jax.shard_map(run, axis_names=automatic, **layout)(*arrays)
