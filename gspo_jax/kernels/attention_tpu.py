"""Attention on TPU: JAX's splash kernels, forward and backward, over rows of a prompt and the responses to it.

Keys are read where they lie: neither are they repeated for the queries' heads, nor a prompt's for its responses. Blocks
of the mask in which no query sees a key are not visited, and of scores and mask no more exists than a block. In a mesh
the kernels want their own part of the rows and heads (`jax.shard_map`): the compiler cannot cut them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jaxtyping import Array, Bool, Float

_LANES = 128
_BLOCKS = (1024, 512, 256)
"""Queries and keys of a block, where a row fills it; else 128. Longer blocks cost fewer cycles per score, as scheduled
by the compiler for v5p (forward and backward, per 2^20 scores: 21300 at 512, 16300 at 1024), but leave less to skip."""
_COMPUTE_KEYS = 512
"""Keys whose scores exist at a time: all 1024 would be no faster, and take twice the VMEM."""
_MAX_DQ_PARTIALS = 8
"""A backward pass in one kernel writes dq once for every block of keys, to be added up: at most so many, for each is as
large as q. With more blocks dq has a kernel of its own, which computes the scores again (a quarter more cycles)."""


@dataclasses.dataclass(frozen=True)
class _Mask(splash_attention_mask.Mask):
    """A query sees what is before it of the prompt and of its own response, and itself.

    Never an array as a whole: the kernel computes its block from the places of queries and keys.
    """

    queries: int
    keys: int
    prompt: int
    """Tokens of the prompt."""
    length: int
    """Tokens of a response."""

    @property
    def shape(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.queries, self.keys

    @property
    def q_sequence(self) -> np.ndarray:
        """The queries' places."""
        return np.arange(self.queries, dtype=np.int32)

    def mask_function(self, query: Any, key: Any) -> Any:
        """Whether queries see keys, by their places: NumPy's arrays, or a kernel's.

        Only the two comparisons are made for every score. What depends on the query or the key alone is not.
        """
        own = query - (query - self.prompt) % self.length  # where the response begins
        return (key <= query) & (key + (key < self.prompt) * self.keys >= own)

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        """A block of it, to see whether all or nothing is seen there."""
        queries, keys = block
        return self.mask_function(self.q_sequence[queries, None], np.arange(keys.start, keys.stop)[None])


def _block(tokens: int, longest: int) -> int:
    """Tokens per block: the most that are no more than `longest` and lengthen a row by an eighth at most."""
    return next((b for b in _BLOCKS if b <= longest and -tokens % b <= tokens // 8), _LANES)


def _block_sizes(queries: int, keys: int, longest: int) -> splash_attention_kernel.BlockSizes:
    """Of rows with so many queries and keys, of which `longest` follow each other."""
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
    """softmax(q k^T / sqrt(h)) v over the valid keys of the prompt and of the own response, at or before each query.

    Query head i reads key/value head i // (H / Kv). Scores are float32, the output has q's dtype. A query that sees no
    key gets something finite: to make it 0 costs three passes over all outputs, and nobody learns from it. The output
    and its log-sum of exponentials are named "dot" for `jax.checkpoint`.

    Args:
      q: queries, scaled and rounded again to their dtype; the last T of N tokens, all of them if there are more
        responses than one.
      k: keys.
      v: values.
      valid: False for keys that no query sees.
      prompt: tokens of the prompt.
      responses: segments of equal length after it.
      interpret: runs the kernels on any backend, slowly, for tests.
    """
    B, T, H, h = q.shape
    N, Kv = k.shape[1:3]
    length = (N - prompt) // responses
    blocks = _block_sizes(T, N, N if responses == 1 else length)
    queries, keys = (n + -n % b for n, b in ((T, blocks.block_q), (N, blocks.block_kv)))
    if responses == 1:
        mask = splash_attention_mask.CausalMask((queries, keys), offset=N - T)
    else:
        mask = _Mask(queries, keys, prompt, length)
    kernel = splash_attention_kernel.make_splash_mqa(
        splash_attention_mask.MultiHeadMask([mask] * (H // Kv)),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="dot",
        interpret=interpret,
    )
    # A key is seen by queries of the same number: a hole, and what fills up the last block, by none.
    ones, numbers = jnp.ones(queries, jnp.int32), jnp.pad(valid, ((0, 0), (0, keys - N))).astype(jnp.int32)

    def one_key_head(q: Array, k: Array, v: Array, numbers: Array) -> Any:
        return kernel(q, k, v, splash_attention_kernel.SegmentIds(ones, numbers))

    # Rows and key heads are grid dimensions without an order, which the two cores of a chip can share.
    one_row = jax.vmap(one_key_head, (0, 0, 0, None))
    grouped = _padded(q * h**-0.5, queries).reshape(B, Kv, H // Kv, queries, -1)
    out = jax.vmap(one_row)(grouped, _padded(k, keys), _padded(v, keys), numbers)
    return jnp.swapaxes(out.reshape(B, H, queries, -1)[:, :, :T, :h], 1, 2)


def _padded(x: Float[Array, "B n H h"], tokens: int) -> Float[Array, "B H m w"]:
    """Heads first, with zeros up to `tokens` and up to whole lanes of a head."""
    return jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, tokens - x.shape[1]), (0, -x.shape[3] % _LANES)))
