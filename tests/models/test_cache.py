"""A cache in int8 moves values and scales as one without moves keys and values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.kernels.kv import head_bytes
from gspo_jax.models import cache
from gspo_jax.models.cache import Cache, empty_pool, stored, write_prefix, write_tokens

L, M, B, KV, C, H = 2, 9, 4, 2, 8, 16


def draw(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, stored(expected, "int8"))


def test_each_token_of_a_head_has_a_scale():
    """Rounded to the nearest of 255 values; the bytes are those of values and scales."""
    x = draw((5, KV, H)).at[0, 0].set(0)
    values, scale = kept = stored(x, "int8")
    assert (values.dtype, scale.shape) == (jnp.int8, (5, KV))
    assert float(jnp.abs(values * scale[..., None] - x).max() / jnp.abs(x).max()) < 0.51 / 127
    assert sum(a.nbytes for a in kept) == 5 * KV * head_bytes(H, jnp.int8, scaled=True)
    assert x.nbytes == 5 * KV * head_bytes(H, jnp.float32, scaled=False)
    assert stored(x, None) is x


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_tokens_and_prefixes_are_written_with_their_scales(platform, monkeypatch):
    monkeypatch.setattr(cache, "platform", lambda: platform)
    pool, rows, new = draw((L, M, KV, C, H)), draw((2, L, KV, 40, H), 1), draw((B, 2, KV, H), 2)
    one, pages, columns = (
        jnp.asarray(1),
        jnp.asarray([[3, 4], [M, M], [0, M], [8, 8]]),
        jnp.asarray([[7, 0], [0, 0], [2, 3], [0, 1]]),
    )
    whole = write_tokens(pool, one, new, pages, columns)
    equal(write_tokens(stored(pool, "int8"), one, new, pages, columns), whole)
    expected = np.array(pool)
    for at in ((0, 0), (0, 1), (2, 0), (3, 0), (3, 1)):  # slot 1 is idle, slot 2 feeds one token
        expected[1, pages[at], :, columns[at]] = new[at]
    np.testing.assert_array_equal(whole, expected)

    row, start, length = map(jnp.asarray, (1, 21, 19))
    pages = jnp.asarray([5, 2, 7, 0])
    whole = write_prefix(pool, pages, rows, row, start, length)
    equal(write_prefix(stored(pool, "int8"), pages, stored(rows, "int8"), row, start, length), whole)
    written = np.concatenate([np.asarray(whole)[:, page] for page in (5, 2, 7)], axis=2)
    np.testing.assert_array_equal(written[:, :, :19], rows[1, :, :, 21:40])
    others = np.delete(np.arange(M), [5, 2, 7])
    np.testing.assert_array_equal(whole[:, others], pool[:, others])


def test_rows_shorter_than_a_page_fill_its_beginning():
    rows = draw((1, L, KV, 5, H))
    pool = write_prefix(draw((L, M, KV, C, H)), jnp.asarray([4]), rows, *map(jnp.asarray, (0, 2, 3)))
    np.testing.assert_array_equal(pool[:, 4, :, :3], rows[0, :, :, 2:5])


def test_the_newest_column_is_the_last_of_its_slots_pages():
    table, prompts, pool = jnp.asarray([[4, 1], [0, 8], [2, 3]]), draw((L, 2, KV, 5, H)), draw((L, M, KV, C, H))
    cache = Cache(prompts, prompts, jnp.asarray([5, 2]), pool, pool, table, 2)
    pages, columns = cache.newest(jnp.asarray([[8, 9], [9, 0], [0, 0]]))
    np.testing.assert_array_equal(pages, [[4, 1], [8, M], [M, M]])
    np.testing.assert_array_equal(columns[0], [7, 0])
    assert columns[1, 0] == 0


def test_an_empty_pool_is_stored_as_the_prompts_are():
    prompts, empty = draw((L, 2, KV, 5, H)), jnp.zeros((L, M, KV, 20, H))
    np.testing.assert_array_equal(empty_pool(prompts, M, 20), empty)
    equal(empty_pool(stored(prompts, "int8"), M, 20), empty)
