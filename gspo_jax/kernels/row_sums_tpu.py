"""Sums of rows by target on TPU: products with one-hot matrices, by the grouped matmul's kernel of outer products."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from gspo_jax.kernels.grouped_matmul_tpu import outer
from gspo_jax.kernels.visits_tpu import LANES

ROW_SUMS = "row_sums"
"""Name of the kernel, whose products stand for sums."""


class ByTarget(NamedTuple):
    """Rows in the order of their targets."""

    order: Int[Array, " N"]
    """The rows; those without a target come last."""
    targets: Int[Array, " N"]
    """Their targets; the number of targets for rows without one."""


def by_target(targets: Int[Array, " N"], count: Int[Array, ""], size: int) -> ByTarget:
    """The order of N rows by their targets in [0, `size`), which those from `count` on do not have."""
    N, number = len(targets), jnp.arange(len(targets), dtype=jnp.int32)
    keys = jnp.where(number < count, targets, size)
    if (size + 1) * N < 2**31:  # one number holds both: cheaper than sorting two arrays
        ordered, order = jnp.divmod(jnp.sort(keys * N + number, stable=False), N)
    else:
        ordered, order = jax.lax.sort((keys, number), num_keys=1)
    return ByTarget(order, ordered)


def row_sums(rows: Float[Array, "N D"], by: ByTarget, size: int, *, interpret: bool = False) -> Float[Array, "M D"]:
    """Compute out[m] = Σ_n rows[n] over the rows n with target m, in [0, M) with M = `size`.

    In the order of their targets, rows of a block of `LANES` of these are adjacent, and its sums are the product of a
    one-hot matrix with them. Accumulated in float32 and rounded once.
    """
    blocks = pl.cdiv(size, LANES)
    block, lane = jnp.divmod(by.targets, LANES)
    here = (block[:, None] == jnp.arange(blocks)[None]) & (by.targets < size)[:, None]
    places = (lane[:, None] == jnp.arange(LANES)[None]).astype(rows.dtype)
    ordered = rows.at[by.order].get(mode="clip")
    sums = outer(places, ordered, here.sum(axis=0, dtype=jnp.int32), interpret=interpret, name=ROW_SUMS)
    return sums.reshape(blocks * LANES, -1)[:size]
