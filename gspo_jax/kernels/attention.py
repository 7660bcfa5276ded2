"""Softmax attention with grouped key/value heads (GQA) and float32 scores.

Plain XLA. The trainer, and prefill on TPU, use packed_attention.py, and a decode step that is fused on TPU
decode_attention_tpu.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels.kv import KV, Values, each, parts, take
from gspo_jax.kernels.scopes import at_most

_MASKED = -1e30
"""Masked score. Finite, so that the softmax of padding is not NaN."""

_MIN_CHUNK, _MAX_CHUNKS = 64, 8
"""Minimum queries per chunk, and maximum chunks, which are unrolled. Only one chunk's scores exist at a time."""


def causal_attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T Kv h"],
    v: Float[Array, "B T Kv h"],
    valid: Bool[Array, "B T"],
) -> Float[Array, "B T H h"]:
    """Return causal attention softmax(q k^T / sqrt(h)) v over the valid keys, for a prefill.

    Query head i reads key/value head i // (H / Kv). A query that sees no key gets 0.
    """
    B, T, H, h = q.shape
    Kv, heads = k.shape[2], H // k.shape[2]
    # One matmul for all query heads of a key head.
    q = jnp.moveaxis(q.reshape(B, T, Kv, heads, h), 1, 3)
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    size = max(_MIN_CHUNK, -(-T // _MAX_CHUNKS))
    chunks = [slice(start, min(start + size, T)) for start in range(0, T, size)]
    out = jnp.concatenate([_attend(q[:, :, :, rows], k, v, valid, rows) for rows in chunks], axis=3)
    return jnp.moveaxis(out, 3, 1).reshape(B, T, H, h)


def _attend(q: Array, k: Array, v: Array, valid: Array, rows: slice) -> Array:
    n, width = rows.stop, q.shape[-1]
    scores = _matmul_float32(_merged(q), jnp.swapaxes(k[:, :, :n], 2, 3)).reshape(*q.shape[:-1], n)
    seen = jnp.arange(n)[None] <= jnp.arange(rows.start, n)[:, None]
    seen = (seen[None] & valid[:, None, :n])[:, None, None]
    scores = jnp.where(seen, scores * width**-0.5, _MASKED)
    # With this floor, all probabilities of a fully masked row underflow to exactly 0.
    highest = jnp.maximum(scores.max(axis=-1, keepdims=True), _MASKED / 10)
    probs = jnp.exp(scores - highest)
    total = jnp.maximum(probs.sum(axis=-1, keepdims=True), 1e-30)
    out = _matmul_float32(_merged(probs.astype(v.dtype)), v[:, :, :n]).reshape(*probs.shape[:-1], -1)
    return (out / total).astype(q.dtype)


def _merged(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _matmul_float32(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


class _PartialSoftmax(NamedTuple):
    """Unnormalised softmax over some of the keys; all float32."""

    out: Float[Array, "*b h"]
    """Σ exp(score − highest) · value."""
    highest: Float[Array, "*b 1"]
    total: Float[Array, "*b 1"]
    """Σ exp(score − highest)."""

    def merge(self, other: "_PartialSoftmax") -> "_PartialSoftmax":
        highest = jnp.maximum(self.highest, other.highest)
        a, b = jnp.exp(self.highest - highest), jnp.exp(other.highest - highest)
        return _PartialSoftmax(self.out * a + other.out * b, highest, self.total * a + other.total * b)


def _partial_softmax(q: Float[Array, "*b T h"], k: KV, v: Values, seen: Array) -> _PartialSoftmax:
    """`seen` broadcasts to the scores [*b, T, N]."""
    (keys, key_scale), (values, value_scale) = parts(k), parts(k if v is None else v)
    scores = _of_columns(_matmul_float32(q, keys.astype(q.dtype).mT), key_scale)
    scores = jnp.where(seen, scores * q.shape[-1] ** -0.5, _MASKED)
    # As in `_attend`.
    highest = jnp.maximum(scores.max(axis=-1, keepdims=True), _MASKED / 10)
    probs = jnp.exp(scores - highest)
    out = _matmul_float32(_of_columns(probs, value_scale).astype(q.dtype), values.astype(q.dtype))
    return _PartialSoftmax(out, highest, probs.sum(axis=-1, keepdims=True))


def _of_columns(x: Float[Array, "*b T N"], scale: Float[Array, "*b N"] | None) -> Float[Array, "*b T N"]:
    return x if scale is None else x * scale[..., None, :]


@struct.dataclass
class SlotRows:
    """Mapping between slots and the P·G responses, and the prompt blocks that slots need, for all layers."""

    responses: Int[Array, " B"]
    """Response in each slot; P·G if inactive."""
    slots: Int[Array, " n"]
    """Slot of each response; meaningless if it has none."""
    blocks: Int[Array, " m"]
    """Prompt block ids, needed ones first."""
    needed: Int[Array, ""]

    @classmethod
    def of(cls, responses: Int[Array, " B"], active: Bool[Array, " B"], prompts: int, group_size: int) -> "SlotRows":
        """Build the mapping of slots that hold `responses` where `active`."""
        B, n = responses.shape[0], prompts * group_size
        count = n // (_prompts_per_block(B, prompts, group_size) * group_size)
        responses = jnp.where(active, responses, n)
        slots = (responses[None] == jnp.arange(n)[:, None]).argmax(axis=1).astype(jnp.int32)
        needed = (responses[None] // (n // count) == jnp.arange(count)[:, None]).any(axis=1)
        blocks = jnp.argsort(~needed, stable=True).astype(jnp.int32)
        return cls(responses, slots, blocks, needed.sum(dtype=jnp.int32))


def _prompts_per_block(slots: int, prompts: int, group_size: int) -> int:
    most = slots // group_size
    return next(w for w in range(min(prompts, max(1, most)), 0, -1) if prompts % w == 0)


def decode_attention(
    q: Float[Array, "B Q H h"],
    prompt_k: KV,
    prompt_v: Values,
    prompt_lengths: Int[Array, " P"],
    k: KV,
    v: Values,
    *,
    layer: Int[Array, ""],
    table: Int[Array, "B W"],
    ages: Int[Array, "B Q"],
    rows: SlotRows | None,
) -> Float[Array, "B Q H h"]:
    """Return the attention of Q queries per slot, each in one softmax over its prompt and own tokens up to its age.

    A group shares its prompt's keys. The own keys of a query are the first `ages` columns of its slot's pages. Only
    prompt blocks that some slot sees are read, and as many pages of every slot as the oldest has. A query of age 0 gets
    an undefined output.

    Args:
      prompt_k, prompt_v: of all layers, [L, P, Kv, S, h].
      k, v: of all layers, [L, M, Kv, C, h]. Without v and prompt_v, the keys are the values too.
      table: pages of each slot, in order; any number past its age.
      ages: own tokens that each query sees.
      rows: None if slot b holds response b, for all P·G responses.
    """
    B, Q, H, h = q.shape
    Kv = prompt_k.shape[2]
    q = jnp.moveaxis(q.reshape(B, Q, Kv, H // Kv, h), 1, 2).reshape(B, Kv, -1, h)  # a key head's queries adjacent
    if rows is None:
        own_k, own_v = each(lambda x: x[layer], prompt_k), each(lambda x: x[layer], prompt_v)
        prompt = _attend_prompts(q, own_k, own_v, prompt_lengths)
    else:
        prompt = _attend_prompt_blocks(q, prompt_k, prompt_v, prompt_lengths, layer, rows)
    out = _attend_own_tokens(prompt, q, k, v, layer, table, ages)
    mixed = (out.out / jnp.maximum(out.total, 1e-30)).astype(q.dtype)
    return jnp.moveaxis(mixed.reshape(B, Kv, Q, H // Kv, h), 2, 1).reshape(B, Q, H, h)


def _attend_prompts(q: Float[Array, "n Kv g h"], k: KV, v: Values, lengths: Array) -> _PartialSoftmax:
    """A group's queries form one matrix per key head."""
    P, Kv, S, h = k.shape
    n, _, g, _ = q.shape
    grid = jnp.swapaxes(q.reshape(P, n // P, Kv, g, h), 1, 2).reshape(P, Kv, -1, h)
    found = _partial_softmax(grid, k, v, jnp.arange(S)[None, None, None] < lengths[:, None, None, None])
    return jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(P, Kv, n // P, g, x.shape[-1]), 1, 2).reshape(n, Kv, g, x.shape[-1]), found
    )


def _attend_prompt_blocks(q: Array, k: KV, v: Values, lengths: Array, layer: Array, rows: SlotRows) -> _PartialSoftmax:
    B, Kv, g, h = q.shape
    _, P, _, S, _ = k.shape
    n, m = rows.slots.shape[0], rows.blocks.shape[0]
    prompts, responses = P // m, n // m

    def visit(i: Array | int, found: _PartialSoftmax) -> _PartialSoftmax:
        block = rows.blocks[i]
        at, size = (layer, block * prompts, 0, 0, 0), (1, prompts, Kv, S, h)
        own_k, own_v = each(lambda x: x[0], take(k, at, size)), each(lambda x: x[0], take(v, at, size))
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
    found: _PartialSoftmax, q: Array, k: KV, v: Values, layer: Array, table: Array, ages: Array
) -> _PartialSoftmax:
    C, W, (B, Q), queries = k.shape[3], table.shape[1], ages.shape, q.shape[2]
    ages = jnp.broadcast_to(ages[..., None], (B, Q, queries // Q)).reshape(B, queries)

    def visit(i: Array | int, found: _PartialSoftmax) -> _PartialSoftmax:
        pages = table[:, i]

        def own(x: Array) -> Array:
            return x.at[layer, pages].get(mode="clip")

        own_k, own_v = each(own, k), each(own, v)
        seen = i * C + jnp.arange(C)[None, None] < ages[..., None]
        return found.merge(_partial_softmax(q, own_k, own_v, seen[:, None]))

    with jax.named_scope(at_most(W)):
        return visit(0, found) if W == 1 else jax.lax.fori_loop(0, -(-ages.max() // C), visit, found)
