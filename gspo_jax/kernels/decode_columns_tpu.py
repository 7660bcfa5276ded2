"""Attention's matrices of a decode step on TPU where each chip holds a part of their columns (`parallel/spread.py`).

Every chip multiplies all chips' rows by its columns (`columns`); what an all-to-all returns to a row's own chip, heads
in parts, becomes heads there (`heads_of_parts`).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from gspo_jax.kernels.decode_qkv_tpu import HeadNorms, turned
from gspo_jax.kernels.decode_tpu import Stacked, blocks, in_place, layer_bytes, normed, product, vmem_limit


def _columns_kernel(
    layer: Any, x: Any, before: tuple[Any, Any] | None, matrices: Sequence[Stacked], out: Any, *, eps: float
) -> None:
    del layer
    rows = x[...]
    if before is not None:
        y, scale = before
        rows = (rows.astype(jnp.float32) + y[...].astype(jnp.float32)).astype(out.dtype)
        rows = normed(rows.astype(jnp.float32), scale[...], eps).astype(out.dtype)
    found = [product(rows, matrix).astype(out.dtype) for matrix in matrices]
    out[...] = found[0] if len(found) == 1 else jnp.concatenate(found, axis=1)


def columns(
    x: Float[Array, "N n"],
    before: tuple[Float[Array, "N n"], Float[Array, "L 1 n"]] | None,
    matrices: Sequence[Stacked],
    *,
    layer: Int[Array, ""],
    eps: float,
    interpret: bool = False,
) -> Float[Array, "N m"]:
    """Return x, or norm(x + y), times each matrix [L, n, _], side by side, in x's dtype.

    Args:
      before: y, and the scale of the norm.
    """
    (N, n), widths = x.shape, [m.weights.shape[-1] for m in matrices]
    matrices = matrices if interpret else in_place(*matrices)
    whole = pl.BlockSpec((N, n), lambda *_: (0, 0))
    norm = None if before is None else (whole, pl.BlockSpec((None, 1, n), lambda _, layer: (layer[0], 0, 0)))
    return pl.pallas_call(
        functools.partial(_columns_kernel, eps=eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[
                whole,
                norm,
                [blocks(m, n, w, lambda _, layer: ((layer[0],), 0, 0)) for m, w in zip(matrices, widths, strict=True)],
            ],
            out_specs=pl.BlockSpec((N, sum(widths)), lambda *_: (0, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((N, sum(widths)), x.dtype),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit()),
        cost_estimate=pl.CostEstimate(
            flops=2 * N * n * sum(widths),
            bytes_accessed=sum(map(layer_bytes, matrices)) + x.dtype.itemsize * N * (2 * n + sum(widths)),
            transcendentals=0,
        ),
        name="decode_columns",
        interpret=interpret,
    )(layer.astype(jnp.int32).reshape(1), x, before, list(matrices))


def _heads_kernel(
    layer: Any,
    parts: Any,
    cos: Any,
    sin: Any,
    norms: tuple[Any, ...],
    out: Any,
    *,
    widths: tuple[int, ...],
    head_norms: HeadNorms,
    eps: float,
) -> None:
    del layer
    first, done, h, dtype = 0, 0, out.shape[2], parts.dtype
    for kind, width in enumerate(widths):
        z = [parts[e, :, first : first + width].astype(jnp.float32) for e in range(parts.shape[0])]
        z = jnp.concatenate(z, axis=1)
        if kind < 2:
            if head_norms == "projection":
                z = normed(z, norms[kind][...], eps).astype(dtype).astype(jnp.float32)
            scale = norms[kind] if head_norms == "head" else None
            z = turned(z, scale, cos, sin, eps, dtype).astype(dtype).astype(jnp.float32)
        for i in range(z.shape[1] // h):
            out[done + i] = z[:, i * h : (i + 1) * h]
        first, done = first + width, done + z.shape[1] // h


def heads_of_parts(
    parts: Float[Array, "E B m"],
    widths: tuple[int, int, int],
    turn: tuple[Float[Array, "B h"], Float[Array, "B h"]],
    norms: tuple[Float[Array, "L 1 _"], ...],
    *,
    layer: Int[Array, ""],
    head_norms: HeadNorms,
    eps: float,
    interpret: bool = False,
) -> Float[Array, "J B h"]:
    """Return `decode_qkv_tpu.heads` from E chips' columns of q, k and v, `widths` of each."""
    (E, B, m), h = parts.shape, turn[0].shape[1]
    count = E * m // h
    angles = pl.BlockSpec((B, h), lambda *_: (0, 0))
    scales = tuple(pl.BlockSpec((None, 1, n.shape[2]), lambda _, layer: (layer[0], 0, 0)) for n in norms)
    return pl.pallas_call(
        functools.partial(_heads_kernel, widths=widths, head_norms=head_norms, eps=eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[pl.BlockSpec((E, B, m), lambda *_: (0, 0, 0)), angles, angles, scales],
            out_specs=pl.BlockSpec((count, B, h), lambda *_: (0, 0, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((count, B, h), jnp.float32),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit()),
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=parts.nbytes + 4 * count * B * h, transcendentals=0),
        name="decode_heads",
        interpret=interpret,
    )(layer.astype(jnp.int32).reshape(1), parts, *turn, norms)
