"""Rows times the weights of their expert: one function, the best implementation per backend behind it.

CPU: loops over blocks of each expert's rows, so that the cost follows the rows and not the experts. TPU: megablox.
Elsewhere: `jax.lax.ragged_dot`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gspo_jax.kernels import grouped_matmul_tpu
from gspo_jax.kernels.backend import platform

_BLOCK, _STEP = 64, 16
"""Rows of a block on CPU, and the steps in which the last block of a group may be smaller: large enough for the matmul
to run at speed, small enough that the rows it computes for nothing cost little."""


def _varying_like(x: Array, *others: Array) -> Array:
    """Marks x as varying over the manual mesh axes that the others vary over, as a loop's carry must be."""
    axes = (
        frozenset().union(*(jax.typeof(o).manual_axis_type.varying for o in others))
        - jax.typeof(x).manual_axis_type.varying
    )
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x


class _Group(NamedTuple):
    """The rows [first, end) of one expert: `full` whole blocks, then a remainder that begins at `rest`."""

    first: Array
    end: Array
    full: Array
    rest: Array

    def remainder(self, branches: Sequence[Callable[..., Array]], *operands: Array) -> Array:
        """Of the functions for 0, 1, 2, ... steps of rows, what the one says that the remainder needs."""
        return jax.lax.switch((self.end - self.rest + _STEP - 1) // _STEP, branches, *operands)

    def inside(self, start: Array, rows: int) -> Array:
        """Which of `rows` rows from `start` are the remainder's, [rows, 1]."""
        at = start + jnp.arange(rows)
        return ((at >= self.rest) & (at < self.end))[:, None]


def _for_groups(group_sizes: Int[Array, " E"], one: Callable[[Array, _Group, Array], Array], out: Array) -> Array:
    """Folds out = one(expert, group, out) over the experts that have rows; the others cost nothing."""
    ends = jnp.cumsum(group_sizes)

    def visit(e: Array, out: Array) -> Array:
        size, end = group_sizes[e], ends[e]
        full = size // _BLOCK
        group = _Group(end - size, end, full, end - size + full * _BLOCK)
        return jax.lax.cond(size > 0, lambda out: one(e, group, out), lambda out: out, out)

    return jax.lax.fori_loop(0, group_sizes.shape[0], visit, out)


def _block_sizes(n: int) -> list[int]:
    """How many rows the last block of a group may have, of `n` rows in all."""
    return [min(rows, n) for rows in range(_STEP, _BLOCK + _STEP, _STEP)]


def _blocked(rows: Array, weights: Array, group_sizes: Array, *, transposed: bool, first: Array | int = 0) -> Array:
    """out[n] = rows[n] @ weights[e(n)] (or its transpose), block by block; rows beyond the last group come out zero.

    The matrix of the first group is number `first` of the weights.
    """
    n = rows.shape[0]
    product = partial(jnp.einsum, "nf,df->nd" if transposed else "nd,df->nf")

    def one(e: Array, group: _Group, out: Array) -> Array:
        w = jax.lax.dynamic_index_in_dim(weights, first + e, keepdims=False)

        def whole(i: Array, out: Array) -> Array:
            start = group.first + i * _BLOCK
            return _put(out, product(_take(rows, start, _BLOCK), w), start)

        def part(block: int, out: Array) -> Array:
            start = jnp.minimum(group.rest, n - block)
            y = jnp.where(group.inside(start, block), product(_take(rows, start, block), w), _take(out, start, block))
            return _put(out, y, start)

        if n >= _BLOCK:
            out = jax.lax.fori_loop(0, group.full, whole, out)
        return group.remainder([lambda out: out, *(partial(part, block) for block in _block_sizes(n))], out)

    out = jnp.zeros((n, weights.shape[1] if transposed else weights.shape[2]), rows.dtype)
    return _for_groups(group_sizes, one, _varying_like(out, rows, weights, group_sizes))


def _blocked_outer(rows: Array, grads: Array, group_sizes: Array) -> Array:
    """dW[e] = sum over the rows n of e of rows[n] grads[n]^T, block by block, accumulated in float32."""
    n = rows.shape[0]
    product = partial(jnp.einsum, "nd,nf->df", preferred_element_type=jnp.float32)

    def one(e: Array, group: _Group, out: Array) -> Array:
        def whole(i: Array, sum_: Array) -> Array:
            start = group.first + i * _BLOCK
            return sum_ + product(_take(rows, start, _BLOCK), _take(grads, start, _BLOCK))

        def part(block: int) -> Array:
            start = jnp.minimum(group.rest, n - block)
            inside = group.inside(start, block)
            return product(*(jnp.where(inside, _take(a, start, block), 0) for a in (rows, grads)))

        none = _varying_like(jnp.zeros(out.shape[1:], out.dtype), rows, grads, group_sizes)
        sum_ = group.remainder([lambda: none, *(partial(part, block) for block in _block_sizes(n))])
        if n >= _BLOCK:
            sum_ = jax.lax.fori_loop(0, group.full, whole, sum_)
        return jax.lax.dynamic_update_index_in_dim(out, sum_, e, 0)

    out = jnp.zeros((group_sizes.shape[0], rows.shape[1], grads.shape[1]), jnp.float32)
    return _for_groups(group_sizes, one, _varying_like(out, rows, grads, group_sizes))


def _take(x: Array, start: Array, rows: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, rows)


def _put(x: Array, rows: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, rows, start, 0)


def _tail_zeroed(out: Array, group_sizes: Array) -> Array:
    return jnp.where(jnp.arange(out.shape[0])[:, None] < group_sizes.sum(), out, 0)


def _ragged(rows: Array, weights: Array, group_sizes: Array, *, transposed: bool) -> Array:
    weights = weights.mT if transposed else weights
    return _tail_zeroed(jax.lax.ragged_dot(rows, weights, group_sizes), group_sizes)


def _ragged_outer(rows: Array, grads: Array, group_sizes: Array) -> Array:
    weights = jnp.zeros((group_sizes.shape[0], rows.shape[1], grads.shape[1]), jnp.float32)
    weights = _varying_like(weights, rows, grads)
    _, vjp = jax.vjp(lambda w: jax.lax.ragged_dot(rows.astype(w.dtype), w, group_sizes), weights)
    return vjp(_tail_zeroed(grads, group_sizes).astype(jnp.float32))[0]


def _matmul(rows: Array, weights: Array, group_sizes: Array, *, transposed: bool, tail: bool) -> Array:
    if platform() == "tpu":
        return grouped_matmul_tpu.matmul(rows, weights, group_sizes, transposed=transposed, tail=tail)
    kernel = _blocked if platform() == "cpu" else _ragged
    return kernel(rows, weights, group_sizes, transposed=transposed)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    rows: Float[Array, "N D"], weights: Float[Array, "E D F"], group_sizes: Int[Array, " E"], tail: bool = True
) -> Float[Array, "N F"]:
    """Multiplies each row with its group's matrix: out[n] = rows[n] @ weights[e(n)].

    Args:
      rows: sorted by group; the first `group_sizes[0]` belong to group 0, and so on.
      weights: one [D, F] matrix per group, of the rows' dtype.
      group_sizes: int32, summing to at most N. Rows beyond the sum come out zero and get no gradient.
      tail: False where nobody looks at the rows beyond the sum: they, and their gradients, may then hold anything.
    """
    return _matmul(rows, weights, group_sizes, transposed=False, tail=tail)


