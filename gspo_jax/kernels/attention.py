"""Softmax attention with grouped key/value heads (GQA) and float32 scores.

On TPU, prefill uses the kernel of attention_tpu.py, and decode attention over a slot's own tokens that of
decode_attention_tpu.py. Everything else is plain XLA. The trainer's attention is in packed_attention.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels import attention_tpu, decode_attention_tpu
from gspo_jax.kernels.backend import platform
from gspo_jax.kernels.kv import KV, each, parts, take
from gspo_jax.kernels.scopes import at_most

_MASKED = -1e30
"""Masked score; finite, so that the softmax of a row without a visible key (padding) is finite instead of NaN."""


_TPU_QUERIES = 32
"""Queries per slot, most of them of no use, in a block of prompts on TPU: the operations of one more block would take
longer to begin than some more prompts and queries take to compute."""
_MIN_CHUNK, _MAX_CHUNKS = 64, 8
"""Minimum queries per chunk, and maximum number of chunks: scores exist for one chunk at a time, and each chunk is
unrolled into its own code. Long rows therefore hold one eighth of the [T, N] scores at a time."""


def causal_attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T Kv h"],
    v: Float[Array, "B T Kv h"],
    valid: Bool[Array, "B T"],
) -> Float[Array, "B T H h"]:
    """Causal attention softmax(q k^T / sqrt(h)) v over the valid keys, as a prefill needs it.

    Query head i reads key/value head i // (H / Kv). The output has q's dtype. A query that sees no key gets 0, on TPU
    an unspecified finite value. Off TPU, one chunk of queries at a time attends to the keys up to its end.
    """
    if platform() == "tpu":
        return attention_tpu.attention(q, k, v, valid)
    B, T, H, h = q.shape
    Kv, heads = k.shape[2], H // k.shape[2]
    # All query heads that read one key head are folded into one matmul.
    q = jnp.moveaxis(q.reshape(B, T, Kv, heads, h), 1, 3)
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    size = max(_MIN_CHUNK, -(-T // _MAX_CHUNKS))
    chunks = [slice(start, min(start + size, T)) for start in range(0, T, size)]
    out = jnp.concatenate([_attend(q[:, :, :, rows], k, v, valid, rows) for rows in chunks], axis=3)
    return jnp.moveaxis(out, 3, 1).reshape(B, T, H, h)


def _attend(q: Array, k: Array, v: Array, valid: Array, rows: slice) -> Array:
    """The attention [B, Kv, g, t, h] of the queries in `rows` over all keys up to the last of them."""
    n, width = rows.stop, q.shape[-1]
    scores = _matmul_float32(_merged(q), jnp.swapaxes(k[:, :, :n], 2, 3)).reshape(*q.shape[:-1], n)
    seen = jnp.arange(n)[None] <= jnp.arange(rows.start, n)[:, None]
    seen = (seen[None] & valid[:, None, :n])[:, None, None]
    scores = jnp.where(seen, scores * width**-0.5, _MASKED)
    # For a row with only masked scores this floor makes all probabilities underflow to exactly 0.
    highest = jnp.maximum(scores.max(axis=-1, keepdims=True), _MASKED / 10)
    probs = jnp.exp(scores - highest)
    total = jnp.maximum(probs.sum(axis=-1, keepdims=True), 1e-30)
    out = _matmul_float32(_merged(probs.astype(v.dtype)), v[:, :, :n]).reshape(*probs.shape[:-1], -1)
    return (out / total).astype(q.dtype)


def _merged(x: Array) -> Array:
    """Merge heads and tokens: [B, Kv, g, t, m] -> [B, Kv, g t, m]."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _matmul_float32(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


class _PartialSoftmax(NamedTuple):
    """Unnormalised softmax over some of the keys, which can be merged with those over other keys; all float32."""

    out: Float[Array, "*b h"]
    """Σ exp(score − highest) · value."""
    highest: Float[Array, "*b 1"]
    """Maximum score."""
    total: Float[Array, "*b 1"]
    """Σ exp(score − highest)."""

    def merge(self, other: "_PartialSoftmax") -> "_PartialSoftmax":
        """Return the softmax over the keys of both."""
        highest = jnp.maximum(self.highest, other.highest)
        a, b = jnp.exp(self.highest - highest), jnp.exp(other.highest - highest)
        return _PartialSoftmax(self.out * a + other.out * b, highest, self.total * a + other.total * b)


