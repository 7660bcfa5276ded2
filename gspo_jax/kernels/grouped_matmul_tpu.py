"""Grouped matmul on TPU: Pallas kernels that skip unused rows and weights.

Weight blocks span the contraction dimension and stay in VMEM across a group's tiles (see `visits_tpu`), so each is read
once.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from gspo_jax.errors import UserError
from gspo_jax.kernels.backend import unchecked
from gspo_jax.kernels.visits_tpu import LANES, VMEM, accumulate, for_parts, part_of, row_tile, schedule, taken


class Thin(NamedTuple):
    """A second path from rows to outputs, through R columns: out_j += (f · Σ_i rows_i @ first_i^T) @ second_j.

    Few rows and many columns take the least memory.
    """

    first: Sequence[Float[Array, "E R D"]]
    """One per array of rows, in their dtype."""
    factors: Float[Array, "1 R"]
    """f, float32."""
    second: Sequence[Float[Array, "E R F"]]
    """One per output, in their dtype."""

    @property
    def back(self) -> "Thin":
        """The reverse path, for gradients."""
        return Thin(self.second, self.factors, self.first)


def _splits(size: int) -> list[int]:
    """Return candidate tile lengths: divisors in whole lanes, else the whole or tiles with a masked last one."""
    if size % LANES:
        return [size, *(t for t in (1024, 512, 256, 128) if t < size)]
    return [t for t in range(LANES, size + 1, LANES) if size % t == 0]


def _columns(width: int, fits: Callable[[int], bool]) -> int:
    """Return the output columns per block: fewest for the busier of two cores (v4, v5p), then longest blocks."""
    lengths = [t for t in _splits(width) if fits(t)]
    if not lengths:
        raise UserError(
            f"no block of {width} columns fits a kernel's {VMEM} bytes of VMEM; use bfloat16 or narrower rows"
        )
    return min(lengths, key=lambda t: (pl.cdiv(pl.cdiv(width, t), 2) * t, -t))


def _tiles(down: int, across: int, fits: Callable[[int, int], bool]) -> tuple[int, int]:
    """Return the block [d, f] of `outer` that moves the fewest bytes, N · (D · F / f + F · D / d).

    Prefers two or more blocks, for two cores.
    """
    pairs = [p for p in itertools.product(_splits(down), _splits(across)) if fits(*p)]
    return min(pairs, key=lambda p: (p == (down, across), 1 / p[0] + 1 / p[1]))


def _store(product: Float[Array, "n f"], out: Any, at: Any, first: Array, end: Array) -> None:
    """Keep other groups' rows of out[at]."""
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
    """Convert int8 weights to the rows' dtype, once per group."""
    if not copies:
        return weights

    @pl.when((v == 0) | (group[jnp.maximum(v - 1, 0)] != group[v]))
    def _() -> None:
        for w, copy in zip(weights, copies, strict=True):
            copy[...] = w[...].astype(jnp.float32).astype(copy.dtype)

    return copies


def _each_kernel(
    group: Any,
    tile: Any,
    first: Any,
    end: Any,
    layer: Any,
    rows: Any,
    *refs: Any,
    n: int,
    scaled: bool,
    thin: bool,
    gated: bool,
    kept: bool,
) -> None:
    """Compute out_i = rows @ weights_i, or if `gated` silu(out_0) · out_1 · share, and if `kept` these two beside."""
    del tile, layer
    v = pl.program_id(1)
    weights, scales, inner, factors, outer, shares, outs, copies = taken(
        refs, n, n * scaled, thin, thin, n * thin, gated, 1 + kept if gated else n, n * scaled
    )
    weights, part = _unpacked(group, v, weights, copies), part_of(rows.shape[0])

    def run(at: Any, first: Array, end: Array) -> None:
        columns = thin_columns([rows[at, :]], inner, factors[0]) if thin else None

        def product(i: int) -> Array:
            y = jnp.dot(rows[at, :], weights[i][...], preferred_element_type=jnp.float32)
            y = y * scales[i][...] if scaled else y
            return y if columns is None else y + jnp.dot(columns, outer[i][...], preferred_element_type=jnp.float32)

        if not gated:
            for i, out in enumerate(outs):
                _store(product(i), out, at, first, end)
            return
        pair = [product(i).astype(rows.dtype) for i in range(n)]
        for i, y in enumerate(pair if kept else ()):
            _store(y.astype(jnp.float32), outs[1].at[pl.ds(i * rows.shape[0], rows.shape[0])], at, first, end)
        for i, piece in enumerate(_pieces(at, part)):
            gate, up = (y[i * part : (i + 1) * part].astype(jnp.float32) for y in pair)
            hidden = jax.nn.silu(gate) * up * _column(shares[0], piece)
            _store(hidden, outs[0], piece, first - i * part, end - i * part)

    for_parts(first[v], end[v], rows.shape[0], run)


