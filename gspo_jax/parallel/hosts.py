"""Batches between the memory of the processes and the devices of the mesh.

A host array that leads with rows is the whole batch, in the same order on every process; on the devices each row lies
once (see `mesh.rows_sharding`). So what picks and orders rows is written once, and does the same for any number of
processes. What takes time for each row on the host, such as its reward, is done by one process: the row's own.
"""

from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from gspo_jax.parallel.mesh import AXES, BATCH_AXES, rows_sharding

Tree = TypeVar("Tree")

_BLOCK = 2**28
"""Bytes of an array on its way to all processes that every device holds at a time."""


def to_rows(mesh: Mesh, tree: Tree) -> Tree:
    """Spreads the rows of whole host arrays over the batch axes; every process gives its devices theirs."""
    place = rows_sharding(mesh)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, place, lambda rows: x[rows]), tree)


def everywhere(tree: Any) -> Any:
    """Host copies of whole arrays, on every process, in the same tree."""
    return jax.device_get(tree) if jax.process_count() == 1 else jax.tree.map(_allgather, tree)


def _allgather(x: jax.Array) -> np.ndarray:
    blocks = -(-x.nbytes // _BLOCK)
    if x.ndim < 2 or blocks < 2:
        return multihost_utils.process_allgather(x, tiled=True)
    width = -(-x.shape[1] // blocks)  # the second dimension is whole on every device: cutting it moves nothing
    starts = [min(start, x.shape[1] - width) for start in range(0, x.shape[1], width)]
    found = np.empty(x.shape, x.dtype)
    for start in starts:
        block = jax.lax.dynamic_slice_in_dim(x, start, width, axis=1)
        found[:, start : start + width] = multihost_utils.process_allgather(block, tiled=True)
    return found


def own_rows(mesh: Mesh, count: int) -> Int[np.ndarray, " n"]:
    """The rows of a batch of `count` that are this process's own, ascending; every row is one process's.

    They lie on its devices. Of processes that hold the same rows, split over `tensor` alone, the first owns them.
    """
    assert AXES[-1] == "tensor"
    rows_of: Any = rows_sharding(mesh).devices_indices_map((count,))
    mine = [device for device in mesh.devices[..., 0].flat if device.process_index == jax.process_index()]
    every = np.arange(count)
    return np.sort(np.concatenate([every[:0], *(every[rows_of[device]] for device in mine)]))


def own(mesh: Mesh, tree: Any) -> Any:
    """Host copies of this process's own rows of arrays that lead with rows, in the same tree."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(lambda x: _fetch_own_rows(mesh, x), tree)


def _fetch_own_rows(mesh: Mesh, x: jax.Array) -> np.ndarray:
    x = jax.device_put(x, rows_sharding(mesh))  # where it is, unless the compiler has split it over `tensor` too
    rows_of = x.sharding.devices_indices_map(x.shape)
    found = np.empty(x.shape, x.dtype)
    for shard in x.addressable_shards:
        found[rows_of[shard.device]] = shard.data
    return found[own_rows(mesh, len(x))]


def shared(mesh: Mesh, tree: Tree, count: int) -> Tree:
    """Whole host arrays of `count` rows, on every process, made of each process's own rows."""
    if jax.process_count() == 1:
        return tree
    rows, spread = own_rows(mesh, count), NamedSharding(mesh, PartitionSpec("tensor", BATCH_AXES))

    def whole(x: Any) -> np.ndarray:
        filled = np.zeros((count, *x.shape[1:]), x.dtype)
        filled[rows] = x
        known = np.broadcast_to(filled, (mesh.shape["tensor"], *filled.shape))
        # A row that several processes hold is known where it is owned: on the first of the tensor axis.
        return _allgather(jax.make_array_from_callback(known.shape, spread, lambda index: known[index])[0])

    return jax.tree.map(whole, tree)
