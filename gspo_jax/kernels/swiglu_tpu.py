"""The experts' SwiGLU on TPU: its element-wise work, forward and backward, is done where the grouped matmuls end."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from gspo_jax.kernels import adapted_matmul_tpu, grouped_matmul_tpu
from gspo_jax.kernels.adapted_matmul import Lows, side_by_side
from gspo_jax.kernels.backend import varying_like
from gspo_jax.kernels.grouped_matmul import Kept, Weights, all_layers, tpu_products, values_and_scales
from gspo_jax.kernels.grouped_matmul_tpu import Thin

Matrices = tuple[Weights, Weights, Weights]
"""gate, up and down."""
Thins = tuple[Thin | None, Thin | None]
"""The adapters of gate and up, and of down."""


def swiglu(
    rows: Float[Array, "N D"],
    shares: Float[Array, " N"],
    weights: Matrices,
    lows: Lows,
    group_sizes: Int[Array, " E"],
    *,
    shards: tuple[Array, Array, Array] | None = None,
    layer: Int[Array, ""] | None = None,
    likely: int | None = None,
    interpret: bool = False,
) -> Float[Array, "N D"]:
    """Return down(silu(gate x) · up x · share) for each row x, by its group's adapted matrices.

    The products with gate and up are named "dot" for `jax.checkpoint`. Rows past the groups are undefined, also in the
    gradients. Other arguments as in `adapted_matmuls`, and `interpret` as in `grouped_matmul_tpu.matmuls`.

    Args:
      shards: this shard's part of the weights along `fsdp`. The backward pass gathers them again, each while another
        is in use.
    """
    pair, down = lows[:2], lows[2:]
    thin_pair, thin_down = (side_by_side(own, rows.dtype) if any(own) else None for own in (pair, down))
    thins = thin_pair, thin_down
    shares = varying_like(shares, rows)  # on each shard of F a share has a gradient of its own
    if layer is None:
        return _swiglu(rows, shares, weights, shards, thins, group_sizes, likely, interpret)
    gate, up, down = all_layers(weights)
    return _forward(rows, shares, (gate, up, down), thins, group_sizes, layer=layer, likely=likely, interpret=interpret)


def _forward(rows: Array, shares: Array, weights: Matrices, thins: Thins, group_sizes: Array, **options: Any) -> Array:
    hidden, *_ = _hidden(rows, shares, weights, thins, group_sizes, **options)
    return tpu_products(hidden, weights[2:], group_sizes, thin=thins[1], **options)[0]


def _hidden(rows: Array, shares: Array, weights: Matrices, thins: Thins, group_sizes: Array, **options: Any) -> Any:
    values, scales = values_and_scales(weights[:2])
    return grouped_matmul_tpu.gated(rows, values, shares, group_sizes, scales=scales, thin=thins[0], **options)


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _swiglu(
    rows: Array,
    shares: Array,
    weights: Matrices,
    shards: tuple[Array, Array, Array] | None,
    thins: Thins,
    group_sizes: Array,
    likely: int | None,
    interpret: bool,
) -> Array:
    del shards
    return _forward(rows, shares, weights, thins, group_sizes, likely=likely, interpret=interpret)


def _kept(
    rows: Any, shares: Any, weights: Any, shards: Any, thins: Any, group_sizes: Any, likely: int | None, interpret: bool
) -> tuple[Array, tuple[Any, ...]]:
    own = [Kept.of(w) for w in weights]
    arrays = rows, shares, shards, thins, group_sizes
    rows, shares, shards, thins, group_sizes = jax.tree.map(lambda p: p.value, arrays)
    gate, up, down = (w.value for w in own)
    options: dict[str, Any] = {"likely": likely, "interpret": interpret}
    hidden, pair = _hidden(rows, shares, (gate, up, down), thins, group_sizes, kept=True, **options)
    (out,) = tpu_products(hidden, (down,), group_sizes, thin=thins[1], **options)
    if shards is not None:
        own = [w.with_values(shard) for w, shard in zip(own, shards, strict=True)]
    return out, (rows, shares, own, shards, thins, group_sizes, checkpoint_name(pair, "dot"))


def _backward(likely: int | None, interpret: bool, kept: tuple[Any, ...], grads: Any) -> tuple[Any, ...]:
    rows, shares, own, shards, thins, group_sizes, pair = kept
    if isinstance(grads, jax.custom_derivatives.SymbolicZero):
        grads = varying_like(jnp.zeros(grads.shape, rows.dtype), rows)
    options: dict[str, Any] = {"likely": likely, "interpret": interpret}
    back = [None if thin is None else thin.back for thin in thins]

    def whole(w: Kept, after: Any) -> Weights:
        """Return weights, gathered when other arrays are known."""
        if shards is None:
            return w.value
        (shard,), _ = jax.lax.optimization_barrier((values_and_scales([w.value])[0], after))
        return w.with_values(jax.lax.all_gather(shard, "fsdp", axis=0, tiled=True)).value

    def outer(x: Array, g: Array, w: Kept) -> Array | None:
        return (
            None
            if w.trained is None
            else grouped_matmul_tpu.outer(x, g, group_sizes, likely=likely, interpret=interpret)
        )

    def thinly(x: Array, gs: list[Array], thin: Thin | None) -> Thin | None:
        if thin is None:
            return None
        first, second = adapted_matmul_tpu.gradient(x, gs, thin, group_sizes, **options)
        return Thin((first,), None, second)  # pyright: ignore[reportArgumentType]

    # `down` is gathered while `pair` is read, `gate` while `down` is used, and `up` during the gradient of `down`.
    down = whole(own[2], grads)
    gate = whole(own[0], (down, pair))
    values, scales = values_and_scales([down])
    *d_pair, hidden, d_shares = grouped_matmul_tpu.gated_transposed(
        grads, values[0], pair, shares, group_sizes, scales=scales, thin=back[1], **options
    )
    up = whole(own[1], d_pair)
    if shards is not None:
        hidden, gate = jax.lax.optimization_barrier((hidden, gate))
    d_down = outer(hidden, grads, own[2])
    if shards is not None:
        *d_pair, d_down = jax.lax.optimization_barrier((*d_pair, d_down))
    values, scales = values_and_scales([gate, up])
    d_rows = grouped_matmul_tpu.matmuls_transposed(d_pair, values, group_sizes, scales=scales, thin=back[0], **options)
    d_weights = outer(rows, d_pair[0], own[0]), outer(rows, d_pair[1], own[1]), d_down
    d_thins = thinly(rows, d_pair, thins[0]), thinly(hidden, [grads], thins[1])
    return d_rows, d_shares.astype(shares.dtype), d_weights, None, d_thins, None


_swiglu.defvjp(_kept, _backward, symbolic_zeros=True)
