"""Causal attention on TPU: JAX's splash kernel.

The compiler cannot partition it: under a mesh, call it on each shard's rows and heads (`jax.shard_map`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jaxtyping import Array, Bool, Float

_LANES = 128
_BLOCKS = (1024, 512, 256)
"""Candidate block lengths, else 128. Longer blocks cost less per score, but fewer can be skipped."""
_COMPUTE_KEYS = 512
"""Keys whose scores exist at a time. 1024 would be no faster and take twice the VMEM."""


def _block(tokens: int) -> int:
    """Return the longest candidate up to `tokens` that pads a row by at most an eighth."""
    return next((b for b in _BLOCKS if b <= tokens and -tokens % b <= tokens // 8), _LANES)


def padded_length(tokens: int) -> int:
    """Return a row's length in whole blocks."""
    return tokens + -tokens % _block(tokens)


def computed_products(tokens: int, *, heads: int) -> int:
    """Return how many products of head-sized vectors the kernel computes for one row and key head.

    Blocks with a visible pair are computed whole, in two matmuls: scores and output.
    """
    block = _block(tokens)
    blocks = padded_length(tokens) // block
    return 2 * heads * block**2 * (blocks * (blocks + 1) // 2)


def attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T Kv h"],
    v: Float[Array, "B T Kv h"],
    valid: Bool[Array, "B T"],
    *,
    interpret: bool = False,
) -> Float[Array, "B T H h"]:
    """Return causal attention softmax(q k^T / sqrt(h)) v over the valid keys.

    A query that sees no key gets an unspecified finite value: zeroing it would cost three passes over all outputs.
    """
    B, T, H, h = q.shape
    Kv, block, padded = k.shape[2], _block(T), padded_length(T)
    kernel = splash_attention_kernel.make_splash_mqa(
        splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((padded, padded))] * (H // Kv)),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=min(block, _COMPUTE_KEYS)
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    # Queries see keys with segment id 1. Invalid keys and padding have 0.
    ones, numbers = jnp.ones(padded, jnp.int32), jnp.pad(valid, ((0, 0), (0, padded - T))).astype(jnp.int32)

    def one_key_head(q: Array, k: Array, v: Array, numbers: Array) -> Any:
        return kernel(q, k, v, splash_attention_kernel.SegmentIds(ones, numbers))

    # vmap makes rows and key heads unordered grid dimensions: a chip's two cores can share them.
    one_row = jax.vmap(one_key_head, (0, 0, 0, None))
    grouped = _padded(q * h**-0.5, padded).reshape(B, Kv, H // Kv, padded, -1)
    out = jax.vmap(one_row)(grouped, _padded(k, padded), _padded(v, padded), numbers)
    return jnp.swapaxes(out.reshape(B, H, padded, -1)[:, :, :T, :h], 1, 2)


def _padded(x: Float[Array, "B n H h"], tokens: int) -> Float[Array, "B H m w"]:
    """Move heads before tokens, and zero-pad tokens to blocks and heads to lanes."""
    return jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, tokens - x.shape[1]), (0, -x.shape[3] % _LANES)))
