"""Softmax attention with grouped key/value heads (GQA). Every backend runs the plain XLA form; scores are float32."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

_MASKED = -1e30
"""Finite, so that a row with no visible key (padding) softmaxes to something finite instead of NaN."""


_CHUNK, _CHUNKS = 64, 8
"""Queries whose scores exist at once: at least so many, and at most so many chunks of them, as each is code of its own.
An eighth of the [T, N] scores is therefore what long rows take."""


def causal_attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B N Kv h"],
    v: Float[Array, "B N Kv h"],
    valid: Bool[Array, "B N"],
) -> Float[Array, "B T H h"]:
    """softmax(q k^T / sqrt(h)) v over the valid keys at or before each query; the queries are the last T of N tokens.

    Query head i reads key/value head i // (H / Kv). The output has q's dtype. A chunk of queries at a time meets the
    keys up to its end, and the backward pass computes the scores again: of the [T, N] scores nothing is kept. A query
    that sees no key gets 0.
    """
    B, T, H, h = q.shape
    Kv, heads = k.shape[2], H // k.shape[2]
    # Each key head with all queries that read it is one matrix.
    q = jnp.moveaxis(q.reshape(B, T, Kv, heads, h), 1, 3)
    out = _attend(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), valid)
    return jnp.moveaxis(out, 3, 1).reshape(B, T, H, h)


def _chunks(T: int, N: int) -> Iterator[tuple[slice, int]]:
    """Queries of each chunk, and how many of the keys they may see."""
    size = max(_CHUNK, -(-T // _CHUNKS))
    for start in range(0, T, size):
        end = min(start + size, T)
        yield slice(start, end), N - T + end


def _scores(q: Array, k: Array, valid: Array) -> Array:
    """[B, Kv, heads, t, n] float32: queries are the last t of the n keys, what they may not see is masked."""
    B, Kv, heads, t, h = q.shape
    n = k.shape[2]
    scores = _float32(_rows(q), jnp.swapaxes(k, 2, 3))
    seen = jnp.arange(n)[None] <= n - t + jnp.arange(t)[:, None]
    seen = (seen[None] & valid[:, None]).reshape(B, 1, 1, t, n)
    return jnp.where(seen, scores.reshape(B, Kv, heads, t, n) * h**-0.5, _MASKED)


def _rows(x: Array) -> Array:
    """[B, Kv, heads, t, m] -> [B, Kv, heads t, m]."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _float32(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _attend(
    q: Float[Array, "B Kv g T h"],
    k: Float[Array, "B Kv N h"],
    v: Float[Array, "B Kv N h"],
    valid: Bool[Array, "B N"],
) -> Float[Array, "B Kv g T h"]:
    return _attend_forward(q, k, v, valid)[0]


def _attend_forward(q: Array, k: Array, v: Array, valid: Array) -> tuple[Array, tuple[Array, ...]]:
    outs, log_sums = [], []
    for rows, n in _chunks(q.shape[3], k.shape[2]):
        scores = _scores(q[:, :, :, rows], k[:, :, :n], valid[:, :n])
        # A row that sees nothing has only masked scores: below this its probabilities are all 0, and stay so.
        highest = jnp.maximum(scores.max(axis=-1, keepdims=True), _MASKED / 10)
        probs = jnp.exp(scores - highest)
        total = jnp.maximum(probs.sum(axis=-1, keepdims=True), 1e-30)
        out = _float32(_rows(probs.astype(v.dtype)), v[:, :, :n]).reshape(*probs.shape[:-1], -1)
        outs.append((out / total).astype(q.dtype))
        log_sums.append(highest + jnp.log(total))
    out, log_sum = (checkpoint_name(jnp.concatenate(x, axis=3), "dot") for x in (outs, log_sums))
    return out, (q, k, v, valid, out, log_sum)


