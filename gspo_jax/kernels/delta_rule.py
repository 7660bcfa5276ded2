"""The gated delta rule (arXiv 2412.06464) and the short convolution before it, over packed rows and step by step.

    S_t = exp(g_t) S_{t-1} + k_t (β_t (v_t − exp(g_t) S_{t-1}^T k_t))^T,   o_t = S_t^T q_t

with q and k of length one, and q divided by √dk. A head's state S is [dk, dv], in float32.

A packed row holds prompts, each directly followed by its responses. A response starts from its prompt's end state,
which is computed once. So the tokens that token i's state is made of, its ancestors, are those that it would see in
attention (`Spans`), and rows form trees. In chunks of C tokens (the UT transform of arXiv 2406.06484, here for trees),
with c_i the sum of g over i and its ancestors in the chunk, Γ_ij = exp(c_i − c_j) if j is i or an ancestor, else 0, and
S^i the state that i's first ancestor in the chunk continues:

    (I + A) Δ = β (v − exp(c) S^T k),   A_ij = β_i Γ_ij k_i·k_j for j < i
    o_i = exp(c_i) (S^i)^T q_i + Σ_j Γ_ij (q_i·k_j) Δ_j
    S_t = exp(c_t) S^t + Σ_j Γ_tj k_j Δ_j^T

S^i is one of three: the state of the last token before the chunk, the end state of the newest prompt, or zero. Only
chunks in which a response starts read the second.

Products of a token and value head, forward (`flops`): 4 C (dk / r + dv) in the chunk, with r value heads per key head,
and 6 dk dv with states: 147 kflop for C = 64, dk = dv = 128 and r = 2, beside 2.1 Mflop of a Qwen3-Next layer's
projections. The least that must move is q, k, v and o: 4 (dk / r + dv) = 768 bytes in bfloat16. XLA takes the chunks of
a row one after another, and in each reads the state twice and writes it once: 12 dk dv / C = 3 kB per token and value
head, beside some 3 kB of float32 inputs and [C, C] matrices. The backward pass recomputes groups of `_GROUP` chunks and
keeps two states for each, 8 dk dv / (C · `_GROUP`) = 256 bytes. On TPU, Pallas kernels (delta_rule_tpu.py) do all that
for heads of 128 columns.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels import delta_rule_tpu
from gspo_jax.kernels.backend import platform, varying_like
from gspo_jax.kernels.packed_attention import Spans

_CHUNK = 64
_GROUP = 8
"""Chunks whose backward pass is recomputed together, from the states before the first."""
_EPS = 1e-6
"""Added to squared lengths of q and k."""


def flops(key_dim: int, value_dim: int, values_per_key: int) -> float:
    """Return the flops per token and value head of the products above."""
    return 4 * _CHUNK * (key_dim / values_per_key + value_dim) + 6 * key_dim * value_dim


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _unit(x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    x = x.astype(_wide(x))
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + _EPS)


def _product(how: str, *arrays: Array) -> Array:
    """Return the product to about 2^-16 or better: an error in a state would stay in it.

    HIGH is three bfloat16 passes on TPU, and TensorFloat-32, 2^-11, on a GPU.
    """
    precision = jax.lax.Precision.HIGH if platform() == "tpu" else jax.lax.Precision.HIGHEST
    return jnp.einsum(how, *arrays, precision=precision)


class _Chunk(NamedTuple):
    """Which states and tokens those of one chunk continue; with a leading [n], of all. Places count from its first."""

    seen: Bool[Array, "*n B C C"]
    """True where the third axis's token is the second's or its ancestor."""
    of_run: Bool[Array, "*n B C"]
    """True where the state continued is that of the last token before the chunk, …"""
    of_prompt: Bool[Array, "*n B C"]
    """… or the end state of the newest prompt that ended before it."""
    last: Int[Array, "*n B"]
    """The chunk's last token; -1 if all is padding."""
    prompt_last: Int[Array, "*n B"]
    """The last token of the prompt that following responses continue; negative: the one before stays."""

    @classmethod
    def of(cls, spans: Spans, length: int) -> "_Chunk":
        """Return all chunks of rows [B, n C], of C = `length` tokens."""
        B, N = spans.own_start.shape
        prompt, end, own = (x.reshape(B, -1, length) for x in spans)
        start = jnp.arange(N // length, dtype=jnp.int32)[None, :, None] * length
        place = jnp.arange(length, dtype=jnp.int32)[None, None]
        valid = own <= start + place
        prompt, end, own = prompt - start, end - start, own - start
        i, j = place[..., None], place[:, :, None]
        seen = (own[..., None] <= j) & (j <= i) | (prompt[..., None] <= j) & (j < end[..., None])
        runs = (own < 0) | ((prompt < 0) & (end > 0))
        last = jnp.where(valid, place, -1).max(axis=-1)
        ends = jnp.where(prompt < end, end - 1, place)
        prompt_last = jnp.take_along_axis(ends, jnp.maximum(last, 0)[..., None], axis=-1)[..., 0]
        chunks = cls(
            seen=seen & valid[..., None],
            of_run=valid & runs,
            of_prompt=valid & ~runs & (prompt < end) & (end <= 0),
            last=last,
            prompt_last=jnp.where(last < 0, -1, prompt_last),
        )
        return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), chunks)


