"""Rows of a batch on the mesh's shards: local work and exchange."""

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
    """Return the number of batch shards, 1 without a mesh."""
    return batch_shards(dict(jax.sharding.get_abstract_mesh().shape)) if has_mesh() else 1


ROWS = PartitionSpec(BATCH_AXES)
"""Arrays with leading rows."""
PLACES = PartitionSpec(None, BATCH_AXES)
"""Arrays [N, Q, …] of places for rows, Q / shards of each N per shard."""


def by_batch_shard(f: Callable[..., Tree], *, in_specs: Any = ROWS, out_specs: Any = ROWS) -> Callable[..., Tree]:
    """Return f applied per batch shard, by default to trees with leading rows."""
    if not has_mesh() or not (axes := set(BATCH_AXES) - manual_axes()):
        return f
    mapped: Any = partial(jax.shard_map, in_specs=in_specs, out_specs=out_specs, axis_names=axes)
    return mapped(f)


def take_rows(tree: Tree, rows: Int[Array, "N Q"]) -> Tree:
    """Return x[rows] for arrays of a tree, [B, …] -> [N, Q, …], from any shard. Row -1 gives zeros.

    One all-to-all gives each shard a slice of all rows' columns, a second reassembles the chosen rows. A shard sends
    twice what it holds. The compiler's gather would hold all rows on each shard.
    """
    count = shards()

    def shard(rows: Array, tree: Any) -> Any:
        live, flat = rows >= 0, jnp.maximum(rows.reshape(-1), 0)
        everywhere = jax.lax.all_gather(flat, BATCH_AXES, tiled=True) if count > 1 else flat

        def take(x: Array) -> Array:
            if not x.size:  # a dense model's routes
                return jnp.zeros((*rows.shape, *x.shape[1:]), x.dtype)
            found = x[flat] if count == 1 else _exchange(x, everywhere, count)
            found = found.reshape(*rows.shape, *x.shape[1:])
            return jnp.where(live.reshape(*rows.shape, *(1,) * (x.ndim - 1)), found, jnp.zeros((), x.dtype))

        return jax.tree.map(take, tree)

    return by_batch_shard(shard, in_specs=(PLACES, ROWS), out_specs=PLACES)(rows, tree)


def merge_rows(first: Tree, second: Tree, rows: Int[Array, " B"]) -> Tree:
    """Return x[rows] of `first` followed by `second`, both [B, …] on the same shards."""
    count, total = shards(), jax.tree.leaves(first)[0].shape[0]

    def joined(one: Any, other: Any) -> Any:
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), one, other)

    each = total // count
    number = rows % total
    place = number // each * 2 * each + rows // total * each + number % each  # a shard's rows of both are adjacent
    return jax.tree.map(lambda x: x[0], take_rows(by_batch_shard(joined)(first, second), place[None]))


def _exchange(x: Array, rows: Int[Array, " all"], count: int) -> Array:
    """Return this shard's rows of x. All shards take equally many."""
    own = x[:, None] if x.ndim < 2 else x
    columns = own.shape[1]
    own = jnp.pad(own, [(0, 0), (0, -columns % count), *((0, 0),) * (own.ndim - 2)])
    slices = jax.lax.all_to_all(own, BATCH_AXES, split_axis=1, concat_axis=0, tiled=True)
    return jax.lax.all_to_all(slices[rows], BATCH_AXES, split_axis=0, concat_axis=1, tiled=True)[:, :columns]
