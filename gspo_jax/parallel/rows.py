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

    The shards' rows go once around a ring, and each shard keeps those that it needs. A gather by the compiler would
    hold the rows of all shards on each one.
    """
    count = shards()
    if count == 1:
        return jax.tree.map(lambda x: x[rows], tree)
    axes = BATCH_AXES
    to_previous = [(i, (i - 1) % count) for i in range(count)]

    def shard(rows: Array, tree: Any) -> Any:
        me = jax.lax.axis_index(axes)

        def turn(step: Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
            found, passing = state
            passing = jax.tree.map(lambda x: jax.lax.ppermute(x, axes, to_previous), passing)
            owner = (me + step) % count

            def keep(mine: Array, theirs: Array) -> Array:
                at = rows - owner * theirs.shape[0]
                here = ((at >= 0) & (at < theirs.shape[0])).reshape(-1, *(1,) * (theirs.ndim - 1))
                return jnp.where(here, theirs.at[at].get(mode="clip"), mine)

            return jax.tree.map(keep, found, passing), passing

        own = jax.tree.map(lambda x: x.at[rows - me * x.shape[0]].get(mode="clip"), tree)
        return jax.lax.fori_loop(1, count, turn, (own, tree))[0]

    return by_batch_shard(shard)(rows, tree)
