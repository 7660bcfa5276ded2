"""Grouped matmul, rows times the weights of their expert: one function with the best implementation per backend.

CPU: loops over blocks of each expert's rows, so that the cost scales with the rows, not with the experts. TPU: Pallas
kernels. Elsewhere: `jax.lax.ragged_dot`.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8

from gspo_jax.kernels import grouped_matmul_tpu
from gspo_jax.kernels.backend import platform, varying_like

Tree = TypeVar("Tree")


class Scaled(NamedTuple):
    """Weights in int8, whose products are multiplied by a scale for each column; they have no gradient."""

    values: Int8[Array, "*E D F"]
    scale: Float[Array, "*E F"]
    """float32."""


Weights = Array | Scaled
"""A matrix for each group, in the rows' dtype or in int8."""

_BLOCK, _STEP = 64, 16
"""Rows per block on CPU, and the granularity of a group's smaller last block: large enough for the matmul to run at
full speed, small enough that the padding rows cost little."""


class _Group(NamedTuple):
    """The rows [first, end) of one expert: `full` whole blocks, then a remainder starting at row `rest`."""

    expert: Array
    first: Array
    end: Array
    full: Array
    rest: Array

    @property
    def steps(self) -> Array:
        """The remainder's rows in units of `_STEP`."""
        return (self.end - self.rest + _STEP - 1) // _STEP

    def has(self, start: Array, rows: int, since: Array) -> Bool[Array, "n 1"]:
        """Return which of the `rows` rows from `start` are among the group's rows from row `since` on."""
        at = start + jnp.arange(rows)
        return ((at >= since) & (at < self.end))[:, None]


def _for_groups(group_sizes: Int[Array, " E"], one: Callable[[_Group, Tree], Tree], out: Tree) -> Tree:
    """Fold out = one(group, out) over the experts that have rows, in order; empty experts cost nothing."""
    ends = jnp.cumsum(group_sizes)

    def visit(state: tuple[Array, Tree]) -> tuple[Array, Tree]:
        first, out = state
        e = (ends <= first).sum(dtype=jnp.int32)
        full = (ends[e] - first) // _BLOCK
        return ends[e], one(_Group(e, first, ends[e], full, first + full * _BLOCK), out)

    begin = varying_like(jnp.zeros((), ends.dtype), ends), out
    return jax.lax.while_loop(lambda state: state[0] < ends[-1], visit, begin)[1]


def _blocked(
    rows: Sequence[Array],
    weights: Sequence[Weights],
    group_sizes: Array,
    product: Callable[[Sequence[Array], Sequence[Weights]], tuple[Array, ...]],
    *,
    first: Array | int = 0,
) -> tuple[Array, ...]:
    """Compute product(rows[n], weights[e(n)]) block by block, of one or several arrays; zero past the last group.

    The first group's matrices are weights[first]. Those in int8 come in the rows' dtype, converted once for a group.
    """
    n, dtype = rows[0].shape[0], rows[0].dtype
    step = min(_STEP, n)

    def matrix(w: Weights, e: Array | int) -> Weights:
        values = w.values if isinstance(w, Scaled) else w
        own = jax.lax.dynamic_index_in_dim(values, first + e, keepdims=False)
        return Scaled(own.astype(dtype), w.scale[e]) if isinstance(w, Scaled) else own

    def one(group: _Group, outs: tuple[Array, ...]) -> tuple[Array, ...]:
        own = [matrix(w, group.expert) for w in weights]

        def whole(i: Array, outs: tuple[Array, ...]) -> tuple[Array, ...]:
            start = group.first + i * _BLOCK
            found = product([_take(x, start, _BLOCK) for x in rows], own)
            return tuple(_write(out, y, start) for out, y in zip(outs, found, strict=True))

        def part(i: Array, outs: tuple[Array, ...]) -> tuple[Array, ...]:
            since = group.rest + i * step
            start = jnp.minimum(since, n - step)
            inside, found = group.has(start, step, since), product([_take(x, start, step) for x in rows], own)
            kept = (jnp.where(inside, y, _take(out, start, step)) for out, y in zip(outs, found, strict=True))
            return tuple(_write(out, y, start) for out, y in zip(outs, kept, strict=True))

        if n >= _BLOCK:
            outs = jax.lax.fori_loop(0, group.full, whole, outs)
        return jax.lax.fori_loop(0, group.steps, part, outs)

    shapes = jax.eval_shape(lambda rows, weights: product(rows, [matrix(w, 0) for w in weights]), rows, weights)
    leaves = jax.tree.leaves(weights)
    outs = tuple(varying_like(jnp.zeros(y.shape, y.dtype), *rows, *leaves, group_sizes) for y in shapes)
    return _for_groups(group_sizes, one, outs)


