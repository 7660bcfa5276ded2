"""Norm and rotation of heads on TPU: a Pallas kernel for each direction.

A tile has all heads of some tokens, side by side, as matmuls write and attention reads them. Norms, products and their
gradients are float32 in registers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from gspo_jax.kernels.backend import unchecked
from gspo_jax.kernels.visits_tpu import LANES, VMEM


def _factors(turn: Any) -> tuple[Array, Array]:
    """Return the factors of a head and of its halves swapped, from a tile of cos | sin."""
    both = turn[...]
    swapped = _swap(both)
    lower = jax.lax.broadcasted_iota(jnp.int32, both.shape, 1) < LANES // 2
    return jnp.where(lower, both, swapped), jnp.where(lower, -swapped, both)


def _swap(x: Float[Array, "n h"]) -> Float[Array, "n h"]:
    return pltpu.roll(x, LANES // 2, 1)


def _for_heads(width: int, one: Callable[[Any], None]) -> None:
    for first in range(0, width, LANES):
        one(pl.ds(first, LANES))


def _over_rms(x: Float[Array, "n h"], eps: float) -> tuple[Array, Array]:
    """Return x / rms(x) and 1 / rms(x)."""
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + eps)
    return x * inverse, inverse


def _forward_kernel(turn: Any, x: Any, *refs: Any, eps: float) -> None:
    *scale, out = refs
    cos, sin = _factors(turn)

    def one(head: Any) -> None:
        y = x[:, head].astype(jnp.float32)
        if scale:
            y = (_over_rms(y, eps)[0] * scale[0][...]).astype(x.dtype).astype(jnp.float32)
        out[:, head] = (y * cos + _swap(y) * sin).astype(out.dtype)

    _for_heads(x.shape[1], one)


def _backward_kernel(
    turn: Any, x: Any, grads: Any, scale: Any, dx: Any, d_scale: Any, *, eps: float, rows: int
) -> None:
    """Undo the rotation, then the norm. `d_scale` gets this tile's share."""
    cos, sin = _factors(turn)
    first = pl.program_id(0) * x.shape[0]
    real = first + jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0) < rows
    d_scale[...] = jnp.zeros_like(d_scale)

    def one(head: Any) -> None:
        g = grads[:, head].astype(jnp.float32)
        g = g * cos + _swap(g * sin)
        normed, inverse = _over_rms(x[:, head].astype(jnp.float32), eps)
        d_scale[...] += jnp.where(real, g * normed, 0).sum(axis=0, keepdims=True)
        g = g * scale[...]
        dx[:, head] = (inverse * (g - normed * jnp.mean(g * normed, axis=1, keepdims=True))).astype(dx.dtype)

    _for_heads(x.shape[1], one)


def _call(
    kernel: Callable[..., None],
    turn: Array,
    wide: list[Array],
    scale: list[Array],
    *,
    name: str,
    interpret: bool,
    **options: Any,
) -> Any:
    """Run a kernel over tiles of tokens. The backward one also returns its tiles' shares, [tiles, 1, h].

    The compiler may read the first array where a scan over layers keeps it, without a copy of its slice.
    """
    (N, width), size, back = wide[0].shape, wide[0].dtype.itemsize, len(wide) > 1
    moved = (len(wide) + 1) * size * width + 4 * LANES
    tile = 512
    while tile > 16 and 2 * tile * moved > VMEM:
        tile //= 2
    tile = min(tile, N)
    tiles, one = pl.cdiv(N, tile), pl.BlockSpec((1, LANES), lambda i: (0, 0))
    of_wide = pl.BlockSpec((tile, width), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct(wide[0].shape, wide[0].dtype)
    shares = jax.ShapeDtypeStruct((tiles, 1, LANES), jnp.float32)
    run = pl.pallas_call(
        functools.partial(kernel, **options),
        out_shape=(out, shares) if back else out,
        in_specs=(
            pl.BlockSpec((tile, LANES), lambda i: (i, 0)),
            pl.BlockSpec((None, tile, width), lambda i: (0, i, 0)),
            *[of_wide] * (len(wide) - 1),
            *[one] * len(scale),
        ),
        out_specs=(of_wide, pl.BlockSpec((None, 1, LANES), lambda i: (i, 0, 0))) if back else of_wide,
        grid=(tiles,),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), allow_input_fusion=[i == 1 for i in range(1 + len(wide) + len(scale))]
        ),
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=N * moved, transcendentals=0),
        interpret=interpret,
        name=name,
    )
    return unchecked(run, turn, wide[0][None], *wide[1:], *(s.astype(jnp.float32).reshape(1, LANES) for s in scale))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _turned(x: Array, turn: Array, scale: Array | None, eps: float, interpret: bool) -> Array:
    own = [] if scale is None else [scale]
    return _call(_forward_kernel, turn, [x], own, name="normed_rope", eps=eps, interpret=interpret)


def _forward(x: Array, turn: Array, scale: Array | None, eps: float, interpret: bool) -> tuple[Array, Any]:
    return _turned(x, turn, scale, eps, interpret), (None if scale is None else x, turn, scale)


def _backward(eps: float, interpret: bool, kept: Any, grads: Array) -> tuple[Array, None, Array | None]:
    x, turn, scale = kept
    if scale is None:  # turn back
        back = jnp.concatenate([turn[:, : LANES // 2], -turn[:, LANES // 2 :]], axis=1)
        return _turned(grads, back, None, eps, interpret), None, None
    options: Any = {"name": "normed_rope_backward", "eps": eps, "rows": len(x), "interpret": interpret}
    dx, shares = _call(_backward_kernel, turn, [x, grads], [scale], **options)
    return dx, None, shares.sum(axis=(0, 1)).astype(scale.dtype)


_turned.defvjp(_forward, _backward)


def normed_rope(
    x: Float[Array, "N Hh"],
    turn: Float[Array, "N h"],
    scale: Float[Array, " h"] | None,
    *,
    eps: float,
    interpret: bool = False,
) -> Float[Array, "N Hh"]:
    """Return each head's RMS norm, if there is a scale, rotated by its token's angles. Heads have h = `LANES` columns.

    Args:
      turn: cos | sin of the h / 2 angles, float32. It gets no gradient.
      interpret: on any backend, slowly, for tests.
    """
    return _turned(x, turn, scale, eps, interpret)
