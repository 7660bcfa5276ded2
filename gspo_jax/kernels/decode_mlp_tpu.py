"""The dense SwiGLU of a decode step on TPU, with the norm before it, in one kernel."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from gspo_jax.kernels.decode_tpu import (
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

_COLUMNS = 512
"""Columns of gate and up, and rows of down, per grid step: 6 MiB of bfloat16 weights of width 2048."""


def _kernel(
    layer: Any,
    x: Any,
    scale: Any,
    gate: Stacked,
    up: Stacked,
    down: Stacked,
    out: Any,
    rows: Any,
    total: Any,
    *,
    eps: float,
) -> None:
    del layer
    j, dtype = pl.program_id(1), x.dtype

    @pl.when(j == 0)
    def _() -> None:
        rows[...] = normed(x[...].astype(jnp.float32), scale[...], eps).astype(dtype)
        total[...] = jnp.zeros_like(total)

    raised = jax.nn.silu(product(rows[...], gate)) * product(rows[...], up)
    total[...] += product(raised.astype(dtype), down)

    @pl.when(j == pl.num_programs(1) - 1)
    def _() -> None:
        out[...] = total[...].astype(dtype)


def mlp(
    x: Float[Array, "B D"],
    scale: Float[Array, "L 1 D"],
    gate: Stacked,
    up: Stacked,
    down: Stacked,
    *,
    layer: Int[Array, ""],
    eps: float,
    interpret: bool = False,
) -> Float[Array, "B D"]:
    """Return down(silu(gate norm(x)) · up norm(x)), for matrices [L, D, F] and [L, F, D]."""
    (B, D), F, size = x.shape, gate.weights.shape[-1], x.dtype.itemsize
    fixed = (6 * size + 8) * B * D
    per_column = D * sum(m.block_bytes for m in (gate, up, down)) + 4 * 4 * B
    width = divisor(F, min(_COLUMNS, (vmem_budget() - fixed) // per_column))
    steps = F // width
    split = 2 if cores() == 2 and steps % 2 == 0 else 1

    def across(core: Any, j: Any, layer: Any) -> tuple[Any, Any, Any]:
        return (layer[0],), 0, core * (steps // split) + j

    def along(core: Any, j: Any, layer: Any) -> tuple[Any, Any, Any]:
        return (layer[0],), core * (steps // split) + j, 0

    matrices = (gate, up, down) if interpret else in_place(gate, up, down)
    out = pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(split, steps // split),
            in_specs=[
                pl.BlockSpec((B, D), lambda *_: (0, 0)),
                pl.BlockSpec((None, 1, D), lambda core, j, layer: (layer[0], 0, 0)),
                *(blocks(m, D, width, across) for m in matrices[:2]),
                blocks(matrices[2], width, D, along),
            ],
            out_specs=pl.BlockSpec((None, B, D), lambda core, *_: (core, 0, 0)),
            scratch_shapes=[pltpu.VMEM((B, D), x.dtype), pltpu.VMEM((B, D), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((split, B, D), x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit()
        ),
        cost_estimate=pl.CostEstimate(
            flops=6 * B * D * F,
            bytes_accessed=sum(map(layer_bytes, (gate, up, down))) + size * B * D * (1 + split),
            transcendentals=B * F,
        ),
        name="decode_mlp",
        interpret=interpret,
    )(layer.astype(jnp.int32).reshape(1), x, scale, *matrices)
    return out[0] if split == 1 else out[0] + out[1]
