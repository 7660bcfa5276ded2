"""Kernels over tokens of packed rows: attention, the gated delta rule, rotary positions, and log-probs."""

import functools
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.bringup.exactness import Draw, Exact, Kernel, limit, log_softmax, wide
from gspo_jax.kernels.delta_rule import delta_rule
from gspo_jax.kernels.logprobs import KeptIds, token_logprobs
from gspo_jax.kernels.packed_attention import Spans, packed_attention
from gspo_jax.kernels.rotary import Rotation, in_place, normed_rope, rms_norm, rope

EPS = 1e-6


class Sizes(NamedTuple):
    """Widths of a layer and a vocabulary, and how much of them is tried."""

    dtype: Any
    tokens: int
    """Of a packed row: even, as cuDNN wants, and no multiple of a block."""
    heads: int
    kv_heads: int
    head: int
    hidden: int
    vocabulary: int
    trained: int
    """Columns of the head whose gradient is checked."""
    scored: int
    """Tokens with log-probs."""
    kept: int
    """Ids beside each target."""


SMALL = Sizes(jnp.float32, 150, 2, 1, 128, 128, 1003, 301, 14, 5)
WIDE = Sizes(jnp.bfloat16, 500, 8, 2, 128, 1024, 151_936, 20_003, 40, 20)
ROWS = 2