class _States(NamedTuple):
    """The states that a chunk's tokens may continue."""

    run: Float[Array, "B h r k v"]
    prompt: Float[Array, "B h r k v"]


class _Reads(NamedTuple):
    """A state at one token of a chunk: Σ_j weights_j k_j Δ_j^T + run · S_run + prompt · S_prompt."""

    weights: Float[Array, "B h r C"]
    run: Float[Array, "B h r"]
    prompt: Float[Array, "B h r"]

    def state(self, k: Float[Array, "B h C k"], delta: Float[Array, "B h r C v"], states: _States) -> Array:
        new = _product("bhck,bhrcv->bhrkv", k, self.weights[..., None] * delta)
        return new + self.run[..., None, None] * states.run + self.prompt[..., None, None] * states.prompt


class _Work(NamedTuple):
    """All of a chunk that needs no state."""

    q: Float[Array, "*n B h C k"]
    k: Float[Array, "*n B h C k"]
    v: Float[Array, "*n B h r C v"]
    beta: Float[Array, "*n B h r C"]
    run: Float[Array, "*n B h r C"]
    """exp(c) of tokens that continue the running state; 0 of others."""
    prompt: Float[Array, "*n B h r C"]
    decays: Float[Array, "*n B h r C C"]
    """Γ."""
    inverse: Float[Array, "*n B h r C C"]
    """(I + A)^-1."""
    scores: Float[Array, "*n B h r C C"]
    """Γ_ij q_i·k_j."""

    @classmethod
    def of(cls, q: Array, k: Array, v: Array, g: Array, beta: Array, chunks: _Chunk) -> "_Work":
        """Return that of n chunks; q and k are [n, B, h, C, k], g and β [n, B, h, r, C]."""
        seen = chunks.seen[:, :, None, None]
        total = _product("nbcd,nbhrd->nbhrc", chunks.seen.astype(g.dtype), g)
        decays = jnp.exp(jnp.where(seen, total[..., None] - total[..., None, :], -jnp.inf))
        near = _product("nbhck,nbhdk->nbhcd", k, k)[:, :, :, None] * decays * beta[..., None]
        eye = jnp.broadcast_to(jnp.eye(_CHUNK, dtype=k.dtype), near.shape)
        inverse = jax.lax.linalg.triangular_solve(near, eye, left_side=True, lower=True, unit_diagonal=True)
        scores = _product("nbhck,nbhdk->nbhcd", q, k)[:, :, :, None] * decays
        of_run, of_prompt = (x[:, :, None, None] for x in (chunks.of_run, chunks.of_prompt))
        run, prompt = (jnp.where(own, jnp.exp(total), 0) for own in (of_run, of_prompt))
        return cls(q, k, v, beta, run, prompt, decays, inverse, scores)

    def at(self, token: Int[Array, " B"]) -> _Reads:
        """Return what makes the state at one token of each row, that before the chunk for a negative one."""
        chosen = (token[:, None] == jnp.arange(_CHUNK)[None])[:, None, None]
        weights = jnp.where(chosen[..., None], self.decays, 0).sum(axis=-2)
        run, prompt = (jnp.where(chosen, x, 0).sum(axis=-1) for x in (self.run, self.prompt))
        return _Reads(weights, run, prompt)

    def solved(self, states: _States, reads_prompt: Bool[Array, ""]) -> tuple[Array, Array]:
        """Return the outputs and Δ, [B, h, r, C, v]."""
        both = jnp.concatenate([self.q, self.k], axis=2)

        def read(state: Array, factor: Array) -> Array:
            found = _product("bhck,bhrkv->bhrcv", both, state)
            return found * jnp.concatenate([factor, factor], axis=-1)[..., None]

        found = read(states.run, self.run)
        found = jax.lax.cond(reads_prompt, lambda x: x + read(states.prompt, self.prompt), lambda x: x, found)
        out, known = jnp.split(found, 2, axis=-2)
        delta = _product("bhrcd,bhrdv->bhrcv", self.inverse, self.beta[..., None] * (self.v - known))
        return out + _product("bhrcd,bhrdv->bhrcv", self.scores, delta), delta


