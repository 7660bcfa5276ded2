"""Index arithmetic of an exchange of (token, expert) pairs between shards of experts."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from gspo_jax.kernels import pairs_tpu
from gspo_jax.kernels.backend import platform
from gspo_jax.kernels.visits_tpu import LANES

Plan = tuple[Int[Array, " E"], ...]
"""Offsets and sizes of `jax.lax.ragged_all_to_all`: input_offsets, send_sizes, output_offsets, recv_sizes."""


def places(
    ids: Int[Array, "K N"], experts: int, *, block: int, none: int
) -> tuple[Int[Array, "K N"], Int[Array, "b M"], Int[Array, " E"]]:
    """Return every pair's place in a buffer sorted by expert, where each expert begins a new block of rows.

    Besides, the places that fill up the last blocks, `none` where there are fewer, and the experts' numbers of blocks.

    Args:
      ids: experts of each token; `none` is the place of those outside [0, E).
    """
    if platform() == "tpu" and ids.shape[1] % LANES == 0:
        return pairs_tpu.places(ids, experts, block=block, none=none)
    every = jnp.arange(experts, dtype=jnp.int32)
    hit = ids[:, :, None] == every[None, None]
    member = hit.sum(axis=0, dtype=jnp.int32)
    counts = member.sum(axis=0)
    blocks = (counts + (block - 1)) // block
    starts = block * (jnp.cumsum(blocks) - blocks)
    own = starts[None] + jnp.cumsum(member, axis=0) - member
    found = jnp.where(hit.any(axis=2), jnp.where(hit, own[None], 0).sum(axis=2), none)
    at = counts[None] + jnp.arange(block)[:, None]
    return found, jnp.where(at < block * blocks[None], starts[None] + at, none), blocks


def moves(
    counts: Int[Array, "S E"], me: Int[Array, ""], first: Int[Array, ""] | int, *, room: int
) -> tuple[Plan, Plan, Int[Array, " h"]]:
    """Return what moves the rows that land in [first, first + room) to their experts' shards, and back.

    Each of S shards has its rows sorted by expert, and gets others' sorted by expert, then by sender. Besides, the rows
    that arrive here, by expert.

    Args:
      counts: each shard's rows for all experts; shard s holds experts [s · E / S, (s + 1) · E / S).
      me: this shard.
      room: rows of the buffer.
    """
    S, E = counts.shape
    if platform() == "tpu" and E % LANES == 0:
        return pairs_tpu.moves(counts, me, first, room=room)
    counts = counts.reshape(S, S, E // S)  # [from, to, expert]

    def before(x: Array) -> Array:  # over the last two axes
        flat = x.reshape(S, -1)
        return (jnp.cumsum(flat, axis=1) - flat).reshape(x.shape)

    leaves, lands = before(counts), jnp.moveaxis(before(jnp.moveaxis(counts, 0, 2)), 2, 0)
    begin, end = (jnp.clip(x - first, 0, room) for x in (lands, lands + counts))
    size, leaves = end - begin, leaves + jnp.clip(first - lands, 0, counts)
    there = leaves[me], size[me], begin[me], size[:, me]
    back = begin[:, me], size[:, me], leaves[:, me], size[me]
    there, back = (tuple(x.reshape(-1) for x in plan) for plan in (there, back))
    return there, back, size[:, me].sum(axis=0)
