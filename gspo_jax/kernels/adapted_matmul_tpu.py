"""Gradients of adapters on TPU: one Pallas kernel reads rows and cotangents once for all.

It recomputes the thin products in VMEM. In main memory their few columns would take whole lanes.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from gspo_jax.errors import UserError
from gspo_jax.kernels.backend import unchecked
from gspo_jax.kernels.grouped_matmul_tpu import Thin, thin_columns
from gspo_jax.kernels.visits_tpu import VMEM, accumulate, row_tile, schedule, taken


def _kernel(group: Any, tile: Any, first: Any, end: Any, rows: Any, *refs: Any, n: int) -> None:
    del tile
    grads, inner, (factors,), outer, outs, totals = taken(refs, n, 1, 1, n, n + 1, n + 1)

    def add(x: Array, *gs: Array) -> None:
        columns, back = thin_columns([x], inner, factors), thin_columns(gs, outer, factors)
        for total, thin, wide in zip(totals, (back, *[columns] * n), (x, *gs), strict=True):
            total[...] += jax.lax.dot_general(thin, wide, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    accumulate(0, group, first, end, (rows, *grads), add, totals, outs)


def gradient(
    rows: Float[Array, "N D"],
    grads: Sequence[Float[Array, "N F"]],
    thin: Thin,
    group_sizes: Int[Array, " E"],
    *,
    likely: int | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "E R D"], tuple[Float[Array, "E R F"], ...]]:
    """Compute the gradients of `thin.first` (one matrix per group here) and of each of `thin.second`.

    Accumulated in float32, rounded once to the rows' dtype. Rows past the last group are not read. Arguments as in
    `grouped_matmul_tpu.matmuls`.

    Raises:
      UserError: the gradients of a group do not fit VMEM.
    """
    (N, D), E, size, R = rows.shape, group_sizes.shape[0], rows.dtype.itemsize, thin.factors.shape[1]
    widths = [D, *(g.shape[1] for g in grads)]
    tile = row_tile(N, E, N if likely is None else likely, sum(widths), size)
    matrices = (4 * size + 4) * sum(widths) * 16 * pl.cdiv(R, 16)  # double buffers, and sums in float32
    while matrices + (2 * size + 4) * tile * sum(widths) > VMEM and tile % 32 == 0:  # rows are masked in float32
        tile //= 2
    if matrices + (2 * size + 4) * tile * sum(widths) > VMEM:
        raise UserError(f"gradients of {R} × {sum(widths)} exceed a kernel's {VMEM} bytes of VMEM; lower the rank")
    visits, counts = schedule(group_sizes, N, tile, interpret=interpret)
    tiles = [pl.BlockSpec((tile, width), lambda v, group, tile, *_: (tile[v], 0)) for width in widths]
    blocks = [pl.BlockSpec((None, R, width), lambda v, group, *_: (group[v], 0, 0)) for width in widths]

    def run(count: Array, *args: Array) -> tuple[Array, ...]:
        return pl.pallas_call(
            functools.partial(_kernel, n=len(grads)),
            out_shape=tuple(jax.ShapeDtypeStruct((E, R, width), rows.dtype) for width in widths),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=4,
                in_specs=(*tiles, blocks[0], pl.BlockSpec((1, R), lambda *_: (0, 0)), *blocks[1:]),
                out_specs=blocks,
                grid=(count,),
                scratch_shapes=tuple(pltpu.VMEM((R, width), jnp.float32) for width in widths),
            ),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
            cost_estimate=pl.CostEstimate(
                flops=4 * N * R * sum(widths), bytes_accessed=size * (N + 2 * E * R) * sum(widths), transcendentals=0
            ),
            interpret=interpret,
            name=f"grouped_outer_thin_{tile}",
        )(*args)

    # Empty groups too: their zero gradient must be written.
    d_first, *d_second = unchecked(run, counts[1], *visits, rows, *grads, *thin.first, thin.factors, *thin.second)
    return d_first, tuple(d_second)
