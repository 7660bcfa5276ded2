"""Attention over packed rows: prompts, each directly followed by its responses, then padding.

The TPU kernels (packed_attention_tpu.py) and the XLA loops elsewhere visit only blocks with visible keys. A GPU would
launch a loop's small steps one by one: it uses cuDNN attention while a mask over all pairs of a row's tokens is small
enough.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels import packed_attention_tpu
from gspo_jax.kernels.backend import platform, varying_like

_MASKED = -1e30
"""Masked score. Finite, so that unused results are too."""

_BLOCK = 64
"""Queries, and keys, per block. Longer blocks cost less per score but compute more unneeded ones."""

_MASK_ENTRIES = 2**28
"""Maximum entries of cuDNN's mask, two bytes each: 0.5 GiB, one row of 16384 tokens."""
_CUDNN_HEAD = 128
"""Maximum head size of cuDNN attention on Ampere. Later GPUs take more."""


class Spans(NamedTuple):
    """The keys that each token of a packed row sees: its prompt's, and its own segment's up to itself."""

    prompt_start: Int[Array, "B N"]
    prompt_end: Int[Array, "B N"]
    """Response tokens see [prompt_start, prompt_end). Equal for prompt tokens and padding."""
    own_start: Int[Array, "B N"]
    """Token i sees [own_start, i]. For padding i + 1, so none."""

    @classmethod
    def of_texts(cls, valid: Bool[Array, "B N"]) -> "Spans":
        """Return those of rows with one text each, the first tokens of a row."""
        token = jnp.arange(valid.shape[1], dtype=jnp.int32)[None]
        none = jnp.zeros(valid.shape, jnp.int32)
        return cls(none, none, jnp.where(valid, none, token + 1))

    @property
    def valid(self) -> Bool[Array, "B N"]:
        """False for padding."""
        return self.own_start <= jnp.arange(self.own_start.shape[1])[None]

    @property
    def positions(self) -> Int[Array, "B N"]:
        """Position in the text, a response continuing its prompt; 0 for padding."""
        own = jnp.arange(self.own_start.shape[1], dtype=self.own_start.dtype)[None] - self.own_start
        return jnp.where(own < 0, 0, self.prompt_end - self.prompt_start + own)

    @property
    def seen(self) -> Bool[Array, "B N N"]:
        """True where the second axis's token sees the third's."""
        start, end, own = (x[:, :, None] for x in self)
        token = jnp.arange(own.shape[1])
        queries, keys = token[None, :, None], token[None, None]
        return ((start <= keys) & (keys < end)) | ((own <= keys) & (keys <= queries))


def packed_attention(
    q: Float[Array, "B N H h"], k: Float[Array, "B N Kv h"], v: Float[Array, "B N Kv h"], spans: Spans
) -> Float[Array, "B N H h"]:
    """Return attention softmax(q k^T / sqrt(h)) v over the keys that each token sees.

    Query head i reads key/value head i // (H / Kv). Scores are float32 and recomputed in the backward pass. Padding
    gets 0, or on TPU and GPU an unspecified finite value, and gets and gives zero gradient. To cuDNN a token that sees
    no key sees all: there the gradient of padding's output must be zero, as when no loss reads it. For `jax.checkpoint`
    the output is named "dot", and so, except with cuDNN, is its log-sum-exp.
    """
    arrays = (q, k, v, *spans)
    q, k, v, *own = (varying_like(x, *arrays) for x in arrays)
    spans = Spans(*own)
    if platform() == "tpu":
        return packed_attention_tpu.attention(q, k, v, spans)
    if platform() == "gpu" and _fits_cudnn(q):
        return masked_attention(q, k, v, spans, implementation="cudnn")
    return _attend(q, k, v, spans)


def _fits_cudnn(q: Float[Array, "B N H h"]) -> bool:
    B, N, _, h = q.shape
    is_half = q.dtype in (jnp.bfloat16, jnp.float16)
    return is_half and h % 8 == 0 and h <= _CUDNN_HEAD and N % 2 == 0 and B * N * N <= _MASK_ENTRIES


def masked_attention(
    q: Float[Array, "B N H h"],
    k: Float[Array, "B N Kv h"],
    v: Float[Array, "B N Kv h"],
    spans: Spans,
    *,
    implementation: Literal["cudnn", "xla"],
) -> Float[Array, "B N H h"]:
    """Compute `packed_attention` by `jax.nn.dot_product_attention` with a mask over all pairs."""
    out = jax.nn.dot_product_attention(q, k, v, mask=spans.seen[:, None], implementation=implementation)
    return checkpoint_name(out, "dot")


