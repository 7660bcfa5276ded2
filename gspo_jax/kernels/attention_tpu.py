"""Attention on TPU: JAX's splash kernels, forward and backward, over rows that hold a prompt and the responses to it.

Keys are read in place: they are repeated neither for the query heads nor, for a prompt's keys, for its responses. Fully
masked blocks are skipped, and scores and mask never exist beyond one block. The compiler cannot partition the kernels,
so under a mesh they must be called on each shard's rows and heads (`jax.shard_map`).
"""

import dataclasses
from collections.abc import Mapping
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
as scheduled by the compiler for v5p (forward and backward, per 2^20 scores: 21300 at 512, 16300 at 1024), but fewer of
them can be skipped."""
_COMPUTE_KEYS = 512
"""Keys whose scores exist at a time; all 1024 of a block would be no faster and take twice the VMEM."""
_MAX_DQ_PARTIALS = 8
"""Maximum key blocks of a fused backward pass, which writes one partial dq, as large as q, per key block and adds them
up. With more blocks, dq is computed by a kernel of its own, which recomputes the scores (a quarter more cycles)."""


@dataclasses.dataclass(frozen=True)
class _Mask(splash_attention_mask.Mask):
    """Mask by which a query sees itself and the earlier tokens of the prompt and of its own response.

    It is never materialised: the kernel computes each block of it from query and key positions.
    """

    queries: int
    keys: int
    prompt: int
    """Prompt length in tokens."""
    length: int
    """Response length in tokens."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of queries and keys."""
        return self.queries, self.keys

    @property
    def q_sequence(self) -> np.ndarray:
        """Positions of the queries."""
        return np.arange(self.queries, dtype=np.int32)

    def mask_function(self, query: Any, key: Any) -> Any:
        """Return True where a query sees a key, from their positions, as NumPy arrays or inside a kernel.

        Written so that only two comparisons are evaluated per score; the rest depends on the query or the key alone.
        """
        own = query - (query - self.prompt) % self.length  # where the response begins
        return (key <= query) & (key + (key < self.prompt) * self.keys >= own)

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        """Return a block of the mask, from which splash decides whether the block is full, partial or empty."""
        queries, keys = block
        return self.mask_function(self.q_sequence[queries, None], np.arange(keys.start, keys.stop)[None])