def packings(tokens: int) -> dict[str, list[list[tuple[int, list[int]]]]]:
    """Return rows of groups, (prompt's tokens, responses' tokens), by load."""
    n = tokens
    return {
        "random": [[(n // 9, [n // 5, n // 7, 1]), (n // 11, [n // 6])], [(1, [n // 3, n // 4])]],
        "empty": [[], [(0, [3]), (2, [1])]],
        "full": [[(n, [])], [(n - 1, [1])]],
        "skewed": [[(1, [1] * 9 + [n - 10])], [(n // 2, [1, 2, n // 4, 3, 1])]],
    }


def spans_of(tokens: int, rows: list[list[tuple[int, list[int]]]]) -> Spans:
    """Return what each token sees, for rows of groups."""
    starts, ends = np.zeros((2, len(rows), tokens), np.int32)
    own = np.tile(np.arange(1, tokens + 1, dtype=np.int32), (len(rows), 1))
    for b, groups in enumerate(rows):
        at = 0
        for prompt, responses in groups:
            first, at = at, at + prompt
            own[b, first:at] = first
            for length in responses:
                here, at = slice(at, at + length), at + length
                starts[b, here], ends[b, here], own[b, here] = first, first + prompt, here.start
        assert at <= tokens
    return cast(Any, Spans)(starts, ends, own)


def _valid(spans: Any) -> np.ndarray:
    return spans.own_start <= np.arange(spans.own_start.shape[1])


def _defined(x: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Return x with NaN at padding, where outputs are not specified."""
    return np.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, np.nan)


def _attention(size: Sizes) -> Kernel:
    """Attention over packed rows, forward and backward."""
    N, H, Kv, h, dtype = size.tokens, size.heads, size.kv_heads, size.head, size.dtype

    def draw(load: str) -> tuple[Any, ...]:
        x, spans = Draw(f"attention {load}", dtype), spans_of(N, packings(N)[load])
        q, k, v, grads = (x(ROWS, N, heads, h) for heads in (H, Kv, Kv, H))
        return q, k, v, np.where(_valid(spans)[..., None, None], grads, 0).astype(grads.dtype), spans

    def run(q: Any, k: Any, v: Any, grads: Any, spans: Any) -> dict[str, jax.Array]:
        out, back = jax.vjp(lambda q, k, v: packed_attention(q, k, v, spans), q, k, v)
        d_q, d_k, d_v = back(grads)
        return {"output": out, "gradient of q": d_q, "gradient of k": d_k, "gradient of v": d_v}

    def exact(found: Any, q: Any, k: Any, v: Any, grads: Any, spans: Any) -> dict[str, Exact]:
        q, k, v, grads = (wide(x) for x in (q, k, v, grads))
        k, v = (np.repeat(x, H // Kv, axis=2) for x in (k, v))
        start, end, own = (x[:, :, None] for x in spans)
        key, query = np.arange(N)[None, None], np.arange(N)[None, :, None]
        seen = ((start <= key) & (key < end)) | ((own <= key) & (key <= query))

        def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:  # [B, N, H, h] twice -> [B, H, N, N]
            return np.moveaxis(a, 1, 2) @ np.moveaxis(b, 1, 2).swapaxes(2, 3)

        def over(p: np.ndarray, x: np.ndarray) -> np.ndarray:
            return np.moveaxis(p @ np.moveaxis(x, 1, 2), 2, 1)

        scores = np.where(seen[:, None], product(q, k) / np.sqrt(h), -np.inf)
        highest = scores.max(axis=-1, keepdims=True)
        probs = np.exp(scores - np.where(np.isfinite(highest), highest, 0))
        probs /= np.maximum(probs.sum(axis=-1, keepdims=True), 1e-300)
        out, d_probs = over(probs, v), product(grads, v)
        mean = (probs * d_probs).sum(axis=-1, keepdims=True)
        d_scores = probs * (d_probs - mean) / np.sqrt(h)
        d_q, d_k, d_v = over(d_scores, k), over(d_scores.swapaxes(2, 3), q), over(probs.swapaxes(2, 3), grads)
        # The mean is a sum of products with the rounded output, and may nearly cancel a token's only large term.
        of_mean = np.moveaxis(np.sqrt(((out * grads) ** 2).sum(axis=-1)), 1, 2)[..., None]
        least_q = np.linalg.norm(over(probs * of_mean, k), axis=-1) / np.sqrt(h)
        least_k = np.sqrt(over(((probs * of_mean) ** 2).swapaxes(2, 3), q**2).sum(axis=-1) / h)
        least_k = np.sqrt((least_k**2).reshape(ROWS, N, Kv, -1).sum(axis=-1))
        d_k, d_v = (x.reshape(ROWS, N, Kv, H // Kv, h).sum(axis=3) for x in (d_k, d_v))
        # Rounded are the probabilities, the output, the scores' gradient, and the results. Of a key that one token
        # sees, all columns hang on one rounded number, whose error may be √3 of the root mean square.
        few, more = limit(dtype, 6), limit(dtype, 12)
        return {
            "output": Exact(_defined(out, _valid(spans)), few),
            "gradient of q": Exact(d_q, more, least_q),
            "gradient of k": Exact(d_k, more, least_k),
            "gradient of v": Exact(d_v, few),
        }

    return Kernel("packed attention", run, exact, {load: partial(draw, load) for load in packings(N)})


class _Recurrence(NamedTuple):
    """The gated delta rule token by token (arXiv 2412.06464) on rows that form trees, and its gradient.

    S_t = e^g S_p + k (β (v − e^g S_p^T k))^T and o_t = S_t^T q, with p the token before in the text, or for a
    response's first token its prompt's last.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray

    def before(self, spans: Any, b: int) -> list[int]:
        """Return each token's predecessor, -1: none."""
        start, end, own = (np.asarray(x[b]) for x in spans)
        tokens = range(len(own))
        return [t - 1 if own[t] < t else int(end[t]) - 1 if start[t] < end[t] else -1 for t in tokens]

    def row(self, b: int, spans: Any, d_out: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return o of row b, and the gradients of q, k, v, g and β for these cotangents of o."""
        q, k, v, g, beta = (x[b] for x in self)
        N, heads, d = q.shape
        valid, before = _valid(spans)[b], self.before(spans, b)
        states, out = np.zeros((N + 1, heads, d, v.shape[-1])), np.zeros(v.shape)
        for t in np.flatnonzero(valid):
            old = states[before[t]] * np.exp(g[t])[:, None, None]  # states[-1] is zero
            delta = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", old, k[t]))
            states[t] = old + k[t][:, :, None] * delta[:, None]
            out[t] = np.einsum("hkv,hk->hv", states[t], q[t])
        d_states, grads = np.zeros(states.shape), [np.zeros(x.shape) for x in (q, k, v, g, beta)]
        d_q, d_k, d_v, d_g, d_beta = grads
        for t in np.flatnonzero(valid)[::-1]:
            decay = np.exp(g[t])[:, None, None]
            old = states[before[t]] * decay
            miss = v[t] - np.einsum("hkv,hk->hv", old, k[t])
            d_state = d_states[t] + q[t][:, :, None] * d_out[b, t][:, None]
            d_q[t] = np.einsum("hkv,hv->hk", states[t], d_out[b, t])
            d_delta = np.einsum("hkv,hk->hv", d_state, k[t])
            d_miss = beta[t][:, None] * d_delta
            d_beta[t], d_v[t] = (miss * d_delta).sum(axis=1), d_miss
            d_k[t] = np.einsum("hkv,hv->hk", d_state, beta[t][:, None] * miss) - np.einsum("hkv,hv->hk", old, d_miss)
            d_old = d_state - k[t][:, :, None] * d_miss[:, None]
            d_g[t] = (d_old * old).sum(axis=(1, 2))
            if before[t] >= 0:
                d_states[before[t]] += d_old * decay
        return out, *grads


def _delta(size: Sizes) -> Kernel:
    """The gated delta rule, forward and backward, with two value heads to each key head."""
    N, heads, d, dtype = size.tokens, 2, size.head, size.dtype
    names = "q", "k", "v", "g", "β"

    def draw(load: str) -> tuple[Any, ...]:
        x, spans = Draw(f"delta {load}", dtype), spans_of(N, packings(N)[load])
        q, k, v, grads = (x(ROWS, N, n, d) for n in (1, 1, heads, heads))
        g, beta = -np.exp(x.rng.normal(-2, 1.5, (ROWS, N, heads))), x.rng.uniform(0, 1, (ROWS, N, heads))
        grads = np.where(_valid(spans)[..., None, None], grads, 0).astype(grads.dtype)
        return q, k, v, g.astype(np.float32), beta.astype(np.float32), grads, spans

    def run(q: Any, k: Any, v: Any, g: Any, beta: Any, grads: Any, spans: Any) -> dict[str, jax.Array]:
        out, back = jax.vjp(lambda q, k, v, g, beta: delta_rule(q, k, v, g, beta, spans)[0], q, k, v, g, beta)
        *wide_ones, d_g, d_beta = back(grads)
        grads = *wide_ones, d_g.mT, d_beta.mT
        return {"output": out} | {f"gradient of {n}": d for n, d in zip(names, grads, strict=True)}

    def exact(found: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, grads: Any, spans: Any) -> dict[str, Exact]:
        lengths = [np.sqrt((wide(x) ** 2).sum(axis=-1, keepdims=True) + EPS) for x in (q, k)]
        units = [wide(x) / length for x, length in zip((q, k), lengths, strict=True)]
        queries, keys = (np.repeat(x, heads, axis=2) for x in (units[0] / np.sqrt(d), units[1]))
        rule = _Recurrence(queries, keys, wide(v), wide(g), wide(beta))
        rows = [rule.row(b, spans, wide(grads)) for b in range(ROWS)]
        out, d_q, d_k, d_v, d_g, d_beta = (np.stack(x) for x in zip(*rows, strict=True))
        d_q, d_k = (x.sum(axis=2, keepdims=True) for x in (d_q, d_k))
        d_units = d_q / np.sqrt(d), d_k
        d_qk = [
            (g - unit * (g * unit).sum(axis=-1, keepdims=True)) / length
            for g, unit, length in zip(d_units, units, lengths, strict=True)
        ]
        once = limit(dtype, 1)
        grads = zip(names, (*d_qk, d_v, d_g.swapaxes(1, 2), d_beta.swapaxes(1, 2)), strict=True)
        return {"output": Exact(out, once)} | {f"gradient of {name}": Exact(x, once) for name, x in grads}

    return Kernel("gated delta rule", run, exact, {load: partial(draw, load) for load in packings(N)}, long=True)


def _rope(size: Sizes) -> Kernel:
    """Heads normed and turned by their positions, forward and backward."""
    N, H, h, dtype, B = size.tokens, size.heads, size.head, size.dtype, ROWS

    def draw(load: str) -> tuple[Any, ...]:
        x = Draw(f"rope {load}", dtype)
        positions = x.rng.integers(0, 40_000 if load == "skewed" else N, (B, N))
        angle = positions[:, None, :, None] * 1e6 ** (-np.arange(h // 2) / (h // 2))
        rotation = cast(Any, Rotation)(np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
        heads = x(B, N, H * h, scale=2.0**-7 if load == "skewed" else 1)
        return (heads * (load != "empty")).astype(heads.dtype), rotation, x.positive(h), x(B, N, H * h)

    def run(x: Any, rotation: Any, scale: Any, grads: Any) -> dict[str, jax.Array]:
        def apply(x: Any, scale: Any) -> jax.Array:
            if in_place(N, h, rotation):
                return normed_rope(x, rotation, scale, eps=EPS)
            heads = jnp.swapaxes(rms_norm(x.reshape(B, N, H, h), scale, EPS), 1, 2)
            return jnp.swapaxes(rope(heads, rotation), 1, 2).reshape(x.shape)

        out, back = jax.vjp(apply, x, scale)
        d_x, d_scale = back(grads)
        out, d_x = (y.reshape(B, N, H, h) for y in (out, d_x))
        return {"output": out, "gradient of heads": d_x, "gradient of scale": d_scale}

    def exact(found: Any, x: Any, rotation: Any, scale: Any, grads: Any) -> dict[str, Exact]:
        x, g, scale = wide(x).reshape(B, N, H, h), wide(grads).reshape(B, N, H, h), wide(scale)
        cos, sin = (np.swapaxes(wide(turn), 1, 2) for turn in rotation)  # [B, N, 1, half]

        def turned(y: np.ndarray, sin: np.ndarray) -> np.ndarray:
            a, b = np.split(y, 2, axis=-1)
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

        inverse = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)
        normed, back = x * inverse, turned(g, -sin)
        d = back * scale
        d_x = inverse * (d - normed * np.mean(d * normed, axis=-1, keepdims=True))
        three = limit(dtype, 3)  # the norm, the rotation, and on the way back XLA's parts
        return {
            "output": Exact(turned(normed * scale, sin), three),
            "gradient of heads": Exact(d_x, three),
            "gradient of scale": Exact((back * normed).sum(axis=(0, 1, 2)), three),
        }

    return Kernel("normed rope", run, exact, {load: partial(draw, load) for load in ("random", "empty", "skewed")})


def _logprobs(size: Sizes, *, trained: bool) -> Kernel:
    """Log-probs of targets and of kept ids, entropies, and their gradient in the hidden states, or also in the head."""
    columns = size.trained if trained else size.vocabulary
    N, D, K, dtype, temperature = size.scored, size.hidden, size.kept, size.dtype, 0.7
    shape = 2, N // 2

    @functools.cache
    def head() -> np.ndarray:
        return Draw("head", dtype)(D, columns)

    def draw(load: str) -> tuple[Any, ...]:
        x = Draw(f"log-probs {load}", dtype)
        scale = {"random": 1.0, "empty": 0.0, "skewed": 8.0}[load]
        hidden = x(*shape, D, scale=2.0 ** -round(np.log2(D**0.5)) * scale)
        ids = np.stack([x.rng.choice(columns, K, replace=False) for _ in range(N)]).reshape(*shape, K)
        ids[:, 1::2, K // 2 :] = -1
        targets = np.where(np.arange(N).reshape(shape) % 3 == 0, ids[..., 0], x.rng.integers(columns, size=shape))
        targets[0, 0], targets[0, 1], ids[0, 1, 0] = 0, columns - 1, columns - 1
        whole = np.arange(N).reshape(shape) % 3 == 0
        kept = cast(Any, KeptIds)(ids.astype(np.int32), whole)
        cotangents = x.positive(*shape), x.positive(*shape) - 1, np.where(ids >= 0, x.positive(*shape, K) - 1, 0)
        return hidden, head(), targets.astype(np.int32), kept, *(c.astype(np.float32) for c in cotangents)

    def run(hidden: Any, head: Any, targets: Any, kept: Any, *cotangents: Any) -> dict[str, jax.Array]:
        def apply(hidden: Any, head: Any) -> Any:
            return token_logprobs(hidden, head, targets, kept=kept, temperature=temperature)

        if trained:
            out, back = jax.vjp(apply, hidden, head)
        else:
            out, back = jax.vjp(lambda hidden: apply(hidden, head), hidden)
        outputs = "log-probs", "entropies", "kept ids' log-probs"
        grads = "gradient of hidden states", *["gradient of the head"] * trained
        return dict(zip((*outputs, *grads), (*out, *back(cotangents)), strict=True))

    def exact(found: Any, hidden: Any, head: Any, targets: Any, kept: Any, *cotangents: Any) -> dict[str, Exact]:
        h, y, ids = wide(hidden).reshape(N, D), targets.reshape(N), kept.ids.reshape(N, K)
        used, whole, n = ids >= 0, kept.whole.reshape(N, 1), np.arange(N)
        of_y, of_entropy, of_ids = (wide(c).reshape(N, -1) for c in cotangents)
        parts = [slice(i, min(i + 8192, columns)) for i in range(0, columns, 8192)]
        every = log_softmax(np.concatenate([h @ wide(head[:, part]) for part in parts], axis=1) / temperature)
        p = np.exp(every)
        entropy = -(p * every).sum(axis=1, keepdims=True)
        logprobs, at_ids = every[n, y][:, None], np.where(used, np.take_along_axis(every, ids, axis=1), -np.inf)
        mass = np.where(whole, np.log(np.exp(at_ids).sum(axis=1, keepdims=True)), 0)
        own = np.where(used, at_ids - mass, 0)
        # The mass, where it counts, takes a share of the others' cotangents.
        of_ids = of_ids - np.where(whole, np.exp(own) * (of_y + of_ids.sum(axis=1, keepdims=True)), 0) * used
        d = -p * (of_y + of_ids.sum(axis=1, keepdims=True) + of_entropy * (every + entropy))
        d[n, y] += of_y[:, 0]
        np.add.at(d, (n[:, None], np.where(used, ids, 0)), np.where(used, of_ids, 0))
        d /= temperature
        d_h = np.sum([d[:, part] @ wide(head[:, part]).T for part in parts], axis=0)
        plain, rounded = limit(jnp.float32, 1), limit(dtype, 2)  # a TPU's product rounds the logits' gradient
        results = {
            "log-probs": Exact((logprobs - mass).reshape(shape), plain),
            "entropies": Exact(entropy.reshape(shape), plain),
            "kept ids' log-probs": Exact(own.reshape(*shape, K), plain),
            "gradient of hidden states": Exact(d_h.reshape(*shape, D), rounded),
        }
        return results | ({"gradient of the head": Exact(h.T @ d, limit(dtype, 3))} if trained else {})

    loads = ("random", "empty", "skewed")
    name = "log-probs, gradient of the head" if trained else "log-probs"
    return Kernel(name, run, exact, {load: partial(draw, load) for load in loads})


def kernels(*, small: bool) -> list[Kernel]:
    """Return the kernels over tokens, of a large model's widths unless `small`."""
    size = SMALL if small else WIDE
    return [_attention(size), _delta(size), _rope(size), _logprobs(size, trained=False), _logprobs(size, trained=True)]