def _forward(rows: Array, weights: Array, group_sizes: Array, tail: bool) -> tuple[Array, tuple[Array, Array, Array]]:
    return _matmul(rows, weights, group_sizes, transposed=False, tail=tail), (rows, weights, group_sizes)


def _backward(tail: bool, residuals: tuple[Array, Array, Array], grads: Array) -> tuple[Array, Array, None]:
    rows, weights, group_sizes = residuals
    d_rows = _matmul(grads, weights, group_sizes, transposed=True, tail=tail)
    outer = {"cpu": _blocked_outer, "tpu": grouped_matmul_tpu.outer}.get(platform(), _ragged_outer)
    return d_rows, outer(rows, grads, group_sizes).astype(weights.dtype), None


grouped_matmul.defvjp(_forward, _backward)


def stacked_matmul(
    rows: Float[Array, "N D"],
    weights: Float[Array, "L E D F"],
    group_sizes: Int[Array, " E"],
    *,
    layer: Int[Array, ""],
) -> Float[Array, "N F"]:
    """grouped_matmul(rows, weights[layer], group_sizes, tail=False), but the layer's weights are read where they lie.

    For a loop over layers, such as a decoder's, in which a copy would cost as much as the product. Without a gradient.
    """
    L, E = weights.shape[:2]
    whole = weights.reshape(L * E, *weights.shape[2:])
    if platform() == "cpu":
        return _blocked(rows, whole, group_sizes, transposed=False, first=layer * E)
    if platform() == "tpu":  # the groups of other layers have no rows, and none of their tiles is visited
        sizes = jax.lax.dynamic_update_slice_in_dim(jnp.zeros(L * E, jnp.int32), group_sizes, layer * E, 0)
        return grouped_matmul_tpu.matmul(rows, whole, sizes, transposed=False, tail=False)
    return _ragged(rows, jax.lax.dynamic_index_in_dim(weights, layer, keepdims=False), group_sizes, transposed=False)
