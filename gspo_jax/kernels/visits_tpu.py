"""Visits of tiles of sorted rows by groups, on TPU: their schedule, and what the grouped matmul's kernels do in each.

Rows are split into tiles. A tile is visited once for each group that has rows in it, and tiles past the last group are
never visited, so the work scales with the rows in the groups, not with the buffer or the number of experts. Of a tile
that it has only some rows in, a group computes the parts of 128 rows that hold them.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from gspo_jax.kernels.backend import unchecked

LANES = 128
VMEM = 14 * 2**20
"""Byte budget of a kernel's blocks out of the 16 MiB of VMEM that the compiler grants; measured: more can fail."""


class Visits(NamedTuple):
    """Schedule of (group, tile) pairs: the tiles of each group in order, then one visit for each group without rows.

    Its length V allows for one visit per tile plus one for each group that begins inside a tile.
    """

    group: Int[Array, " V"]
    tile: Int[Array, " V"]
    first: Int[Array, " V"]
    """Offset in the tile of the group's first row."""
    end: Int[Array, " V"]
    """Offset in the tile just past the group's last row."""


def _visits_kernel(sizes: Any, group: Any, tile: Any, first: Any, end: Any, counts: Any, *, rows: int) -> None:
    """Write the visits of each group in turn, then those of the empty groups; a tile has `rows` rows."""
    E = sizes.shape[0]

    def write(v: Array, *visit: Array | int) -> Array:
        for out, value in zip((group, tile, first, end), visit, strict=True):
            out[v] = value
        return v + 1

    def filled(e: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        start, v = at
        stop = start + sizes[e]

        def one(t: Array, v: Array) -> Array:
            return write(v, e, t, jnp.maximum(start - t * rows, 0), jnp.minimum(stop - t * rows, rows))

        # From the tile of the first row to that of the last; no tile for an empty group.
        tiles = jnp.where(sizes[e] > 0, (stop - 1) // rows + 1, 0)
        return stop, jax.lax.fori_loop(start // rows, tiles, one, v)

    def empty(e: Array, v: Array) -> Array:
        return jax.lax.cond(sizes[e] > 0, lambda v: v, lambda v: write(v, e, 0, 0, 0), v)

    _, with_rows = jax.lax.fori_loop(0, E, filled, (jnp.int32(0), jnp.int32(0)))
    counts[0], counts[1] = with_rows, jax.lax.fori_loop(0, E, empty, with_rows)


@functools.partial(jax.jit, static_argnames=("rows", "tile", "interpret"))
def schedule(
    group_sizes: Int[Array, " E"], rows: int, tile: int, *, interpret: bool
) -> tuple[Visits, Int[Array, " 2"]]:
    """Return the visits and two counts: the visits with rows, and all visits including those of empty groups.

    Scalar loops in a kernel take less time than the many small array operations of a plain-XLA version. Because it is
    jitted it is traced once, so the compiler sees identical kernels wherever the groups are the same, in forward and
    backward, and runs them once.
    """
    E = group_sizes.shape[0]
    room = pl.cdiv(rows, tile) + E - 1
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    run = pl.pallas_call(
        functools.partial(_visits_kernel, rows=tile),
        out_shape=(*[jax.ShapeDtypeStruct((room,), jnp.int32)] * 4, jax.ShapeDtypeStruct((2,), jnp.int32)),
        in_specs=(scalars,),
        out_specs=(scalars,) * 5,
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=4 * (E + 4 * room + 2), transcendentals=0),
        interpret=interpret,
        name="grouped_visits",
    )
    *visits, counts = unchecked(run, group_sizes.astype(jnp.int32))
    return Visits(*visits), counts


def row_tile(rows: int, groups: int, likely: int, width: int, size: int) -> int:
    """Rows per tile: the largest of 512, 256 and 128 that an average group fills; fewer if rows are very wide or few.

    Short tiles leave the matrix units waiting for weights, as do the parts that are computed of a group's first and
    last tile; of tiles longer than the groups only parts would be. Two buffers of a tile, whose rows have `width`
    elements of `size` bytes, take at most a third of the VMEM budget.
    """
    tile = next((t for t in (512, 256) if likely // groups >= t), LANES)
    while tile > 16 and 2 * size * tile * width > VMEM // 3:
        tile //= 2
    return min(tile, rows)


def _part(tile: int) -> int:
    """Rows per part of a tile: the fewest that are computed at once."""
    return LANES if tile % LANES == 0 else tile


def executed_rows(group_sizes: Int[np.ndarray, " E"], tile: int) -> int:
    """Rows that a kernel with tiles of `tile` rows computes: for each group, whole, the parts that hold rows of it.

    The name of a kernel ends in its tile.
    """
    part, ends = _part(tile), np.cumsum(group_sizes)
    parts = -(-ends // part) - (ends - group_sizes) // part
    return part * int(parts[group_sizes > 0].sum())


def for_parts(first: Array, end: Array, rows: int, run: Callable[[Any, Array, Array], None]) -> None:
    """Call run(slice, first, end) for slices of a tile of `rows` rows that cover the parts with rows of [first, end).

    In the call first and end count from the slice. A slice has one, two, four, … parts, as in the binary number of the
    parts to cover: a product takes less time per row the more rows it has, and least for a whole tile.
    """
    part = _part(rows)
    begin = first // part
    count = pl.cdiv(end, part) - begin
    for parts in (2**i for i in reversed(range((rows // part).bit_length()))):

        def one(parts: int = parts) -> None:
            start = part * (begin + (count & (-2 * parts)))
            at = pl.ds(0 if parts * part == rows else pl.multiple_of(start, part), parts * part)
            run(at, first - start, end - start)

        pl.when((count & parts) != 0)(one)


def accumulate(
    axis: int,
    group: Any,
    first: Any,
    end: Any,
    tiles: Sequence[Any],
    add: Callable[..., None],
    totals: Sequence[Any],
    outs: Sequence[Any],
) -> None:
    """Sum up the visits of each group, along an axis of the grid, and write the sums after a group's last.

    `add` adds to the totals for a slice of each of the tiles, in which the rows of other groups are zero.
    """
    v, last = pl.program_id(axis), pl.num_programs(axis) - 1
    begins = (v == 0) | (group[jnp.maximum(v - 1, 0)] != group[v])
    ends = (v == last) | (group[jnp.minimum(v + 1, last)] != group[v])

    @pl.when(begins)
    def _() -> None:
        for total in totals:
            total[...] = jnp.zeros_like(total)

    def run(at: Any, first: Array, end: Array) -> None:
        def own(x: Array) -> Array:  # masks all factors, because the other rows may hold NaN
            row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
            return jnp.where((row >= first) & (row < end), x.astype(jnp.float32), 0).astype(x.dtype)

        whole = (first <= 0) & (end >= at.size)

        @pl.when(whole)
        def _() -> None:
            add(*(x[at, :] for x in tiles))

        @pl.when(~whole)
        def _() -> None:
            add(*(own(x[at, :]) for x in tiles))

    for_parts(first[v], end[v], tiles[0].shape[0], run)

    @pl.when(ends)
    def _() -> None:
        for total, out in zip(totals, outs, strict=True):
            out[...] = total[...].astype(out.dtype)


def taken(refs: Sequence[Any], *counts: int) -> list[tuple[Any, ...]]:
    """The refs, in groups of these sizes."""
    rest = iter(refs)
    return [tuple(itertools.islice(rest, count)) for count in counts]
