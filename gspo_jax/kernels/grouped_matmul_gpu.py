"""Grouped matmul on GPU: Pallas kernels by Triton that compute used rows alone and read stacked weights in place.

A program computes a tile of one group's rows and of the output's columns. It finds its group from `group_sizes` itself:
in a decode step, launches of small operations take as long as the products.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int, Shaped

from gspo_jax.kernels.backend import unchecked

_LEAST = 16
"""Fewest rows, columns and contracted elements of a matrix unit's product."""


class Tile(NamedTuple):
    """Sizes of a program's part of a product, and how its loads are pipelined."""

    rows: int
    inner: int
    """Contracted elements per load."""
    columns: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        return {"compiler_params": plgpu.CompilerParams(num_warps=self.warps, num_stages=self.stages)}


def fits(*widths: int) -> bool:
    """True if the kernels take matrices of these widths."""
    return all(width % _LEAST == 0 for width in widths)


def tile_of(rows: int, groups: int, inner: int, size: int, *, outputs: int) -> Tile:
    """Return the tile for so many rows of `inner` elements of `size` bytes: as many as a group has, at most 128.

    Others of up to twice the columns, depth or stages were within 6% on an H200, from 128 to 65,536 rows of
    Qwen3-30B-A3B's experts.
    """
    tall = min(128, max(_LEAST, pl.next_power_of_2(pl.cdiv(rows, groups))))
    deep = next(k for k in (128 // size, 64 // size, _LEAST) if inner % k == 0)
    wide = 256 // outputs if tall == 128 else 128
    return Tile(tall, deep, max(_LEAST, wide // size), *((8, 3) if tall == 128 else (4, 4)))


def _dot(a: Array, b: Array) -> Float[Array, "m n"]:
    """Multiply with float32 sums. Float32 factors are not rounded to TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


class _Span(NamedTuple):
    """A visit's group and its rows [first, end)."""

    group: Array
    first: Array
    end: Array


def _sizes(sizes: Any) -> tuple[Int[Array, " room"], Bool[Array, " room"], Int[Array, " room"]]:
    """Load all groups' sizes, padded to a power of two. Return numbers, a mask of real ones, and sizes."""
    each = jnp.arange(pl.next_power_of_2(sizes.shape[0]))
    real = each < sizes.shape[0]
    return each, real, plgpu.load(sizes.at[each], mask=real, other=0)


def _span(sizes: Any, visit: Array, rows: int) -> _Span:
    """Find the span of a visit of so many rows. Behind all groups come the rows of none, as group number E."""
    each, real, size = _sizes(sizes)
    visits = (size + (rows - 1)) // rows
    done = (jnp.cumsum(visits) <= visit) & real
    group = jnp.sum(done.astype(jnp.int32))
    first = jnp.sum(jnp.where(done, size, 0)) + (visit - jnp.sum(jnp.where(done, visits, 0))) * rows
    return _Span(group, first, jnp.sum(jnp.where(each <= group, size, 0)))


def _each_kernel(sizes: Any, layer: Any, *refs: Any, n: int, tile: Tile, scaled: bool, back: bool) -> None:
    """Compute out_i = rows @ weights_i, or if `back` out = Σ_i rows_i @ weights_i^T."""
    inputs, outputs = (n, 1) if back else (1, n)
    rows, weights, scales, outs = refs[:inputs], refs[inputs : inputs + n], refs[inputs + n : -outputs], refs[-outputs:]
    (total, inner), width, E = rows[0].shape, outs[0].shape[1], sizes.shape[0]
    span = _span(sizes, pl.program_id(1), tile.rows)
    is_group = span.group < E
    e = jnp.where(is_group, span.group, 0)
    matrix, down = layer[0] * E + e, pl.ds(span.first, tile.rows)
    inside = (span.first + jnp.arange(tile.rows) < jnp.where(is_group, span.end, total))[:, None]
    start = pl.program_id(0) * tile.columns
    across, there = pl.ds(start, tile.columns), start + jnp.arange(tile.columns) < width

    def step(k: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        part = pl.ds(k * tile.inner, tile.inner)

        def row(i: int) -> Array:
            x = plgpu.load(rows[i].at[down, part], mask=inside, other=0)
            if not (scaled and back):
                return x
            return (x.astype(jnp.float32) * plgpu.load(scales[i].at[e, part])[None]).astype(x.dtype)

        def weight(i: int) -> Array:
            at, mask = ((across, part), there[:, None]) if back else ((part, across), there[None])
            w = plgpu.load(weights[i].at[matrix, *at], mask=mask, other=0).astype(rows[0].dtype)
            return w.T if back else w

        if back:
            return (sum((_dot(row(i), weight(i)) for i in range(n)), sums[0]),)
        x = row(0)
        return tuple(y + _dot(x, weight(i)) for i, y in enumerate(sums))

    zeros = (jnp.zeros((tile.rows, tile.columns), jnp.float32),) * outputs
    sums = jax.lax.fori_loop(0, is_group.astype(jnp.int32) * (inner // tile.inner), step, zeros)
    for i, (y, out) in enumerate(zip(sums, outs, strict=True)):
        if scaled and not back:
            y *= plgpu.load(scales[i].at[e, across], mask=there, other=0)[None]
        plgpu.store(out.at[down, across], y.astype(out.dtype), mask=inside & there[None])


def _each(
    rows: Sequence[Array],
    weights: Sequence[Array],
    group_sizes: Array,
    scales: Sequence[Array],
    layer: Array | int,
    *,
    back: bool,
    interpret: bool,
) -> tuple[Array, ...]:
    (N, inner), E, width = rows[0].shape, group_sizes.shape[0], weights[0].shape[1 if back else 2]
    outputs = 1 if back else len(weights)
    tile = tile_of(N, E, inner, rows[0].dtype.itemsize, outputs=outputs)
    run = pl.pallas_call(
        functools.partial(_each_kernel, n=len(weights), tile=tile, scaled=bool(scales), back=back),
        grid=(pl.cdiv(width, tile.columns), pl.cdiv(N, tile.rows) + min(E, N)),
        out_shape=[jax.ShapeDtypeStruct((N, width), rows[0].dtype)] * outputs,
        name="grouped_matmul_transposed" if back else "grouped_matmul",
        interpret=interpret,
        **tile.options,
    )
    number = jnp.asarray(layer, jnp.int32).reshape(1)
    return tuple(unchecked(run, group_sizes.astype(jnp.int32), number, *rows, *weights, *scales))


def matmuls(
    rows: Float[Array, "N D"],
    weights: Sequence[Shaped[Array, "LE D F"]],
    group_sizes: Int[Array, " E"],
    *,
    scales: Sequence[Float[Array, "E F"]] = (),
    layer: Int[Array, ""] | int = 0,
    interpret: bool = False,
) -> tuple[Float[Array, "N F"], ...]:
    """Return each group's rows @ weights_i[layer · E + group], zero past all groups.

    Args:
      rows: sorted by group.
      weights: all in the rows' dtype, or all in int8 with `scales`.
    """
    return _each([rows], weights, group_sizes, scales, layer, back=False, interpret=interpret)


def matmuls_transposed(
    grads: Sequence[Float[Array, "N F"]],
    weights: Sequence[Shaped[Array, "E D F"]],
    group_sizes: Int[Array, " E"],
    *,
    scales: Sequence[Float[Array, "E F"]] = (),
    interpret: bool = False,
) -> Float[Array, "N D"]:
    """Return Σ_i grads_i @ weights_i[group]^T, zero past all groups."""
    return _each(grads, weights, group_sizes, scales, 0, back=True, interpret=interpret)[0]


def _outer_kernel(sizes: Any, rows: Any, grads: Any, out: Any, *, tile: Tile) -> None:
    e, (each, _, size) = pl.program_id(2), _sizes(sizes)
    first, end = (jnp.sum(jnp.where(own, size, 0)) for own in (each < e, each <= e))
    sides = []
    for axis, width, x in ((1, tile.rows, rows), (0, tile.columns, grads)):
        start = pl.program_id(axis) * width
        sides.append((x, pl.ds(start, width), start + jnp.arange(width) < x.shape[1]))

    def step(k: Array, total: Array) -> Array:
        begin = first + k * tile.inner
        inside = (begin + jnp.arange(tile.inner) < end)[:, None]
        left, right = (
            plgpu.load(x.at[pl.ds(begin, tile.inner), at], mask=inside & there[None], other=0) for x, at, there in sides
        )
        return total + _dot(left.T, right)

    zeros = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    total = jax.lax.fori_loop(0, (end - first + (tile.inner - 1)) // tile.inner, step, zeros)
    (_, down, above), (_, across, there) = sides
    plgpu.store(out.at[e, down, across], total, mask=above[:, None] & there[None])


def outer(
    rows: Float[Array, "N D"],
    grads: Float[Array, "N F"],
    group_sizes: Int[Array, " E"],
    *,
    interpret: bool = False,
) -> Float[Array, "E D F"]:
    """Return each group's rows^T @ grads, in float32."""
    E, D, F = group_sizes.shape[0], rows.shape[1], grads.shape[1]
    size = rows.dtype.itemsize
    tile = Tile(rows=128, inner=128 // size, columns=256 // size, warps=8, stages=3)
    run = pl.pallas_call(
        functools.partial(_outer_kernel, tile=tile),
        grid=(pl.cdiv(F, tile.columns), pl.cdiv(D, tile.rows), E),
        out_shape=jax.ShapeDtypeStruct((E, D, F), jnp.float32),
        name="grouped_outer",
        interpret=interpret,
        **tile.options,
    )
    return unchecked(run, group_sizes.astype(jnp.int32), rows, grads)