class _Block(NamedTuple):
    """Up to `_BLOCK` consecutive queries of one segment, and the keys that they see, in blocks of `_BLOCK`.

    Rows lie end to end. Seen keys count from the prompt's first: `length` of the prompt, then the segment's own. A
    query matrix has `_BLOCK` · H / Kv rows, a token's adjacent. Rows past the last query belong to other segments.
    """

    first: Array
    """First query's token."""
    size: Array
    prompt: Array
    """Prompt's first token."""
    length: Array
    own: Array
    """Segment's first token."""

    @property
    def key_blocks(self) -> Array:
        return (self.length + self.first - self.own + self.size + _BLOCK - 1) // _BLOCK

    def take(self, x: Float[Array, "Kv M gw"], width: int) -> Float[Array, "Kv n w"]:
        return jax.lax.dynamic_slice_in_dim(x, self.first, _BLOCK, 1).reshape(x.shape[0], -1, width)

    def put(self, x: Float[Array, "Kv M gw"], rows: Float[Array, "Kv n w"]) -> Float[Array, "Kv M gw"]:
        """Write the queries' rows of x, and zeros past them, which later blocks overwrite."""
        rows = jnp.where(self.is_query(rows.shape[1]), rows, 0).astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(x, rows.reshape(x.shape[0], _BLOCK, -1), self.first, 1)

    def is_query(self, rows: int) -> Bool[Array, "1 n 1"]:
        return (jnp.arange(rows) // (rows // _BLOCK) < self.size).reshape(1, rows, 1)

    def keys(self, x: Float[Array, "Kv M h"], c: Array) -> Float[Array, "Kv s h"]:
        in_prompt, *starts = self._parts(c)
        return jnp.where(in_prompt, *(jax.lax.dynamic_slice_in_dim(x, start, _BLOCK, 1) for start in starts))

    def add_keys(self, x: Float[Array, "Kv M h"], c: Array, y: Float[Array, "Kv s h"]) -> Float[Array, "Kv M h"]:
        in_prompt, *starts = self._parts(c)
        for start, part in zip(starts, (in_prompt, ~in_prompt), strict=True):
            there = jax.lax.dynamic_slice_in_dim(x, start, _BLOCK, 1) + jnp.where(part, y, 0)
            x = jax.lax.dynamic_update_slice_in_dim(x, there, start, 1)
        return x

    def _parts(self, c: Array) -> tuple[Bool[Array, "1 s 1"], Array, Array]:
        """Return which keys of block c are the prompt's, and the block's start counted from each part.

        Both lie inside the row, since the prompt comes first.
        """
        at = c * _BLOCK
        in_prompt = (at + jnp.arange(_BLOCK) < self.length).reshape(1, _BLOCK, 1)
        return in_prompt, self.prompt + at, self.own - self.length + at

    def scores(self, queries: Float[Array, "Kv n h"], keys: Float[Array, "Kv s h"], c: Array) -> Float[Array, "Kv n s"]:
        """Return scores with block c, masked where a key is not seen."""
        rows = queries.shape[1]
        last = self.length + self.first - self.own + jnp.arange(rows) // (rows // _BLOCK)
        seen = c * _BLOCK + jnp.arange(_BLOCK)[None] <= last[:, None]
        return jnp.where(seen[None], _product("knh,ksh->kns", queries, keys) * queries.shape[-1] ** -0.5, _MASKED)


def _product(how: str, a: Array, b: Array) -> Array:
    return jnp.einsum(how, a, b, preferred_element_type=_sum_type(a))


def _sum_type(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _for_blocks(spans: Spans, one: Callable[[_Block, Any], Any], carry: Any) -> Any:
    """Fold carry = one(block, carry) over all query blocks, in token order."""
    B, N = spans.own_start.shape
    rows = (jnp.arange(B, dtype=jnp.int32) * N)[:, None]
    prompt, own, length = (
        x.reshape(B * N)
        for x in (spans.prompt_start + rows, spans.own_start + rows, spans.prompt_end - spans.prompt_start)
    )
    done = jnp.arange(B * N, dtype=jnp.int32) - own
    begins = (done >= 0) & (done % _BLOCK == 0)
    firsts = jnp.flatnonzero(begins, size=B * N, fill_value=0).astype(jnp.int32)
    segments = jnp.pad(own, (0, _BLOCK), constant_values=-1)

    def visit(n: Array, carry: Any) -> Any:
        first = firsts[n]
        size = (jax.lax.dynamic_slice_in_dim(segments, first, _BLOCK) == own[first]).sum(dtype=jnp.int32)
        return one(_Block(first, size, prompt[first], length[first], own[first]), carry)

    return jax.lax.fori_loop(0, begins.sum(dtype=jnp.int32), visit, carry)


def _by_head(x: Float[Array, "B N H w"], heads: int) -> Float[Array, "Kv M gw"]:
    """Lay rows end to end per key head, with room for a block at the last token."""
    B, N = x.shape[:2]
    return jnp.pad(jnp.swapaxes(x.reshape(B * N, heads, -1), 0, 1), ((0, 0), (0, _BLOCK), (0, 0)))


def _by_token(x: Float[Array, "Kv M gw"], like: Float[Array, "B N H w"]) -> Float[Array, "B N H w"]:
    """Invert `_by_head`."""
    B, N = like.shape[:2]
    return jnp.swapaxes(x[:, : B * N], 0, 1).reshape(like.shape).astype(like.dtype)


@jax.custom_vjp
def _attend(
    q: Float[Array, "B N H h"], k: Float[Array, "B N Kv h"], v: Float[Array, "B N Kv h"], spans: Spans
) -> Float[Array, "B N H h"]:
    return _attend_forward(q, k, v, spans)[0]


class _Softmax(NamedTuple):
    """Unnormalised softmax over the keys visited so far."""

    out: Float[Array, "Kv n h"]
    """Σ exp(score − highest) · value."""
    highest: Float[Array, "Kv n 1"]
    total: Float[Array, "Kv n 1"]
    """Σ exp(score − highest)."""


def _attend_forward(q: Array, k: Array, v: Array, spans: Spans) -> tuple[Array, Any]:
    (*_, H, h), Kv = q.shape, k.shape[2]
    queries, keys, values = (_by_head(x, Kv) for x in (q, k, v))
    rows, dtype = _BLOCK * H // Kv, _sum_type(q)

    def one(block: _Block, found: tuple[Array, Array]) -> tuple[Array, Array]:
        own = block.take(queries, h)

        def visit(c: Array, so_far: _Softmax) -> _Softmax:
            scores = block.scores(own, block.keys(keys, c), c)
            # Every query sees the first key: no maximum is of masked scores alone.
            highest = jnp.maximum(so_far.highest, scores.max(axis=-1, keepdims=True))
            probs, kept = jnp.exp(scores - highest), jnp.exp(so_far.highest - highest)
            out = _product("kns,ksh->knh", probs.astype(v.dtype), block.keys(values, c))
            total = probs.sum(axis=-1, keepdims=True)
            return _Softmax(so_far.out * kept + out, highest, so_far.total * kept + total)

        zero = varying_like(jnp.zeros((Kv, rows, 1), dtype), q)
        nothing = _Softmax(varying_like(jnp.zeros((Kv, rows, h), dtype), q), zero + _MASKED, zero)
        softmax = jax.lax.fori_loop(0, block.key_blocks, visit, nothing)
        out, log_sum = found
        return (
            block.put(out, softmax.out / softmax.total),
            block.put(log_sum, softmax.highest + jnp.log(softmax.total)),
        )

    found = jnp.zeros_like(queries), varying_like(jnp.zeros((*queries.shape[:2], H // Kv), dtype), q)
    out, log_sum = _for_blocks(spans, one, found)
    out, log_sum = (checkpoint_name(x, "dot") for x in (_by_token(out, q), log_sum))
    return out, (q, k, v, spans, out, log_sum)


def _attend_backward(residuals: Any, grads: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, spans, out, log_sum = residuals
    h, Kv, dtype = q.shape[3], k.shape[2], _sum_type(q)
    delta = (grads.astype(dtype) * out.astype(dtype)).sum(axis=-1, keepdims=True)
    queries, keys, values, d_out, delta = (_by_head(x, Kv) for x in (q, k, v, grads, delta))

    def one(block: _Block, found: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        own, do = block.take(queries, h), block.take(d_out, h)
        own_delta, sums = block.take(delta, 1), block.take(log_sum, 1)
        # Probability 0 past the last query.
        sums = jnp.where(block.is_query(sums.shape[1]), sums, -_MASKED)

        def visit(c: Array, found: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk, dv = found
            own_keys = block.keys(keys, c)
            probs = jnp.exp(block.scores(own, own_keys, c) - sums)
            dp = _product("knh,ksh->kns", do, block.keys(values, c))
            ds = (probs * (dp - own_delta) * h**-0.5).astype(q.dtype)
            return (
                dq + _product("kns,ksh->knh", ds, own_keys),
                block.add_keys(dk, c, _product("kns,knh->ksh", ds, own)),
                block.add_keys(dv, c, _product("kns,knh->ksh", probs.astype(q.dtype), do)),
            )

        dq, dk, dv = found
        own_dq = varying_like(jnp.zeros(own.shape, dtype), q)
        own_dq, dk, dv = jax.lax.fori_loop(0, block.key_blocks, visit, (own_dq, dk, dv))
        return block.put(dq, own_dq), dk, dv

    found = (jnp.zeros_like(queries), *(varying_like(jnp.zeros(x.shape, dtype), q) for x in (keys, values)))
    dq, dk, dv = _for_blocks(spans, one, found)
    return _by_token(dq, q), _by_token(dk, k), _by_token(dv, v), None


_attend.defvjp(_attend_forward, _attend_backward)
