"""Grouped matmul, rows times the weights of their expert: one function with the best implementation per backend.

CPU: loops over blocks of each expert's rows, so that the cost scales with the rows, not with the experts. TPU: Pallas
kernels. Elsewhere: `jax.lax.ragged_dot`.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gspo_jax.kernels import grouped_matmul_tpu
from gspo_jax.kernels.backend import platform, varying_like

_BLOCK, _STEP = 64, 16
"""Rows per block on CPU, and the granularity of a group's smaller last block: large enough for the matmul to run at
full speed, small enough that the padding rows cost little."""


class _Group(NamedTuple):
    """The rows [first, end) of one expert: `full` whole blocks, then a remainder starting at row `rest`."""

    first: Array
    end: Array
    full: Array
    rest: Array

    def remainder(self, branches: Sequence[Callable[..., Array]], *operands: Array) -> Array:
        """Call the branch for the remainder's size; branch i handles up to i · `_STEP` rows."""
        return jax.lax.switch((self.end - self.rest + _STEP - 1) // _STEP, branches, *operands)

    def in_remainder(self, start: Array, rows: int) -> Array:
        """Return [rows, 1], True for those of the `rows` rows from `start` that belong to the remainder."""
        at = start + jnp.arange(rows)
        return ((at >= self.rest) & (at < self.end))[:, None]


def _for_groups(group_sizes: Int[Array, " E"], one: Callable[[Array, _Group, Array], Array], out: Array) -> Array:
    """Fold out = one(expert, group, out) over the experts that have rows; empty experts cost nothing."""
    ends = jnp.cumsum(group_sizes)

    def visit(e: Array, out: Array) -> Array:
        size, end = group_sizes[e], ends[e]
        full = size // _BLOCK
        group = _Group(end - size, end, full, end - size + full * _BLOCK)
        return jax.lax.cond(size > 0, lambda out: one(e, group, out), lambda out: out, out)

    return jax.lax.fori_loop(0, group_sizes.shape[0], visit, out)


def _block_sizes(n: int) -> list[int]:
    """Possible row counts of a group's last block, given `n` rows in total."""
    return [min(rows, n) for rows in range(_STEP, _BLOCK + _STEP, _STEP)]


def _blocked(rows: Array, weights: Array, group_sizes: Array, *, transposed: bool, first: Array | int = 0) -> Array:
    """Compute out[n] = rows[n] @ weights[e(n)] (or its transpose) block by block; rows past the last group are zero.

    The first group's matrix is weights[first].
    """
    n = rows.shape[0]
    product = partial(jnp.einsum, "nf,df->nd" if transposed else "nd,df->nf")

    def one(e: Array, group: _Group, out: Array) -> Array:
        w = jax.lax.dynamic_index_in_dim(weights, first + e, keepdims=False)

        def whole(i: Array, out: Array) -> Array:
            start = group.first + i * _BLOCK
            return _write(out, product(_take(rows, start, _BLOCK), w), start)

        def part(block: int, out: Array) -> Array:
            start = jnp.minimum(group.rest, n - block)
            y = jnp.where(
                group.in_remainder(start, block), product(_take(rows, start, block), w), _take(out, start, block)
            )
            return _write(out, y, start)

        if n >= _BLOCK:
            out = jax.lax.fori_loop(0, group.full, whole, out)
        return group.remainder([lambda out: out, *(partial(part, block) for block in _block_sizes(n))], out)

    out = jnp.zeros((n, weights.shape[1] if transposed else weights.shape[2]), rows.dtype)
    return _for_groups(group_sizes, one, varying_like(out, rows, weights, group_sizes))


def _blocked_outer(rows: Array, grads: Array, group_sizes: Array) -> Array:
    """Compute dW[e] = Σ rows[n] grads[n]^T over the rows n of expert e, block by block, accumulated in float32."""
    n = rows.shape[0]
    product = partial(jnp.einsum, "nd,nf->df", preferred_element_type=jnp.float32)

    def one(e: Array, group: _Group, out: Array) -> Array:
        def whole(i: Array, sum_: Array) -> Array:
            start = group.first + i * _BLOCK
            return sum_ + product(_take(rows, start, _BLOCK), _take(grads, start, _BLOCK))

        def part(block: int) -> Array:
            start = jnp.minimum(group.rest, n - block)
            inside = group.in_remainder(start, block)
            return product(*(jnp.where(inside, _take(a, start, block), 0) for a in (rows, grads)))

        zero = varying_like(jnp.zeros(out.shape[1:], out.dtype), rows, grads, group_sizes)
        sum_ = group.remainder([lambda: zero, *(partial(part, block) for block in _block_sizes(n))])
        if n >= _BLOCK:
            sum_ = jax.lax.fori_loop(0, group.full, whole, sum_)
        return jax.lax.dynamic_update_index_in_dim(out, sum_, e, 0)

    out = jnp.zeros((group_sizes.shape[0], rows.shape[1], grads.shape[1]), jnp.float32)
    return _for_groups(group_sizes, one, varying_like(out, rows, grads, group_sizes))


def _take(x: Array, start: Array, rows: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, rows)


def _write(x: Array, rows: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, rows, start, 0)


def _tail_zeroed(out: Array, group_sizes: Array) -> Array:
    return jnp.where(jnp.arange(out.shape[0])[:, None] < group_sizes.sum(), out, 0)


def _ragged(rows: Array, weights: Array, group_sizes: Array, *, transposed: bool) -> Array:
    weights = weights.mT if transposed else weights
    return _tail_zeroed(jax.lax.ragged_dot(rows, weights, group_sizes), group_sizes)


def _ragged_outer(rows: Array, grads: Array, group_sizes: Array) -> Array:
    weights = jnp.zeros((group_sizes.shape[0], rows.shape[1], grads.shape[1]), jnp.float32)
    weights = varying_like(weights, rows, grads)
    _, vjp = jax.vjp(lambda w: jax.lax.ragged_dot(rows.astype(w.dtype), w, group_sizes), weights)
    return vjp(_tail_zeroed(grads, group_sizes).astype(jnp.float32))[0]


def _products(
    rows: Array, weights: Sequence[Array], group_sizes: Array, tail: bool, likely: int | None
) -> tuple[Array, ...]:
    if platform() == "tpu":
        out = grouped_matmul_tpu.matmuls(rows, weights, group_sizes, likely=likely)
        return tuple(_tail_zeroed(y, group_sizes) for y in out) if tail else out
    kernel = _blocked if platform() == "cpu" else _ragged
    return tuple(kernel(rows, w, group_sizes, transposed=False) for w in weights)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmuls(
    rows: Float[Array, "N D"],
    weights: tuple[Float[Array, "E D F"], ...],
    group_sizes: Int[Array, " E"],
    tail: bool = True,
    likely: int | None = None,
) -> tuple[Float[Array, "N F"], ...]:
    """Multiply each row by the matrices of its group: out_i[n] = rows[n] @ weights_i[e(n)].

    Several weights in one call cost less than separate calls: rows are read once, and the sum of their gradients is
    written once.

    Args:
      rows: sorted by group; the first `group_sizes[0]` belong to group 0, and so on.
      weights: one [D, F] matrix per group each, in the rows' dtype.
      group_sizes: int32, summing to at most N. Rows past the sum come out zero and get no gradient.
      tail: False if the rows past the sum are never read; they and their gradients are then undefined.
      likely: expected total of `group_sizes`, a tuning hint; None expects all N rows in use.
    """
    return _products(rows, weights, group_sizes, tail, likely)


def _forward(
    rows: Array, weights: tuple[Array, ...], group_sizes: Array, tail: bool, likely: int | None
) -> tuple[tuple[Array, ...], tuple[Array, tuple[Array, ...], Array]]:
    return _products(rows, weights, group_sizes, tail, likely), (rows, weights, group_sizes)


def _backward(
    tail: bool, likely: int | None, residuals: tuple[Array, tuple[Array, ...], Array], grads: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...], None]:
    rows, weights, group_sizes = residuals
    if platform() == "tpu":
        d_rows = grouped_matmul_tpu.matmuls_transposed(grads, weights, group_sizes, likely=likely)
        d_rows = _tail_zeroed(d_rows, group_sizes) if tail else d_rows
        outer = partial(grouped_matmul_tpu.outer, likely=likely)
    else:
        kernel, outer = (_blocked, _blocked_outer) if platform() == "cpu" else (_ragged, _ragged_outer)
        d_rows = reduce(
            jnp.add, (kernel(g, w, group_sizes, transposed=True) for g, w in zip(grads, weights, strict=True))
        )
    d_weights = (outer(rows, g, group_sizes).astype(w.dtype) for g, w in zip(grads, weights, strict=True))
    return d_rows, tuple(d_weights), None


grouped_matmuls.defvjp(_forward, _backward)


def stacked_matmuls(
    rows: Float[Array, "N D"],
    weights: tuple[Float[Array, "L E D F"], ...],
    group_sizes: Int[Array, " E"],
    *,
    layer: Int[Array, ""],
    likely: int | None = None,
) -> tuple[Float[Array, "N F"], ...]:
    """Like `grouped_matmuls` of each weights[layer] with tail=False, but reads the layer's weights in place.

    Meant for a loop over layers, such as a decoder's, in which copying the weights out would cost as much as the
    matmul. Not differentiable.
    """
    L, E = weights[0].shape[:2]
    whole = tuple(w.reshape(L * E, *w.shape[2:]) for w in weights)
    if platform() == "tpu":
        return grouped_matmul_tpu.matmuls(rows, whole, group_sizes, layer=layer, likely=likely)
    if platform() == "cpu":
        return tuple(_blocked(rows, w, group_sizes, transposed=False, first=layer * E) for w in whole)
    own = (jax.lax.dynamic_index_in_dim(w, layer, keepdims=False) for w in weights)
    return tuple(_ragged(rows, w, group_sizes, transposed=False) for w in own)
