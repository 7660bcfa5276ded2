"""The decoder's KV cache: each prompt once, and a ring buffer with the newest tokens of each slot."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels.kv import KV, ScaledKV, each, put, take
from gspo_jax.models.int8 import quantize
from gspo_jax.parallel.mesh import constrain

CacheDtype = Literal["int8"]
CACHE_DTYPES: tuple[CacheDtype, ...] = get_args(CacheDtype)
"""What keys and values may be stored in, other than the dtype that they are computed in."""

_SEGMENT, _SEGMENTS = 64, 8
"""Minimum columns of a segment, and maximum segments of a ring: attention reads whole segments, one at a time."""


RING_AXES = "layers", None, "batch", "kv_heads", None, None
"""Logical axes of a ring, [L, N, B, Kv, C, h]."""


@struct.dataclass
class Slots:
    """State of the B decode slots, each of which decodes one response at a time."""

    responses: Int[Array, " B"]
    """Response in each slot, in [0, P·G); its prompt is that number // G. Undefined in an idle slot."""
    ages: Int[Array, " B"]
    """Tokens of its response that a slot has fed, this step's included; 0 if idle."""
    aligned: bool = struct.field(pytree_node=False, default=False)
    """True if slot b holds response b, for all P·G responses."""

    @property
    def active(self) -> Bool[Array, " B"]:
        """True for slots that hold a response."""
        return self.ages > 0


@struct.dataclass
class Cache:
    """Keys and values of all layers: the prompts', and a ring of columns; each step all slots write one column.

    Keys are rotated already, so the order of columns does not matter: a slot's live columns are its newest `age` ones,
    wherever the ring has got to. Setting its age to 0 empties a slot.
    """

    prompt_k: KV
    """[L, P, Kv, S, h]."""
    prompt_v: KV
    prompt_lengths: Int[Array, " P"]
    """Filled columns of each prompt."""
    k: KV
    """[L, N, B, Kv, C, h]: N segments of C columns; slot b is entry b, and entries past the slots are unused."""
    v: KV
    step: Int[Array, ""]
    """Columns written so far; the next one is `step` modulo N·C."""
    group_size: int = struct.field(pytree_node=False)
    """G: responses per prompt."""


def segments(length: int) -> tuple[int, int]:
    """Return (N, C): segments and their columns, of a ring for `length` tokens."""
    size = -(-length // _SEGMENTS)
    size = min(length, -(-size // _SEGMENT) * _SEGMENT)
    return -(-length // size), size


def stored(x: Float[Array, "*b h"], dtype: CacheDtype | None) -> KV:
    """Keys or values as the cache stores them: unchanged for None.

    In int8, the scale of a token and head is its largest magnitude / 127.
    """
    if dtype is None:
        return x
    values, scale = quantize(x, inputs=-1)
    return ScaledKV(jnp.asarray(values), jnp.asarray(scale)[..., 0])


def empty_ring(prompts: KV, slots: int, length: int) -> KV:
    """Return an empty ring for the newest `length` tokens of each slot, keys or values of all layers.

    It has layers, heads and dtype of the prompts' [L, P, Kv, S, h].
    """
    (N, C), (L, _, Kv, _, h) = segments(length), prompts.shape
    shape = L, N, slots, Kv, C, h
    return sharded_ring(each(lambda x: jnp.zeros(shape[: x.ndim + 1], x.dtype), prompts))


def sharded_ring(ring: KV) -> KV:
    """The ring with its slots and heads sharded."""
    return each(lambda x: constrain(x, *RING_AXES[: x.ndim]), ring)


def keep_slots(cache: Cache, kept: Int[Array, " b"]) -> Cache:
    """Move these slots to the front; the memory of the others stays allocated, unused.

    Works in place, one layer and segment at a time: a smaller cache beside the old one would take half as much memory
    again, and moving all segments together would change the cache's layout in memory, for which a TPU copies it.
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

    A head's columns are contiguous then: a matmul reads them in place.
    """
    axes = "layers", "batch", "kv_heads", None, None
    return each(lambda x: constrain(jnp.swapaxes(x, 2, 3), *axes[: x.ndim]), kept)


def write_column(ring: KV, layer: Array, step: Array, new: Float[Array, "B Kv h"]) -> KV:
    """Return the ring with every slot's newest token written to one layer's column of this step."""
    N, C = ring.shape[1], ring.shape[4]
    segment, column = jnp.divmod(step % (N * C), C)
    own = stored(new, "int8" if isinstance(ring, ScaledKV) else None)
    return put(ring, each(lambda x: x[None, None, :, :, None], own), (layer, segment, 0, 0, column, 0))


def write_prefix(ring: KV, slot: Array, step: Array, rows: KV, row: Array, start: Array, length: Array) -> KV:
    """Return the ring with `length` columns of a row from `start` on as a slot's newest, before those of this step.

    `rows` are [R, L, Kv, M, h], of at least as many columns as a segment.
    One layer and segment at a time, and by slices: more at a time would be several copies of a slot, and a gather would
    make a TPU change the layout of the ring, and so copy it, in every step.
    """
    L, N, _, Kv, C, h = ring.shape
    M = rows.shape[3]

    def write(i: Array | int, ring: KV) -> KV:
        layer, segment = jnp.divmod(i, N)

        def columns(first: Array) -> KV:
            """C columns from `first` on, [1, 1, Kv, C, h], undefined outside the row."""
            near = jnp.clip(first, 0, M - C)

            def shifted(x: Array) -> Array:
                padded = jnp.pad(x, [(C, C) if axis == 3 else (0, 0) for axis in range(x.ndim)])
                return jax.lax.dynamic_slice_in_dim(padded, C + first - near, C, axis=3)

            return each(shifted, take(rows, (row, layer, 0, near, 0), (1, 1, Kv, C, h)))

        # Where the ring begins again, its columns go on with those N·C before.
        first = (segment * C - step + length) % (N * C)
        again = first + jnp.arange(C) >= N * C
        before, here = columns(start + first - N * C), columns(start + first)
        own = each(lambda a, b: jnp.where(again.reshape(-1, *(1,) * (a.ndim - 4)), a, b)[:, :, None], before, here)
        return put(ring, own, (layer, segment, slot, 0, 0, 0))

    return jax.lax.fori_loop(0, L * N, write, ring)
