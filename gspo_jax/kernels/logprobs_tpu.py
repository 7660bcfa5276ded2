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


def _kernel(hidden: Any, head: Any, targets: Any, *others: Any, temperature: float, columns: int) -> None:
    """Add a block of columns to the sums, which are rescaled when the maximum grows."""
    j, width = pl.program_id(1), head.shape[1]
    *places, out, top, z, weighted, picked = others
    sums = top, z, weighted, picked

    @pl.when(j == 0)
    def _() -> None:
        top[...] = jnp.full_like(top, _MASKED)
        for total in (z, weighted, picked, *places[1:]):
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
    if places:
        _pick(logits, *places, first=j * width)

    @pl.when(j == pl.num_programs(1) - 1)
    def _() -> None:
        lane = jax.lax.broadcasted_iota(jnp.int32, out.shape, 1)
        found = jnp.zeros(out.shape, jnp.float32)
        for n, total in enumerate(sums):
            found = jnp.where(lane == n, total[...], found)
        out[...] = found


def _pick(logits: Any, ids: Any, picked: Any, *, first: Any) -> None:
    """Write the logits of ids in a block of columns from `first` on: each group of 128 columns is looked up in once."""
    for column in range(0, logits.shape[1], LANES):
        part = logits[:, column : column + LANES]
        for lane in range(0, ids.shape[1], LANES):
            there = slice(None), slice(lane, lane + LANES)
            own = ids[there] - (first + column)
            found = jnp.take_along_axis(part, jnp.clip(own, 0, LANES - 1), axis=1)
            picked[there] = jnp.where((own >= 0) & (own < LANES), found, picked[there])


def _blocks(inner: int, size: int, lanes: int) -> tuple[int, int]:
    """Return the rows and columns of a block: most rows first, as weights are read once for each block of rows.

    `lanes`: of a row's ids.
    """

    def fits(tile: int, width: int) -> bool:  # double buffers, columns on lanes, and logits with what is made of them
        return 2 * size * inner * (tile + width) + (32 * LANES + 16 * lanes) * tile + 16 * tile * width <= VMEM

    lengths = (512, 256, LANES)
    return next(((t, w) for t in lengths for w in lengths if w >= min(t, 256) and fits(t, w)), (LANES, LANES))


def softmax_sums(
    hidden: Float[Array, "N D"],
    head: Float[Array, "D V"],
    targets: Int[Array, " N"],
    ids: Int[Array, "N K"] | None = None,
    *,
    temperature: float,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Return max l, Σ exp(l − max), Σ exp(l − max) (l − max) and l[target] of the logits l = h W / temperature.

    With `ids` also l[ids], [N, K]. Both are 0 where a target or id is not in [0, V). All float32.
    """
    (N, D), V, size = hidden.shape, head.shape[1], hidden.dtype.itemsize
    lanes = 0 if ids is None else pl.cdiv(ids.shape[1], LANES) * LANES
    tile, width = _blocks(D, size, lanes)
    tile = min(tile, N)
    tiles = pl.cdiv(N, tile)

    def rows(columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((tile, columns), lambda i, j: (i, 0))

    def known(x: Array) -> Array:
        return jnp.where((x >= 0) & (x < V), x, -1).astype(jnp.int32)

    widths = [LANES] if ids is None else [lanes, LANES]
    run = pl.pallas_call(
        functools.partial(_kernel, temperature=temperature, columns=V),
        out_shape=[jax.ShapeDtypeStruct((N, columns), jnp.float32) for columns in widths],
        grid=(tiles, pl.cdiv(V, width)),
        in_specs=(
            rows(D),
            pl.BlockSpec((D, width), lambda i, j: (0, j)),
            rows(1),
            *([] if ids is None else [rows(lanes)]),
        ),
        out_specs=[rows(columns) for columns in widths],
        scratch_shapes=(pltpu.VMEM((tile, 1), jnp.float32),) * 4,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * N * D * V,
            bytes_accessed=size * (N * D + tiles * D * V) + 4 * N * (LANES + 2 * lanes),
            transcendentals=N * V,
        ),
        interpret=interpret,
        name="softmax_sums",
    )
    looked_up = [] if ids is None else [jnp.pad(known(ids), ((0, 0), (0, lanes - ids.shape[1])), constant_values=-1)]
    *picked, found = unchecked(run, hidden, head, known(targets)[:, None], *looked_up)
    sums = found[:, 0], found[:, 1], found[:, 2], found[:, 3]
    return sums if ids is None else (*sums, picked[0][:, : ids.shape[1]])
