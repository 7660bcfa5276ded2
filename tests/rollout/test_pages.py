"""Pages of keys and values are given, taken back and moved with their slots, and never held twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.errors import UserError
from gspo_jax.rollout.pages import PageTable, Pool, default_columns, fitting, page_columns, whole_pool


def held(pages: PageTable, counts) -> list[list[int]]:
    return [row[:count].tolist() for row, count in zip(np.asarray(pages.table), counts, strict=True)]


def test_every_page_has_one_owner_through_a_random_history():
    """Against sets in Python: pages of a slot stay in their order while others come and go, and slots are reordered."""
    rng, B, pool = np.random.default_rng(0), 5, Pool(columns=4, pages=13)
    pages, own, free = PageTable.start(pool, B, 20), [[] for _ in range(B)], 13
    give, take_back = jax.jit(PageTable.give), jax.jit(PageTable.take_back)
    for _ in range(60):
        counts = np.array([len(x) for x in own])
        wanted = np.minimum(rng.integers(0, 3, B), 5 - counts)
        while wanted.sum() > free:
            wanted[rng.integers(B)] = 0
        pages = give(pages, jnp.asarray(counts), jnp.asarray(wanted))
        found = held(pages, counts + wanted)
        assert [new[: len(old)] for new, old in zip(found, own, strict=True)] == own
        own, free = found, free - wanted.sum()
        everyone = [page for one in own for page in one]
        assert len(set(everyone)) == len(everyone) and set(everyone) <= set(range(13))
        assert int(pages.free()) == free == 13 - len(everyone)
        over, order = rng.random(B) < 0.2, rng.permutation(B)
        pages = take_back(pages, jnp.asarray(over)).reordered(jnp.asarray(order))
        free += sum(len(x) for x, gone in zip(own, over, strict=True) if gone)
        own = [[] if over[b] else own[b] for b in order]
        assert int(pages.free()) == free


def test_a_whole_pool_gives_nothing_as_all_have_theirs():
    pool = whole_pool(3, 100)
    assert pool == Pool(columns=64, pages=6) and pool.is_whole(3, 128) and not pool.is_whole(3, 129)
    pages = PageTable.start(pool, 3, 100)
    assert sorted(np.asarray(pages.table).reshape(-1)) == list(range(6))
    order = jnp.asarray([2, 0, 1])
    np.testing.assert_array_equal(pages.reordered(order).table, pages.table[order])
    assert pages.give(order, order) is pages is pages.take_back(order > 0)


def test_default_columns_make_at_most_eight_pages():
    assert [default_columns(length) for length in (1, 64, 70, 512, 1000, 16_384)] == [1, 64, 64, 64, 128, 2048]


def test_pages_of_a_tpu_are_whole_tiles():
    assert [page_columns(None, length, "tpu") for length in (1, 200, 16_384)] == [128, 256, 256]
    assert page_columns(96, 1000, "tpu") == 96 and page_columns(70, 1000, "cpu") == 70
    with pytest.raises(UserError, match="page is 70, and on TPU pages are multiples of 32 tokens; use 96"):
        page_columns(70, 1000, "tpu")


def test_a_pool_serves_as_many_whole_responses_as_it_holds_or_all_that_grow():
    assert fitting(8, 100, None, 32, grows=False) == (8, Pool(32, 32))
    assert fitting(8, 100, 9999, 32, grows=True) == (8, Pool(32, 32)), "no more pages than the slots may need"
    assert fitting(8, 100, 400, 32, grows=False) == (3, Pool(32, 12))
    assert fitting(8, 100, 400, 32, grows=True) == (8, Pool(32, 12))
    with pytest.raises(UserError, match="leaves 127 tokens to a batch shard, and one response may need 128"):
        fitting(8, 100, 127, 32, grows=True)
