"""The gated delta rule and its convolution match a float64 recurrence token by token, packed and step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.kernels import delta_rule as kernel
from tests.kernels.test_packed_attention import spans_of

PACKINGS = {
    "groups, rows, chunks": (
        320,
        [
            [(5, [40, 1, 70]), (1, [1, 2]), (2, [1]), (3, [2, 2]), (9, [30])],
            [(64, [64, 128]), (64, [])],
            [],
            [(1, [1, 1, 1]), (128, [64, 64, 1])],
        ],
    ),
    "shared by 16, of one token to 300": (2200, [[(70, [*range(1, 16), 300]), (1, [1] * 5), (300, [64, 63])]]),
}
"""As in `test_packed_attention`."""
HK, HV, DK, DV, W = 2, 4, 8, 6, 4


def draw(B, N, dtype=np.float64):
    """Return q, k, v, g, beta, a convolution's x and weight, and cotangents of both outputs."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, B, N, HK, DK))
    v, do = rng.standard_normal((2, B, N, HV, DV))
    g, beta = -np.exp(rng.normal(-2, 1.5, (B, N, HV))), rng.uniform(0, 1, (B, N, HV))
    x, dy, weight = rng.standard_normal((B, N, 5)), rng.standard_normal((B, N, 5)), rng.standard_normal((5, W))
    return [a.astype(dtype) for a in (q, k, v, g, beta, x, weight, do, dy)]