def scaled(x: Array, scale: Array) -> Array:
    """x times the scale, one for each column or an array like x, multiplied in float32 and in x's dtype again."""
    return (x.astype(jnp.float32) * scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)).astype(x.dtype)


def _blocked_products(
    rows: Array, weights: Sequence[Weights], group_sizes: Array, *, first: Array | int = 0
) -> tuple[Array, ...]:
    """Compute out_i[n] = rows[n] @ weights_i[e(n)] block by block."""

    def product(rows: Sequence[Array], weights: Sequence[Weights]) -> tuple[Array, ...]:
        return tuple(scaled(rows[0] @ w.values, w.scale) if isinstance(w, Scaled) else rows[0] @ w for w in weights)

    return _blocked([rows], weights, group_sizes, product, first=first)


def _blocked_transposed(grads: Sequence[Array], weights: Sequence[Weights], group_sizes: Array) -> Array:
    """Compute Σ_i grads_i[n] @ weights_i[e(n)]^T block by block."""

    def product(grads: Sequence[Array], weights: Sequence[Weights]) -> tuple[Array, ...]:
        each = (
            scaled(g, w.scale) @ w.values.T if isinstance(w, Scaled) else g @ w.T
            for g, w in zip(grads, weights, strict=True)
        )
        return (reduce(jnp.add, each),)

    return _blocked(grads, weights, group_sizes, product)[0]


