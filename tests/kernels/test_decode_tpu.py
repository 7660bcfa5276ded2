"""The kernels of a decode step on TPU, in interpret mode on CPU, match float64 oracles; attention has its own file."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.kernels import decode_experts_tpu, decode_mlp_tpu, decode_output_tpu, decode_qkv_tpu
from gspo_jax.kernels.decode_experts_tpu import experts_sum, pack, packed_width
from gspo_jax.kernels.decode_output_tpu import RouteLog, Router, output_and_routes
from gspo_jax.kernels.decode_qkv_tpu import rotation
from gspo_jax.kernels.decode_tpu import divisor
from tests.kernels.decode import close, draw, matrix, rms, silu
from tests.tiny import mostly_slow

L, D, F, EPS = 2, 32, 48, 1e-6
KINDS = {
    "plain": ("float32", {}),
    "bfloat16": ("bfloat16", {}),
    "int8": ("float32", {"int8": True}),
    "adapted": ("float32", {"rank": 2}),
    "int8, adapted": ("bfloat16", {"int8": True, "rank": 4}),
}
"""dtype, and the kind of matrices."""


E, HELD, FIRST, K = 16, 4, 4, 3


def chosen(rng, case, rows, experts=E):
    """Return the experts of each row; E: none."""
    ids = np.stack([rng.permutation(experts)[:K] for _ in range(rows)])
    if case == "one takes all":
        ids = np.tile([FIRST + 1, 0, experts - 1], (rows, 1))
    if case == "idle":
        ids[:] = experts
    if case == "elsewhere":
        ids = np.tile([0, 1, experts - 1], (rows, 1))
    ids[0] = experts  # one idle slot
    return ids


def experts_oracle(x, ids, shares, gate, up, down, dtype):
    """Return the weighted sum of the held experts' outputs; weights are as rows carry them."""
    y, shares = np.zeros_like(x), np.asarray(jnp.asarray(shares, dtype), np.float64)
    for n, k in np.ndindex(ids.shape):
        if 0 <= (e := ids[n, k] - FIRST) < HELD:
            y[n] += shares[n, k] * (silu(x[n] @ gate[e]) * (x[n] @ up[e])) @ down[e]
    return y


CASES = [
    *(("random", 40, kind) for kind in KINDS),
    *((case, 150, "plain") for case in ("random", "one takes all", "idle", "elsewhere")),
    ("random", 5, "bfloat16"),
]


@pytest.mark.parametrize(
    ("case", "rows", "kind"),
    mostly_slow(CASES, always=[("random", 40, "int8, adapted"), ("one takes all", 150, "plain")]),
)
def test_experts_equal_the_oracle(case, rows, kind):
    """Also with more rows than a part holds, and for each layer."""
    rng, (dtype, of) = np.random.default_rng(0), KINDS[kind]
    x, x64 = draw(rng, dtype, rows, D)
    ids, shares = chosen(rng, case, rows), rng.random((rows, K))
    (gate, gate64), (up, up64) = (matrix(rng, dtype, L, HELD, D, F, **of) for _ in range(2))
    down, down64 = matrix(rng, dtype, L, HELD, F, D, **of)
    packed = pack(x, jnp.asarray(ids), jnp.asarray(shares, jnp.float32), E)
    run = jax.jit(partial(experts_sum, first=FIRST, k=K, experts=E, interpret=True))
    y = run(packed, gate, up, down, layer=jnp.asarray(1))
    assert y.dtype == dtype
    close(y, experts_oracle(x64, ids, shares, gate64[1], up64[1], down64[1], dtype), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [E, 600])
def test_chunks_columns_and_large_ids_change_nothing(experts, monkeypatch):
    """512 tokens in 2 chunks, picked from 128 at a time, F in 2 blocks, on one core or two.

    Ids of 600 experts take two digits in bfloat16.
    """
    rng = np.random.default_rng(1)
    x, x64 = draw(rng, "bfloat16", 512, D)
    ids, shares = chosen(rng, "random", 512, experts), rng.random((512, K))
    ids[1:40] = np.stack([FIRST + np.arange(39) % HELD, np.full(39, experts - 1), np.full(39, experts)], axis=1)
    (gate, gate64), (up, up64) = (matrix(rng, "bfloat16", L, HELD, D, 256) for _ in range(2))
    down, down64 = matrix(rng, "bfloat16", L, HELD, 256, D)
    packed = pack(x, jnp.asarray(ids), jnp.asarray(shares, jnp.float32), experts)
    assert packed.shape[1] == packed_width(D, K, experts)
    expected = experts_oracle(x64, ids, shares, gate64[0], up64[0], down64[0], "bfloat16")
    monkeypatch.setattr(decode_experts_tpu, "CHUNK", 256)
    monkeypatch.setattr(decode_experts_tpu, "_PICKED", 128)
    monkeypatch.setattr(decode_experts_tpu, "divisor", lambda size, limit, unit=128: min(size, 128))
    for cores in (1, 2):
        monkeypatch.setattr(decode_experts_tpu, "cores", lambda cores=cores: cores)
        options = {"layer": jnp.asarray(0), "first": FIRST, "k": K, "experts": experts, "interpret": True}
        close(experts_sum(packed, gate, up, down, **options), expected, "bfloat16")


