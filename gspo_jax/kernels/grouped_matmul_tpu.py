"""Grouped matmul on TPU: the Pallas kernels of the forward and backward passes, which skip unused rows and weights.

Rows are split into tiles. A tile is visited once for each group that has rows in it, and tiles past the last group are
never visited, so the work scales with the rows in the groups, not with the buffer or the number of experts. Of a tile
that it has only some rows in, a group computes the parts of 128 rows that hold them. Weight blocks span the whole
contraction dimension and stay in VMEM from one tile of a group to the next, so each is read once.
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
from jaxtyping import Array, Float, Int, Shaped

from gspo_jax.kernels.backend import unchecked
from gspo_jax.types import UserError

LANES = 128
_VMEM = 14 * 2**20
"""Byte budget of a kernel's blocks out of the 16 MiB of VMEM that the compiler grants; measured: more can fail."""


class Added(NamedTuple):
    """Products that a kernel adds to its outputs before it rounds them: rows[n] @ weights_i[e(n)], of few columns R."""

    rows: Float[Array, "N R"]
    """As many as the kernel's own rows, in their dtype."""
    weights: Sequence[Float[Array, "E R F"]]
    """One of each output, in the rows' dtype; they are those of one layer."""


class _Visits(NamedTuple):
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
def _visits(
    group_sizes: Int[Array, " E"], rows: int, tile: int, *, interpret: bool
) -> tuple[_Visits, Int[Array, " 2"]]:
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
    return _Visits(*visits), counts


