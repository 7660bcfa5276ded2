"""Queries, keys and values of a decode step on TPU: one kernel from the residual stream to rotated heads."""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from gspo_jax.kernels.decode_tpu import (
    LANES,
    Stacked,
    blocks,
    cores,
    divisor,
    in_place,
    layer_bytes,
    normed,
    product,
    vmem_budget,
    vmem_limit,
)
from gspo_jax.kernels.rotary import Rotation

HeadNorms = Literal["none", "head", "projection"]
"""RMS norm of queries and keys: none, of each head, or of all heads of a token together."""

_COLUMNS = 512
"""Columns per grid step: 2 MiB of bfloat16 weights of width 2048."""


def turned(z: Float[Array, "B m"], scale: Any, cos: Any, sin: Any, eps: float, dtype: Any) -> Float[Array, "B m"]:
    """Return heads side by side, normed if there is a scale [1, h], and rotated; in float32, in a kernel."""
    h = cos.shape[1]
    count, half = z.shape[1] // h, h // 2
    lane = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)

    def repeated(one: Any) -> Array:
        return one[...] if count == 1 else jnp.concatenate([one[...]] * count, axis=1)

    if scale is not None:
        mean = jnp.zeros_like(z)
        for i in range(count):
            inside = lane // h == i
            mean = jnp.where(inside, jnp.sum(jnp.where(inside, z * z, 0.0), axis=1, keepdims=True), mean)
        z = (z * jax.lax.rsqrt(mean / h + eps) * repeated(scale)).astype(dtype).astype(jnp.float32)
    ahead, behind = pltpu.roll(z, z.shape[1] - half, 1), pltpu.roll(z, half, 1)
    return z * repeated(cos) + jnp.where(lane % h < half, ahead, behind) * repeated(sin)


def _kernel(
    layer: Any,
    x: Any,
    y: Any,
    scale: Any,
    cos: Any,
    sin: Any,
    norms: tuple[Any, ...],
    q: Stacked,
    k: Stacked,
    v: Stacked,
    out: Any,
    rows: Any,
    squares: Any,
    *,
    head_norms: HeadNorms,
    eps: float,
    head_dim: int,
    steps: tuple[int, int],
) -> None:
    del layer
    own, (queries, keys) = pl.program_id(1), steps
    j = pl.program_id(0) * pl.num_programs(1) + own
    dtype, heads = x.dtype, q.weights.shape[1] // head_dim
    base = j * heads if head_norms == "projection" else 0

    @pl.when(own == 0)
    def _() -> None:
        stream = (x[...].astype(jnp.float32) + y[...].astype(jnp.float32)).astype(dtype)
        rows[...] = normed(stream.astype(jnp.float32), scale[...], eps).astype(dtype)
        squares[...] = jnp.zeros_like(squares)

    def projected(matrix: Stacked) -> Array:
        return product(rows[...], matrix).astype(dtype).astype(jnp.float32)

    def write(z: Array) -> None:
        for i in range(heads):
            out[base + i] = z[:, i * head_dim : (i + 1) * head_dim]

    def rotated(z: Array, kind: int) -> None:
        if head_norms == "projection":
            squares[kind] += jnp.sum(z * z, axis=1, keepdims=True)
            z = z * norms[kind][...]
        z = turned(z, norms[kind] if head_norms == "head" else None, cos, sin, eps, dtype)
        write(z if head_norms == "projection" else z.astype(dtype).astype(jnp.float32))

    pl.when(j < queries)(lambda: rotated(projected(q), 0))
    pl.when((j >= queries) & (j < queries + keys))(lambda: rotated(projected(k), 1))
    pl.when(j >= queries + keys)(lambda: write(projected(v)))

    if head_norms == "projection":

        @pl.when(j == queries + 2 * keys - 1)
        def _() -> None:  # the rotation is linear: a token's factor comes last
            for kind, begin, end in ((0, 0, queries * heads), (1, queries * heads, (queries + keys) * heads)):
                factor = jax.lax.rsqrt(squares[kind] / ((end - begin) * head_dim) + eps)
                out[begin:end] = (out[begin:end] * factor[None]).astype(dtype).astype(jnp.float32)


