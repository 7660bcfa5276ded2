"""Sums of softmaxes over a vocabulary on TPU: a Pallas kernel whose logits never leave VMEM."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from gspo_jax.kernels.backend import unchecked
from gspo_jax.kernels.visits_tpu import LANES, VMEM

_MASKED = -1e30
"""Logit of a column beyond the vocabulary, and the first maximum. Finite, so that differences are too."""


def _kernel(hidden: Any, head: Any, targets: Any, out: Any, *sums: Any, temperature: float, columns: int) -> None:
    """Add a block of columns to the sums, which are rescaled when the maximum grows."""
    j, width = pl.program_id(1), head.shape[1]
    top, z, weighted, picked = sums

    @pl.when(j == 0)
    def _() -> None:
        top[...] = jnp.full_like(top, _MASKED)
        for total in (z, weighted, picked):
            total[...] = jnp.zeros_like(total)

    logits = jnp.dot(hidden[...], head[...], preferred_element_type=jnp.float32) / temperature
    column = j * width + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    if columns % width:
        logits = jnp.where(column < columns, logits, _MASKED)
    before = top[...]
    now = jnp.maximum(before, logits.max(axis=1, keepdims=True))
    shifted, down = logits - now, before - now
    parts, share = jnp.exp(shifted), jnp.exp(down)
    weighted[...] = share * (weighted[...] + down * z[...]) + (parts * shifted).sum(axis=1, keepdims=True)
    z[...] = share * z[...] + parts.sum(axis=1, keepdims=True)
    picked[...] += jnp.where(column == targets[...], logits, 0).sum(axis=1, keepdims=True)
    top[...] = now

    @pl.when(j == pl.num_programs(1) - 1)
    def _() -> None:
        lane = jax.lax.broadcasted_iota(jnp.int32, out.shape, 1)
        found = jnp.zeros(out.shape, jnp.float32)
        for n, total in enumerate(sums):
            found = jnp.where(lane == n, total[...], found)
        out[...] = found


def _blocks(inner: int, size: int) -> tuple[int, int]:
    """Return the rows and columns of a block: most rows first, as weights are read once for each block of rows."""

    def fits(tile: int, width: int) -> bool:  # double buffers, columns on lanes, and logits with what is made of them
        return 2 * size * inner * (tile + width) + 32 * LANES * tile + 16 * tile * width <= VMEM

    lengths = (512, 256, LANES)
    return next(((t, w) for t in lengths for w in lengths if w >= min(t, 256) and fits(t, w)), (LANES, LANES))


def softmax_sums(
    hidden: Float[Array, "N D"],
    head: Float[Array, "D V"],
    targets: Int[Array, " N"],
    *,
    temperature: float,
    interpret: bool = False,
) -> tuple[Float[Array, " N"], Float[Array, " N"], Float[Array, " N"], Float[Array, " N"]]:
    """Return max l, Σ exp(l − max), Σ exp(l − max) (l − max) and l[target] of the logits l = h W / temperature.

    The last is 0 where the target is not in [0, V). All float32.
    """
    (N, D), V, size = hidden.shape, head.shape[1], hidden.dtype.itemsize
    tile, width = _blocks(D, size)
    tile, inside = min(tile, N), (targets >= 0) & (targets < V)
    tiles = pl.cdiv(N, tile)
    run = pl.pallas_call(
        functools.partial(_kernel, temperature=temperature, columns=V),
        out_shape=jax.ShapeDtypeStruct((N, LANES), jnp.float32),
        grid=(tiles, pl.cdiv(V, width)),
        in_specs=(
            pl.BlockSpec((tile, D), lambda i, j: (i, 0)),
            pl.BlockSpec((D, width), lambda i, j: (0, j)),
            pl.BlockSpec((tile, 1), lambda i, j: (i, 0)),
        ),
        out_specs=pl.BlockSpec((tile, LANES), lambda i, j: (i, 0)),
        scratch_shapes=(pltpu.VMEM((tile, 1), jnp.float32),) * 4,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * N * D * V, bytes_accessed=size * (N * D + tiles * D * V) + 4 * N * LANES, transcendentals=N * V
        ),
        interpret=interpret,
        name="softmax_sums",
    )
    found = unchecked(run, hidden, head, jnp.where(inside, targets, -1).astype(jnp.int32)[:, None])
    return found[:, 0], found[:, 1], found[:, 2], found[:, 3]