def _row_tile(rows: int, groups: int, likely: int, width: int, size: int) -> int:
    """Rows per tile: the largest of 512, 256 and 128 that an average group fills; fewer if rows are very wide or few.

    Short tiles leave the matrix units waiting for weights, as do the parts that are computed of a group's first and
    last tile; of tiles longer than the groups only parts would be. Two buffers of a tile, whose rows have `width`
    elements of `size` bytes, take at most a third of the VMEM budget.
    """
    tile = next((t for t in (512, 256) if likely // groups >= t), LANES)
    while tile > 16 and 2 * size * tile * width > _VMEM // 3:
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


def _splits(size: int) -> list[int]:
    """Candidate tile lengths for a dimension: its divisors in whole lanes.

    If the dimension is not a multiple of the lanes: the dimension itself, or shorter tiles with a masked last one.
    """
    if size % LANES:
        return [size, *(t for t in (1024, 512, 256, 128) if t < size)]
    return [t for t in range(LANES, size + 1, LANES) if size % t == 0]


def _columns(width: int, fits: Callable[[int], bool]) -> int:
    """Output columns per block: minimises the columns of the busier of two cores, then prefers long blocks.

    Chips of v4 and v5p have two cores, which share the blocks of columns. Rows are read once per block.
    """
    lengths = [t for t in _splits(width) if fits(t)]
    if not lengths:
        raise UserError(
            f"no block of {width} columns fits a kernel's {_VMEM} bytes of VMEM; use bfloat16 or narrower rows"
        )
    return min(lengths, key=lambda t: (pl.cdiv(pl.cdiv(width, t), 2) * t, -t))


def _tiles(down: int, across: int, fits: Callable[[int, int], bool]) -> tuple[int, int]:
    """Block shape [d, f] of the output of `outer` that moves the fewest bytes: N · (D · F / f + F · D / d).

    Prefers at least two blocks, one for each of a chip's two cores.
    """
    pairs = [p for p in itertools.product(_splits(down), _splits(across)) if fits(*p)]
    return min(pairs, key=lambda p: (p == (down, across), 1 / p[0] + 1 / p[1]))


def _sublanes(rows: int, size: int) -> int:
    """Rows that so many take in VMEM, of elements of `size` bytes."""
    return pl.cdiv(rows * size, 32) * 32 // size


def _for_parts(first: Array, end: Array, rows: int, run: Callable[[Any, Array, Array], None]) -> None:
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


def _store(product: Float[Array, "n f"], out: Any, at: Any, first: Array, end: Array) -> None:
    """Write the rows [first, end) of a product to out[at] and leave those of other groups unchanged."""
    whole = (first <= 0) & (end >= product.shape[0])

    @pl.when(whole)
    def _() -> None:
        out[at, :] = product.astype(out.dtype)

    @pl.when(~whole)
    def _() -> None:
        row = jax.lax.broadcasted_iota(jnp.int32, product.shape, 0)
        before = out[at, :].astype(jnp.float32)
        out[at, :] = jnp.where((row >= first) & (row < end), product, before).astype(out.dtype)


def _unpacked(group: Any, v: Array, weights: Sequence[Any], copies: Sequence[Any]) -> Sequence[Any]:
    """The weights' blocks in the rows' dtype: int8 ones are converted once for all visits of a group."""
    if not copies:
        return weights

    @pl.when((v == 0) | (group[jnp.maximum(v - 1, 0)] != group[v]))
    def _() -> None:
        for w, copy in zip(weights, copies, strict=True):
            copy[...] = w[...].astype(jnp.float32).astype(copy.dtype)

    return copies


def _each_kernel(
    group: Any, tile: Any, first: Any, end: Any, layer: Any, rows: Any, *refs: Any, n: int, scaled: bool, added: bool
) -> None:
    """Compute out_i = rows @ weights_i, and what is added to it, for one visit and one block of columns."""
    del tile, layer  # used by the index maps only
    v = pl.program_id(1)
    weights, scales, thin, others, outs, copies = _taken(refs, n, n * scaled, added, n * added, n, n * scaled)
    weights = _unpacked(group, v, weights, copies)

    def run(at: Any, first: Array, end: Array) -> None:
        for i, (w, out) in enumerate(zip(weights, outs, strict=True)):
            product = jnp.dot(rows[at, :], w[...], preferred_element_type=jnp.float32)
            product = product * scales[i][...] if scaled else product
            _store(_plus(product, at, thin, others[i : i + 1]), out, at, first, end)

    _for_parts(first[v], end[v], rows.shape[0], run)


def _taken(refs: Sequence[Any], *counts: int) -> list[tuple[Any, ...]]:
    """The refs, in groups of these sizes."""
    rest = iter(refs)
    return [tuple(itertools.islice(rest, count)) for count in counts]


def _plus(product: Float[Array, "n f"], at: Any, thin: Sequence[Any], weights: Sequence[Any]) -> Float[Array, "n f"]:
    """The product, and rows `at` of what is added to it, if there is any."""
    for rows, w in zip(thin, weights, strict=True):
        product += jnp.dot(rows[at, :], w[...], preferred_element_type=jnp.float32)
    return product


def _sum_kernel(
    group: Any, tile: Any, first: Any, end: Any, layer: Any, *refs: Any, n: int, scaled: bool, added: bool
) -> None:
    """Compute out = Σ_i rows_i @ weights_i^T, and what is added to it, for one visit and one block of columns."""
    del tile, layer  # used by the index maps only
    v = pl.program_id(1)
    rows, weights, scales, thin, others, (out,), copies = _taken(refs, n, n, n * scaled, added, added, 1, n * scaled)
    weights = _unpacked(group, v, weights, copies)
    product = functools.partial(
        jax.lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )

    def operand(i: int, at: Any) -> Array:
        x = rows[i][at, :]
        return (x.astype(jnp.float32) * scales[i][...]).astype(x.dtype) if scaled else x

    def run(at: Any, first: Array, end: Array) -> None:
        total = functools.reduce(jnp.add, (product(operand(i, at), w[...]) for i, w in enumerate(weights)))
        _store(_plus(total, at, thin, others), out, at, first, end)

    _for_parts(first[v], end[v], out.shape[0], run)


def _products(
    rows: Sequence[Float[Array, "N D"]],
    weights: Sequence[Shaped[Array, "M I O"]],
    group_sizes: Int[Array, " E"],
    *,
    scales: Sequence[Float[Array, "E O"]],
    added: Added | None,
    transposed: bool,
    layer: Int[Array, ""] | int,
    likely: int | None,
    interpret: bool,
) -> tuple[Float[Array, "N F"], ...]:
    """Return the products of one array of rows with each of the weights.

    If `transposed`, takes one array of rows per weight and returns the sum of their products instead.
    """
    (N, inner), E, size = rows[0].shape, group_sizes.shape[0], rows[0].dtype.itemsize
    stored, scaled = weights[0].dtype.itemsize, len(scales) > 0
    thin, others = ((), ()) if added is None else ((added.rows,), added.weights)
    rank = 0 if added is None else added.rows.shape[1]
    width, outs = (weights[0].shape[1], 1) if transposed else (weights[0].shape[2], len(weights))
    tile = _row_tile(N, E, N if likely is None else likely, max(inner, width), size)

    def fits(columns: int) -> bool:  # double buffers of rows, weights and outputs, converted weights, float32 products
        blocks = len(rows) * tile * inner + outs * tile * columns
        matrices = (2 * stored + size * scaled) * len(weights) * inner * columns
        lanes = LANES * pl.cdiv(rank, LANES)
        summands = 2 * size * (tile * lanes + len(others) * _sublanes(rank, size) * columns)
        return 2 * size * blocks + matrices + summands + 4 * outs * tile * columns <= _VMEM

    columns = _columns(width, fits)
    blocks = pl.cdiv(width, columns)
    visits, counts = _visits(group_sizes, N, tile, interpret=interpret)
    block = (columns, inner) if transposed else (inner, columns)

    def matrix(n: Any, v: Any, group: Any, tile: Any, first: Any, end: Any, layer: Any) -> tuple[Any, ...]:
        del tile, first, end
        return layer[0] * E + group[v], *((n, 0) if transposed else (0, n))

    def scale(n: Any, v: Any, group: Any, tile: Any, first: Any, end: Any, layer: Any) -> tuple[Any, ...]:
        del tile, first, end, layer
        return group[v], 0, 0 if transposed else n

    def other(n: Any, v: Any, group: Any, *_: Any) -> tuple[Any, ...]:
        return group[v], 0, n

    kernel = functools.partial(
        _sum_kernel if transposed else _each_kernel, n=len(weights), scaled=scaled, added=added is not None
    )

    def run(count: Array, *args: Array) -> tuple[Array, ...]:
        return pl.pallas_call(
            kernel,
            out_shape=(jax.ShapeDtypeStruct((N, width), rows[0].dtype),) * outs,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=5,
                in_specs=(
                    *[pl.BlockSpec((tile, inner), lambda n, v, group, tile, *_: (tile[v], 0))] * len(rows),
                    *[pl.BlockSpec((None, *block), matrix)] * len(weights),
                    *[pl.BlockSpec((None, 1, block[1]), scale)] * len(scales),
                    *[pl.BlockSpec((tile, rank), lambda n, v, group, tile, *_: (tile[v], 0))] * len(thin),
                    *[pl.BlockSpec((None, rank, columns), other)] * len(others),
                ),
                out_specs=(pl.BlockSpec((tile, columns), lambda n, v, group, tile, *_: (tile[v], n)),) * outs,
                grid=(blocks, count),
                scratch_shapes=(pltpu.VMEM(block, rows[0].dtype),) * len(scales),
            ),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
            # For all rows of the buffer, since the number of used rows is unknown at compile time.
            cost_estimate=pl.CostEstimate(
                flops=2 * N * width * (inner * len(weights) + rank * len(others)),
                bytes_accessed=size * (N * (len(rows) * inner + rank) * blocks + outs * N * width)
                + min(E, N) * width * (stored * len(weights) * inner + size * len(others) * rank),
                transcendentals=0,
            ),
            interpret=interpret,
            name=f"grouped_matmul_transposed_{tile}" if transposed else f"grouped_matmul_{tile}",
        )(*args)

    rank3 = (s.astype(jnp.float32)[:, None] for s in scales)
    return unchecked(
        run, counts[0], *visits, jnp.asarray(layer, jnp.int32).reshape(1), *rows, *weights, *rank3, *thin, *others
    )


def matmuls(
    rows: Float[Array, "N D"],
    weights: Sequence[Shaped[Array, "M D F"]],
    group_sizes: Int[Array, " E"],
    *,
    scales: Sequence[Float[Array, "E F"]] = (),
    added: Added | None = None,
    layer: Int[Array, ""] | int = 0,
    likely: int | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "N F"], ...]:
    """Compute out_i[n] = rows[n] @ weights_i[layer · E + e(n)] for each of the weights, reading the rows once for all.

    Products are accumulated in float32, multiplied by their columns' scales, added to and rounded once to the rows'
    dtype. Rows past the last group are undefined, in the input as in the output.

    Args:
      rows: sorted by group.
      weights: all of one shape, in the rows' dtype, or in int8 if there are scales.
      group_sizes: summing to at most N.
      scales: those of each of the weights, of this layer alone, or none.
      added: products that are added to the outputs.
      layer: index of the layer whose E matrices the groups use.
      likely: expected total of `group_sizes`, a tuning hint; None expects all N rows in use.
      interpret: run the kernel on any backend, slowly, for tests; not supported inside `jax.shard_map`.

    Raises:
      UserError: no block of the weights fits VMEM.
    """
    return _products(
        (rows,),
        weights,
        group_sizes,
        scales=scales,
        added=added,
        transposed=False,
        layer=layer,
        likely=likely,
        interpret=interpret,
    )