def recurrence(q, k, v, g, beta):
    """Return o and the end state of one text in float64, token by token."""

    def unit(x):
        return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)

    q, k = (np.repeat(unit(x), HV // HK, axis=1) for x in (q, k))
    state, out = np.zeros((HV, DK, DV)), []
    for t in range(len(v)):
        state = state * np.exp(g[t])[:, None, None]
        delta = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * delta[:, None]
        out.append(np.einsum("hkv,hk->hv", state, q[t]) / np.sqrt(DK))
    return np.array(out), state


def convolution(x, weight):
    """Return silu of the causal convolution of one text."""
    padded = np.concatenate([np.zeros((W - 1, x.shape[1])), x])
    y = sum(padded[d : d + len(x)] * weight[:, d] for d in range(W))
    return y / (1 + np.exp(-y))


def texts_of(groups):
    """Yield each text's tokens in a row, and how many of them are the prompt's; of each group the prompt first."""
    at = 0
    for prompt, responses in groups:
        own = list(range(at, at + prompt))
        at += prompt
        yield own, 0
        for length in responses:
            yield own + list(range(at, at + length)), prompt
            at += length


def outputs(q, k, v, g, beta, x, weight, spans):
    return kernel.delta_rule(q, k, v, g, beta, spans)[0], kernel.short_conv(x, weight, spans)


@jax.jit
def value_and_grads(arrays, spans, do, dy):
    """Return outputs, and the gradients of their sums with these weights."""
    found, back = jax.vjp(lambda *arrays: outputs(*arrays, spans), *arrays)
    return found, back((do, dy))


def texts_alone(arrays, texts):
    """Return outputs and gradients of the texts (row, tokens, prompt), each in a row of its own, summed over texts."""
    n = -(-max(len(tokens) for _, tokens, _ in texts) // 64) * 64
    *rows, weight = [np.zeros((len(texts), n, *a.shape[2:])) for a in arrays[:6]] + [arrays[6]]
    cotangents = [np.zeros((len(texts), n, *a.shape[2:])) for a in arrays[7:]]
    for t, (b, tokens, prompt) in enumerate(texts):
        for own, a in zip((*rows, *cotangents), (*arrays[:6], *arrays[7:]), strict=True):
            own[t, : len(tokens)] = a[b, tokens]
        for own in cotangents:
            own[t, :prompt] = 0
    alone = spans_of(n, [[(len(tokens), [])] for _, tokens, _ in texts])
    values, grads = value_and_grads([jnp.asarray(a) for a in (*rows, weight)], alone, *map(jnp.asarray, cotangents))
    found, sums = [np.zeros(a.shape) for a in arrays[7:]], [np.zeros(a.shape) for a in arrays[:6]]
    for t, (b, tokens, prompt) in enumerate(texts):
        for whole, own in zip(found, values, strict=True):
            whole[b, tokens[prompt:]] = np.asarray(own)[t, prompt : len(tokens)]
        for whole, own in zip(sums, grads[:6], strict=True):
            np.add.at(whole, (b, np.array(tokens)), np.asarray(own)[t, : len(tokens)])
    return found, [*sums, np.asarray(grads[6])]


def error(found, expected) -> float:
    return float(np.linalg.norm(np.asarray(found) - expected) / np.linalg.norm(expected))


def texts_in(rows):
    """Return every text of the rows: row, tokens, and how many of them are the prompt's."""
    return [(b, *text) for b, row in enumerate(rows) for text in texts_of(row) if text[0]]


def oracle(arrays, texts):
    """Return both outputs at the texts' own tokens, by the recurrence."""
    found = [np.zeros((*a.shape[:2], *shape)) for a, shape in ((arrays[0], (HV, DV)), (arrays[5], (5,)))]
    for b, tokens, prompt in texts:
        q, k, v, g, beta, x = (a[b, tokens] for a in arrays[:6])
        for whole, own in zip(found, (recurrence(q, k, v, g, beta)[0], convolution(x, arrays[6])), strict=True):
            whole[b, tokens[prompt:]] = own[prompt:]
    return found


@jax.enable_x64()
def test_packed_rows_match_the_recurrence() -> None:
    """Values of every text, and the slope of their weighted sum along a random direction, in float64."""
    N, rows = PACKINGS["groups, rows, chunks"]
    *arrays, do, dy = draw(len(rows), N)
    texts, rng = texts_in(rows), np.random.default_rng(1)
    ways = [rng.standard_normal(a.shape) for a in arrays]
    inputs = [jnp.asarray(a) for a in (*arrays, do, dy)]
    values, grads = value_and_grads(inputs[:7], spans_of(N, rows), *inputs[7:])
    for found, expected in zip(values, oracle(arrays, texts), strict=True):
        assert error(found, expected) < 1e-12

    def loss(step: float) -> float:
        o, y = oracle([a + step * way for a, way in zip(arrays, ways, strict=True)], texts)
        return float((o * do).sum() + (y * dy).sum())

    slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
    assert np.isclose(sum((np.asarray(d) * way).sum() for d, way in zip(grads, ways, strict=True)), slope, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKINGS)
def test_packed_rows_equal_each_text_alone(name: str) -> None:
    """A prompt's gradient sums over its responses'."""
    N, rows = PACKINGS[name]
    arrays, texts = draw(len(rows), N), texts_in(rows)
    with jax.enable_x64():
        values, grads = texts_alone(arrays, texts)
        for found, expected in zip(values, oracle(arrays, texts), strict=True):
            assert error(found, expected) < 1e-12
        inputs = [jnp.asarray(a) for a in arrays]
        exact = value_and_grads(inputs[:7], spans_of(N, rows), *inputs[7:])
        for found, expected in zip((*exact[0], *exact[1]), (*values, *grads), strict=True):
            assert error(found, expected) < 1e-12
    inputs = [jnp.asarray(a, jnp.float32) for a in arrays]
    rounded = value_and_grads(inputs[:7], spans_of(N, rows), *inputs[7:])
    for found, expected in zip((*rounded[0], *rounded[1]), (*values, *grads), strict=True):
        assert error(found, expected) < 1e-6


def test_end_states() -> None:
    """States and inputs after any token, in order; zeros for no token."""
    N, (row, *_) = PACKINGS["groups, rows, chunks"]
    arrays, texts = draw(1, N), [tokens for tokens, _ in texts_of(row)]
    wide, spans = [jnp.asarray(a, jnp.float32) for a in arrays[:6]], spans_of(N, [row])
    ends = jnp.asarray([tokens[-1] for tokens in texts] + [N + 64], jnp.int32)
    states, inputs = (
        jax.jit(kernel.delta_rule)(*wide[:5], spans, ends)[1],
        kernel.conv_inputs(wide[5], spans, ends, width=W),
    )
    for tokens, state, tail in zip(texts, states, inputs, strict=False):
        assert error(state, recurrence(*(a[0, tokens] for a in arrays[:5]))[1]) < 2e-6
        own = np.concatenate([np.zeros((W - 1, 5)), arrays[5][0, tokens]])[1 - W :]
        np.testing.assert_array_equal(tail, own.astype(np.float32))
    assert not np.any(states[-1]) and not np.any(inputs[-1])
    # Without `ends`, that of the row's last token.
    np.testing.assert_array_equal(kernel.conv_inputs(wide[5], spans, width=W)[0], inputs[-2])
    assert error(jax.jit(kernel.delta_rule)(*wide[:5], spans)[1][0], np.asarray(states[-2])) < 1e-6


def test_steps_continue_rows() -> None:
    """From a row's end state, one token at a time gives what the whole row does."""
    N, more = 70, 9
    q, k, v, g, beta, x, weight, *_ = (jnp.asarray(a, jnp.float32) for a in draw(2, N + more))
    whole = spans_of(N + more, [[(N + more, [])]] * 2)
    first = spans_of(N, [[(N, [])]] * 2)
    o, y = jax.jit(outputs)(q, k, v, g, beta, x, weight, whole)
    _, state = jax.jit(kernel.delta_rule)(*(a[:, :N] for a in (q, k, v, g, beta)), first)
    inputs = kernel.conv_inputs(x[:, :N], first, width=W)[:, None]
    for t in range(N, N + more):
        out, state = jax.jit(kernel.delta_step)(state, *(a[:, t] for a in (q, k, v, g, beta)))
        conv, inputs = jax.jit(kernel.short_conv_step)(inputs, x[:, None, t], weight[None])
        np.testing.assert_allclose(out, o[:, t], rtol=0, atol=1e-6)
        np.testing.assert_allclose(conv[:, 0], y[:, t], rtol=0, atol=1e-6)


def test_equal_keys_are_solved() -> None:
    """Powers of A would overflow float32 here: all keys of a chunk are equal, and nothing is forgotten."""
    q, k, v, g, beta, *_ = draw(1, 64)
    k, g, beta = np.broadcast_to(k[:, :1], k.shape), 0 * g, np.ones_like(beta)
    spans = spans_of(64, [[(64, [])]])
    o, _ = jax.jit(kernel.delta_rule)(*(jnp.asarray(a, jnp.float32) for a in (q, k, v, g, beta)), spans)
    np.testing.assert_allclose(o[0], recurrence(q[0], k[0], v[0], g[0], beta[0])[0], rtol=0, atol=3e-6)
