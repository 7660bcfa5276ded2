"""Mini-batches of a batch, one for each update.

They are strided rather than contiguous, so that every device slices its own rows when it holds some of each.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from gspo_jax.parallel.mesh import constrain


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


def _interleaved(x: Array, unit: int) -> Array:
    """[count, rows, …] -> [count · rows, …], taking `unit` rows of each part in turn."""
    count, rows, *rest = x.shape
    x = jnp.moveaxis(x.reshape(count, rows // unit, unit, *rest), 0, 1)
    return constrain(x.reshape(count * rows, *rest), "batch", *(None,) * len(rest))