def matmuls_transposed(
    grads: Sequence[Float[Array, "N F"]],
    weights: Sequence[Shaped[Array, "E D F"]],
    group_sizes: Int[Array, " E"],
    *,
    scales: Sequence[Float[Array, "E F"]] = (),
    added: Added | None = None,
    likely: int | None = None,
    interpret: bool = False,
) -> Float[Array, "N D"]:
    """Compute Σ_i grads_i[n] @ weights_i[e(n)]^T, the gradient of `matmuls` with respect to its rows.

    Gradients are multiplied by the scales and rounded to their dtype first. The sum, to which one product may be
    added, is accumulated in float32 and rounded once. Arguments and errors are those of `matmuls`.
    """
    (out,) = _products(
        grads,
        weights,
        group_sizes,
        scales=scales,
        added=added,
        transposed=True,
        layer=0,
        likely=likely,
        interpret=interpret,
    )
    return out


def _outer_kernel(group: Any, tile: Any, first: Any, end: Any, rows: Any, grads: Any, out: Any, total: Any) -> None:
    """Compute out = Σ rows^T grads over the visits of a group, for one block of the output."""
    del tile  # used by the index maps only
    v, last = pl.program_id(1), pl.num_programs(1) - 1
    begins = (v == 0) | (group[jnp.maximum(v - 1, 0)] != group[v])
    ends = (v == last) | (group[jnp.minimum(v + 1, last)] != group[v])

    @pl.when(begins)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    def run(at: Any, first: Array, end: Array) -> None:
        def own(x: Array) -> Array:  # masks both factors, because the other rows may hold NaN
            row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
            return jnp.where((row >= first) & (row < end), x.astype(jnp.float32), 0).astype(x.dtype)

        def add(x: Array, g: Array) -> None:
            total[...] += jax.lax.dot_general(x, g, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

        whole = (first <= 0) & (end >= at.size)

        @pl.when(whole)
        def _() -> None:
            add(rows[at, :], grads[at, :])

        @pl.when(~whole)
        def _() -> None:
            add(own(rows[at, :]), own(grads[at, :]))

    _for_parts(first[v], end[v], rows.shape[0], run)

    @pl.when(ends)
    def _() -> None:
        out[...] = total[...].astype(out.dtype)


def outer(
    rows: Float[Array, "N D"],
    grads: Float[Array, "N F"],
    group_sizes: Int[Array, " E"],
    *,
    likely: int | None = None,
    interpret: bool = False,
    name: str = "grouped_outer",
) -> Float[Array, "E D F"]:
    """Compute dW[e] = Σ_n rows[n] grads[n]^T over the rows n of expert e, the gradient of `matmuls` for its weights.

    Accumulated in float32 and rounded once to the rows' dtype. Arguments are those of `matmuls`; the kernel's name is
    `name` and its tile.
    """
    (N, D), F, E, size = rows.shape, grads.shape[1], group_sizes.shape[0], rows.dtype.itemsize
    tile = _row_tile(N, E, N if likely is None else likely, max(D, F), size)
    # Double buffers of rows, gradients and output, plus the accumulator and both inputs masked in float32.
    down, across = _tiles(
        D, F, lambda d, f: 2 * size * (tile * (d + f) + d * f) + 4 * d * f + 4 * tile * (d + f) <= _VMEM
    )
    deep, wide = pl.cdiv(D, down), pl.cdiv(F, across)
    visits, counts = _visits(group_sizes, N, tile, interpret=interpret)

    def run(count: Array, *args: Array) -> Array:
        return pl.pallas_call(
            _outer_kernel,
            out_shape=jax.ShapeDtypeStruct((E, D, F), rows.dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=4,
                in_specs=(
                    pl.BlockSpec((tile, down), lambda b, v, group, tile, *_: (tile[v], b // wide)),
                    pl.BlockSpec((tile, across), lambda b, v, group, tile, *_: (tile[v], b % wide)),
                ),
                out_specs=pl.BlockSpec((None, down, across), lambda b, v, group, *_: (group[v], b // wide, b % wide)),
                grid=(deep * wide, count),
                scratch_shapes=(pltpu.VMEM((down, across), jnp.float32),),
            ),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
            cost_estimate=pl.CostEstimate(
                flops=2 * N * D * F,
                bytes_accessed=size * (N * D * wide + N * F * deep + E * D * F),
                transcendentals=0,
            ),
            interpret=interpret,
            name=f"{name}_{tile}",
        )(*args)

    # Groups without rows are visited too: their gradient is zero and must be written.
    return unchecked(run, counts[1], *visits, rows, grads)
