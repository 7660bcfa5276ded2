"""The decoder's KV cache: each prompt once, and each slot's own tokens in pages of a pool."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels.backend import platform
from gspo_jax.kernels.kv import KV, ScaledKV, Stored, Values, each, put, take
from gspo_jax.models.int8 import quantize
from gspo_jax.parallel.mesh import constrain, head_axis

CacheDtype = Literal["int8"]
"""Storage dtypes other than the compute dtype."""

STATE_AXES = "layers", "batch", "heads", None, None
"""Logical axes of states [L, B, heads, …]."""


def pool_axes(heads: int) -> tuple[str | None, ...]:
    """Return the logical axes of a pool [L, M, Kv, C, h]."""
    return "layers", None, head_axis(heads), None, None


@struct.dataclass
class DecodeSlots:
    """State of the B decode slots."""

    responses: Int[Array, " B"]
    """Response in each slot, in [0, P·G), of prompt number // G. Undefined if idle."""
    ages: Int[Array, "B Q"]
    """Response tokens fed up to each of this step's, itself included; 0 where a slot feeds fewer than Q, or is idle."""
    aligned: bool = struct.field(pytree_node=False, default=False)
    """True if slot b holds response b, for all P·G."""

    @property
    def active(self) -> Bool[Array, " B"]:
        """True where a slot holds a response."""
        return self.ages[:, 0] > 0


@struct.dataclass
class Cache:
    """Keys and values of all layers that have them: the prompts', and a pool of M pages with C columns each.

    Column t of a slot holds token t of its response, so the first `age` columns are live.
    """

    prompt_k: KV
    """[L, P, Kv, S, h]."""
    prompt_v: Values
    prompt_lengths: Int[Array, " P"]
    k: KV
    """[L, M, Kv, C, h]."""
    v: Values
    table: Int[Array, "B W"]
    """Page of each slot's columns [w C, (w + 1) C); undefined past its age."""
    group_size: int = struct.field(pytree_node=False)
    """G: responses per prompt."""
    states: Any = None
    """States of the slots in the layers that keep them in place of keys and values: arrays [L, B, …]."""

    def newest(self, ages: Int[Array, "B Q"]) -> tuple[Int[Array, "B Q"], Int[Array, "B Q"]]:
        """Return the page and column of each token fed; page M for none."""
        (_, M, _, C, _), (_, W) = self.k.shape, self.table.shape
        at, column = jnp.divmod(jnp.maximum(ages - 1, 0), C)
        page = jnp.where(jnp.arange(W)[None, None] == at[..., None], self.table[:, None], 0).sum(axis=2)
        return jnp.where(ages > 0, page, M), column


def stored(x: Float[Array, "*b h"] | None, dtype: CacheDtype | None) -> Values:
    """Return keys or values as the cache stores them; a dtype of None: unchanged.

    An int8 scale is the token and head's largest magnitude / 127.
    """
    if x is None or dtype is None:
        return x
    values, scale = quantize(x, inputs=-1)
    return ScaledKV(jnp.asarray(values), jnp.asarray(scale)[..., 0])


def empty_pool(prompts: Stored, pages: int, columns: int) -> Stored:
    """Return an empty pool for keys or values of all layers, stored as the prompts' are."""
    if prompts is None:
        return prompts
    L, _, Kv, _, h = prompts.shape
    shape = L, pages, Kv, columns, h
    return sharded_pool(each(lambda x: jnp.zeros(shape[: x.ndim], x.dtype), prompts))


def sharded_pool(pool: Stored) -> Stored:
    """Shard a pool's heads."""
    return each(lambda x: constrain(x, *pool_axes(x.shape[2])[: x.ndim]), pool)


def heads_first(kept: Stored) -> Stored:
    """Transpose a forward's keys or values, [L, R, M, Kv, h] to [L, R, Kv, M, h].

    A matmul reads a head's contiguous columns in place.
    """

    def one(x: Array) -> Array:
        axes = "layers", "batch", head_axis(x.shape[3]), None, None
        return constrain(jnp.swapaxes(x, 2, 3), *axes[: x.ndim])

    return each(one, kept)


def write_tokens(
    pool: Stored,
    layer: Array,
    new: Float[Array, "B Q Kv h"] | None,
    pages: Int[Array, "B Q"],
    columns: Int[Array, "B Q"],
) -> Stored:
    """Write every slot's newest tokens to columns of its pages in one layer. Page M is none."""
    own = stored(new, "int8" if isinstance(pool, ScaledKV) else None)
    if platform() != "tpu":
        return each(lambda old, x: old.at[layer, pages, :, columns].set(x, mode="drop"), pool, own)

    # Head by head: to write a token's heads together, a TPU copies the pool to a layout with heads side by side.
    def by_head(old: Array, x: Array) -> Array:
        heads = jnp.arange(old.shape[2])[None, None]
        return old.at[layer, pages[..., None], heads, columns[..., None]].set(x, mode="drop")

    return each(by_head, pool, own)


def write_prefix(
    pool: Stored, pages: Int[Array, " W"], rows: Stored, row: Array, start: Array, length: Array
) -> Stored:
    """Write `length` columns of a row, from `start` on, to a response's first pages.

    `rows` are [R, L, Kv, N, h]. One slice per layer and page: a gather would make a TPU copy the pool in every step.
    """
    if pool is None or rows is None:
        return pool
    L, _, Kv, C, h = pool.shape
    N = rows.shape[3]
    count, size = -(-length // C), min(C, N)

    def write(i: Array | int, pool: KV) -> KV:
        layer, page = jnp.divmod(i, jnp.maximum(count, 1))
        first = start + page * C
        near = jnp.minimum(first, N - size)  # the last page may reach past the row

        def shifted(x: Array) -> Array:
            padded = jnp.pad(x, [(0, C) if axis == 3 else (0, 0) for axis in range(x.ndim)])
            return jax.lax.dynamic_slice_in_dim(padded, first - near, C, axis=3)

        own = each(shifted, take(rows, (row, layer, 0, near, 0), (1, 1, Kv, size, h)))
        return put(pool, own, (layer, pages[page], 0, 0, 0))

    return jax.lax.fori_loop(0, L * count, write, pool)


def empty_states(states: Any, slots: int) -> Any:
    """Return zero states [L, B, …] of so many slots, stored as the prompts' [L, P, …] are."""
    return sharded_states(jax.tree.map(lambda x: jnp.zeros((x.shape[0], slots, *x.shape[2:]), x.dtype), states))


def sharded_states(states: Any) -> Any:
    """Shard the slots, and heads if the states have them."""
    return jax.tree.map(lambda x: constrain(x, *STATE_AXES[: x.ndim]), states)


def state_at(states: Any, place: Array) -> Any:
    """Return the states [L, 1, …] at one place of [L, B, …]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, place, 1, axis=1), states)


def state_in_row(states: Any, row: Array, number: Array) -> Any:
    """Return the states [L, 1, …] at one place of one row of [R, L, E, …]."""

    def one(x: Array) -> Array:
        nowhere = (0,) * (x.ndim - 3)
        return jax.lax.dynamic_slice(x, (row, 0, number, *nowhere), (1, x.shape[1], 1, *x.shape[3:]))[0]

    return jax.tree.map(one, states)


def write_state(states: Any, slot: Array, own: Any) -> Any:
    """Write one slot's states."""
    return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, slot, axis=1), states, own)
