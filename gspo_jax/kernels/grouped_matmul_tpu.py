"""The grouped matmul on TPU: JAX's megablox kernels with tiles that fit the shapes.

Rows are visited in tiles, a tile once for each group that has rows in it, and no tile beyond the last group is: the
work follows the rows in the groups, not the rows of the buffer and not the experts.
"""

import functools
import importlib
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

# The package's name `gmm` is the differentiable wrapper, which hides the module of the kernels.
_kernels = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")

_LANES = 128
_VMEM = 14 * 2**20
"""Bytes that a kernel's blocks may take of the 16 MiB that the compiler grants it; measured: more can fail."""


def _row_tile(rows: int, groups: int) -> int:
    """Rows per tile: the longest of 512, 256 and 128 that an average group fills.

    A group's first and last tile are computed whole and masked, so long tiles waste work on short groups; short ones
    load the weights more often. Fewer rows than a tile make one tile, of a multiple of the 16 that bfloat16 packs.
    """
    tile = next((t for t in (512, 256) if rows // groups >= t and rows % t == 0), _LANES)
    return min(tile, -(-rows // 16) * 16)


def _splits(size: int) -> list[int]:
    """Tile lengths for a dimension: its divisors that fill the lanes, or, if it does not, itself and masked ends."""
    if size % _LANES:
        return [size, *(t for t in (1024, 512, 256, 128) if t < size)]
    return [t for t in range(_LANES, size + 1, _LANES) if size % t == 0]


def _tiles(inner: int, outer: int, fits: Callable[[int, int], bool]) -> tuple[int, int]:
    """The largest pair of tiles of the two weight dimensions that fits in VMEM.

    The weights are read once per tile of rows and the rows once per tile of the weights, so the largest block of
    weights moves the fewest bytes; of equal blocks, the longest inner one, which saves visits to the accumulator.
    """
    pairs = [p for p in itertools.product(_splits(inner), _splits(outer)) if fits(*p)]
    return max(pairs, key=lambda p: (p[0] * p[1], p[0]))


def _unchecked(kernel: Callable[..., Array], *args: Array) -> Array:
    """Runs a kernel whose outputs do not say over which manual mesh axes they vary, and says it for them.

    Inside `jax.shard_map` the types are checked, and these kernels would be refused.
    """
    axes = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in args))
    if not axes:
        return kernel(*args)
    whole = PartitionSpec()
    out = jax.shard_map(kernel, in_specs=(whole,) * len(args), out_specs=whole, check_vma=False)(*args)
    return jax.lax.pcast(out, tuple(axes), to="varying")


def _padded(a: Array, tile: int) -> Array:
    return jnp.pad(a, ((0, -a.shape[0] % tile), (0, 0)))


def matmul(
    rows: Float[Array, "N D"],
    weights: Float[Array, "E I O"],
    group_sizes: Int[Array, " E"],
    *,
    transposed: bool,
    tail: bool = True,
    interpret: bool = False,
) -> Float[Array, "N F"]:
    """out[n] = rows[n] @ weights[e(n)], or its transpose; rows beyond the last group come out zero, if `tail`.

    Products are accumulated in float32 and rounded once to the rows' dtype. `interpret` runs the kernel on any
    backend, slowly, for tests, and not inside `jax.shard_map`.
    """
    width, size = weights.shape[1 if transposed else 2], rows.dtype.itemsize
    tile = _row_tile(rows.shape[0], weights.shape[0])
    # Two buffers each of rows, weights and output, and the accumulator.
    inner, across = _tiles(
        rows.shape[1], width, lambda k, n: 2 * size * (tile * k + k * n + tile * n) + 4 * tile * n <= _VMEM
    )
    kernel = functools.partial(
        _kernels.gmm,
        preferred_element_type=rows.dtype,
        tiling=(tile, inner, across),
        transpose_rhs=transposed,
        interpret=interpret,
    )
    out = _unchecked(kernel, _padded(rows, tile), weights, group_sizes.astype(jnp.int32))[: rows.shape[0]]
    # What no group owns is never written, and may hold anything.
    return jnp.where(jnp.arange(out.shape[0])[:, None] < group_sizes.sum(), out, 0) if tail else out


def outer(
    rows: Float[Array, "N D"], grads: Float[Array, "N F"], group_sizes: Int[Array, " E"], *, interpret: bool = False
) -> Float[Array, "E D F"]:
    """dW[e] = Σ_n rows[n] grads[n]^T over the rows n of e, accumulated in float32, rounded once to the rows' dtype."""
    size = rows.dtype.itemsize
    tile = _row_tile(rows.shape[0], group_sizes.shape[0])
    # Two buffers each of rows, gradients and output, the accumulator, and both inputs masked in float32.
    down, across = _tiles(
        rows.shape[1],
        grads.shape[1],
        lambda k, n: 2 * size * (tile * k + tile * n + k * n) + 4 * k * n + 4 * tile * (k + n) <= _VMEM,
    )
    kernel = functools.partial(
        _kernels.tgmm, preferred_element_type=rows.dtype, tiling=(tile, down, across), interpret=interpret
    )
    return _unchecked(kernel, _padded(rows, tile).T, _padded(grads, tile), group_sizes.astype(jnp.int32))
