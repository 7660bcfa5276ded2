"""Parts of a batch: mini-batches, one for each update, and micro-batches, which bound the memory that one takes.

Parts are strided rather than contiguous, so that every device slices its own rows when it holds some of every part.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from gspo_jax.parallel.mesh import constrain, shared_rows


def take_minibatch(batch: Any, index: Array | int, *, count: int, group_size: int) -> Any:
    """Mini-batch `index` of `count`: the groups whose number is `index` modulo `count`.

    `batch` is any pytree of arrays that lead with the rows.
    """

    def cut(x: Array) -> Array:
        rows, *rest = x.shape  # no -1: a dense model's routes have no elements to infer it from
        groups = x.reshape(rows // (count * group_size), count, group_size, *rest)
        return groups[:, index].reshape(rows // count, *rest)

    return jax.tree.map(cut, batch)


def join_minibatches(parts: Any, *, group_size: int) -> Any:
    """[count, B / count, …] -> [B, …] for every array: invert `take_minibatch`, given all parts."""
    return jax.tree.map(lambda x: _interleaved(x, group_size), parts)


def cut_rows(batch: Any, count: int, *, group_size: int) -> Any:
    """[B, …] -> [count, B / count, …] for every array: micro-batches, each spread over all shards.

    Cut in units of as many adjacent rows of a group as fit on one shard, so that they still share their prompt.
    """

    def cut(x: Array) -> Array:
        rows, *rest = x.shape
        unit = shared_rows(rows // count, group_size)
        x = jnp.moveaxis(x.reshape(rows // (count * unit), count, unit, *rest), 1, 0)
        return constrain(x.reshape(count, rows // count, *rest), None, "batch", *(None,) * len(rest))

    return jax.tree.map(cut, batch)


def join_rows(parts: Any, *, group_size: int) -> Any:
    """Invert `cut_rows`."""
    return jax.tree.map(lambda x: _interleaved(x, shared_rows(x.shape[1], group_size)), parts)


def _interleaved(x: Array, unit: int) -> Array:
    """[count, rows, …] -> [count · rows, …], taking `unit` rows of each part in turn."""
    count, rows, *rest = x.shape
    x = jnp.moveaxis(x.reshape(count, rows // unit, unit, *rest), 0, 1)
    return constrain(x.reshape(count * rows, *rest), "batch", *(None,) * len(rest))