def _attend_backward(kept: tuple[Array, ...], grads: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, valid, out, log_sum = kept
    delta = (grads.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    dk, dv = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dq = []
    for rows, n in _chunks(q.shape[3], k.shape[2]):
        own, do = q[:, :, :, rows], grads[:, :, :, rows]
        probs = jnp.exp(_scores(own, k[:, :, :n], valid[:, :n]) - log_sum[:, :, :, rows])
        dp = _float32(_rows(do), jnp.swapaxes(v[:, :, :n], 2, 3)).reshape(probs.shape)
        ds = _rows((probs * (dp - delta[:, :, :, rows]) * q.shape[-1] ** -0.5).astype(q.dtype))
        probs = _rows(probs.astype(q.dtype))
        dq.append(_float32(ds, k[:, :, :n]).reshape(own.shape))
        dk = dk.at[:, :, :n].add(_float32(jnp.swapaxes(ds, 2, 3), _rows(own)))
        dv = dv.at[:, :, :n].add(_float32(jnp.swapaxes(probs, 2, 3), _rows(do)))
    return jnp.concatenate(dq, axis=3).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)


def segment_attention(
    q: Float[Array, "B N H h"],
    k: Float[Array, "B N Kv h"],
    v: Float[Array, "B N Kv h"],
    valid: Bool[Array, "B N"],
    prompt: int,
    responses: int,
) -> Float[Array, "B N H h"]:
    """Causal attention over rows of a prompt (`prompt` tokens) and `responses` responses to it, of equal lengths.

    Every response sees the valid tokens of the prompt and its own; one response goes on as one text, plain causal.
    """
    B, N = valid.shape
    S, G, T = prompt, responses, (N - prompt) // responses
    if G == 1:
        return causal_attention(q, k, v, valid)

    def joined(x: Array) -> Array:
        """[B G, S + T, ...]: each response after its prompt."""
        return jnp.concatenate([jnp.repeat(x[:, :S], G, axis=0), x[:, S:].reshape(B * G, T, *x.shape[2:])], axis=1)

    of_prompt = causal_attention(q[:, :S], k[:, :S], v[:, :S], valid[:, :S])
    own = causal_attention(q[:, S:].reshape(B * G, T, *q.shape[2:]), joined(k), joined(v), joined(valid))
    return jnp.concatenate([of_prompt, own.reshape(B, G * T, *q.shape[2:])], axis=1)


def shared_prompt_attention(
    q: Float[Array, "B H h"],
    prompt_k: Float[Array, "P S Kv h"],
    prompt_v: Float[Array, "P S Kv h"],
    prompt_mask: Bool[Array, "P S"],
    k: Float[Array, "B T Kv h"],
    v: Float[Array, "B T Kv h"],
    mask: Bool[Array, "B T"],
) -> Float[Array, "B H h"]:
    """One query per row over two segments with one softmax: its prompt's keys, stored once per group, and its own.

    Rows of a group are adjacent: row b reads prompt b // (B / P).
    """
    P, S, Kv, h = prompt_k.shape
    B, H, _ = q.shape
    q = q.reshape(P, B // P, Kv, H // Kv, h)  # prompt, member of its group, key head, query heads of it
    own_k, own_v = (a.reshape(P, B // P, *a.shape[1:]) for a in (k, v))
    shared = jnp.einsum("pnkgh,pskh->pnkgs", q, prompt_k, preferred_element_type=jnp.float32)
    own = jnp.einsum("pnkgh,pntkh->pnkgt", q, own_k, preferred_element_type=jnp.float32)
    shared = jnp.where(prompt_mask[:, None, None, None], shared * h**-0.5, _MASKED)
    own = jnp.where(mask.reshape(P, B // P, 1, 1, -1), own * h**-0.5, _MASKED)
    probs = jax.nn.softmax(jnp.concatenate([shared, own], axis=-1), axis=-1).astype(v.dtype)
    out = jnp.einsum("pnkgs,pskh->pnkgh", probs[..., :S], prompt_v)
    out += jnp.einsum("pnkgt,pntkh->pnkgh", probs[..., S:], own_v)
    return out.reshape(B, H, h)
