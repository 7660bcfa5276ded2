"""The decoder's key/value cache: each prompt once, and the newest tokens of each slot in a ring."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.models.config import ModelConfig
from gspo_jax.parallel.mesh import constrain

_SEGMENT, _SEGMENTS = 64, 8
"""Columns of a segment, at least, and segments of a ring, at most: attention reads whole segments, one at a time."""


@struct.dataclass
class Slots:
    """What the B slots are at: each decodes one response at a time."""

    responses: Int[Array, " B"]
    """The response in each slot, in [0, P·G); its prompt is that number // G. Anything where a slot is idle."""
    ages: Int[Array, " B"]
    """Tokens of its response that a slot has fed, that of this step included; 0 where it is idle."""
    aligned: bool = struct.field(pytree_node=False, default=False)
    """Whether slot b holds response b, for all of P·G."""

    @property
    def active(self) -> Bool[Array, " B"]:
        """Where a slot is not idle."""
        return self.ages > 0


@struct.dataclass
class Cache:
    """Keys and values of all layers: the prompts', and a ring of columns that all slots write together, one a step.

    Rotary positions are in the keys, so the order of columns means nothing: the live ones of a slot are its newest
    `age`, wherever the ring is. A slot is emptied by setting its age to 0.
    """

    prompt_k: Float[Array, "L P Kv S h"]
    prompt_v: Float[Array, "L P Kv S h"]
    prompt_lengths: Int[Array, " P"]
    """Filled columns of each prompt."""
    k: Float[Array, "L N B Kv C h"]
    """N segments of C columns, for B slots or more: the first B."""
    v: Float[Array, "L N B Kv C h"]
    step: Int[Array, ""]
    """Columns written so far; the next goes to `step` modulo N·C."""
    group_size: int = struct.field(pytree_node=False)
    """G: responses to each prompt."""


def segments(length: int) -> tuple[int, int]:
    """How many segments of how many columns make a ring for `length` tokens."""
    size = -(-length // _SEGMENTS)
    size = min(length, -(-size // _SEGMENT) * _SEGMENT)
    return -(-length // size), size


def empty_ring(config: ModelConfig, slots: int, length: int, dtype: DTypeLike) -> Float[Array, "L N B Kv C h"]:
    """Room for the newest `length` tokens of each slot, keys or values."""
    N, C = segments(length)
    ring = jnp.zeros((config.num_layers, N, slots, config.num_kv_heads, C, config.head_dim), dtype)
    return constrain(ring, "layers", None, "batch", "kv_heads", None, None)


def keep_slots(cache: Cache, kept: Int[Array, " b"]) -> Cache:
    """These slots become the first ones; the room of the others stays, unused.

    One layer after the other, in place: a smaller cache beside the old one would take half as much again.
    """

    def move(layer: Array | int, rings: tuple[Array, Array]) -> tuple[Array, Array]:
        def moved(ring: Array) -> Array:
            new = jnp.take(jax.lax.dynamic_index_in_dim(ring, layer, keepdims=False), kept, axis=1)
            return jax.lax.dynamic_update_slice(ring, new[None], (layer, 0, 0, 0, 0, 0))

        return moved(rings[0]), moved(rings[1])

    k, v = jax.lax.fori_loop(0, cache.k.shape[0], move, (cache.k, cache.v))
    return dataclasses.replace(cache, k=k, v=v)


def heads_first(kept: Float[Array, "L R M Kv h"]) -> Float[Array, "L R Kv M h"]:
    """A forward's keys or values, with the columns of each head together: so a matmul reads them in place."""
    return constrain(jnp.swapaxes(kept, 2, 3), "layers", "batch", "kv_heads", None, None)


def write_column(ring: Array, layer: Array, step: Array, new: Float[Array, "B Kv h"]) -> Array:
    """The ring with the newest token of every slot in the column of this step."""
    N, C = ring.shape[1], ring.shape[4]
    segment, column = jnp.divmod(step % (N * C), C)
    return jax.lax.dynamic_update_slice(ring, new[None, None, :, :, None], (layer, segment, 0, 0, column, 0))


def write_row(ring: Array, slot: Array, step: Array, own: Float[Array, "L Kv Q h"], length: Array) -> Array:
    """The ring with the first `length` columns of `own` as the newest of one slot, before those of this step."""
    L, N, _, Kv, C, h = ring.shape
    from_first = (jnp.arange(N * C) - step + length) % (N * C)
    row = own[:, :, jnp.minimum(from_first, own.shape[2] - 1)]
    row = jnp.swapaxes(row.reshape(L, Kv, N, C, h), 1, 2)
    return jax.lax.dynamic_update_slice(ring, row[:, :, None].astype(ring.dtype), (0, 0, slot, 0, 0, 0))
