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

    Works in place, one layer at a time: a smaller cache beside the old one would take half as much memory again.
    """

    def move(layer: Array | int, rings: tuple[Array, Array]) -> tuple[Array, Array]:
        def moved(ring: Array) -> Array:
            new = jnp.take(jax.lax.dynamic_index_in_dim(ring, layer, keepdims=False), kept, axis=1)
            return jax.lax.dynamic_update_slice(ring, new[None], (layer, 0, 0, 0, 0, 0))

        return moved(rings[0]), moved(rings[1])

    k, v = jax.lax.fori_loop(0, cache.k.shape[0], move, (cache.k, cache.v))
    return dataclasses.replace(cache, k=k, v=v)


def heads_first(kept: Float[Array, "L R M Kv h"]) -> Float[Array, "L R Kv M h"]:
    """Transpose a forward's keys or values so that a head's columns are contiguous: a matmul reads them in place."""
    return constrain(jnp.swapaxes(kept, 2, 3), "layers", "batch", "kv_heads", None, None)


def write_column(ring: Array, layer: Array, step: Array, new: Float[Array, "B Kv h"]) -> Array:
    """Return the ring with every slot's newest token written to one layer's column of this step."""
    N, C = ring.shape[1], ring.shape[4]
    segment, column = jnp.divmod(step % (N * C), C)
    return jax.lax.dynamic_update_slice(ring, new[None, None, :, :, None], (layer, segment, 0, 0, column, 0))


def write_row(
    ring: Array, slot: Array, step: Array, row: Float[Array, "L Kv M h"], start: Array, length: Array
) -> Array:
    """Return the ring with `length` columns of `row` from `start` on as a slot's newest, before those of this step."""
    L, N, _, Kv, C, h = ring.shape
    from_first = (jnp.arange(N * C) - step + length) % (N * C)
    row = row[:, :, jnp.minimum(start + from_first, row.shape[2] - 1)]
    row = jnp.swapaxes(row.reshape(L, Kv, N, C, h), 1, 2)
    return jax.lax.dynamic_update_slice(ring, row[:, :, None].astype(ring.dtype), (0, 0, slot, 0, 0, 0))
