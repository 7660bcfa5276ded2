"""Transfer of batches between the host memory of the processes and the devices of the mesh.

On hosts, an array with leading dimension rows is the whole batch, in the same order on every process; on devices the
rows are sharded (see `mesh.rows_sharding`). Code that selects and orders rows is therefore the same for any number of
processes. Costly per-row host work, such as rewards, is done by one process only: the one that owns the row.
"""

from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from gspo_jax.parallel import processes
from gspo_jax.parallel.mesh import AXES, BATCH_AXES, rows_sharding

Tree = TypeVar("Tree")

_TEXT_BYTES = 400
_BLOCK = 2**28
"""Maximum bytes of an array that each device holds at a time while the array is all-gathered to the hosts."""


def shard_rows(mesh: Mesh, tree: Tree) -> Tree:
    """Shard the rows of whole host arrays over the batch axes; each process feeds its own devices."""
    place = rows_sharding(mesh)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, place, lambda rows: x[rows]), tree)


def allgather(tree: Any) -> Any:
    """All-gather device arrays: return the same tree of whole host arrays on every process."""
    return jax.device_get(tree) if jax.process_count() == 1 else jax.tree.map(_allgather, tree)


def _allgather(x: jax.Array) -> np.ndarray:
    processes.meet()  # counts how long this process waits for the others' part
    blocks = -(-x.nbytes // _BLOCK)
    if x.ndim < 2 or blocks < 2:
        return multihost_utils.process_allgather(x, tiled=True)
    width = -(-x.shape[1] // blocks)  # the second dimension is unsharded, so slicing it moves no data
    starts = [min(start, x.shape[1] - width) for start in range(0, x.shape[1], width)]
    found = np.empty(x.shape, x.dtype)
    for start in starts:
        block = jax.lax.dynamic_slice_in_dim(x, start, width, axis=1)
        found[:, start : start + width] = multihost_utils.process_allgather(block, tiled=True)
    return found


def any_process(here: bool) -> bool:
    """Whether `here` is true in any process; all have to call it."""
    if jax.process_count() == 1:
        return here
    processes.meet()  # counts how long this process waits for the others
    return bool(multihost_utils.process_allgather(np.bool_(here)).any())


def first_nonempty(text: str) -> str:
    """The text of the first process that has any, cut to a few hundred bytes; "" if none has."""
    if jax.process_count() == 1:
        return text
    mine = np.zeros(_TEXT_BYTES, np.uint8)
    written = text.encode()[:_TEXT_BYTES]
    mine[: len(written)] = list(written)
    texts = (bytes(row).rstrip(b"\0").decode(errors="ignore") for row in multihost_utils.process_allgather(mine))
    return next((found for found in texts if found), "")


def own_rows(mesh: Mesh, count: int) -> Int[np.ndarray, " n"]:
    """Return the row indices, ascending, that this process owns in a batch of `count`; each row has one owner.

    A process owns rows that live on its devices. If several processes hold the same rows, because `tensor` spans them,
    the first of them along `tensor` owns the rows.
    """
    assert AXES[-1] == "tensor"
    rows_of: Any = rows_sharding(mesh).devices_indices_map((count,))
    mine = [device for device in mesh.devices[..., 0].flat if device.process_index == jax.process_index()]
    every = np.arange(count)
    return np.sort(np.concatenate([every[:0], *(every[rows_of[device]] for device in mine)]))


def fetch_own_rows(mesh: Mesh, tree: Any) -> Any:
    """Return the same tree with host copies of the rows that this process owns; rows are the leading dimension."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(lambda x: _fetch_own_rows(mesh, x), tree)


def _fetch_own_rows(mesh: Mesh, x: jax.Array) -> np.ndarray:
    x = jax.device_put(x, rows_sharding(mesh))  # a no-op unless the compiler also split it over `tensor`
    rows_of = x.sharding.devices_indices_map(x.shape)
    found = np.empty(x.shape, x.dtype)
    for shard in x.addressable_shards:
        found[rows_of[shard.device]] = shard.data
    return found[own_rows(mesh, len(x))]


def allgather_rows(mesh: Mesh, tree: Tree, count: int) -> Tree:
    """Assembles whole host arrays of `count` rows on every process from the rows that each process owns."""
    if jax.process_count() == 1:
        return tree
    rows, spread = own_rows(mesh, count), NamedSharding(mesh, PartitionSpec("tensor", BATCH_AXES))

    def whole(x: Any) -> np.ndarray:
        filled = np.zeros((count, *x.shape[1:]), x.dtype)
        filled[rows] = x
        known = np.broadcast_to(filled, (mesh.shape["tensor"], *filled.shape))
        # A row held by several processes is correct only on its owner, the first along the tensor axis.
        return _allgather(jax.make_array_from_callback(known.shape, spread, lambda index: known[index])[0])

    return jax.tree.map(whole, tree)
