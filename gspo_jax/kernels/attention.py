"""Softmax attention with grouped key/value heads (GQA). Every backend runs the plain XLA form; scores are float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_MASKED = -1e30
"""Finite, so that a row with no visible key (padding) softmaxes to something finite instead of NaN."""


def attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B S Kv h"],
    v: Float[Array, "B S Kv h"],
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T H h"]:
    """softmax(q k^T / sqrt(h)) v over the keys where `mask` is True.

    Query head i reads key/value head i // (H / Kv). The output has q's dtype.
    """
    B, T, H, h = q.shape
    q = q.reshape(B, T, k.shape[2], -1, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * h**-0.5
    probs = jax.nn.softmax(jnp.where(mask[:, None, None], scores, _MASKED), axis=-1)
    return jnp.einsum("bkgts,bskh->btkgh", probs.astype(v.dtype), v).reshape(B, T, H, h)


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