def _partial_softmax(q: Float[Array, "*b T h"], k: KV, v: KV, seen: Array) -> _PartialSoftmax:
    """Softmax of queries over the keys [*b, N, h] that they see; `seen` broadcasts to the scores' shape [*b, T, N]."""
    (keys, key_scale), (values, value_scale) = parts(k), parts(v)
    scores = _of_columns(_matmul_float32(q, keys.astype(q.dtype).mT), key_scale)
    scores = jnp.where(seen, scores * q.shape[-1] ** -0.5, _MASKED)
    # For a query with only masked scores this floor makes all probabilities underflow to exactly 0.
    highest = jnp.maximum(scores.max(axis=-1, keepdims=True), _MASKED / 10)
    probs = jnp.exp(scores - highest)
    out = _matmul_float32(_of_columns(probs, value_scale).astype(q.dtype), values.astype(q.dtype))
    return _PartialSoftmax(out, highest, probs.sum(axis=-1, keepdims=True))


def _of_columns(x: Float[Array, "*b T N"], scale: Float[Array, "*b N"] | None) -> Float[Array, "*b T N"]:
    """x times the scale of each column; None: 1."""
    return x if scale is None else x * scale[..., None, :]


@struct.dataclass
class Rows:
    """Mapping between slots and the P·G responses, and the prompts that the slots need; the same for all layers.

    Prompts are read in blocks, sized so that the slots could hold the whole groups of a block's prompts, on TPU
    `_TPU_QUERIES` times as many.
    """

    responses: Int[Array, " B"]
    """Response in each slot; P·G for an inactive slot."""
    slots: Int[Array, " n"]
    """Slot of each response; meaningless for a response that is in no slot."""
    blocks: Int[Array, " m"]
    """Ids of the prompt blocks, those needed by a slot first."""
    needed: Int[Array, ""]
    """Number of blocks needed by a slot."""

    @classmethod
    def of(cls, responses: Int[Array, " B"], active: Bool[Array, " B"], prompts: int, group_size: int) -> "Rows":
        """Build the mapping for slots that hold these responses where they are active."""
        B, n = responses.shape[0], prompts * group_size
        count = n // (_prompts_per_block(B, prompts, group_size) * group_size)
        responses = jnp.where(active, responses, n)
        slots = (responses[None] == jnp.arange(n)[:, None]).argmax(axis=1).astype(jnp.int32)
        needed = (responses[None] // (n // count) == jnp.arange(count)[:, None]).any(axis=1)
        blocks = jnp.argsort(~needed, stable=True).astype(jnp.int32)
        return cls(responses, slots, blocks, needed.sum(dtype=jnp.int32))


def _prompts_per_block(slots: int, prompts: int, group_size: int) -> int:
    most = slots * (_TPU_QUERIES if platform() == "tpu" else 1) // group_size
    return next(w for w in range(min(prompts, max(1, most)), 0, -1) if prompts % w == 0)


def decode_attention(
    q: Float[Array, "B H h"],
    prompt_k: KV,
    prompt_v: KV,
    prompt_lengths: Int[Array, " P"],
    k: KV,
    v: KV,
    *,
    layer: Int[Array, ""],
    step: Int[Array, ""],
    ages: Int[Array, " B"],
    rows: Rows | None,
) -> Float[Array, "B H h"]:
    """Decode attention: one query per slot and one softmax over the keys of its prompt and of its own tokens.

    A prompt's keys are stored once for its group. A slot's own keys lie in a ring of N segments of C columns; this
    step's column is `step` modulo N·C, and a slot sees its newest `ages` columns. The ring may have room for more slots
    than there are queries. Only the prompt blocks and ring segments that some slot sees are read. The output of a slot
    of age 0 is undefined.

    Args:
      q: queries.
      prompt_k: keys of the prompts in all layers, of which `layer` is read, [L, P, Kv, S, h].
      prompt_v: values of the prompts.
      prompt_lengths: number of valid tokens of each prompt, of the S that fit.
      k: keys of the slots' own tokens, [L, N, R, Kv, C, h].
      v: values of the slots' own tokens.
      layer: index of the current layer.
      step: number of columns written before this step.
      ages: number of own tokens of each slot, this step's included.
      rows: mapping between slots and responses; None if slot b holds response b, for all P·G responses.
    """
    B, H, h = q.shape
    Kv = prompt_k.shape[2]
    q = q.reshape(B, Kv, H // Kv, h)
    if rows is None:
        own_k, own_v = (each(lambda x: x[layer], kv) for kv in (prompt_k, prompt_v))
        prompt = _attend_prompts(q, own_k, own_v, prompt_lengths)
    else:
        prompt = _attend_prompt_blocks(q, prompt_k, prompt_v, prompt_lengths, layer, rows)
    if platform() == "tpu":
        out = prompt.merge(
            _PartialSoftmax(*decode_attention_tpu.ring_softmax(q, k, v, layer=layer, step=step, ages=ages))
        )
    else:
        out = _attend_own_tokens(prompt, q, k, v, layer, step, ages)
    return (out.out / jnp.maximum(out.total, 1e-30)).astype(q.dtype).reshape(B, H, h)


def _attend_prompts(q: Float[Array, "n Kv g h"], k: KV, v: KV, lengths: Array) -> _PartialSoftmax:
    """Attend from the queries of all responses to some prompts, in order, to these prompts.

    The queries of a group that share a key head form one matrix.
    """
    P, Kv, S, h = k.shape
    n, _, g, _ = q.shape
    grid = jnp.swapaxes(q.reshape(P, n // P, Kv, g, h), 1, 2).reshape(P, Kv, -1, h)
    found = _partial_softmax(grid, k, v, jnp.arange(S)[None, None, None] < lengths[:, None, None, None])
    return jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(P, Kv, n // P, g, x.shape[-1]), 1, 2).reshape(n, Kv, g, x.shape[-1]), found
    )


def _attend_prompt_blocks(q: Array, k: KV, v: KV, lengths: Array, layer: Array, rows: Rows) -> _PartialSoftmax:
    B, Kv, g, h = q.shape
    _, P, _, S, _ = k.shape
    n, m = rows.slots.shape[0], rows.blocks.shape[0]
    prompts, responses = P // m, n // m

    def visit(i: Array | int, found: _PartialSoftmax) -> _PartialSoftmax:
        block = rows.blocks[i]
        at, size = (layer, block * prompts, 0, 0, 0), (1, prompts, Kv, S, h)
        own_k, own_v = (each(lambda x: x[0], take(kv, at, size)) for kv in (k, v))
        first = block * responses
        slots = jax.lax.dynamic_slice_in_dim(rows.slots, first, responses)
        here = _attend_prompts(q[slots], own_k, own_v, jax.lax.dynamic_slice_in_dim(lengths, block * prompts, prompts))
        at = rows.responses - first
        in_block = ((at >= 0) & (at < responses))[:, None, None, None]
        return jax.tree.map(lambda x, new: jnp.where(in_block, new.at[at].get(mode="clip"), x), found, here)

    none = jnp.full((B, Kv, g, 1), _MASKED / 10)
    found = _PartialSoftmax(jnp.zeros((B, Kv, g, h)), none, jnp.zeros_like(none))
    with jax.named_scope(at_most(m)):
        return visit(0, found) if m == 1 else jax.lax.fori_loop(0, rows.needed, visit, found)


def _attend_own_tokens(
    found: _PartialSoftmax, q: Array, k: KV, v: KV, layer: Array, step: Array, ages: Array
) -> _PartialSoftmax:
    """Merge the softmax over each slot's own tokens into `found`, one ring segment at a time."""
    _, N, _, Kv, C, h = k.shape
    B = q.shape[0]
    first = jnp.maximum(step + 1 - ages.max(), 0) // C
    count = jnp.minimum(step // C - first + 1, N)

    def visit(i: Array | int, found: _PartialSoftmax) -> _PartialSoftmax:
        segment = (first + i) % N
        at, size = (layer, segment, 0, 0, 0, 0), (1, 1, B, Kv, C, h)
        own_k, own_v = (each(lambda x: x[0, 0], take(kv, at, size)) for kv in (k, v))
        age = (step - segment * C - jnp.arange(C)) % (N * C)
        seen = age[None, None, None] < ages[:, None, None, None]
        return found.merge(_partial_softmax(q, own_k, own_v, seen))

    with jax.named_scope(at_most(N)):
        return visit(0, found) if N == 1 else jax.lax.fori_loop(0, count, visit, found)
