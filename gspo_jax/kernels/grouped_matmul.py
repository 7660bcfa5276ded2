"""Grouped matmul: rows times their expert's weights.

CPU: loops over blocks of rows, at a cost that follows rows, not experts. TPU and GPU: Pallas kernels. Elsewhere, and
on GPU for widths that are no multiples of 16: `jax.lax.ragged_dot`.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8

from gspo_jax.kernels import grouped_matmul_gpu, grouped_matmul_tpu
from gspo_jax.kernels.backend import platform, varying_like

Tree = TypeVar("Tree")


class Scaled(NamedTuple):
    """Int8 weights without a gradient. Products are multiplied by a scale per column."""

    values: Int8[Array, "*E D F"]
    scale: Float[Array, "*E F"]
    """float32."""


Weights = Array | Scaled
"""One matrix per group."""

_BLOCK, _STEP = 64, 16
"""Rows per block on CPU, and the granularity of a group's last block: full speed with little padding."""


class _Group(NamedTuple):
    """The rows [first, end) of one expert: `full` blocks, then a remainder from row `rest`."""

    expert: Array
    first: Array
    end: Array
    full: Array
    rest: Array

    @property
    def steps(self) -> Array:
        return (self.end - self.rest + _STEP - 1) // _STEP

    def has(self, start: Array, rows: int, since: Array) -> Bool[Array, "n 1"]:
        """Mask the group's rows in [start, start + rows), from row `since` on."""
        at = start + jnp.arange(rows)
        return ((at >= since) & (at < self.end))[:, None]


def _for_groups(group_sizes: Int[Array, " E"], rows: int, one: Callable[[_Group, Tree], Tree], out: Tree) -> Tree:
    """Fold out = one(group, out) over the experts with some of `rows` rows, in order."""
    ends = jnp.cumsum(group_sizes)

    def visit(state: tuple[Array, Tree]) -> tuple[Array, Tree]:
        first, out = state
        e = (ends <= first).sum(dtype=jnp.int32)
        full = (ends[e] - first) // _BLOCK if _has_blocks(rows) else jnp.zeros_like(first)
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
    """Compute product(rows[n], weights[first + e(n)]) block by block, zero past the last group.

    Int8 matrices are converted once per group.
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

        if _has_blocks(n):
            outs = jax.lax.fori_loop(0, group.full, whole, outs)
        return jax.lax.fori_loop(0, group.steps, part, outs)

    shapes = jax.eval_shape(lambda rows, weights: product(rows, [matrix(w, 0) for w in weights]), rows, weights)
    leaves = jax.tree.leaves(weights)
    outs = tuple(varying_like(jnp.zeros(y.shape, y.dtype), *rows, *leaves, group_sizes) for y in shapes)
    return _for_groups(group_sizes, n, one, outs)


def _has_blocks(rows: int) -> bool:
    """False if remainders are all there is. Of one block alone XLA makes a step twice as slow."""
    return rows > _BLOCK


def scaled(x: Array, scale: Array) -> Array:
    """Return x · scale, one per column or shaped like x, multiplied in float32, in x's dtype."""
    return (x.astype(jnp.float32) * scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)).astype(x.dtype)


def _blocked_products(
    rows: Array, weights: Sequence[Weights], group_sizes: Array, *, first: Array | int = 0
) -> tuple[Array, ...]:

    def product(rows: Sequence[Array], weights: Sequence[Weights]) -> tuple[Array, ...]:
        return tuple(scaled(rows[0] @ w.values, w.scale) if isinstance(w, Scaled) else rows[0] @ w for w in weights)

    return _blocked([rows], weights, group_sizes, product, first=first)


def _blocked_transposed(grads: Sequence[Array], weights: Sequence[Weights], group_sizes: Array) -> Array:

    def product(grads: Sequence[Array], weights: Sequence[Weights]) -> tuple[Array, ...]:
        each = (
            scaled(g, w.scale) @ w.values.T if isinstance(w, Scaled) else g @ w.T
            for g, w in zip(grads, weights, strict=True)
        )
        return (reduce(jnp.add, each),)

    return _blocked(grads, weights, group_sizes, product)[0]


