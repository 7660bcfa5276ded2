"""Causal attention on TPU: JAX's splash kernel.

Keys are read in place: they are not repeated for the query heads. Fully masked blocks are skipped, and scores and mask
never exist beyond one block. The compiler cannot partition the kernel, so under a mesh it must be called on each
shard's rows and heads (`jax.shard_map`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
    splash_attention_mask_info,
)
from jaxtyping import Array, Bool, Float

_LANES = 128
_BLOCKS = (1024, 512, 256)
"""Candidate block lengths in queries and keys; 128 where none of them fits. Longer blocks cost fewer cycles per score,
but fewer of them can be skipped."""
_COMPUTE_KEYS = 512
"""Keys whose scores exist at a time; all 1024 of a block would be no faster and take twice the VMEM."""


def _block(tokens: int) -> int:
    """Tokens per block: the longest candidate up to `tokens` whose padding lengthens a row by at most an eighth."""
    return next((b for b in _BLOCKS if b <= tokens and -tokens % b <= tokens // 8), _LANES)


def _mask(tokens: int) -> splash_attention_mask.Mask:
    """The causal mask over `tokens`, padded to whole blocks."""
    padded = tokens + -tokens % _block(tokens)
    return splash_attention_mask.CausalMask((padded, padded))


def computed_products(tokens: int, *, heads: int) -> int:
    """Products of a query and a key, or of vectors as long, that the kernel computes for one row and key head.

    Whole each block in which the mask lets a query see a key, in two matrix products: scores, and output. `heads` query
    heads share the key head.
    """
    block = _block(tokens)
    info, _ = splash_attention_mask_info.process_mask(  # cached: tracing the kernel has called it
        splash_attention_mask.MultiHeadMask([_mask(tokens)] * heads), (block, block)
    )
    assert info.block_mask is not None
    return 2 * heads * block**2 * int(np.count_nonzero(info.block_mask[0]))


def attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T Kv h"],
    v: Float[Array, "B T Kv h"],
    valid: Bool[Array, "B T"],
    *,
    interpret: bool = False,
) -> Float[Array, "B T H h"]:
    """Causal attention softmax(q k^T / sqrt(h)) v over the valid keys.

    Query head i reads key/value head i // (H / Kv). Scores are float32, the output has q's dtype. A query that sees no
    key gets an unspecified finite value: zeroing it would cost three passes over all outputs, and such outputs are
    never used.

    Args:
      q: queries, scaled here and rounded back to their dtype.
      k: keys.
      v: values.
      valid: False for keys that no query sees.
      interpret: run the kernel on any backend, slowly, for tests.
    """
    B, T, H, h = q.shape
    Kv, block, mask = k.shape[2], _block(T), _mask(T)
    padded = mask.shape[0]
    kernel = splash_attention_kernel.make_splash_mqa(
        splash_attention_mask.MultiHeadMask([mask] * (H // Kv)),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=min(block, _COMPUTE_KEYS)
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    # Queries see only keys with their own segment id, 1; invalid keys and the padding of the last block have id 0.
    ones, numbers = jnp.ones(padded, jnp.int32), jnp.pad(valid, ((0, 0), (0, padded - T))).astype(jnp.int32)

    def one_key_head(q: Array, k: Array, v: Array, numbers: Array) -> Any:
        return kernel(q, k, v, splash_attention_kernel.SegmentIds(ones, numbers))

    # vmap makes rows and key heads unordered grid dimensions, which the two cores of a chip can share.
    one_row = jax.vmap(one_key_head, (0, 0, 0, None))
    grouped = _padded(q * h**-0.5, padded).reshape(B, Kv, H // Kv, padded, -1)
    out = jax.vmap(one_row)(grouped, _padded(k, padded), _padded(v, padded), numbers)
    return jnp.swapaxes(out.reshape(B, H, padded, -1)[:, :, :T, :h], 1, 2)


def _padded(x: Float[Array, "B n H h"], tokens: int) -> Float[Array, "B H m w"]:
    """Move heads before tokens and zero-pad to `tokens` tokens and to whole lanes of the head dimension."""
    return jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, tokens - x.shape[1]), (0, -x.shape[3] % _LANES)))
