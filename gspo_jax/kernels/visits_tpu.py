"""Visits of tiles of sorted rows by groups on TPU: their schedule, and shared parts of the kernels.

A group visits only tiles with its rows, so work scales with used rows, not with the buffer or the number of experts. In
a shared tile it computes only the parts of 128 rows that hold its rows.
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
"""Byte budget of a kernel's blocks, of the 16 MiB of VMEM that the compiler grants. Measured: more can fail."""


class Visits(NamedTuple):
    """Schedule of (group, tile) pairs: each group's tiles in order, then one visit per empty group.

    V allows for one visit per tile plus one per group that begins inside a tile.
    """

    group: Int[Array, " V"]
    tile: Int[Array, " V"]
    first: Int[Array, " V"]
    """The group's first row in the tile."""
    end: Int[Array, " V"]
    """One past the group's last row in the tile."""


def _visits_kernel(sizes: Any, group: Any, tile: Any, first: Any, end: Any, counts: Any, *, rows: int) -> None:
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

        # No tile for an empty group.
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
    """Return the visits and two counts: visits with rows, and all visits.

    Scalar loops in a kernel beat many small XLA operations. Jitted to be traced once: for equal groups the compiler
    sees identical kernels and runs them once.
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
    """Return the rows per tile: the largest of 512, 256 and 128 that an average group fills; fewer if few or very wide.

    Short tiles leave the matrix units waiting for weights, and so do parts of tiles longer than a group. Two buffers of
    rows of `width` elements of `size` bytes take at most a third of the VMEM budget.
    """
    tile = next((t for t in (512, 256) if likely // groups >= t), LANES)
    while tile > 16 and 2 * size * tile * width > VMEM // 3:
        tile //= 2
    return min(tile, rows)


def part_of(tile: int) -> int:
    """Return the fewest rows computed at once."""
    return LANES if tile % LANES == 0 else tile


def executed_rows(group_sizes: Int[np.ndarray, " E"], tile: int) -> int:
    """Return the rows that a kernel with this tile computes: all parts with a group's rows, whole.

    A kernel's name ends in its tile.
    """
    part, ends = part_of(tile), np.cumsum(group_sizes)
    parts = -(-ends // part) - (ends - group_sizes) // part
    return part * int(parts[group_sizes > 0].sum())


def for_parts(first: Array, end: Array, rows: int, run: Callable[[Any, Array, Array], None]) -> None:
    """Call run(slice, first, end) for slices of a tile that cover the parts with rows of [first, end).

    In the call, first and end count from the slice. Slices have one, two, four, … parts, the binary digits of the
    total: larger products take less time per row.
    """
    part = part_of(rows)
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
    """Sum each group's visits along a grid axis, and write the sums after its last.

    `add` gets a slice of each tile, other groups' rows zeroed.
    """
    v, last = pl.program_id(axis), pl.num_programs(axis) - 1
    begins = (v == 0) | (group[jnp.maximum(v - 1, 0)] != group[v])
    ends = (v == last) | (group[jnp.minimum(v + 1, last)] != group[v])

    @pl.when(begins)
    def _() -> None:
        for total in totals:
            total[...] = jnp.zeros_like(total)

    def run(at: Any, first: Array, end: Array) -> None:
        def own(x: Array) -> Array:  # masks all factors: other rows may hold NaN
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
    """Split refs into groups of these sizes."""
    rest = iter(refs)
    return [tuple(itertools.islice(rest, count)) for count in counts]