def _advance(
    carry: tuple[_States, Array | None], xs: tuple[_Work, _Chunk, Array], ends: Array | None
) -> tuple[tuple[_States, Array | None], Array]:
    """Take one chunk: return the states after it, and its outputs."""
    (states, found), (work, chunk, number) = carry, xs
    out, delta = work.solved(states, chunk.of_prompt.any())

    def prompt(_: None) -> Array:
        own = work.at(chunk.prompt_last).state(work.k, delta, states)
        return jnp.where((chunk.prompt_last < 0)[:, None, None, None, None], states.prompt, own)

    run = work.at(chunk.last).state(work.k, delta, states)
    run = jnp.where((chunk.last < 0)[:, None, None, None, None], states.run, run)
    after = _States(run, jax.lax.cond((chunk.prompt_last >= 0).any(), prompt, lambda _: states.prompt, None))
    if found is not None and ends is not None:

        def keep(e: Array, found: Array) -> Array:
            state = work.at(ends[e][None] - number * _CHUNK).state(work.k, delta, states)
            return jax.lax.dynamic_update_slice_in_dim(found, state, e, 0)

        before, until = ((ends < n * _CHUNK).sum(dtype=jnp.int32) for n in (number, number + 1))
        found = jax.lax.fori_loop(before, until, keep, found)
    return (after, found), out


