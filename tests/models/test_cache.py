"""A cache in int8 moves values and scales as one without moves keys and values."""

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.kernels.kv import head_bytes
from gspo_jax.models.cache import Cache, empty_ring, keep_slots, stored, write_column, write_prefix

L, N, B, KV, C, H = 2, 3, 4, 2, 8, 16


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


def test_columns_prefixes_and_slots_move_with_their_scales():
    ring, rows, column = draw((L, N, B, KV, C, H)), draw((2, L, KV, 40, H), 1), draw((B, KV, H), 2)
    step, one = jnp.asarray(N * C + 3), jnp.asarray(1)
    equal(write_column(stored(ring, "int8"), one, step, column), write_column(ring, one, step, column))
    slot, row, start, length = map(jnp.asarray, (2, 1, 5, 17))
    found = write_prefix(stored(ring, "int8"), slot, step, stored(rows, "int8"), row, start, length)
    equal(found, write_prefix(ring, slot, step, rows, row, start, length))
    prompts = draw((L, 2, KV, 5, H), 3)
    kept, whole = (
        keep_slots(Cache(p, p, jnp.asarray([5, 2]), r, r, step, 2), jnp.asarray([3, 1]))
        for p, r in ((stored(prompts, "int8"), stored(ring, "int8")), (prompts, ring))
    )
    equal(kept.k, whole.k)
    equal(kept.v, whole.v)
    np.testing.assert_array_equal(whole.k[:, :, :2], ring[:, :, [3, 1]])


def test_an_empty_ring_is_stored_as_the_prompts_are():
    prompts, empty = draw((L, 2, KV, 5, H)), jnp.zeros((L, 1, B, KV, 20, H))
    np.testing.assert_array_equal(empty_ring(prompts, B, 20), empty)
    equal(empty_ring(stored(prompts, "int8"), B, 20), empty)
