"""Index arithmetic of an exchange of (token, expert) pairs on TPU: two kernels in place of some fifty small operations.

Counts and places are sums of masks, computed as products with triangles of ones, exact in float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from gspo_jax.kernels.backend import unchecked
from gspo_jax.kernels.visits_tpu import LANES

_TILE = 512
"""Most tokens whose places are computed together."""


def _exact(x: Array, y: Array) -> Array:
    return jax.lax.dot(x, y, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _ones(shape: tuple[int, int], where: Any) -> Array:
    """Return float32 ones where `where(row, column)`."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return where(row, column).astype(jnp.float32)


def _places_kernel(ids: Any, places: Any, spare: Any, blocks: Any, *, experts: int, block: int, none: int) -> None:
    (k, N), E = ids.shape, blocks.shape[1]
    tile = next(t for t in (_TILE, 256, LANES) if N % t == 0)

    def chosen(t: Any, i: int) -> tuple[Array, Array]:
        one = ids[pl.ds(i, 1), pl.ds(pl.multiple_of(t * tile, tile), tile)]
        one = jnp.where(one < experts, one, -1)
        return one, jax.lax.broadcasted_iota(jnp.int32, (E, tile), 0) == one

    def members(t: Any) -> Array:
        total = jnp.zeros((E, tile), jnp.float32)
        for i in range(k):
            total += chosen(t, i)[1].astype(jnp.float32)
        return total

    def counted(t: Any, counts: Array) -> Array:
        return counts + members(t).sum(axis=1, keepdims=True)

    counts = jax.lax.fori_loop(0, N // tile, counted, jnp.zeros((E, 1), jnp.float32))
    filled = jnp.broadcast_to((counts + (block - 1)).astype(jnp.int32) // block, (E, LANES))
    starts = block * _exact(_ones((E, E), lambda row, column: column < row), filled.astype(jnp.float32))

    def place(t: Any, seen: Array) -> Array:
        member = members(t)
        before = _ones((tile, tile), lambda row, column: row < column).astype(jnp.bfloat16)
        own = jnp.dot(member.astype(jnp.bfloat16), before, preferred_element_type=jnp.float32) + seen
        for i in range(k):
            one, hit = chosen(t, i)
            at = jnp.where(hit, own, 0.0).sum(axis=0, keepdims=True).astype(jnp.int32)
            there = pl.ds(i, 1), pl.ds(pl.multiple_of(t * tile, tile), tile)
            places[there] = jnp.where(one >= 0, at, none)
        return seen + member.sum(axis=1, keepdims=True)

    jax.lax.fori_loop(0, N // tile, place, starts[:, :1])
    # As rows, along lanes.
    counts, filled, starts = (
        jnp.broadcast_to(x[:, :1].astype(jnp.float32), (E, LANES)).T[:1] for x in (counts, filled, starts)
    )
    blocks[...] = filled.astype(jnp.int32)
    at = counts.astype(jnp.int32) + jax.lax.broadcasted_iota(jnp.int32, spare.shape, 0)
    ends = block * filled.astype(jnp.int32)
    spare[...] = jnp.where(at < ends, starts.astype(jnp.int32) + at, none)


def places(
    ids: Int[Array, "K N"], experts: int, *, block: int, none: int, interpret: bool = False
) -> tuple[Int[Array, "K N"], Int[Array, "b M"], Int[Array, " E"]]:
    """Compute `pairs.places`, for a multiple of `LANES` tokens.

    M is `experts` in whole lanes: the others have no pair.
    """
    E = LANES * pl.cdiv(experts, LANES)
    whole = pl.BlockSpec(memory_space=pltpu.VMEM)
    run = pl.pallas_call(
        functools.partial(_places_kernel, experts=experts, block=block, none=none),
        out_shape=(
            jax.ShapeDtypeStruct(ids.shape, jnp.int32),
            jax.ShapeDtypeStruct((block, E), jnp.int32),
            jax.ShapeDtypeStruct((1, E), jnp.int32),
        ),
        in_specs=(whole,),
        out_specs=(whole,) * 3,
        cost_estimate=pl.CostEstimate(
            flops=2 * E * min(_TILE, ids.shape[1]) * ids.shape[1],
            bytes_accessed=8 * ids.size + 4 * E * (block + 1),
            transcendentals=0,
        ),
        interpret=interpret,
        name="pair_places",
    )
    found, spare, blocks = unchecked(run, ids)
    return found, spare, blocks[0, :experts]


def _moves_kernel(where: Any, counts: Any, *outs: Any, held: int, room: int) -> None:
    me, first = where[0], where[1].astype(jnp.float32)
    S, E = counts.shape
    count = counts[...].astype(jnp.float32)
    square, before = (E, E), _ones((E, E), lambda row, column: row < column)
    leaves = _exact(count, before)
    among = before * _ones(square, lambda row, column: row // held == column // held)
    lands = _exact(jnp.broadcast_to(count.sum(axis=0, keepdims=True), (8, E)), among)[:1]
    lands = lands + _exact(_ones((S, S), lambda row, column: column < row), count)
    begin, end = (jnp.clip(x - first, 0.0, float(room)) for x in (lands, lands + count))
    size, leaves = end - begin, leaves + jnp.clip(first - lands, 0.0, count)
    mine = _ones((S, E), lambda row, column: row == me)
    column_of = _ones(square, lambda row, column: row == me * held + column % held)
    own = _ones((S, E), lambda row, column: row == column // held)

    def here(x: Array) -> Array:
        """Return x[from, me, e] of all senders and their experts e here, side by side."""
        return (_exact(x, column_of) * own).sum(axis=0, keepdims=True)

    arriving = (_exact(size, column_of)).sum(axis=0, keepdims=True)
    found = [(x * mine).sum(axis=0, keepdims=True) for x in (leaves, size, begin)]
    for out, x in zip(outs, (*found, here(size), here(begin), here(leaves), arriving), strict=True):
        out[...] = x.astype(jnp.int32)


def moves(
    counts: Int[Array, "S E"], me: Int[Array, ""], first: Int[Array, ""] | int, *, room: int, interpret: bool = False
) -> tuple[tuple[Int[Array, " E"], ...], tuple[Int[Array, " E"], ...], Int[Array, " h"]]:
    """Compute `pairs.moves`."""
    S, E = counts.shape
    scalars, whole = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.VMEM)
    run = pl.pallas_call(
        functools.partial(_moves_kernel, held=E // S, room=room),
        out_shape=(jax.ShapeDtypeStruct((1, E), jnp.int32),) * 7,
        in_specs=(scalars, whole),
        out_specs=(whole,) * 7,
        cost_estimate=pl.CostEstimate(flops=12 * S * E * E, bytes_accessed=4 * (S + 7) * E, transcendentals=0),
        interpret=interpret,
        name="pair_moves",
    )
    where = jnp.stack([me.astype(jnp.int32), jnp.asarray(first, jnp.int32)])
    leaves, size, lands, received, landed, left, arriving = (x[0] for x in unchecked(run, where, counts))
    return (leaves, size, lands, received), (landed, received, left, size), arriving[: E // S]
