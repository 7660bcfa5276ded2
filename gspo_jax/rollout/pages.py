"""Pages of the decoder's pool of keys and values: which slot holds which.

A response takes a page when its next token needs one, and gives all back when it ends. So a pool may have fewer pages
than slots of the longest length would need.
"""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from gspo_jax.errors import UserError
from gspo_jax.kernels.backend import platform

_COLUMNS, _PAGES = 64, 8
"""Minimum columns per page, and maximum pages of the longest response, by default. Attention reads whole pages."""
_TPU_LANES, _TPU_COLUMNS = 128, 256
"""Least columns by default on TPU, and most: its attention reads live pages alone."""
_TPU_TILE = 32
"""Columns of int8 that a TPU keeps together."""


@dataclasses.dataclass(frozen=True)
class Pool:
    """Size of a batch shard's pool."""

    columns: int
    """Tokens per page."""
    pages: int

    def per_response(self, length: int) -> int:
        """Return the pages of a response of `length` tokens."""
        return -(-length // self.columns)

    def is_whole(self, slots: int, length: int) -> bool:
        """Return True if every slot can hold `length` tokens at a time."""
        return self.pages >= slots * self.per_response(length)


def default_columns(length: int, platform: str = "cpu") -> int:
    """Return the columns per page for responses of up to `length` tokens."""
    if platform == "tpu":
        return min(_TPU_COLUMNS, -(-length // _TPU_LANES) * _TPU_LANES)
    size = -(-length // _PAGES)
    return min(length, -(-size // _COLUMNS) * _COLUMNS)


def page_columns(page: int | None, length: int, platform: str) -> int:
    """Return the columns per page, `page` or by default.

    Raises:
      UserError: a TPU's kernels cannot read such pages.
    """
    if page is None:
        return default_columns(length, platform)
    if platform == "tpu" and page % _TPU_TILE:
        near = -(-page // _TPU_TILE) * _TPU_TILE
        raise UserError(f"sampling.page is {page}, and on TPU pages are multiples of {_TPU_TILE} tokens; use {near}")
    return page


def whole_pool(slots: int, length: int, columns: int | None = None) -> Pool:
    """Return a pool in which every slot can hold `length` tokens; by default with this platform's columns per page."""
    columns = columns or default_columns(length, platform())
    return Pool(columns, slots * Pool(columns, 0).per_response(length))


def fitting(
    slots: int, length: int, tokens: int | None, columns: int, *, shards: int = 1, grows: bool
) -> tuple[int, Pool]:
    """Return a shard's slots and pool, for responses of up to `length` tokens.

    Args:
      slots: at most so many.
      tokens: size of the pool; None: enough for all slots.
      columns: tokens per page.
      shards: of a batch, for the message.
      grows: whether responses may be set aside, so that each needs pages for its tokens so far alone.

    Raises:
      UserError: the pool is too small for one response.
    """
    whole = whole_pool(slots, length, columns)
    if tokens is None or (pages := tokens // whole.columns) >= whole.pages:
        return slots, whole
    one = whole.per_response(length)
    if pages < one:
        raise UserError(
            f"sampling.pool_tokens leaves {tokens} tokens to a batch shard, and one response may need "
            f"{one * whole.columns}, in pages of {whole.columns}; use {one * whole.columns * shards} or more, or "
            "lower sampling.max_response_length or sampling.page"
        )
    if grows:
        return slots, Pool(whole.columns, pages)
    return pages // one, whole_pool(pages // one, length, columns)


@struct.dataclass
class PageTable:
    """Pages of B slots."""

    table: Int[Array, "B W"]
    """Page of each slot's columns [w C, (w + 1) C); any number beyond the pages that it holds."""
    owner: Int[Array, " M"] | None
    """Slot that holds each page, -1 if free. None: every slot keeps W pages of its own."""

    @classmethod
    def start(cls, pool: Pool, slots: int, length: int) -> "PageTable":
        """Return the table of slots without a response."""
        W = pool.per_response(length)
        if pool.is_whole(slots, length):
            return cls(jnp.arange(slots * W, dtype=jnp.int32).reshape(W, slots).T, None)
        return cls(jnp.zeros((slots, W), jnp.int32), jnp.full(pool.pages, -1, jnp.int32))

    def free(self) -> Int[Array, ""]:
        """Return the number of free pages."""
        assert self.owner is not None
        return (self.owner < 0).sum(dtype=jnp.int32)

    def give(self, first: Int[Array, " B"], count: Int[Array, " B"]) -> "PageTable":
        """Give each slot `count` free pages, of which there must be enough, as its pages from number `first` on."""
        if self.owner is None:
            return self
        B, W = self.table.shape
        free, ends = self.owner < 0, jnp.cumsum(count)
        begins, pages = ends - count, jnp.argsort(~free, stable=True).astype(jnp.int32)
        rank = jnp.cumsum(free) - 1
        taker = (ends[None] <= rank[:, None]).sum(axis=1)
        own = jnp.arange(W)[None] - first[:, None]
        new = pages.at[begins[:, None] + own].get(mode="clip")
        return dataclasses.replace(
            self,
            table=jnp.where((own >= 0) & (own < count[:, None]), new, self.table),
            owner=jnp.where(free & (taker < B), taker, self.owner).astype(jnp.int32),
        )

    def take_back(self, slots: Bool[Array, " B"]) -> "PageTable":
        """Free all pages of these slots."""
        if self.owner is None:
            return self
        over = (self.owner >= 0) & slots[jnp.maximum(self.owner, 0)]
        return dataclasses.replace(self, owner=jnp.where(over, -1, self.owner))

    def reordered(self, order: Int[Array, " B"]) -> "PageTable":
        """Move slot `order[b]` to b, with its pages."""
        owner = self.owner
        if owner is not None:
            owner = jnp.where(owner < 0, -1, jnp.argsort(order).astype(jnp.int32)[jnp.maximum(owner, 0)])
        return dataclasses.replace(self, table=self.table[order], owner=owner)