def _blocked_outer(rows: Array, grads: Sequence[Array], group_sizes: Array) -> tuple[Array, ...]:
    """Compute dW_i[e] = Σ rows[n] grads_i[n]^T over the rows n of expert e, block by block, accumulated in float32."""
    n = rows.shape[0]
    product = partial(jnp.einsum, "nd,nf->df", preferred_element_type=jnp.float32)

    def one(group: _Group, outs: tuple[Array, ...]) -> tuple[Array, ...]:
        def whole(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            at = group.first + i * _BLOCK
            x = _take(rows, at, _BLOCK)
            return tuple(sum_ + product(x, _take(g, at, _BLOCK)) for sum_, g in zip(sums, grads, strict=True))

        def part(block: int) -> tuple[Array, ...]:
            start = jnp.minimum(group.rest, n - block)
            inside = group.has(start, block, group.rest)
            x, *gs = (jnp.where(inside, _take(a, start, block), 0) for a in (rows, *grads))
            return tuple(product(x, g) for g in gs)

        # Branches that return a whole buffer, and not a sum alone, would copy it.
        nothing = tuple(varying_like(jnp.zeros(out.shape[1:], out.dtype), out) for out in outs)
        parts = (partial(part, min(rows, n)) for rows in range(_STEP, _BLOCK + _STEP, _STEP))
        sums = jax.lax.switch(group.steps, [lambda: nothing, *parts])
        if n >= _BLOCK:
            sums = jax.lax.fori_loop(0, group.full, whole, sums)
        return tuple(
            jax.lax.dynamic_update_index_in_dim(out, sum_, group.expert, 0)
            for out, sum_ in zip(outs, sums, strict=True)
        )

    shapes = ((group_sizes.shape[0], rows.shape[1], g.shape[1]) for g in grads)
    outs = tuple(varying_like(jnp.zeros(shape, jnp.float32), rows, *grads, group_sizes) for shape in shapes)
    return _for_groups(group_sizes, one, outs)


def _take(x: Array, start: Array, rows: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, rows)


def _write(x: Array, rows: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, rows, start, 0)


def _tail_zeroed(out: Array, group_sizes: Array) -> Array:
    return jnp.where(jnp.arange(out.shape[0])[:, None] < group_sizes.sum(), out, 0)


def _of_rows(w: Scaled, group_sizes: Array, rows: int) -> Float[Array, "N F"]:
    """The scales of each row's group."""
    return jnp.repeat(w.scale, group_sizes, axis=0, total_repeat_length=rows)


def _ragged_products(rows: Array, weights: Sequence[Weights], group_sizes: Array) -> tuple[Array, ...]:
    def one(w: Weights) -> Array:
        if not isinstance(w, Scaled):
            return jax.lax.ragged_dot(rows, w, group_sizes)
        y = jax.lax.ragged_dot(rows, w.values.astype(rows.dtype), group_sizes)
        return scaled(y, _of_rows(w, group_sizes, len(rows)))

    return tuple(_tail_zeroed(one(w), group_sizes) for w in weights)


def _ragged_transposed(grads: Sequence[Array], weights: Sequence[Weights], group_sizes: Array) -> Array:
    def one(g: Array, w: Weights) -> Array:
        if isinstance(w, Scaled):
            g, w = scaled(g, _of_rows(w, group_sizes, len(g))), w.values.astype(g.dtype)
        return _ragged_products(g, [w.mT], group_sizes)[0]

    return reduce(jnp.add, map(one, grads, weights))


def _ragged_outer(rows: Array, grads: Sequence[Array], group_sizes: Array) -> tuple[Array, ...]:
    def one(grads: Array) -> Array:
        weights = jnp.zeros((group_sizes.shape[0], rows.shape[1], grads.shape[1]), jnp.float32)
        weights = varying_like(weights, rows, grads)
        _, vjp = jax.vjp(lambda w: jax.lax.ragged_dot(rows.astype(w.dtype), w, group_sizes), weights)
        return vjp(_tail_zeroed(grads, group_sizes).astype(jnp.float32))[0]

    return tuple(map(one, grads))


def _products(
    rows: Array, weights: Sequence[Weights], group_sizes: Array, tail: bool, likely: int | None
) -> tuple[Array, ...]:
    if platform() == "tpu":
        out = _in_calls(partial(_tpu_products, rows, group_sizes, likely=likely), weights)
        return tuple(_tail_zeroed(y, group_sizes) for y in out) if tail else out
    if platform() == "cpu":
        return _blocked_products(rows, weights, group_sizes)
    return _ragged_products(rows, weights, group_sizes)


def _tpu_products(rows: Array, group_sizes: Array, weights: Sequence[Weights], **options: Any) -> tuple[Array, ...]:
    values, scales = values_and_scales(weights)
    return grouped_matmul_tpu.matmuls(rows, values, group_sizes, scales=scales, **options)


def _tpu_transposed(
    grads: Sequence[Array], weights: Sequence[Weights], group_sizes: Array, likely: int | None
) -> Array:
    """The sum of what calls with weights that are alike give."""

    def of(alike: list[int]) -> Array:
        values, scales = values_and_scales([weights[i] for i in alike])
        own = [grads[i] for i in alike]
        return grouped_matmul_tpu.matmuls_transposed(own, values, group_sizes, scales=scales, likely=likely)

    return reduce(jnp.add, map(of, _alike(weights)))


def values_and_scales(weights: Sequence[Weights]) -> tuple[list[Array], list[Array]]:
    """The values of weights that are alike, and their scales: as many, or none."""
    scales = [w.scale for w in weights if isinstance(w, Scaled)]
    return [w.values if isinstance(w, Scaled) else w for w in weights], scales


def _in_calls(run: Callable[..., tuple[Array, ...]], weights: Sequence[Weights]) -> tuple[Array, ...]:
    """The products of all weights, each call of `run` with those that are alike, as the kernels need."""
    found: dict[int, Array] = {}
    for alike in _alike(weights):
        found |= zip(alike, run([weights[i] for i in alike]), strict=True)
    return tuple(found[i] for i in range(len(weights)))


def _alike(weights: Sequence[Weights]) -> list[list[int]]:
    """The numbers of the weights of each shape, those in int8 apart."""
    kinds = [(isinstance(w, Scaled), jax.tree.leaves(w)[0].shape) for w in weights]
    return [[i for i, each in enumerate(kinds) if each == kind] for kind in dict.fromkeys(kinds)]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmuls(
    rows: Float[Array, "N D"],
    weights: tuple[Weights, ...],
    group_sizes: Int[Array, " E"],
    tail: bool = True,
    likely: int | None = None,
) -> tuple[Float[Array, "N _"], ...]:
    """Multiply each row by the matrices of its group: out_i[n] = rows[n] @ weights_i[e(n)].

    Several weights of one width F in one call cost less than separate calls: rows are read once, and the sum of their
    gradients is written once. Weights that are not differentiated cost no gradient.

    Args:
      rows: sorted by group; the first `group_sizes[0]` belong to group 0, and so on.
      weights: one [D, F] matrix per group each.
      group_sizes: int32, summing to at most N. Rows past the sum come out zero and get no gradient.
      tail: False if the rows past the sum are never read; they and their gradients are then undefined.
      likely: expected total of `group_sizes`, a tuning hint; None expects all N rows in use.
    """
    return _products(rows, weights, group_sizes, tail, likely)


class _Weight(NamedTuple):
    """A weight, in the field that says whether it is differentiated: the tree's structure is known when tracing."""

    trained: Array | None = None
    frozen: Weights | None = None

    @property
    def value(self) -> Weights:
        """The weight."""
        value = self.frozen if self.trained is None else self.trained
        assert value is not None
        return value


def _forward(
    rows: Any, weights: tuple[Any, ...], group_sizes: Any, tail: bool, likely: int | None
) -> tuple[tuple[Array, ...], tuple[Array, list[_Weight], Array]]:
    def kept(w: Any) -> _Weight:
        if isinstance(w, Scaled):
            return _Weight(frozen=Scaled(*(part.value for part in cast(Any, w))))
        return _Weight(trained=w.value) if w.perturbed else _Weight(frozen=w.value)

    own = [kept(w) for w in weights]
    out = _products(rows.value, [w.value for w in own], group_sizes.value, tail, likely)
    return out, (rows.value, own, group_sizes.value)


def _backward(
    tail: bool, likely: int | None, residuals: tuple[Array, list[_Weight], Array], given: tuple[Any, ...]
) -> tuple[Array, tuple[Array | None, ...], None]:
    rows, kept, group_sizes = residuals
    zero = jax.custom_derivatives.SymbolicZero
    weights = [w.value for w in kept]
    grads = [varying_like(jnp.zeros(g.shape, rows.dtype), rows) if isinstance(g, zero) else g for g in given]
    own = [g for g, w in zip(grads, kept, strict=True) if w.trained is not None]
    if platform() == "tpu":
        d_rows = _tpu_transposed(grads, weights, group_sizes, likely)
        d_rows = _tail_zeroed(d_rows, group_sizes) if tail else d_rows
        found = iter([grouped_matmul_tpu.outer(rows, g, group_sizes, likely=likely) for g in own])
    else:
        blocked, ragged = (_blocked_transposed, _blocked_outer), (_ragged_transposed, _ragged_outer)
        transposed, outer = blocked if platform() == "cpu" else ragged
        d_rows = transposed(grads, weights, group_sizes)
        found = iter(outer(rows, own, group_sizes) if own else ())
    return d_rows, tuple(None if w.trained is None else next(found).astype(w.trained.dtype) for w in kept), None


grouped_matmuls.defvjp(_forward, _backward, symbolic_zeros=True)


def stacked_matmuls(
    rows: Float[Array, "N D"],
    weights: tuple[Weights, ...],
    group_sizes: Int[Array, " E"],
    *,
    layer: Int[Array, ""],
    likely: int | None = None,
) -> tuple[Float[Array, "N _"], ...]:
    """Like `grouped_matmuls` of each weights[layer] with tail=False, but reads the layer's weights in place.

    Meant for a loop over layers, such as a decoder's, in which copying the weights out would cost as much as the
    matmul. The weights are those of all layers, [L, E, D, F], and scales are the layer's. Not differentiable.
    """

    def changed(change: Callable[[Array], Array]) -> list[Weights]:
        return [w._replace(values=change(w.values)) if isinstance(w, Scaled) else change(w) for w in weights]

    E = len(group_sizes)
    if platform() not in ("tpu", "cpu"):
        own = changed(lambda w: jax.lax.dynamic_index_in_dim(w, layer, keepdims=False))
        return _ragged_products(rows, own, group_sizes)
    whole = changed(lambda w: w.reshape(-1, *w.shape[2:]))
    if platform() == "cpu":
        return _blocked_products(rows, whole, group_sizes, first=layer * E)
    return _in_calls(partial(_tpu_products, rows, group_sizes, layer=layer, likely=likely), whole)