def _blocked_outer(rows: Array, grads: Sequence[Array], group_sizes: Array) -> tuple[Array, ...]:
    """Accumulate in float32."""
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

        # Branches that return the whole buffer would copy it.
        nothing = tuple(varying_like(jnp.zeros(out.shape[1:], out.dtype), out) for out in outs)
        parts = (partial(part, min(rows, n)) for rows in range(_STEP, _BLOCK + _STEP, _STEP))
        sums = jax.lax.switch(group.steps, [lambda: nothing, *parts])
        if _has_blocks(n):
            sums = jax.lax.fori_loop(0, group.full, whole, sums)
        return tuple(
            jax.lax.dynamic_update_index_in_dim(out, sum_, group.expert, 0)
            for out, sum_ in zip(outs, sums, strict=True)
        )

    shapes = ((group_sizes.shape[0], rows.shape[1], g.shape[1]) for g in grads)
    outs = tuple(varying_like(jnp.zeros(shape, jnp.float32), rows, *grads, group_sizes) for shape in shapes)
    return _for_groups(group_sizes, n, one, outs)


def _take(x: Array, start: Array, rows: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, rows)


def _write(x: Array, rows: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, rows, start, 0)


def _tail_zeroed(out: Array, group_sizes: Array) -> Array:
    return jnp.where(jnp.arange(out.shape[0])[:, None] < group_sizes.sum(), out, 0)


def _of_rows(w: Scaled, group_sizes: Array, rows: int) -> Float[Array, "N F"]:
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


def _gpu_products(rows: Array, weights: Sequence[Weights], group_sizes: Array, **options: Any) -> tuple[Array, ...]:
    values, scales = values_and_scales(weights)
    return grouped_matmul_gpu.matmuls(rows, values, group_sizes, scales=scales, **options)


def _gpu_transposed(
    grads: Sequence[Array], weights: Sequence[Weights], group_sizes: Array, *, interpret: bool = False
) -> Array:
    values, scales = values_and_scales(weights)
    return grouped_matmul_gpu.matmuls_transposed(grads, values, group_sizes, scales=scales, interpret=interpret)


def _gpu_outer(
    rows: Array, grads: Sequence[Array], group_sizes: Array, *, interpret: bool = False
) -> tuple[Array, ...]:
    return tuple(grouped_matmul_gpu.outer(rows, g, group_sizes, interpret=interpret) for g in grads)


class _Kernels(NamedTuple):
    products: Callable[[Array, Sequence[Weights], Array], tuple[Array, ...]]
    transposed: Callable[[Sequence[Array], Sequence[Weights], Array], Array]
    outer: Callable[[Array, Sequence[Array], Array], tuple[Array, ...]]


_BLOCKED = _Kernels(_blocked_products, _blocked_transposed, _blocked_outer)
_RAGGED = _Kernels(_ragged_products, _ragged_transposed, _ragged_outer)
_GPU = _Kernels(_gpu_products, _gpu_transposed, _gpu_outer)


def _kernels(weights: Sequence[Weights]) -> _Kernels:
    """Return the kernels of a platform other than TPU for weights of one shape."""
    if platform() == "cpu":
        return _BLOCKED
    values, scales = values_and_scales(weights)
    of_one_kind = len(scales) in (0, len(weights))
    fit = platform() == "gpu" and of_one_kind and grouped_matmul_gpu.fits(*values[0].shape[-2:])
    return _GPU if fit else _RAGGED


def _products(rows: Array, weights: Sequence[Weights], group_sizes: Array, likely: int | None) -> tuple[Array, ...]:
    if platform() == "tpu":
        return tpu_products(rows, weights, group_sizes, likely=likely)
    return _kernels(weights).products(rows, weights, group_sizes)


def tpu_products(rows: Array, weights: Sequence[Weights], group_sizes: Array, **options: Any) -> tuple[Array, ...]:
    """Return `grouped_matmul_tpu.matmuls` of weights of one kind."""
    values, scales = values_and_scales(weights)
    return grouped_matmul_tpu.matmuls(rows, values, group_sizes, scales=scales, **options)


def values_and_scales(weights: Sequence[Weights]) -> tuple[list[Array], list[Array]]:
    """Split weights of one kind into values and scales. Only int8 weights have scales."""
    scales = [w.scale for w in weights if isinstance(w, Scaled)]
    return [w.values if isinstance(w, Scaled) else w for w in weights], scales