def _block(tokens: int, longest: int) -> int:
    """Tokens per block: the longest candidate up to `longest` whose padding lengthens a row by at most an eighth."""
    return next((b for b in _BLOCKS if b <= longest and -tokens % b <= tokens // 8), _LANES)


def _block_sizes(queries: int, keys: int, longest: int) -> splash_attention_kernel.BlockSizes:
    """Block sizes for rows with the given queries and keys, whose longest contiguous segment has `longest` tokens."""
    block_q, block_k = _block(queries, longest), _block(keys, longest)
    fused = -(-keys // block_k) <= _MAX_DQ_PARTIALS
    return splash_attention_kernel.BlockSizes(
        block_q=block_q,
        block_kv=block_k,
        block_kv_compute=min(block_k, _COMPUTE_KEYS),
        block_q_dkv=block_q,
        block_kv_dkv=block_k,
        block_kv_dkv_compute=min(block_k, _COMPUTE_KEYS),
        block_q_dq=None if fused else block_q,
        block_kv_dq=None if fused else block_k,
        use_fused_bwd_kernel=fused,
    )


def _masked(
    T: int, N: int, prompt: int, responses: int
) -> tuple[splash_attention_mask.Mask, splash_attention_kernel.BlockSizes]:
    """Mask over queries and keys, each padded to whole blocks, and the block sizes; arguments as in `attention`."""
    length = (N - prompt) // responses
    blocks = _block_sizes(T, N, N if responses == 1 else length)
    queries, keys = (n + -n % b for n, b in ((T, blocks.block_q), (N, blocks.block_kv)))
    if responses == 1:
        return splash_attention_mask.CausalMask((queries, keys), offset=N - T), blocks
    return _Mask(queries, keys, prompt, length), blocks


def computed_products(T: int, N: int, *, heads: int, prompt: int = 0, responses: int = 1) -> Mapping[str, int]:
    """Products of a query and a key, or of vectors as long, that each kernel computes for one row and key head.

    Keys are the beginnings of the kernels' names. A kernel computes whole each block of T queries and N keys in which
    its mask lets a query see a key. The forward kernel computes two matrix products of a block (scores, output). The
    backward pass has five (scores, the probabilities' gradient, and those of v, k and q); where dq has a kernel of its
    own, both kernels compute the first two. `heads` query heads share the key head; other arguments as in `attention`.
    """
    mask, blocks = _masked(T, N, prompt, responses)
    info, _ = splash_attention_mask_info.process_mask(  # cached: tracing the kernel has called it
        splash_attention_mask.MultiHeadMask([mask] * heads), (blocks.block_q, blocks.block_kv)
    )
    assert info.block_mask is not None
    visited = heads * blocks.block_q * blocks.block_kv * int(np.count_nonzero(info.block_mask[0]))
    backward = {"splash_mqa_dkv": 5} if blocks.use_fused_bwd_kernel else {"splash_mqa_dkv": 4, "splash_mqa_dq": 3}
    return {name: count * visited for name, count in ({"splash_mqa_fwd": 2} | backward).items()}


def attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B N Kv h"],
    v: Float[Array, "B N Kv h"],
    valid: Bool[Array, "B N"],
    *,
    prompt: int = 0,
    responses: int = 1,
    interpret: bool = False,
) -> Float[Array, "B T H h"]:
    """Causal attention softmax(q k^T / sqrt(h)) v over the valid keys of the prompt and of the query's own response.

    Query head i reads key/value head i // (H / Kv). Scores are float32, the output has q's dtype. A query that sees no
    key gets an unspecified finite value: zeroing it would cost three passes over all outputs, and such outputs are
    never learned from. The output and its log-sum-exp are named "dot" for `jax.checkpoint`.

    Args:
      q: queries (scaled here and rounded back to their dtype): the last T of the N tokens, or all of them if there is
        more than one response.
      k: keys.
      v: values.
      valid: False for keys that no query sees.
      prompt: prompt length in tokens.
      responses: number of equally long responses after the prompt.
      interpret: run the kernels on any backend, slowly, for tests.
    """
    B, T, H, h = q.shape
    N, Kv = k.shape[1:3]
    mask, blocks = _masked(T, N, prompt, responses)
    queries, keys = mask.shape
    kernel = splash_attention_kernel.make_splash_mqa(
        splash_attention_mask.MultiHeadMask([mask] * (H // Kv)),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="dot",
        interpret=interpret,
    )
    # Queries see only keys with their own segment id, 1; invalid keys and the padding of the last block have id 0.
    ones, numbers = jnp.ones(queries, jnp.int32), jnp.pad(valid, ((0, 0), (0, keys - N))).astype(jnp.int32)

    def one_key_head(q: Array, k: Array, v: Array, numbers: Array) -> Any:
        return kernel(q, k, v, splash_attention_kernel.SegmentIds(ones, numbers))

    # vmap makes rows and key heads unordered grid dimensions, which the two cores of a chip can share.
    one_row = jax.vmap(one_key_head, (0, 0, 0, None))
    grouped = _padded(q * h**-0.5, queries).reshape(B, Kv, H // Kv, queries, -1)
    out = jax.vmap(one_row)(grouped, _padded(k, keys), _padded(v, keys), numbers)
    return jnp.swapaxes(out.reshape(B, H, queries, -1)[:, :, :T, :h], 1, 2)


def _padded(x: Float[Array, "B n H h"], tokens: int) -> Float[Array, "B H m w"]:
    """Move heads before tokens and zero-pad to `tokens` tokens and to whole lanes of the head dimension."""
    return jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, tokens - x.shape[1]), (0, -x.shape[3] % _LANES)))
