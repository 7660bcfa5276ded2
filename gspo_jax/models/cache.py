"""The decoder's KV cache: each prompt once, and a ring of each slot's newest tokens."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels.kv import KV, ScaledKV, each, put, take
from gspo_jax.models.int8 import quantize
from gspo_jax.parallel.mesh import constrain

CacheDtype = Literal["int8"]
"""Storage dtypes other than the compute dtype."""

_SEGMENT, _SEGMENTS = 64, 8
"""Minimum columns per segment, and maximum segments. Attention reads whole segments."""


RING_AXES = "layers", None, "batch", "kv_heads", None, None
"""Logical axes of [L, N, B, Kv, C, h]."""


@struct.dataclass
class DecodeSlots:
    """State of the B decode slots."""

    responses: Int[Array, " B"]
    """Response in each slot, in [0, P·G), of prompt number // G. Undefined if idle."""
    ages: Int[Array, " B"]
    """Response tokens fed, including this step's; 0 if idle."""
    aligned: bool = struct.field(pytree_node=False, default=False)
    """True if slot b holds response b, for all P·G."""

    @property
    def active(self) -> Bool[Array, " B"]:
        """True where a slot holds a response."""
        return self.ages > 0


@struct.dataclass
class Cache:
    """Keys and values of all layers: the prompts', and a ring where each step writes one column for all slots.

    Keys are rotated already, so column order does not matter: a slot's live columns are its newest `age` ones. Age 0
    empties a slot.
    """

    prompt_k: KV
    """[L, P, Kv, S, h]."""
    prompt_v: KV
    prompt_lengths: Int[Array, " P"]
    k: KV
    """[L, N, B, Kv, C, h]: N segments of C columns. Entries past the slots are unused."""
    v: KV
    step: Int[Array, ""]
    """Columns written so far. The next is `step` modulo N·C."""
    group_size: int = struct.field(pytree_node=False)
    """G: responses per prompt."""


def segments(length: int) -> tuple[int, int]:
    """Return (N, C), segments and their columns, of a ring for `length` tokens."""
    size = -(-length // _SEGMENTS)
    size = min(length, -(-size // _SEGMENT) * _SEGMENT)
    return -(-length // size), size


def stored(x: Float[Array, "*b h"], dtype: CacheDtype | None) -> KV:
    """Return keys or values as the cache stores them; None: unchanged.

    An int8 scale is the token and head's largest magnitude / 127.
    """
    if dtype is None:
        return x
    values, scale = quantize(x, inputs=-1)
    return ScaledKV(jnp.asarray(values), jnp.asarray(scale)[..., 0])


def empty_ring(prompts: KV, slots: int, length: int) -> KV:
    """Return an empty ring of keys or values of all layers, for each slot's newest `length` tokens."""
    (N, C), (L, _, Kv, _, h) = segments(length), prompts.shape
    shape = L, N, slots, Kv, C, h
    return sharded_ring(each(lambda x: jnp.zeros(shape[: x.ndim + 1], x.dtype), prompts))


def sharded_ring(ring: KV) -> KV:
    """Shard a ring's slots and heads."""
    return each(lambda x: constrain(x, *RING_AXES[: x.ndim]), ring)


def keep_slots(cache: Cache, kept: Int[Array, " b"]) -> Cache:
    """Move these slots to the front. The others' memory stays allocated, unused.

    In place, one layer and segment at a time: a second, smaller cache would take half as much memory again, and a TPU
    would copy the cache to move all segments together.
    """
    L, N, B, Kv, C, h = cache.k.shape

    def move(i: Array | int, rings: tuple[KV, KV]) -> tuple[KV, KV]:
        layer, segment = jnp.divmod(i, N)

        def moved(ring: KV) -> KV:
            at = layer, segment, 0, 0, 0, 0
            own = take(ring, at, (1, 1, B, Kv, C, h))
            return put(ring, each(lambda x: x[:, :, kept], own), at)

        return moved(rings[0]), moved(rings[1])

    k, v = jax.lax.fori_loop(0, L * N, move, (cache.k, cache.v))
    return dataclasses.replace(cache, k=k, v=v)


def heads_first(kept: KV) -> KV:
    """Transpose a forward's keys or values, [L, R, M, Kv, h] to [L, R, Kv, M, h].

    A matmul reads a head's contiguous columns in place.
    """
    axes = "layers", "batch", "kv_heads", None, None
    return each(lambda x: constrain(jnp.swapaxes(x, 2, 3), *axes[: x.ndim]), kept)


def write_column(ring: KV, layer: Array, step: Array, new: Float[Array, "B Kv h"]) -> KV:
    """Write every slot's newest token to this step's column of one layer."""
    N, C = ring.shape[1], ring.shape[4]
    segment, column = jnp.divmod(step % (N * C), C)
    own = stored(new, "int8" if isinstance(ring, ScaledKV) else None)
    return put(ring, each(lambda x: x[None, None, :, :, None], own), (layer, segment, 0, 0, column, 0))


def write_prefix(ring: KV, slot: Array, step: Array, rows: KV, row: Array, start: Array, length: Array) -> KV:
    """Write `length` columns of a row from `start` on as a slot's newest, before this step's.

    `rows` are [R, L, Kv, M, h], M at least a segment's columns. One slice per layer and segment: more would take
    several copies of a slot, and a gather would make a TPU copy the ring in every step.
    """
    L, N, _, Kv, C, h = ring.shape
    M = rows.shape[3]

    def write(i: Array | int, ring: KV) -> KV:
        layer, segment = jnp.divmod(i, N)

        def columns(first: Array) -> KV:
            """Return [1, 1, Kv, C, h], undefined outside the row."""
            near = jnp.clip(first, 0, M - C)

            def shifted(x: Array) -> Array:
                padded = jnp.pad(x, [(C, C) if axis == 3 else (0, 0) for axis in range(x.ndim)])
                return jax.lax.dynamic_slice_in_dim(padded, C + first - near, C, axis=3)

            return each(shifted, take(rows, (row, layer, 0, near, 0), (1, 1, Kv, C, h)))

        # Past the ring's start, columns continue those N·C before.
        first = (segment * C - step + length) % (N * C)
        again = first + jnp.arange(C) >= N * C
        before, here = columns(start + first - N * C), columns(start + first)
        own = each(lambda a, b: jnp.where(again.reshape(-1, *(1,) * (a.ndim - 4)), a, b)[:, :, None], before, here)
        return put(ring, own, (layer, segment, slot, 0, 0, 0))

    return jax.lax.fori_loop(0, L * N, write, ring)
