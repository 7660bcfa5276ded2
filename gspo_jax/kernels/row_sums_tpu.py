"""Sums of rows by target on TPU: as products with one-hot matrices, or of as many rows for every target."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels.backend import unchecked
from gspo_jax.kernels.grouped_matmul_tpu import outer
from gspo_jax.kernels.visits_tpu import LANES, VMEM

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


def _sum_kernel(factors: Any, rows: Any, out: Any) -> None:
    total = jnp.zeros(out.shape, jnp.float32)
    for j in range(len(rows)):
        factor = factors[:, j : j + 1]
        total += jnp.where(factor != 0, factor * rows[j].astype(jnp.float32), 0)
    out[...] = total.astype(out.dtype)


def masked_sum(
    rows: Float[Array, "J N D"], factors: Bool[Array, "N J"] | Float[Array, "N J"], *, interpret: bool = False
) -> Float[Array, "N D"]:
    """Compute out[n] = Σ_j factors[n, j] · rows[j, n]. Accumulated in float32, rounded once.

    Rows with a factor of 0 count 0, whatever they hold.
    """
    (J, N, D), size = rows.shape, rows.dtype.itemsize
    tile = 512
    while tile > 16 and tile * D * (2 * size * (J + 1) + 8) > VMEM:
        tile //= 2
    tile = min(tile, N)
    run = pl.pallas_call(
        _sum_kernel,
        out_shape=jax.ShapeDtypeStruct((N, D), rows.dtype),
        in_specs=(
            pl.BlockSpec((tile, J), lambda i: (i, 0)),
            pl.BlockSpec((J, tile, D), lambda i: (0, i, 0)),
        ),
        out_specs=pl.BlockSpec((tile, D), lambda i: (i, 0)),
        grid=(pl.cdiv(N, tile),),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=N * ((J + 1) * D * size + 4 * J), transcendentals=0),
        interpret=interpret,
        name="masked_sum",
    )
    return unchecked(run, factors.astype(jnp.float32), rows)