def head_oracle(x, w, turn, scale, head_norms, head_dim, rotate=True):
    """Return heads [J, B, h] of x w, normed and rotated."""
    z = x @ w
    if head_norms == "projection" and scale is not None:
        z = rms(z, scale, EPS)
    z = np.moveaxis(z.reshape(len(x), -1, head_dim), 1, 0)
    if head_norms == "head" and scale is not None:
        z = rms(z, scale, EPS)
    if not rotate:
        return z
    a, b = np.split(z, 2, axis=-1)
    cos, sin = (np.split(np.asarray(t, np.float64), 2, axis=-1)[1] for t in turn)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@pytest.mark.parametrize(
    ("head_norms", "kind"),
    mostly_slow(
        [("none", "bfloat16"), ("head", "plain"), ("head", "int8, adapted"), ("projection", "adapted")],
        always=[("head", "int8, adapted")],
    ),
)
def test_heads_equal_the_oracle(head_norms, kind, monkeypatch):
    """Four heads of queries and two of keys, over several blocks of columns."""
    rng, (dtype, of), B, h = np.random.default_rng(2), KINDS[kind], 5, 16
    (x, x64), (y, y64) = (draw(rng, dtype, B, D) for _ in range(2))
    scale = rng.uniform(0.5, 1.5, (L, 1, D))
    (q, q64), (k, k64), (v, v64) = (matrix(rng, dtype, L, D, n * h, **of) for n in (4, 2, 2))
    sizes = {"none": (), "head": (h, h), "projection": (4 * h, 2 * h)}[head_norms]
    norms = [rng.uniform(0.5, 1.5, (L, 1, n)) for n in sizes]
    turn = rotation(jnp.asarray([0, 1, 7, 100, 4095]), jnp.asarray(1e4 ** (-np.arange(h // 2) / (h // 2)), jnp.float32))
    stream = np.asarray(jnp.asarray(x64 + y64, dtype), np.float64)
    rows = np.asarray(jnp.asarray(rms(stream, scale[1], EPS), dtype), np.float64)
    of_q, of_k = (norms[0][1], norms[1][1]) if norms else (None, None)
    expected = np.concatenate(
        [
            head_oracle(rows, q64[1], turn, of_q, head_norms, h),
            head_oracle(rows, k64[1], turn, of_k, head_norms, h),
            head_oracle(rows, v64[1], turn, None, head_norms, h, rotate=False),
        ]
    )
    arrays = x, y, jnp.asarray(scale, jnp.float32), q, k, v, turn, tuple(jnp.asarray(n, jnp.float32) for n in norms)
    options = {"layer": jnp.asarray(1), "head_norms": head_norms, "eps": EPS, "interpret": True}
    for columns, cores in ((512, 1), (h, 2)):
        monkeypatch.setattr(decode_qkv_tpu, "_COLUMNS", columns)
        monkeypatch.setattr(decode_qkv_tpu, "cores", lambda cores=cores: cores)
        found = jax.jit(partial(decode_qkv_tpu.heads, **options))(*arrays)
        assert found.dtype == jnp.float32 and (found == found.astype(dtype)).all()
        close(found, expected, dtype)


@pytest.mark.parametrize("kind", mostly_slow(["plain", "int8, adapted"], always=["plain"]))
def test_output_and_routes_equal_the_oracle(kind, monkeypatch):
    """Of an idle slot, whose attention is NaN here, the stream is x + y, and no expert is asked."""
    rng, (dtype, of), B, H, h = np.random.default_rng(3), KINDS[kind], 6, 4, 16
    monkeypatch.setattr(decode_output_tpu, "_ROWS", 32)
    (x, x64), (y, y64) = (draw(rng, dtype, B, D) for _ in range(2))
    attended, attended64 = draw(rng, dtype, B + 1, H, h)
    attended = attended.astype(jnp.float32).at[jnp.asarray([2, B])].set(jnp.nan)
    active = jnp.ones((B, 1)).at[2].set(0)
    o, o64 = matrix(rng, dtype, L, H * h, D, **of)
    weights, weights64 = matrix(rng, "float32", L, D, E)
    scale = rng.uniform(0.5, 1.5, (L, 1, D))
    for renormalise in (True, False):
        router = Router(jnp.asarray(scale, jnp.float32), weights, K, renormalise)
        log = RouteLog(jnp.full((L, B, K), 7), jnp.full((L, B, K), 7.0))
        options = {"layer": jnp.asarray(1), "eps": EPS, "interpret": True}
        stream, packed, log = output_and_routes(attended, x, y, active, o, router, log, **options)
        out = attended64[:B].reshape(B, -1) @ o64[1] * np.asarray(active)
        close(stream, x64 + y64 + out, dtype)
        rows = np.asarray(jnp.asarray(rms(np.asarray(stream, np.float64), scale[1], EPS), dtype), np.float64)
        close(packed[:, :D], rows, dtype)
        used = np.asarray(jnp.asarray(weights64[1], dtype), np.float64)  # as XLA's default on TPU
        logits = np.asarray(packed[:, :D], np.float64) @ used
        every = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        ids = np.argsort(-every, axis=1)[:, :K]
        shares = np.exp(np.take_along_axis(every, ids, axis=1))
        shares = shares / shares.sum(axis=1, keepdims=True) if renormalise else shares
        assert (log.experts[1] == ids).all() and (log.experts[0] == 7).all()
        close(log.logprobs[1], np.take_along_axis(every, ids, axis=1), "float32")
        close(packed[:, D : D + K], shares, dtype)
        assert (packed[:, D + K : D + 2 * K] == np.where(active > 0, ids, E)).all()
    stream, *none = output_and_routes(attended, x, y, active, o, None, None, **options)
    close(stream, x64 + y64 + out, dtype)
    assert none == [None, None]
    whole = decode_output_tpu.projection(attended, o, B, layer=jnp.asarray(1), dtype=x.dtype, interpret=True)
    kept = np.asarray(active[:, 0]) > 0
    close(whole[kept], out[kept], dtype)


def test_of_equal_experts_the_first_is_chosen():
    """As `jax.lax.top_k`: experts 5, 9 and 2 have the highest logit, 11 and 3 the next."""
    logits = jnp.zeros((1, E)).at[0, jnp.asarray([5, 9, 2])].set(2.0).at[0, jnp.asarray([11, 3])].set(1.0)
    ids, logprobs = decode_output_tpu._choose(logits, 5)
    expected, places = jax.lax.top_k(jax.nn.log_softmax(logits), 5)
    assert ids.tolist() == places.tolist() == [[2, 5, 9, 3, 11]]
    np.testing.assert_allclose(logprobs, expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "int8, adapted"])
def test_the_dense_layer_equals_the_oracle(kind, monkeypatch):
    rng, (dtype, of), B = np.random.default_rng(4), KINDS[kind], 5
    x, x64 = draw(rng, dtype, B, D)
    scale = rng.uniform(0.5, 1.5, (L, 1, D))
    (gate, gate64), (up, up64) = (matrix(rng, dtype, L, D, 256, **of) for _ in range(2))
    down, down64 = matrix(rng, dtype, L, 256, D, **of)
    rows = np.asarray(jnp.asarray(rms(x64, scale[1], EPS), dtype), np.float64)
    expected = silu(rows @ gate64[1]) * (rows @ up64[1]) @ down64[1]
    monkeypatch.setattr(decode_mlp_tpu, "_COLUMNS", 128)
    for cores in (1, 2):
        monkeypatch.setattr(decode_mlp_tpu, "cores", lambda cores=cores: cores)
        arrays = x, jnp.asarray(scale, jnp.float32), gate, up, down
        close(decode_mlp_tpu.mlp(*arrays, layer=jnp.asarray(1), eps=EPS, interpret=True), expected, dtype)


@pytest.mark.parametrize(
    ("size", "limit", "unit", "found"), [(768, 700, 128, 384), (768, 10, 128, 128), (48, 10, 128, 48), (904, 500, 8, 8)]
)
def test_blocks_divide_a_dimension(size, limit, unit, found):
    """904 = 8 · 113, a prime."""
    assert divisor(size, limit, unit) == found
