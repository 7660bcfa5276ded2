"""The TPU kernel for attention over the decode ring, in interpret mode on CPU, matches the plain XLA loop."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.kernels import attention, decode_attention_tpu
from gspo_jax.kernels.kv import head_bytes
from gspo_jax.models.cache import stored
from tests.tiny import mostly_slow

L, N, B, KV, C, H, G = 2, 3, 4, 2, 32, 16, 2
"""Layers, ring segments, slots, KV heads, columns per segment, head dimension, and query heads per KV head."""
RING = N * C


def draw(dtype, cache_dtype=None):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((B, KV, G, H)), dtype)
    return q, *(stored(jnp.asarray(x, dtype), cache_dtype) for x in rng.standard_normal((2, L, N, B, KV, C, H)))


@partial(jax.jit, static_argnames="block")
def kernel(q, k, v, step, ages, block):
    """Run the kernel on layer 1; `block` is static so that each block size is compiled once."""
    del block
    return decode_attention_tpu.ring_softmax(q, k, v, layer=jnp.asarray(1), step=step, ages=ages, interpret=True)


@pytest.mark.parametrize(
    ("block", "dtype", "cache_dtype"),
    mostly_slow(
        [
            *itertools.product([16, 32], ["float32", "bfloat16"], [None]),
            (16, "float32", "int8"),
            (32, "bfloat16", "int8"),
        ],
        always=[(16, "float32", None), (32, "bfloat16", None), (16, "float32", "int8")],
    ),
)
def test_the_kernel_equals_the_loop_over_segments(block, dtype, cache_dtype, monkeypatch):
    """Covers a ring that is filling, full and wrapped around; slots of mixed ages, one idle slot, equal ages."""
    q, k, v = draw(dtype, cache_dtype)
    column = KV * head_bytes(H, cache_dtype or dtype, scaled=cache_dtype is not None)
    monkeypatch.setattr(decode_attention_tpu, "_BLOCK_BYTES", block * column)
    monkeypatch.setattr(decode_attention_tpu, "_LANES", 16)
    assert decode_attention_tpu.block_columns(C, column, scaled=cache_dtype is not None) == block
    zero, lowest = jnp.zeros((B, KV, G, 1)), jnp.full((B, KV, G, 1), attention._MASKED / 10)
    none = attention._PartialSoftmax(jnp.zeros((B, KV, G, H)), lowest, zero)
    loop = jax.jit(partial(attention._attend_own_tokens, none, q, k, v, jnp.asarray(1)))
    rng = np.random.default_rng(1)
    for step in (0, 3, C, RING - 1, RING + 3, 5 * RING + 17):
        oldest = min(step + 1, RING)
        for ages in (rng.integers(1, oldest + 1, B), np.array([0, 1, oldest, oldest]), np.full(B, oldest)):
            ours = attention._PartialSoftmax(*kernel(q, k, v, jnp.asarray(step), jnp.asarray(ages), block))
            theirs = loop(jnp.asarray(step), jnp.asarray(ages))
            for a, b in zip(ours, theirs, strict=True):
                assert np.isfinite(a).all()
                tolerance = 1e-5 if dtype == "float32" else 2e-2
                np.testing.assert_allclose(a[ages > 0], b[ages > 0], rtol=tolerance, atol=tolerance)


def test_blocks_that_no_slot_sees_are_not_read():
    """Two of three segments hold NaN; every output is finite, so they were never read."""
    q, k, v = draw("float32")
    k, v = (x.at[:, [0, 2]].set(jnp.nan) for x in (k, v))
    out = kernel(q, k, v, jnp.asarray(2 * C - 1), jnp.asarray([0, 1, 7, C]), C)
    for x in out:
        assert np.isfinite(x).all()


def test_decoding_takes_the_kernel_on_tpu(monkeypatch):
    """On TPU, `decode_attention` over prompts and own tokens, one softmax, equals the portable form to 1e-5."""
    q, k, v = draw("float32")
    rng = np.random.default_rng(2)
    prompt_k, prompt_v = (jnp.asarray(x, jnp.float32) for x in rng.standard_normal((2, L, 2, KV, 5, H)))
    arrays = (q.reshape(B, KV * G, H), prompt_k, prompt_v, jnp.asarray([5, 2]), k, v)
    where = {"layer": jnp.asarray(1), "step": jnp.asarray(40), "ages": jnp.asarray([1, 41, 9, 30]), "rows": None}
    expected = jax.jit(attention.decode_attention)(*arrays, **where)
    monkeypatch.setattr(attention, "platform", lambda: "tpu")
    interpreted = partial(decode_attention_tpu.ring_softmax, interpret=True)
    monkeypatch.setattr(decode_attention_tpu, "ring_softmax", interpreted)
    got = jax.jit(lambda *x: attention.decode_attention(*x, **where))(*arrays)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(("size", "columns"), [(448, 448), (4096, 1024), (64 * 37, 592), (50, 50)])
def test_blocks_divide_a_segment(size, columns):
    """Four bfloat16 heads of 128: 1024 columns take 2^20 bytes. 64 · 37 = 2368 = 4 · 592."""
    assert decode_attention_tpu.block_columns(size, 4 * 128 * 2) == columns


@pytest.mark.parametrize(("size", "columns"), [(448, 448), (4096, 1024), (128 * 37, 128), (64 * 37, 64 * 37)])
def test_blocks_with_scales_are_whole_lanes(size, columns):
    """Or all of a segment, where no number of whole lanes divides it."""
    assert decode_attention_tpu.block_columns(size, 4 * (128 + 4), scaled=True) == columns