def _pieces(at: Any, part: int) -> list[Any]:
    """Return a slice of a tile in parts."""
    if isinstance(at.start, int):
        return [pl.ds(at.start + first, part) for first in range(0, at.size, part)]
    return [pl.ds(pl.multiple_of(at.start + first, part), part) for first in range(0, at.size, part)]


def _diagonal(part: int) -> Array:
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (part, part), axis) for axis in (0, 1))
    return row == column


def _column(numbers: Any, piece: Any) -> Float[Array, "n 1"]:
    """Return a part's numbers as a column. A tile's lie along lanes, a row for each part."""
    row = numbers[pl.ds(piece.start // piece.size, 1), :]
    return jnp.where(_diagonal(piece.size), row, 0).sum(axis=1, keepdims=True)


def _store_column(column: Float[Array, "n 1"], out: Any, piece: Any, first: Array, end: Array) -> None:
    """Invert `_column`, keeping other groups' numbers."""
    row = jnp.where(_diagonal(piece.size), column, 0).sum(axis=0, keepdims=True)
    there, lane = pl.ds(piece.start // piece.size, 1), jax.lax.broadcasted_iota(jnp.int32, row.shape, 1)
    out[there, :] = jnp.where((lane >= first) & (lane < end), row, out[there, :])


def thin_columns(rows: Sequence[Float[Array, "n _"]], first: Sequence[Any], factors: Any) -> Float[Array, "n R"]:
    """Return the columns of a `Thin` path, from one group's matrices."""
    total = functools.reduce(jnp.add, (_by_transposed(x, w[...]) for x, w in zip(rows, first, strict=True)))
    return (total * factors[...]).astype(rows[0].dtype)


def _by_transposed(x: Float[Array, "n d"], w: Float[Array, "f d"]) -> Float[Array, "n f"]:
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _sum_kernel(
    group: Any,
    tile: Any,
    first: Any,
    end: Any,
    layer: Any,
    *refs: Any,
    n: int,
    scaled: bool,
    thin: bool,
    gated: bool,
) -> None:
    """Compute out = Σ_i rows_i @ weights_i^T, or if `gated` what the gradient of a SwiGLU makes of it."""
    del tile, layer
    v = pl.program_id(1)
    rows, weights, scales, outer, factors, inner, shares, pair, outs, copies = taken(
        refs, n, n, n * scaled, n * thin, thin, thin, gated, gated, 4 if gated else 1, n * scaled
    )
    weights, part = _unpacked(group, v, weights, copies), part_of(rows[0].shape[0])

    def operand(i: int, at: Any) -> Array:
        x = rows[i][at, :]
        return (x.astype(jnp.float32) * scales[i][...]).astype(x.dtype) if scaled else x

    def run(at: Any, first: Array, end: Array) -> None:
        total = functools.reduce(jnp.add, (_by_transposed(operand(i, at), w[...]) for i, w in enumerate(weights)))
        if thin:
            columns = thin_columns([x[at, :] for x in rows], outer, factors[0])
            total += jnp.dot(columns, inner[0][...], preferred_element_type=jnp.float32)
        if not gated:
            _store(total, outs[0], at, first, end)
            return
        for i, piece in enumerate(_pieces(at, part)):
            own, since, until = total[i * part : (i + 1) * part], first - i * part, end - i * part
            gate, up = (
                pair[0].at[pl.ds(n, rows[0].shape[0])][piece, :].astype(jnp.float32) for n in (0, rows[0].shape[0])
            )
            share, sigmoid = _column(shares[0], piece), jax.nn.sigmoid(gate)
            silu, slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
            results = own * share * up * slope, own * share * silu, silu * up * share
            for y, out in zip(results, outs, strict=False):
                _store(y, out, piece, since, until)
            _store_column((own * silu * up).sum(axis=1, keepdims=True), outs[3], piece, since, until)

    for_parts(first[v], end[v], rows[0].shape[0], run)


def _products(
    rows: Sequence[Float[Array, "N D"]],
    weights: Sequence[Shaped[Array, "M I O"]],
    group_sizes: Int[Array, " E"],
    *,
    scales: Sequence[Float[Array, "E O"]] = (),
    thin: Thin | None = None,
    transposed: bool = False,
    layer: Int[Array, ""] | int = 0,
    likely: int | None = None,
    shares: Float[Array, " N"] | None = None,
    kept: bool = False,
    pair: Float[Array, "P F"] | None = None,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Return each product, or their sum if `transposed`; with `shares` as `gated` and `gated_transposed` say."""
    (N, inner), E, size = rows[0].shape, group_sizes.shape[0], rows[0].dtype.itemsize
    stored, scaled, gated = weights[0].dtype.itemsize, len(scales) > 0, shares is not None
    rank = 0 if thin is None else thin.factors.shape[1]
    path = () if thin is None else (*thin.first, thin.factors, *thin.second)
    width, sums = (weights[0].shape[1], 1) if transposed else (weights[0].shape[2], len(weights))
    outs = sums if not gated else 3 if transposed else 1
    beside = 2 * (kept or pair is not None)
    tile = row_tile(N, E, N if likely is None else likely, max(inner, width), size)

    def fits(columns: int) -> bool:  # double buffers of rows, weights and outputs, converted weights, float32 products
        blocks = len(rows) * tile * inner + (outs + beside) * tile * columns
        matrices = (2 * stored + size * scaled) * len(weights) * inner * columns
        lanes, sublanes = (unit * pl.cdiv(rank, unit) for unit in (LANES, 16))
        thinly = 2 * size * sublanes * (len(rows) * inner + sums * columns) + (4 + size) * tile * lanes
        return 2 * size * blocks + matrices + thinly + 4 * max(outs, sums, beside) * tile * columns <= VMEM

    columns = _columns(width, fits)
    blocks = pl.cdiv(width, columns)
    visits, counts = schedule(group_sizes, N, tile, interpret=interpret)
    block = (columns, inner) if transposed else (inner, columns)

    def matrix(n: Any, v: Any, group: Any, tile: Any, first: Any, end: Any, layer: Any) -> tuple[Any, ...]:
        del tile, first, end
        return layer[0] * E + group[v], *((n, 0) if transposed else (0, n))

    def scale(n: Any, v: Any, group: Any, tile: Any, first: Any, end: Any, layer: Any) -> tuple[Any, ...]:
        del tile, first, end, layer
        return group[v], 0, 0 if transposed else n

    def whole(n: Any, v: Any, group: Any, *_: Any) -> tuple[Any, ...]:
        del n
        return group[v], 0, 0

    def across(n: Any, v: Any, group: Any, *_: Any) -> tuple[Any, ...]:
        return group[v], 0, n

    static: dict[str, Any] = {"n": len(weights), "scaled": scaled, "thin": thin is not None, "gated": gated}
    kernel = (
        functools.partial(_sum_kernel, **static) if transposed else functools.partial(_each_kernel, kept=kept, **static)
    )
    part = part_of(tile)
    numbers = (blocks if transposed else 1, pl.cdiv(N, tile), tile // part, part)
    by_lanes = () if shares is None else (jnp.pad(shares.astype(jnp.float32), (0, -N % tile)).reshape(1, *numbers[1:]),)
    of_thin = (
        ()
        if thin is None
        else (
            *[pl.BlockSpec((None, rank, inner), whole)] * len(rows),
            pl.BlockSpec((1, rank), lambda *_: (0, 0)),
            *[pl.BlockSpec((None, rank, columns), across)] * sums,
        )
    )

    of_out = pl.BlockSpec((tile, columns), lambda n, v, group, tile, *_: (tile[v], n))
    of_pair = pl.BlockSpec((2 * tile, columns), lambda n, v, group, tile, *_: (tile[v], n))
    of_shares = pl.BlockSpec((None, None, *numbers[2:]), lambda n, v, group, tile, *_: (0, tile[v], 0, 0))
    of_d_shares = pl.BlockSpec((None, None, *numbers[2:]), lambda n, v, group, tile, *_: (n, tile[v], 0, 0))
    out_shapes, out_specs = [jax.ShapeDtypeStruct((N, width), rows[0].dtype)] * outs, [of_out] * outs
    if kept:
        out_shapes.append(jax.ShapeDtypeStruct((2 * tile * pl.cdiv(N, tile), width), rows[0].dtype))
        out_specs.append(of_pair)
    if gated and transposed:
        out_shapes.append(jax.ShapeDtypeStruct(numbers, jnp.float32))
        out_specs.append(of_d_shares)

    def run(count: Array, *args: Array) -> tuple[Array, ...]:
        return pl.pallas_call(
            kernel,
            out_shape=tuple(out_shapes),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=5,
                in_specs=(
                    *[pl.BlockSpec((tile, inner), lambda n, v, group, tile, *_: (tile[v], 0))] * len(rows),
                    *[pl.BlockSpec((None, *block), matrix)] * len(weights),
                    *[pl.BlockSpec((None, 1, block[1]), scale)] * len(scales),
                    *of_thin,
                    *[of_shares] * gated,
                    *[of_pair] * (pair is not None),
                ),
                out_specs=tuple(out_specs),
                grid=(blocks, count),
                scratch_shapes=(pltpu.VMEM(block, rows[0].dtype),) * len(scales),
            ),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
            # The number of used rows is unknown at compile time.
            cost_estimate=pl.CostEstimate(
                flops=2 * N * (inner * width * len(weights) + rank * (len(rows) * inner + sums * width)),
                bytes_accessed=size * (len(rows) * N * inner * blocks + (outs + beside) * N * width)
                + min(E, N)
                * (stored * len(weights) * inner * width + size * rank * (len(rows) * inner + sums * width)),
                transcendentals=N * width * gated,
            ),
            interpret=interpret,
            name=f"grouped_matmul{'_transposed' * transposed}{'_gated' * gated}_{tile}",
        )(*args)

    rank3 = (s.astype(jnp.float32)[:, None] for s in scales)
    others = (*rank3, *path, *by_lanes, *(() if pair is None else (pair,)))
    return unchecked(run, counts[0], *visits, jnp.asarray(layer, jnp.int32).reshape(1), *rows, *weights, *others)


def matmuls(
    rows: Float[Array, "N D"],
    weights: Sequence[Shaped[Array, "M D F"]],
    group_sizes: Int[Array, " E"],
    **options: Any,
) -> tuple[Float[Array, "N F"], ...]:
    """Compute out_i[n] = rows[n] @ weights_i[layer · E + e(n)] for each of the weights, reading the rows once.

    Products are accumulated in float32, scaled per column and rounded once to the rows' dtype. Rows past the last group
    are undefined.

    Args:
      rows: sorted by group.
      weights: of one shape, in the rows' dtype, or int8 with scales.
      scales: one per weight, [E, F], of this layer alone; or none.
      thin: added before rounding.
      layer: 0 unless given.
      likely: expected sum of `group_sizes`, a tuning hint; None: N.
      interpret: on any backend, slowly, for tests; not inside `jax.shard_map`.

    Raises:
      UserError: no block of the weights fits VMEM.
    """
    return _products((rows,), weights, group_sizes, **options)


def matmuls_transposed(
    grads: Sequence[Float[Array, "N F"]],
    weights: Sequence[Shaped[Array, "E D F"]],
    group_sizes: Int[Array, " E"],
    **options: Any,
) -> Float[Array, "N D"]:
    """Compute Σ_i grads_i[n] @ weights_i[e(n)]^T, the gradient of `matmuls` for its rows.

    Gradients are first scaled and rounded to their dtype. The float32 sum is rounded once. Arguments and errors as in
    `matmuls`, but for `layer`.
    """
    return _products(grads, weights, group_sizes, transposed=True, **options)[0]


def gated(
    rows: Float[Array, "N D"],
    weights: Sequence[Shaped[Array, "M D F"]],
    shares: Float[Array, " N"],
    group_sizes: Int[Array, " E"],
    *,
    kept: bool = False,
    **options: Any,
) -> tuple[Array, ...]:
    """Compute silu(y_0) · y_1 · share of the two `matmuls` y, and return with it, if `kept`, both, tile by tile.

    The products are rounded first. Shares multiply in float32. Arguments and errors as in `matmuls`.
    """
    return _products((rows,), weights, group_sizes, shares=shares, kept=kept, **options)


def gated_transposed(
    grads: Float[Array, "N D"],
    down: Shaped[Array, "E F D"],
    pair: Float[Array, "P F"],
    shares: Float[Array, " N"],
    group_sizes: Int[Array, " E"],
    **options: Any,
) -> tuple[Float[Array, "N F"], Float[Array, "N F"], Float[Array, "N F"], Float[Array, " N"]]:
    """Return the gradients of the two products in `pair`, the output of `gated`, and the gradient of the shares.

    `grads` are of that output times `down`. Other arguments and errors as in `matmuls_transposed`.
    """
    found = _products((grads,), (down,), group_sizes, transposed=True, shares=shares, pair=pair, **options)
    d_gate, d_up, hidden, d_shares = found
    return d_gate, d_up, hidden, d_shares.sum(axis=0).reshape(-1)[: len(shares)]


def _outer_kernel(group: Any, tile: Any, first: Any, end: Any, rows: Any, grads: Any, out: Any, total: Any) -> None:
    """Compute out = Σ rows^T grads over a group's visits."""
    del tile

    def add(x: Array, g: Array) -> None:
        total[...] += jax.lax.dot_general(x, g, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    accumulate(1, group, first, end, (rows, grads), add, [total], [out])


def outer(
    rows: Float[Array, "N D"],
    grads: Float[Array, "N F"],
    group_sizes: Int[Array, " E"],
    *,
    likely: int | None = None,
    interpret: bool = False,
    name: str = "grouped_outer",
) -> Float[Array, "E D F"]:
    """Compute dW[e] = Σ_n rows[n] grads[n]^T over expert e's rows, the gradient of `matmuls` for its weights.

    Accumulated in float32, rounded once. Arguments as in `matmuls`. The kernel's name is `name` and its tile.
    """
    (N, D), F, E, size = rows.shape, grads.shape[1], group_sizes.shape[0], rows.dtype.itemsize
    tile = row_tile(N, E, N if likely is None else likely, max(D, F), size)
    # Double buffers, accumulator, and inputs masked in float32.
    down, across = _tiles(
        D, F, lambda d, f: 2 * size * (tile * (d + f) + d * f) + 4 * d * f + 4 * tile * (d + f) <= VMEM
    )
    deep, wide = pl.cdiv(D, down), pl.cdiv(F, across)
    visits, counts = schedule(group_sizes, N, tile, interpret=interpret)

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

    # Empty groups too: their zero gradient must be written.
    return unchecked(run, counts[1], *visits, rows, grads)
