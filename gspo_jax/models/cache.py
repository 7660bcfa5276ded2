"""The decoder's KV cache: each prompt once, and a ring buffer with the newest tokens of each slot."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.models.config import ModelConfig
from gspo_jax.parallel.mesh import constrain

_SEGMENT, _SEGMENTS = 64, 8
"""Minimum columns of a segment, and maximum segments of a ring: attention reads whole segments, one at a time."""


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

    prompt_k: Float[Array, "L P Kv S h"]
    prompt_v: Float[Array, "L P Kv S h"]
    prompt_lengths: Int[Array, " P"]
    """Filled columns of each prompt."""
    k: Float[Array, "L N B Kv C h"]
    """N segments of C columns; slot b is entry b, and entries past the slots are unused."""
    v: Float[Array, "L N B Kv C h"]
    step: Int[Array, ""]
    """Columns written so far; the next one is `step` modulo N·C."""
    group_size: int = struct.field(pytree_node=False)
    """G: responses per prompt."""


def segments(length: int) -> tuple[int, int]:
    """Return (N, C): segments and their columns, of a ring for `length` tokens."""
    size = -(-length // _SEGMENTS)
    size = min(length, -(-size // _SEGMENT) * _SEGMENT)
    return -(-length // size), size


def empty_ring(config: ModelConfig, slots: int, length: int, dtype: DTypeLike) -> Float[Array, "L N B Kv C h"]:
    """Return an empty ring for the newest `length` tokens of each slot, keys or values of all layers."""
    N, C = segments(length)
    ring = jnp.zeros((config.num_layers, N, slots, config.num_kv_heads, C, config.head_dim), dtype)
    return constrain(ring, "layers", None, "batch", "kv_heads", None, None)


def keep_slots(cache: Cache, kept: Int[Array, " b"]) -> Cache:
    """Move these slots to the front; the memory of the others stays allocated, unused.

    Works in place, one layer and segment at a time: a smaller cache beside the old one would take half as much memory
    again, and moving all segments together would change the cache's layout in memory, for which a TPU copies it.
    """
    L, N, B, Kv, C, h = cache.k.shape

    def move(i: Array | int, rings: tuple[Array, Array]) -> tuple[Array, Array]:
        layer, segment = jnp.divmod(i, N)

        def moved(ring: Array) -> Array:
            own = jax.lax.dynamic_slice(ring, (layer, segment, 0, 0, 0, 0), (1, 1, B, Kv, C, h))[0, 0]
            return jax.lax.dynamic_update_slice(ring, own[kept][None, None], (layer, segment, 0, 0, 0, 0))

        return moved(rings[0]), moved(rings[1])

    k, v = jax.lax.fori_loop(0, L * N, move, (cache.k, cache.v))
    return dataclasses.replace(cache, k=k, v=v)


def heads_first(kept: Float[Array, "L R M Kv h"]) -> Float[Array, "L R Kv M h"]:
    """Transpose a forward's keys or values so that a head's columns are contiguous: a matmul reads them in place."""
    return constrain(jnp.swapaxes(kept, 2, 3), "layers", "batch", "kv_heads", None, None)


def write_column(ring: Array, layer: Array, step: Array, new: Float[Array, "B Kv h"]) -> Array:
    """Return the ring with every slot's newest token written to one layer's column of this step."""
    N, C = ring.shape[1], ring.shape[4]
    segment, column = jnp.divmod(step % (N * C), C)
    return jax.lax.dynamic_update_slice(ring, new[None, None, :, :, None], (layer, segment, 0, 0, column, 0))


def write_prefix(
    ring: Array, slot: Array, step: Array, rows: Float[Array, "R L Kv M h"], row: Array, start: Array, length: Array
) -> Array:
    """Return the ring with `length` columns of a row from `start` on as a slot's newest, before those of this step.

    A row has at least as many columns as a segment.
    One layer and segment at a time, and by slices: more at a time would be several copies of a slot, and a gather would
    make a TPU change the layout of the ring, and so copy it, in every step.
    """
    L, N, _, Kv, C, h = ring.shape
    M = rows.shape[3]

    def write(i: Array | int, ring: Array) -> Array:
        layer, segment = jnp.divmod(i, N)

        def columns(first: Array) -> Float[Array, "Kv C h"]:
            """C columns from `first` on, undefined outside the row."""
            near = jnp.clip(first, 0, M - C)
            found = jax.lax.dynamic_slice(rows, (row, layer, 0, near, 0), (1, 1, Kv, C, h))[0, 0]
            return jax.lax.dynamic_slice_in_dim(jnp.pad(found, ((0, 0), (C, C), (0, 0))), C + first - near, C, axis=1)

        # Where the ring begins again, its columns go on with those N·C before.
        first = (segment * C - step + length) % (N * C)
        again = (first + jnp.arange(C) >= N * C)[:, None]
        own = jnp.where(again, columns(start + first - N * C), columns(start + first)).astype(ring.dtype)
        return jax.lax.dynamic_update_slice(ring, own[None, None, None], (layer, segment, slot, 0, 0, 0))

    return jax.lax.fori_loop(0, L * N, write, ring)
