"""The device mesh and the rules that map logical axes to mesh axes.

Model code names the logical axes of an array ("batch", "heads", "expert"); the rules below map them to mesh axes.
Without a mesh in scope (`jax.set_mesh`) every sharding constraint is the identity, so the same code runs on one device.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool

from gspo_jax.errors import UserError

AXES = ("data", "fsdp", "expert", "tensor")

BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes that rows are sharded over, `expert` included: the dispatch brings tokens to their experts over it."""

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
    "mlp": ("tensor",),
    "expert": ("expert",),
    "router": (),
    "rank": (),
}
"""Trainer layout: weights sharded over fsdp, expert and tensor."""

SAMPLER: Rules = {**TRAINER, "embed": ()}
"""Sampler layout: weights replicated over data and fsdp, so that decode steps need no weight all-gathers."""


def divisors(n: int) -> list[int]:
    """Return all divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def mesh_sizes(sizes: Mapping[str, int], num_devices: int) -> tuple[int, ...]:
    """Resolve axis sizes (-1 once means "the rest") against the number of devices.

    Raises:
      UserError: an axis is unknown, more than one size is -1, or the product is not `num_devices`.
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
    """Build a mesh over `devices` (default: all) with the axes data, fsdp, expert, tensor.

    On several TPU slices, `data` spans the slices and all other axes stay within one, so that only gradients and the
    sampler's weights cross the data-center network between slices.

    Raises:
      UserError: as `mesh_sizes`, or `data` is not a multiple of the number of slices.
    """
    devices = jax.devices() if devices is None else devices
    shape, axis_types = mesh_sizes(sizes, len(devices)), (AxisType.Auto,) * len(AXES)
    # Backends other than TPU report every host as a slice of its own, without slow links between them.
    slices = len({getattr(device, "slice_index", 0) for device in devices if device.platform == "tpu"})
    # Split physical axes are needed: an axis of 8 on 4x4x4 takes one side and half of another.
    if slices < 2:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        check_divides("mesh.data", shape[0], "the number of slices", slices)
        inner, outer = (shape[0] // slices, *shape[1:]), (slices, 1, 1, 1)
        grid = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=axis_types)


def reshaped(mesh: Mesh, sizes: Mapping[str, int]) -> Mesh:
    """Return a mesh of the same devices in the same order with other axis sizes; see `mesh_sizes`."""
    return Mesh(mesh.devices.reshape(mesh_sizes(sizes, mesh.size)), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_shards(sizes: Mapping[str, int]) -> int:
    """Return the number of shards of a batch's rows, for resolved axis sizes (such as `mesh.shape`)."""
    return math.prod(sizes[axis] for axis in BATCH_AXES)


def check_divides(what: str, size: int, by: str, parts: int) -> None:
    """Raise a UserError with the nearest sizes unless `parts` (made up of `by`) divides `size`."""
    if size % parts:
        below, above = size - size % parts, size + parts - size % parts
        near = f"{below} or {above}" if below else f"{above}"
        raise UserError(f"{what} {size} is not divisible by {by} = {parts}; use {near}")


def spec(axes: Sequence[str | None], rules: Rules) -> PartitionSpec:
    """Return the PartitionSpec of an array whose dimensions have these logical axes (None: replicated)."""
    return PartitionSpec(*(rules[axis] or None if axis is not None else None for axis in axes))


def expert_axes(num_experts: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes that shard the trainer's experts, including `fsdp` if each shard then has whole experts.

    Whole experts are all-gathered as they lie in memory, whereas slices of every expert would need a relayout in each
    layer. With too few experts, their kernels are sharded over `fsdp` like all other matrices.
    """
    whole = num_experts % (sizes["expert"] * sizes["fsdp"]) == 0
    return ("expert", "fsdp") if whole else ("expert",)


def spread_dimension(variable: nnx.Variable, rules: Rules, sizes: Mapping[str, int]) -> int | None:
    """The dimension of a parameter that is sharded over `expert` first and then as the rules say; None if none is.

    It is the one that the parameter was declared to `spread`, if the mesh axes divide it.
    """
    dimension, size = variable.get_metadata("spread", None) or (None, 0)
    if dimension is None or sizes["expert"] == 1:
        return None
    over = ("expert", *rules[variable.get_metadata("axes")[dimension]])
    return dimension if size % math.prod(sizes[axis] for axis in over) == 0 else None


def param_specs(params: Tree, rules: Rules, sizes: Mapping[str, int]) -> Tree:
    """Return the same tree with each parameter's PartitionSpec, from the logical axes it was declared with.

    `sizes` are the sizes of the mesh axes; see `expert_axes` and `spread_dimension`.
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
    """Return the same tree (of arrays or shapes) with each parameter's NamedSharding, for `jit` and `device_put`."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), param_specs(params, rules, mesh.shape))


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of rows over the batch axes, with all other dimensions unsharded."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the fully replicated sharding."""
    return NamedSharding(mesh, PartitionSpec())


def has_mesh() -> bool:
    """Return whether a mesh of several devices is in scope (`jax.set_mesh`).

    A single device is treated like no mesh: XLA's CPU backend would copy what a collective over one device returns.
    """
    return jax.sharding.get_abstract_mesh().size > 1


def manual_axes() -> frozenset[str]:
    """Return the manual axes (`jax.shard_map`) of the mesh in scope."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Manual)


def any_shard(here: Bool[Array, ""]) -> Bool[Array, ""]:
    """True on every batch shard if `here` is true on any."""
    axes = tuple(axis for axis in BATCH_AXES if axis in manual_axes())
    return jax.lax.pmax(here.astype(jnp.int32), axes) > 0 if axes else here


def axes_by_dimension(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """Return the mesh axes over which a spec shards each dimension that it names."""
    return [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]


def without_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Return a spec with these mesh axes removed."""
    return PartitionSpec(
        *(tuple(axis for axis in part if axis not in axes) or None for part in axes_by_dimension(spec))
    )


def varying(x: jax.Array, *axes: str) -> jax.Array:
    """Mark x as varying over these manual axes, unless it already is."""
    new = tuple(axis for axis in axes if axis not in jax.typeof(x).manual_axis_type.varying)
    return jax.lax.pcast(x, new, to="varying") if new else x


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains x's sharding by logical axes, over the non-manual mesh axes; the identity without a mesh in scope."""
    if not has_mesh():
        return x
    return jax.lax.with_sharding_constraint(x, without_axes(spec(axes, TRAINER), manual_axes()))
