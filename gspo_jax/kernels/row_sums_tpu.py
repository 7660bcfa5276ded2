"""Sums of rows by target on TPU, as products with one-hot matrices."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from gspo_jax.kernels.grouped_matmul_tpu import outer
from gspo_jax.kernels.visits_tpu import LANES

ROW_SUMS = "row_sums"
"""The kernel's name. Its products stand for sums."""


class ByTarget(NamedTuple):
    """Rows sorted by target."""

    order: Int[Array, " N"]
    """Rows without a target come last."""
    targets: Int[Array, " N"]
    """`size` for rows without one."""


def in_order(keys: Int[Array, " N"], most: int) -> tuple[Int[Array, " N"], Int[Array, " N"]]:
    """Return keys in [0, `most`] sorted, and the order that sorts them stably."""
    N, number = len(keys), jnp.arange(len(keys), dtype=jnp.int32)
    if (most + 1) * N < 2**31:  # one number holds both: cheaper than sorting two arrays
        ordered, order = jnp.divmod(jnp.sort(keys * N + number, stable=False), N)
        return ordered, order
    ordered, order = jax.lax.sort((keys, number), num_keys=1)
    return ordered, order


def by_target(targets: Int[Array, " N"], count: Int[Array, ""], size: int) -> ByTarget:
    """Sort rows by target in [0, `size`). Rows from `count` on have none."""
    keys = jnp.where(jnp.arange(len(targets)) < count, targets, size)
    ordered, order = in_order(keys, size)
    return ByTarget(order, ordered)


def row_sums(rows: Float[Array, "N D"], by: ByTarget, size: int, *, interpret: bool = False) -> Float[Array, "M D"]:
    """Compute out[m] = Σ_n rows[n] over the rows with target m in [0, M), M = `size`.

    Sorted rows of `LANES` targets are adjacent: a one-hot product sums them. Accumulated in float32, rounded once.
    """
    blocks = pl.cdiv(size, LANES)
    block, lane = jnp.divmod(by.targets, LANES)
    here = (block[:, None] == jnp.arange(blocks)[None]) & (by.targets < size)[:, None]
    places = (lane[:, None] == jnp.arange(LANES)[None]).astype(rows.dtype)
    ordered = rows.at[by.order].get(mode="clip")
    sums = outer(places, ordered, here.sum(axis=0, dtype=jnp.int32), interpret=interpret, name=ROW_SUMS)
    return sums.reshape(blocks * LANES, -1)[:size]