def delta_rule(
    q: Float[Array, "B N Hk dk"],
    k: Float[Array, "B N Hk dk"],
    v: Float[Array, "B N Hv dv"],
    g: Float[Array, "B N Hv"],
    beta: Float[Array, "B N Hv"],
    spans: Spans,
    ends: Int[Array, " E"] | None = None,
) -> tuple[Float[Array, "B N Hv dv"], Float[Array, "_ Hv dk dv"]]:
    """Return o in v's dtype, 0 for padding, and the state at each row's last token. All float32 inside.

    Value head i reads key head i // (Hv / Hk). For `jax.checkpoint`, o and the states between groups of chunks are
    named "dot". On TPU the states have no gradient if heads have 128 columns.

    Args:
      g: at most 0.
      ends: tokens of the only row, ascending, whose states are returned instead; N or more for none, with state 0.
    """
    (B, N, Hk, dk), (Hv, dv), dtype = k.shape, v.shape[2:], v.dtype
    if platform() == "tpu" and delta_rule_tpu.fits(dk, dv, Hv // Hk):
        return _on_tpu(q, k, v, g, beta, spans, ends)
    chunks = -(-N // _CHUNK)
    group = min(_GROUP, chunks)
    padding = -N % (_CHUNK * group)
    valid = spans.valid[..., None]
    q, k = _unit(q) * dk**-0.5, _unit(k)
    v, g, beta = v.astype(k.dtype), *(jnp.where(valid, x.astype(k.dtype), 0) for x in (g, beta))
    q, k, v, g, beta = (varying_like(x, q, k, v, g, beta, *spans) for x in (q, k, v, g, beta))

    def grouped(x: Array) -> Array:
        """[B, N, heads, …] -> [groups, n, B, heads, C, …]."""
        x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(B, -1, group, _CHUNK, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 0, 2), 3, 4)

    def of_values(x: Array) -> Array:
        x = grouped(x)
        return x.reshape(*x.shape[:3], Hk, Hv // Hk, *x.shape[4:])

    places = _Chunk.of(_padded(spans, padding), _CHUNK)
    places = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), places)
    numbers = jnp.arange(places.last.shape[0] * group, dtype=jnp.int32).reshape(-1, group)

    def take(carry: Any, xs: Any) -> tuple[Any, Array]:
        (q, k, v, g, beta), places, numbers = xs
        work = _Work.of(q, k, v, g, beta, places)
        return jax.lax.scan(lambda c, x: _advance(c, x, ends), carry, (work, places, numbers))

    def named(carry: Any, xs: Any) -> tuple[Any, Array]:
        return jax.checkpoint(take, prevent_cse=False)(jax.tree.map(lambda x: checkpoint_name(x, "dot"), carry), xs)

    nothing = varying_like(jnp.zeros((B, Hk, Hv // Hk, dk, dv), k.dtype), k)
    found = None if ends is None else jnp.zeros((len(ends), *nothing.shape[1:]), k.dtype)
    arrays = grouped(q), grouped(k), of_values(v), of_values(g), of_values(beta)
    (states, found), out = jax.lax.scan(named, (_States(nothing, nothing), found), (arrays, places, numbers))
    out = jnp.moveaxis(out.reshape(-1, B, Hv, _CHUNK, dv), 0, 1)  # [B, n, Hv, C, dv]
    out = jnp.swapaxes(out, 2, 3).reshape(B, -1, Hv, dv)[:, :N]
    kept = states.run if found is None else found
    return checkpoint_name(out.astype(dtype), "dot"), kept.reshape(-1, Hv, dk, dv)


def _padded(spans: Spans, padding: int) -> Spans:
    start, end, own = spans
    B, N = own.shape
    after = jnp.arange(N, N + padding, dtype=own.dtype)[None] + 1
    own = jnp.concatenate([own, jnp.broadcast_to(after, (B, padding))], axis=1)
    start, end = (jnp.pad(x, ((0, 0), (0, padding))) for x in (start, end))
    return Spans(start, end, own)


def _on_tpu(
    q: Array, k: Array, v: Array, g: Array, beta: Array, spans: Spans, ends: Array | None
) -> tuple[Array, Array]:
    """Compute `delta_rule` by Pallas kernels."""
    B, N, Hv = v.shape[:3]
    group = delta_rule_tpu.group_of(N, Hv // k.shape[2], v.dtype.itemsize)
    padding = -N % (delta_rule_tpu.CHUNK * group)
    row, valid = N + padding, spans.valid[..., None]
    arrays = q, k, v, jnp.where(valid, g, 0), jnp.where(valid, beta, 0)
    q, k, v, g, beta = (jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2))) for x in arrays)
    spans = _padded(spans, padding)
    chunks = _Chunk.of(spans, delta_rule_tpu.CHUNK)
    if ends is None:
        last = jnp.where(spans.valid, jnp.arange(row, dtype=jnp.int32)[None], -1).max(axis=1)
        there = last >= 0
        read = jnp.where(there, last, row - 1) + row * jnp.arange(B, dtype=jnp.int32)
    else:
        there = ends < N
        read = jnp.where(there, ends, row)
    out, found = delta_rule_tpu.delta_rule(q, k, v, g, beta, spans, chunks, read)
    return out[:, :N], jnp.where(there[:, None, None, None], found, 0)


def delta_step(
    state: Float[Array, "B Hv dk dv"],
    q: Float[Array, "B Hk dk"],
    k: Float[Array, "B Hk dk"],
    v: Float[Array, "B Hv dv"],
    g: Float[Array, "B Hv"],
    beta: Float[Array, "B Hv"],
) -> tuple[Float[Array, "B Hv dv"], Float[Array, "B Hv dk dv"]]:
    """Return o in v's dtype and the state after one more token of each row.

    Sums over dk are no matrix products: each reads the state once, in float32 on every platform.
    """
    r = v.shape[1] // k.shape[1]
    q, k = (jnp.repeat(_unit(x), r, axis=1)[..., None] for x in (q, k))
    g, beta = (x.astype(state.dtype)[..., None] for x in (g, beta))
    decayed = jnp.exp(g)[..., None] * state
    delta = beta * (v.astype(state.dtype) - (decayed * k).sum(axis=2))
    new = decayed + k * delta[:, :, None]
    return ((new * q).sum(axis=2) * q.shape[2] ** -0.5).astype(v.dtype), new


def short_conv(x: Float[Array, "B N c"], weight: Float[Array, "c W"], spans: Spans) -> Float[Array, "B N c"]:
    """Return silu(Σ_d weight[W - 1 - d] · x of the d-th ancestor), channel by channel, in x's dtype.

    A text's first tokens have fewer ancestors, and the missing ones are zeros. Within a segment the inputs are shifted.
    A loop over the responses adds what their first tokens take from the prompt.
    """
    (B, N, c), w = x.shape, weight.shape[1] - 1
    taps = weight.T.astype(_wide(x))
    flat = jnp.pad(x.reshape(B * N, c), ((w, w), (0, 0)))  # rows end to end, with room for w tokens at both ends
    age = (jnp.arange(N, dtype=jnp.int32)[None] - spans.own_start).reshape(B * N)
    age = jnp.pad(age, (0, w), constant_values=-1)[:, None]
    shifted = (jnp.where(age >= d, flat[w - d : 2 * w - d + B * N], 0) * taps[None, w - d] for d in range(w + 1))
    total = _with_prompts(functools.reduce(jnp.add, shifted), flat, taps, spans)
    return jax.nn.silu(total[: B * N]).astype(x.dtype).reshape(x.shape)


class _Heads(NamedTuple):
    """Responses with a prompt, in rows that lie end to end."""

    first: Int[Array, " M"]
    """Their first tokens."""
    count: Int[Array, ""]
    own: Int[Array, " M"]
    prompt: Int[Array, " M"]
    """A token's segment and prompt, by their first tokens."""
    end: Int[Array, " M"]

    @classmethod
    def of(cls, spans: Spans) -> "_Heads":
        B, N = spans.own_start.shape
        rows = (jnp.arange(B, dtype=jnp.int32) * N)[:, None]
        prompt, end, own = ((x + rows).reshape(-1) for x in spans)
        begins = (own == jnp.arange(B * N, dtype=own.dtype)) & (prompt < end)
        first = jnp.flatnonzero(begins, size=B * N, fill_value=0).astype(jnp.int32)
        return cls(first, begins.sum(dtype=jnp.int32), own, prompt, end)

    def fold(self, one: Callable[[Array, Array, Array, Array], Any], carry: Any, width: int) -> Any:
        """Fold carry = one(token, where its prompt's last `width` tokens start, which of them, of its first `width`
        tokens, there are, carry)."""
        own = jnp.pad(self.own, (0, width), constant_values=-1)
        place = jnp.arange(width, dtype=jnp.int32)

        def visit(n: Array, carry: Any) -> Any:
            token = self.first[n]
            start = self.end[token] - width
            mine = jax.lax.dynamic_slice_in_dim(own, token, width) == token
            return one(token, start, jnp.stack([start + place >= self.prompt[token], mine]), carry)

        return jax.lax.fori_loop(0, self.count, visit, carry)


def _from_prompt(tail: Float[Array, "w c"], taps: Float[Array, "W c"]) -> Float[Array, "w c"]:
    """Return what a response's first w = W - 1 tokens take from the prompt's last w."""
    w = len(tail)
    rows = [(tail[a:] * taps[: w - a]).sum(axis=0) for a in range(w)]
    return jnp.stack(rows)


def _tail(flat: Float[Array, "M c"], start: Array, there: Bool[Array, " w"], taps: Float[Array, "W c"]) -> Array:
    w = len(taps) - 1
    tail = jax.lax.dynamic_slice_in_dim(flat, start + w, w).astype(taps.dtype)
    return jnp.where(there[:, None], tail, 0)


@jax.custom_vjp
def _with_prompts(rows: Array, flat: Array, taps: Array, spans: Spans) -> Array:
    """Add to rows [M + w, c] what responses take from their prompts; `flat` are the inputs, [w + M + w, c]."""
    w = len(taps) - 1

    def one(token: Array, start: Array, there: Array, rows: Array) -> Array:
        added = jnp.where(there[1][:, None], _from_prompt(_tail(flat, start, there[0], taps), taps), 0)
        added += jax.lax.dynamic_slice_in_dim(rows, token, w)
        return jax.lax.dynamic_update_slice_in_dim(rows, added, token, 0)

    return _Heads.of(spans).fold(one, rows, w)


def _with_prompts_backward(kept: tuple[Array, Array, Spans], grads: Array) -> tuple[Array, Array, Array, None]:
    flat, taps, spans = kept
    w = len(taps) - 1

    def one(token: Array, start: Array, there: Array, found: Any) -> Any:
        dx, dtaps = found
        own = jnp.where(there[1][:, None], jax.lax.dynamic_slice_in_dim(grads, token, w), 0)
        dtail, more = jax.vjp(_from_prompt, _tail(flat, start, there[0], taps), taps)[1](own)
        dtail = jnp.where(there[0][:, None], dtail, 0) + jax.lax.dynamic_slice_in_dim(dx, start + w, w)
        return jax.lax.dynamic_update_slice_in_dim(dx, dtail, start + w, 0), dtaps + more

    nothing = (varying_like(jnp.zeros(x.shape, taps.dtype), flat, grads) for x in (flat, taps))
    dx, dtaps = _Heads.of(spans).fold(one, tuple(nothing), w)
    return grads, dx.astype(flat.dtype), dtaps, None


_with_prompts.defvjp(
    lambda rows, flat, taps, spans: (_with_prompts(rows, flat, taps, spans), (flat, taps, spans)),
    _with_prompts_backward,
)


def conv_inputs(
    x: Float[Array, "B N c"], spans: Spans, ends: Int[Array, " E"] | None = None, *, width: int
) -> Float[Array, "_ w c"]:
    """Return the last w = width - 1 inputs that the convolution's next token takes, oldest first, zeros if missing.

    Args:
      ends: as in `delta_rule`.
    """
    N, valid = x.shape[1], spans.valid
    last = jnp.where(valid, jnp.arange(N, dtype=jnp.int32)[None], -1).max(axis=1)
    tokens = last[:, None] if ends is None else ends[None]
    tokens = jnp.where(tokens < N, tokens, -1)
    start, end, own = (jnp.take_along_axis(s, jnp.maximum(tokens, 0), axis=1)[..., None] for s in spans)
    back = jnp.arange(width - 2, -1, -1, dtype=jnp.int32)[None, None]
    at = tokens[..., None] - back
    at = jnp.where(at >= own, at, at - own + end)
    there = (tokens[..., None] >= 0) & ((at >= own) | (at >= start) & (at < end))
    found = jnp.take_along_axis(x, jnp.maximum(at, 0).reshape(len(x), -1, 1), axis=1)
    return jnp.where(there[..., None], found.reshape(*at.shape, -1), 0).reshape(-1, width - 1, x.shape[-1])


def short_conv_step(
    inputs: Float[Array, "B n w c"], x: Float[Array, "B n c"], weight: Float[Array, "n c W"]
) -> tuple[Float[Array, "B n c"], Float[Array, "B n w c"]]:
    """Return the convolution of one more token of each row, and the last inputs after it. Channels are n of c each."""
    window = jnp.concatenate([inputs, x[:, :, None].astype(inputs.dtype)], axis=2)
    total = (window.astype(_wide(x)) * jnp.swapaxes(weight, 1, 2).astype(_wide(x))[None]).sum(axis=2)
    return jax.nn.silu(total).astype(x.dtype), window[:, :, 1:]
