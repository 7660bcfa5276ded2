"""Rows of a batch on the shards of the mesh in scope: work on each shard's own, and rows taken from other shards."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from gspo_jax.parallel.mesh import BATCH_AXES, batch_shards, has_mesh, manual_axes

Tree = TypeVar("Tree")


def shards() -> int:
    """Number of batch shards of the mesh in scope; 1 without a mesh."""
    return batch_shards(dict(jax.sharding.get_abstract_mesh().shape)) if has_mesh() else 1


def by_batch_shard(f: Callable[..., Tree]) -> Callable[..., Tree]:
    """f on each batch shard's own rows; all arguments and results are trees of arrays that lead with rows."""
    if not has_mesh() or not (axes := set(BATCH_AXES) - manual_axes()):
        return f
    rows = PartitionSpec(BATCH_AXES)
    mapped: Any = partial(jax.shard_map, in_specs=rows, out_specs=rows, axis_names=axes)
    return mapped(f)


def take_rows(tree: Tree, rows: Int[Array, " Q"]) -> Tree:
    """x[rows] for every array of the tree, whichever batch shard has the rows.

    An all-to-all gives each shard a slice of the columns of all rows; there the rows are picked, and a second
    all-to-all brings the columns of each together. So a shard sends twice what it holds, however many shards there
    are. A gather by the compiler would hold the rows of all shards on each one.
    """
    count = shards()
    if count == 1:
        return jax.tree.map(lambda x: x[rows], tree)
    axes = BATCH_AXES

    def shard(rows: Array, tree: Any) -> Any:
        here, rows = rows.shape[0], jax.lax.all_gather(rows, axes, tiled=True)

        def take(x: Array) -> Array:
            if not x.size:  # such as the routes of a dense model
                return jnp.zeros((here, *x.shape[1:]), x.dtype)
            own = x.reshape(x.shape[0], -1) if x.ndim < 2 else x
            columns = own.shape[1]
            own = jnp.pad(own, [(0, 0), (0, -columns % count), *((0, 0),) * (own.ndim - 2)])
            slices = jax.lax.all_to_all(own, axes, split_axis=1, concat_axis=0, tiled=True)
            found = jax.lax.all_to_all(slices[rows], axes, split_axis=0, concat_axis=1, tiled=True)
            return found[:, :columns].reshape(here, *x.shape[1:])

        return jax.tree.map(take, tree)

    return by_batch_shard(shard)(rows, tree)