def with_values(weights: Sequence[Weights], change: Callable[[Array], Array]) -> list[Weights]:
    """Return the weights with changed matrices and the same scales."""
    return [w._replace(values=change(w.values)) if isinstance(w, Scaled) else change(w) for w in weights]


def all_layers(weights: Sequence[Weights]) -> list[Weights]:
    """Return weights [L, E, …] as [L · E, …]."""
    return with_values(weights, lambda w: w.reshape(-1, *w.shape[2:]))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmuls(
    rows: Float[Array, "N D"],
    weights: tuple[Weights, ...],
    group_sizes: Int[Array, " E"],
    likely: int | None = None,
) -> tuple[Float[Array, "N _"], ...]:
    """Multiply each row by its group's matrices: out_i[n] = rows[n] @ weights_i[e(n)].

    Several weights cost less in one call: rows are read once, and the sum of their gradients is written once. Weights
    that are not differentiated cost no gradient.

    Args:
      rows: sorted by group.
      weights: on TPU of one shape, all or none in int8.
      group_sizes: int32. Rows past their sum, and their gradients, are undefined on TPU and zero elsewhere.
      likely: expected sum of `group_sizes`, a tuning hint; None: N.
    """
    return _products(rows, weights, group_sizes, likely)


class Kept(NamedTuple):
    """A weight, in the field that says whether it is trained."""

    trained: Array | None = None
    frozen: Weights | None = None

    @classmethod
    def of(cls, w: Any) -> "Kept":
        """Return a `CustomVJPPrimal` or `Scaled` of two as a weight."""
        if isinstance(w, Scaled):
            return cls(frozen=Scaled(*(part.value for part in cast(Any, w))))
        return cls(trained=w.value) if w.perturbed else cls(frozen=w.value)

    @property
    def value(self) -> Weights:
        value = self.frozen if self.trained is None else self.trained
        assert value is not None
        return value

    def with_values(self, values: Array) -> "Kept":
        """Return it with another matrix and the same scales."""
        if self.trained is not None:
            return Kept(trained=values)
        return Kept(frozen=self.frozen._replace(values=values) if isinstance(self.frozen, Scaled) else values)


def _forward(
    rows: Any, weights: tuple[Any, ...], group_sizes: Any, likely: int | None
) -> tuple[tuple[Array, ...], tuple[Array, list[Kept], Array]]:
    own = [Kept.of(w) for w in weights]
    out = _products(rows.value, [w.value for w in own], group_sizes.value, likely)
    return out, (rows.value, own, group_sizes.value)


def _backward(
    likely: int | None, residuals: tuple[Array, list[Kept], Array], given: tuple[Any, ...]
) -> tuple[Array, tuple[Array | None, ...], None]:
    rows, kept, group_sizes = residuals
    zero = jax.custom_derivatives.SymbolicZero
    weights = [w.value for w in kept]
    grads = [varying_like(jnp.zeros(g.shape, rows.dtype), rows) if isinstance(g, zero) else g for g in given]
    own = [g for g, w in zip(grads, kept, strict=True) if w.trained is not None]
    if platform() == "tpu":
        values, scales = values_and_scales(weights)
        d_rows = grouped_matmul_tpu.matmuls_transposed(grads, values, group_sizes, scales=scales, likely=likely)
        found = iter([grouped_matmul_tpu.outer(rows, g, group_sizes, likely=likely) for g in own])
    else:
        kernels = _kernels(weights)
        d_rows = kernels.transposed(grads, weights, group_sizes)
        found = iter(kernels.outer(rows, own, group_sizes) if own else ())
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
    """Compute `grouped_matmuls` of each weights[layer], reading the weights in place.

    For loops over layers, where a copy would cost as much as the matmul. Weights are [L, E, D, F], scales the layer's.
    Not differentiable.
    """
    if platform() == "tpu":
        return tpu_products(rows, all_layers(weights), group_sizes, layer=layer, likely=likely)
    kernels = _kernels(weights)
    if kernels is _BLOCKED:
        return _blocked_products(rows, all_layers(weights), group_sizes, first=layer * len(group_sizes))
    if kernels is _GPU:
        return _gpu_products(rows, all_layers(weights), group_sizes, layer=layer)
    own = with_values(weights, lambda w: jax.lax.dynamic_index_in_dim(w, layer, keepdims=False))
    return _ragged_products(rows, own, group_sizes)