def rotation(
    positions: Int[Array, " B"], frequencies: Float[Array, " half"], amplitude: float = 1.0
) -> tuple[Float[Array, "B h"], Float[Array, "B h"]]:
    """Return the cosines and signed sines by which each half of a head is turned; see `rotary.rope`."""
    cos, sin = (x[:, 0, 0] for x in Rotation.of(positions[:, None], frequencies, amplitude))
    return jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1)


def heads(
    x: Float[Array, "B D"],
    y: Float[Array, "B D"],
    scale: Float[Array, "L 1 D"],
    q: Stacked,
    k: Stacked,
    v: Stacked,
    turn: tuple[Float[Array, "B h"], Float[Array, "B h"]],
    norms: tuple[Float[Array, "L 1 _"], ...],
    *,
    layer: Int[Array, ""],
    head_norms: HeadNorms,
    eps: float,
    interpret: bool = False,
) -> Float[Array, "J B h"]:
    """Return the heads of q, k and v of norm(x + y), one after another, q and k normed and rotated.

    In float32, rounded to x's dtype; a kernel can then read any token's row.

    Args:
      scale: of the norm.
      q, k, v: [L, D, n] with whole heads side by side.
      turn: as of `rotation`.
      norms: scales of the norms of q and k, of a head or of all columns; empty if there are none.
    """
    (B, D), head_dim, size = x.shape, turn[0].shape[1], x.dtype.itemsize
    widths = [m.weights.shape[-1] for m in (q, k, v)]
    common, unit = math.gcd(*widths), math.lcm(head_dim, LANES)
    whole = head_norms == "projection"
    fixed = 4 * size * B * D + (4 + size) * B * D + (8 * sum(widths) * B if whole else 0)
    per_column = sum(m.block_bytes for m in (q, k, v)) * D + 4 * 12 * B
    most = min((vmem_budget() - fixed) // per_column, _COLUMNS)
    columns = divisor(common, most, unit if common % unit == 0 else head_dim)
    steps, count = [w // columns for w in widths], sum(widths) // columns
    split = 1 if whole or count % 2 or cores() == 1 else 2
    begins = [0, steps[0], steps[0] + steps[1]]

    def at(which: int, *given: Any) -> tuple[Any, Any, Any]:
        core, own, layer = given
        j = core * (count // split) + own
        return (layer[0],), 0, jnp.clip(j - begins[which], 0, steps[which] - 1)

    def scales(which: int) -> pl.BlockSpec:
        if head_norms == "head":
            return pl.BlockSpec((None, 1, head_dim), lambda *given: (given[2][0], 0, 0))
        return pl.BlockSpec((None, 1, columns), lambda *given: (given[2][0], 0, at(which, *given)[2]))

    def result(*given: Any) -> tuple[Any, ...]:
        return (0, 0, 0) if whole else (given[0] * (count // split) + given[1], 0, 0)

    total, per_step = sum(widths) // head_dim, columns // head_dim
    everywhere = pl.BlockSpec((B, D), lambda *_: (0, 0))
    angles = pl.BlockSpec((B, head_dim), lambda *_: (0, 0))
    matrices = (q, k, v) if interpret else in_place(q, k, v)
    return pl.pallas_call(
        functools.partial(_kernel, head_norms=head_norms, eps=eps, head_dim=head_dim, steps=(steps[0], steps[1])),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(split, count // split),
            in_specs=[
                everywhere,
                everywhere,
                pl.BlockSpec((None, 1, D), lambda *given: (given[2][0], 0, 0)),
                angles,
                angles,
                tuple(scales(which) for which in range(len(norms))),
                *(blocks(m, D, columns, functools.partial(at, i)) for i, m in enumerate(matrices)),
            ],
            out_specs=pl.BlockSpec((total if whole else per_step, B, head_dim), result),
            scratch_shapes=[pltpu.VMEM((B, D), x.dtype), pltpu.VMEM((2, B, 1), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((total, B, head_dim), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit()
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * B * D * sum(widths),
            bytes_accessed=sum(map(layer_bytes, (q, k, v))) + B * (2 * size * D + 4 * sum(widths)),
            transcendentals=0,
        ),
        name="decode_qkv",
        interpret=interpret,
    )(layer.astype(jnp.int32).reshape(1), x, y, scale, *turn, norms, *matrices)
