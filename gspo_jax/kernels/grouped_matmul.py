"""Rows times the weights of their expert: one function, the best implementation per backend behind it.

CPU: a loop over blocks of rows whose cost follows the rows, not the experts. Elsewhere: `jax.lax.ragged_dot`.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_BLOCK = 64
"""Rows per block on CPU: enough for the matmul to run at speed, few enough that a block's unused rows cost little."""


def _varying_like(x: Array, *others: Array) -> Array:
    """Marks x as varying over the manual mesh axes that the others vary over, as a loop's carry must be."""
    axes = (
        frozenset().union(*(jax.typeof(o).manual_axis_type.varying for o in others))
        - jax.typeof(x).manual_axis_type.varying
    )
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x


def _blocks(group_sizes: Int[Array, " E"], block: int) -> tuple[Array, Array, Array, Array]:
    """How many blocks there are, and for block i its expert, first row and end-of-group row, as functions of i."""
    per_group = (group_sizes + block - 1) // block
    last = jnp.cumsum(per_group)
    ends = jnp.cumsum(group_sizes)
    return last[-1], last, last - per_group, ends


def _block(i: Array, last: Array, first: Array, ends: Array, sizes: Array, block: int) -> tuple[Array, Array, Array]:
    expert = jnp.searchsorted(last, i, side="right").astype(jnp.int32)
    start = ends[expert] - sizes[expert] + (i - first[expert]) * block
    inside = start + jnp.arange(block) < ends[expert]
    return expert, start, inside[:, None]


def _blocked(rows: Array, weights: Array, group_sizes: Array, *, transposed: bool) -> Array:
    """out[n] = rows[n] @ weights[e(n)] (or its transpose), block by block; rows beyond the last group come out zero."""
    n, block = rows.shape[0], min(_BLOCK, rows.shape[0])
    width = weights.shape[1] if transposed else weights.shape[2]
    count, last, first, ends = _blocks(group_sizes, block)
    padded = jnp.pad(rows, ((0, block), (0, 0)))

    def body(i: Array, out: Array) -> Array:
        expert, start, inside = _block(i, last, first, ends, group_sizes, block)
        x = jax.lax.dynamic_slice_in_dim(padded, start, block)
        w = jax.lax.dynamic_index_in_dim(weights, expert, keepdims=False)
        y = jnp.where(inside, x @ (w.T if transposed else w), 0)
        # A block may reach into the next group's rows; that group's own blocks come later and write over them.
        return jax.lax.dynamic_update_slice_in_dim(out, y, start, 0)

    out = _varying_like(jnp.zeros((n + block, width), rows.dtype), rows, weights, group_sizes)
    return jax.lax.fori_loop(0, count, body, out)[:n]


def _blocked_outer(rows: Array, grads: Array, group_sizes: Array) -> Array:
    """dW[e] = sum over the rows n of e of rows[n] grads[n]^T, block by block, accumulated in float32."""
    block = min(_BLOCK, rows.shape[0])
    count, last, first, ends = _blocks(group_sizes, block)
    rows, grads = (jnp.pad(a, ((0, block), (0, 0))) for a in (rows, grads))

    def body(i: Array, out: Array) -> Array:
        expert, start, inside = _block(i, last, first, ends, group_sizes, block)
        x = jnp.where(inside, jax.lax.dynamic_slice_in_dim(rows, start, block), 0)
        g = jax.lax.dynamic_slice_in_dim(grads, start, block)
        return out.at[expert].add(jnp.dot(x.T, g, preferred_element_type=jnp.float32))

    out = jnp.zeros((group_sizes.shape[0], rows.shape[1], grads.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, count, body, _varying_like(out, rows, grads, group_sizes))


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


def _matmul(rows: Array, weights: Array, group_sizes: Array, transposed: bool) -> Array:
    return jax.lax.platform_dependent(
        rows,
        weights,
        group_sizes,
        cpu=functools.partial(_blocked, transposed=transposed),
        default=functools.partial(_ragged, transposed=transposed),
    )


@jax.custom_vjp
def grouped_matmul(
    rows: Float[Array, "N D"], weights: Float[Array, "E D F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "N F"]:
    """Multiplies each row with its group's matrix: out[n] = rows[n] @ weights[e(n)].

    Args:
      rows: sorted by group; the first `group_sizes[0]` belong to group 0, and so on.
      weights: one [D, F] matrix per group, of the rows' dtype.
      group_sizes: int32, summing to at most N. Rows beyond the sum come out zero and get no gradient.
    """
    return _matmul(rows, weights, group_sizes, False)


def _forward(rows: Array, weights: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _matmul(rows, weights, group_sizes, False), (rows, weights, group_sizes)


def _backward(residuals: tuple[Array, Array, Array], grads: Array) -> tuple[Array, Array, None]:
    rows, weights, group_sizes = residuals
    d_rows = _matmul(grads, weights, group_sizes, True)
    d_weights = jax.lax.platform_dependent(rows, grads, group_sizes, cpu=_blocked_outer, default=_ragged_outer)
    return d_rows, d_weights.astype(weights.dtype), None


grouped_matmul.defvjp(_forward, _backward)
