"""Shared parts of a decode step's TPU kernels: matrices of all layers read in place, and what fits in VMEM."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Shaped

from gspo_jax.kernels.backend import platform

LANES = 128
RANKS = 16
"""Ranks of adapters are padded to whole tiles of so many."""
_SMALL = 16 * 2**20
"""VMEM of the smallest chips (v4)."""
_LEFT = 4 * 2**20
"""VMEM left to the compiler where there is more."""
_BLOCKS = 40 * 2**20
"""Most bytes of a kernel's blocks where VMEM is large."""


@struct.dataclass
class Adapter:
    """An adapter's matrices of all layers, s · A B, with the rank on rows: as columns it would fill whole lanes."""

    a: Any
    """[L, *E, r, n]: A transposed. In a kernel, a block."""
    b: Any
    """[L, *E, r, m]."""
    scale: float = struct.field(pytree_node=False)


class Stacked(NamedTuple):
    """A matrix of all layers, W · diag(scale) + s A B, of each expert or of all tokens.

    Scale and adapter may be one layer's, with L = 1.
    """

    weights: Shaped[Array, "L *E n m"]
    """W: int8 if there is a scale, else in the tokens' dtype."""
    scale: Float[Array, "L *E 1 m"] | None = None
    """Per column, float32."""
    low: Adapter | None = None
    """In the tokens' dtype."""

    @property
    def block_bytes(self) -> int:
        """Bytes of VMEM per element of a block: two buffers, and copies of int8 converted by way of float32."""
        return 2 * self.weights.dtype.itemsize + (6 if self.scale is not None else 0)


At = Callable[..., tuple[tuple[Any, ...], Any, Any]]
"""(grid indices, prefetched scalars) -> (leading indices, block of rows, block of columns)."""


def blocks(matrix: Stacked, rows: int, columns: int, at: At) -> Stacked:
    """Return the BlockSpecs of a matrix read in blocks of W. What has one layer alone is that of the layer at hand."""
    lead = (None,) * (matrix.weights.ndim - 2)

    def spec(of: Any, shape: tuple[int, int], place: Callable[[Any, Any], tuple[Any, Any]]) -> pl.BlockSpec:
        def index(*given: Any) -> tuple[Any, ...]:
            (layer, *leading), row, column = at(*given)
            return 0 if of.shape[0] == 1 else layer, *leading, *place(row, column)

        return pl.BlockSpec((*lead, *shape), index)

    specs = [spec(matrix.weights, (rows, columns), lambda row, column: (row, column))]
    if matrix.scale is not None:
        specs.append(spec(matrix.scale, (1, columns), lambda row, column: (0, column)))
    if matrix.low is not None:
        rank = matrix.low.a.shape[-2]
        specs.append(spec(matrix.low.a, (rank, rows), lambda row, column: (0, row)))
        specs.append(spec(matrix.low.b, (rank, columns), lambda row, column: (0, column)))
    return jax.tree.unflatten(jax.tree.structure(matrix), specs)


def dot(x: Array, w: Array, *, x_axis: int = 1, w_axis: int = 0) -> Array:
    """Return the float32 product of two matrices, contracted over these axes; of float32 ones, exact to float32."""
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    axes = (((x_axis,), (w_axis,)), ((), ()))
    return jax.lax.dot_general(x, w, axes, precision=exact, preferred_element_type=jnp.float32)


def product(x: Float[Array, "B n"], matrix: Stacked) -> Float[Array, "B m"]:
    """Return x times a block of a matrix in float32, in a kernel.

    Of a block of the matrix's rows, this is the block's share of the sum.
    """
    weights = matrix.weights[...]
    y = dot(x, weights if weights.dtype == x.dtype else weights.astype(jnp.float32).astype(x.dtype))
    y = y if matrix.scale is None else y * matrix.scale[...]
    if matrix.low is None:
        return y
    thin = (dot(x, matrix.low.a[...], w_axis=1) * matrix.low.scale).astype(x.dtype)
    return y + dot(thin, matrix.low.b[...])


def normed(x: Float[Array, "B D"], scale: Float[Array, "1 D"], eps: float) -> Float[Array, "B D"]:
    """Return the RMS norm of a float32 x, in a kernel."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + eps) * scale


def layer_bytes(matrix: Stacked) -> int:
    """Return the bytes of one layer's matrix, of all experts."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(matrix)) // matrix.weights.shape[0]


def in_place(*trees: Any) -> Any:
    """Keep arrays in HBM: the compiler may else move those of all layers to VMEM in every layer.

    Not where VMEM is small: v4 has another memory on chip, from which some would go to HBM in every layer.
    """
    if platform() != "tpu" or pltpu.get_tpu_info().vmem_capacity_bytes <= _SMALL:
        return trees
    return jax.tree.map(lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM), trees)


def cores() -> int:
    """Return the cores that share a kernel's first grid dimension: 2 on v4 and v5p."""
    return pltpu.get_tpu_info().num_cores if platform() == "tpu" else 1


def vmem_limit() -> int:
    """Return the bytes of VMEM that a kernel asks for.

    Nearly all: in what is left, the compiler would keep matrices of all layers, and move them in every layer.
    """
    capacity = pltpu.get_tpu_info().vmem_capacity_bytes if platform() == "tpu" else _SMALL
    return max(_SMALL, capacity - _LEFT)


def vmem_budget() -> int:
    """Return the bytes that blocks, scratch and large values of a kernel may take together."""
    return min(vmem_limit() * 7 // 8, _BLOCKS)


def divisor(size: int, limit: int, unit: int = LANES) -> int:
    """Return the largest divisor of `size` up to `limit` in whole units; `size` or the least one, if none is."""
    fitting = [d for d in range(unit, size + 1, unit) if size % d == 0]
    return max((d for d in fitting if d <= limit), default=min(fitting, default=size))
