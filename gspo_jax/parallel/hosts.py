"""Transfer of batches between host memory and the mesh's devices.

Host arrays hold the whole batch, in the same order on every process. On devices rows are sharded
(`mesh.rows_sharding`). Code that selects and orders rows is thus the same for any number of processes. Costly work per
row, such as rewards, is done by the row's owner only.
"""

import functools
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
"""Maximum bytes per device at a time in an all-gather to the hosts."""


def shard_rows(mesh: Mesh, tree: Tree) -> Tree:
    """Shard rows of whole host arrays over the batch axes. Each process feeds its own devices."""
    place = rows_sharding(mesh)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, place, lambda rows: x[rows]), tree)


def memory_of(mesh: Mesh) -> int | None:
    """Return the bytes that every device of a mesh has for programs, None if one does not say, as on CPU."""
    least = min((device.memory_stats() or {}).get("bytes_limit", 0) for device in mesh.local_devices) >> 20
    if jax.process_count() > 1:  # in MiB, as jax has 32 bits
        processes.meet()
        least = int(multihost_utils.process_allgather(np.int32(least)).min())
    return (least << 20) or None


def allgather(tree: Any) -> Any:
    """Return whole host arrays on every process."""
    return jax.device_get(tree) if jax.process_count() == 1 else jax.tree.map(_allgather, tree)


def _allgather(x: jax.Array) -> np.ndarray:
    processes.meet()  # records the wait for other processes
    blocks = -(-x.nbytes // _BLOCK)
    whole = x.sharding.shard_shape(x.shape)
    free = [axis for axis in range(x.ndim) if whole[axis] == x.shape[axis] > 1]  # slices along these move no data
    if blocks < 2 or not free:
        return multihost_utils.process_allgather(x, tiled=True)
    axis = max(free, key=lambda axis: x.shape[axis])
    length, found = x.shape[axis], np.empty(x.shape, x.dtype)
    width = -(-length // blocks)
    for start in (min(start, length - width) for start in range(0, length, width)):
        block = jax.lax.dynamic_slice_in_dim(x, start, width, axis=axis)
        at = (*[slice(None)] * axis, slice(start, start + width))
        found[at] = multihost_utils.process_allgather(block, tiled=True)
    return found


def fetch_places(tree: Any, places: Int[np.ndarray, " n"]) -> Any:
    """Return host copies, on every process, of places of arrays [M, Q, …], counted over M · Q."""
    width = jax.tree.leaves(tree)[0].shape[1]
    return _fetch(tree, places // width, places % width)


def fetch_rows(tree: Any, rows: Int[np.ndarray, " n"]) -> Any:
    """Return host copies, on every process, of rows of arrays [B, …]."""
    return _fetch(tree, rows)


def _fetch(tree: Any, *index: Int[np.ndarray, " n"]) -> Any:
    return jax.device_get(_chooser(jax.tree.leaves(tree)[0].sharding.mesh)(tree, index))


@functools.cache
def _chooser(mesh: Mesh) -> Any:
    def chosen(tree: Any, index: tuple[jax.Array, ...]) -> Any:
        return jax.tree.map(lambda x: x[index], tree)

    return jax.jit(chosen, out_shardings=NamedSharding(mesh, PartitionSpec()))


def any_process(here: bool) -> bool:
    """Return True if `here` is true in any process. All must call it."""
    if jax.process_count() == 1:
        return here
    processes.meet()  # records the wait for other processes
    return bool(multihost_utils.process_allgather(np.bool_(here)).any())


def first_nonempty(text: str) -> str:
    """Return the first non-empty text of any process, cut to a few hundred bytes. All must call it."""
    if jax.process_count() == 1:
        return text
    mine = np.zeros(_TEXT_BYTES, np.uint8)
    written = text.encode()[:_TEXT_BYTES]
    mine[: len(written)] = list(written)
    texts = (bytes(row).rstrip(b"\0").decode(errors="ignore") for row in multihost_utils.process_allgather(mine))
    return next((found for found in texts if found), "")


def own_rows(mesh: Mesh, count: int) -> Int[np.ndarray, " n"]:
    """Return the rows, ascending, that this process owns in a batch of `count`. Each row has one owner.

    If several processes hold a row, because `tensor` spans them, the first along `tensor` owns it.
    """
    assert AXES[-1] == "tensor"
    rows_of: Any = rows_sharding(mesh).devices_indices_map((count,))
    mine = [device for device in mesh.devices[..., 0].flat if device.process_index == jax.process_index()]
    every = np.arange(count)
    return np.sort(np.concatenate([every[:0], *(every[rows_of[device]] for device in mine)]))


def fetch_own_rows(mesh: Mesh, tree: Any) -> Any:
    """Return host copies of this process's own rows."""
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
    """Assemble whole host arrays of `count` rows from each process's own rows."""
    if jax.process_count() == 1:
        return tree
    rows, spread = own_rows(mesh, count), NamedSharding(mesh, PartitionSpec("tensor", BATCH_AXES))

    def whole(x: Any) -> np.ndarray:
        filled = np.zeros((count, *x.shape[1:]), x.dtype)
        filled[rows] = x
        known = np.broadcast_to(filled, (mesh.shape["tensor"], *filled.shape))
        # Only the owner, first along `tensor`, holds a valid row.
        return _allgather(jax.make_array_from_callback(known.shape, spread, lambda index: known[index])[0])

    return jax.tree.map(whole, tree)
