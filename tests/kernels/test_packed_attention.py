"""Attention over packed rows matches a dense float64 oracle, forward and backward, and does no work on padding."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from gspo_jax.bringup import token_kernels
from gspo_jax.kernels.attention import causal_attention
from gspo_jax.kernels.packed_attention import Spans, masked_attention, packed_attention
from gspo_jax.models.transformer import REMATS
from gspo_jax.parallel import mesh as mesh_lib
from tests.tiny import mostly_slow

PACKINGS = {
    "groups, padding, an empty row": (200, [[(5, [40, 1, 70]), (9, [30])], [], [(1, [1, 1, 1]), (3, [100])]]),
    "one full text": (150, [[(150, [])]]),
    "blocks line up": (320, [[(64, [64, 128]), (64, [])], [(128, [64, 64, 64])]]),
    "a prompt of several blocks": (400, [[(150, [20, 90, 65]), (1, [2, 1])]]),
    "texts without a prompt": (130, [[(0, [64]), (0, [1, 65])]]),
    "shorter than a block": (7, [[(2, [1, 3])], [(1, [])]]),
}
"""Tokens per row, and of each row its groups: the prompt's length and the responses'."""


def spans_of(tokens, rows):
    """Return the spans of rows with the given groups, on the device."""
    return Spans(*(jnp.asarray(x) for x in token_kernels.spans_of(tokens, rows)))


def seen_by(spans):
    """Return the dense mask [B, N, N] of the keys that each token sees."""
    starts, ends, own = (np.asarray(x)[:, :, None] for x in spans)
    token = np.arange(own.shape[1])
    return ((starts <= token) & (token < ends)) | ((own <= token) & (token <= token[:, None]))


def draw(spans, heads=4, kv_heads=2, width=8, dtype=jnp.float32):
    """Return random queries, keys, values and an output cotangent, which is zero for padding."""
    rng, (B, N) = np.random.default_rng(0), spans.own_start.shape
    q, k, v, grads = (
        jnp.asarray(rng.standard_normal((B, N, n, width)), dtype) for n in (heads, kv_heads, kv_heads, heads)
    )
    return q, k, v, jnp.where(spans.valid[:, :, None, None], grads, 0)


def oracle(q, k, v, grads, spans):
    """Return the output and the gradients of q, k and v in float64, from all pairs of tokens."""
    q, k, v, grads = (np.asarray(x, np.float64) for x in (q, k, v, grads))
    (*_, H, h), Kv = q.shape, k.shape[2]
    k, v = (np.repeat(x, H // Kv, axis=2) for x in (k, v))
    probs = np.exp(np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(h)) * seen_by(spans)[:, None]
    probs /= np.maximum(probs.sum(-1, keepdims=True), 1e-300)
    out = np.einsum("bhts,bshd->bthd", probs, v)
    dp = np.einsum("bthd,bshd->bhts", grads, v)
    ds = probs * (dp - (probs * dp).sum(-1, keepdims=True)) / np.sqrt(h)
    dq = np.einsum("bhts,bshd->bthd", ds, k)
    dk, dv = np.einsum("bhts,bthd->bshd", ds, q), np.einsum("bhts,bthd->bshd", probs, grads)
    return out, dq, *(x.reshape(*x.shape[:2], Kv, H // Kv, h).sum(3) for x in (dk, dv))


@partial(jax.jit, static_argnames="attend")
def with_gradients(q, k, v, grads, spans, attend=packed_attention):
    out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, spans), q, k, v)
    return out, *vjp(grads)


def close(ours, theirs, dtype=jnp.float32):
    tolerance = {jnp.float32: 2e-6, jnp.bfloat16: 2e-2}[dtype]
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype
        b = np.asarray(b, np.float64)
        np.testing.assert_allclose(np.asarray(a, np.float64), b, atol=tolerance * np.abs(b).max(), rtol=0)


LOWER = [(name, jnp.bfloat16) for name in ("groups, padding, an empty row", "a prompt of several blocks")]


@pytest.mark.parametrize(
    ("name", "dtype"),
    mostly_slow(
        [*((name, jnp.float32) for name in PACKINGS), *LOWER], always=[(name, jnp.float32) for name in PACKINGS]
    ),
)
def test_equals_the_dense_oracle(name, dtype):
    spans = spans_of(*PACKINGS[name])
    arrays = draw(spans, dtype=dtype)
    ours = with_gradients(*arrays, spans)
    close(ours, oracle(*arrays, spans), dtype)
    for x in ours:
        assert not np.asarray(x)[~np.asarray(spans.valid)].any(), "padding gets nothing and gives nothing"
    *inputs, grads = arrays
    read = with_gradients(*inputs, jnp.where(spans.valid[:, :, None, None], grads, 1), spans)
    chex.assert_trees_all_equal(ours, read)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_packings_equal_the_dense_oracle(seed):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(rng.integers(1, 4)):
        groups = [(rng.integers(0, 90), list(rng.integers(1, 150, rng.integers(0, 4)))) for _ in range(3)]
        rows.append([group for group in groups if rng.random() < 0.8])
    longest = max(sum(p + sum(r) for p, r in groups) for groups in rows)
    tokens = next(size for size in (300, 511, 833, 1025, 1700) if size > longest)  # few shapes are compiled
    spans = spans_of(tokens, [*rows, [], []][:3])
    arrays = draw(spans)
    close(with_gradients(*arrays, spans), oracle(*arrays, spans))


@pytest.mark.parametrize(
    ("name", "dtype"),
    mostly_slow(
        [*((name, jnp.float32) for name in PACKINGS), LOWER[0]],
        always=[("groups, padding, an empty row", jnp.float32)],
    ),
)
def test_the_mask_that_cudnn_gets_says_the_same(name, dtype):
    """XLA's own attention with that mask equals the oracle, except in what padding gets."""
    spans = spans_of(*PACKINGS[name])
    arrays = draw(spans, dtype=dtype)
    out, *grads = with_gradients(*arrays, spans, attend=partial(masked_attention, implementation="xla"))
    expected, *others = oracle(*arrays, spans)
    assert np.isfinite(np.asarray(out, np.float64)).all()
    close((jnp.where(spans.valid[:, :, None, None], out, 0), *grads), (expected, *others), dtype)


def test_positions_continue_the_prompt():
    spans = spans_of(10, [[(2, [3, 1]), (1, [1])]])
    np.testing.assert_array_equal(spans.valid[0], [True] * 8 + [False] * 2)
    np.testing.assert_array_equal(spans.positions[0], [0, 1, 2, 3, 4, 2, 0, 1, 0, 0])


def test_double_precision():
    with jax.enable_x64(True):
        spans = spans_of(*PACKINGS["a prompt of several blocks"])
        arrays = draw(spans, dtype=jnp.float64)
        for a, b in zip(with_gradients(*arrays, spans), oracle(*arrays, spans), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)


def test_scores_far_apart_stay_finite():
    """Keys of padding and of other segments never set the maximum that is subtracted."""
    spans = spans_of(100, [[(3, [20, 30])]])
    q, k, v, grads = draw(spans)
    q, k = q * 30, k.at[:, 53:].mul(1e4)
    for x in with_gradients(q, k, v, grads, spans):
        assert np.isfinite(x).all()


@pytest.mark.parametrize("remat", [remat for remat in REMATS if remat != "offload"])
def test_within_a_scan_over_layers(remat):
    """With every remat policy; "dots" keeps the output and its log-sum-exp, so the forward loop runs once."""
    spans = spans_of(*PACKINGS["groups, padding, an empty row"])
    q, k, v, grads = draw(spans)

    def loss(q, k, v, remat):
        def layer(x, _):
            return packed_attention(x, k, v, spans), None

        layer = layer if remat == "none" else jax.checkpoint(layer, policy=REMATS[remat])
        return (jax.lax.scan(layer, q, None, length=2)[0] * grads).sum()

    def compiled(remat):
        return jax.jit(jax.grad(partial(loss, remat=remat), argnums=(0, 1, 2))).lower(q, k, v).compile()

    ours, theirs = compiled(remat), compiled("none")
    for a, b in zip(ours(q, k, v), theirs(q, k, v), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    loops, without = (program.as_text().count(" while(") for program in (ours, theirs))
    assert loops == without + (2 if remat == "full" else 0), "a loop over queries and one over their keys run again"


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_every_shard_of_a_mesh_has_its_own_rows_and_heads(check):
    """Under manual axes, with the types that state over which axes an array varies, and without."""
    spans = spans_of(*PACKINGS["groups, padding, an empty row"])
    spans = jax.tree.map(lambda x: jnp.concatenate([x, x[::-1]])[:4], spans)
    arrays = draw(spans)
    heads, rows = PartitionSpec("data", None, "tensor"), PartitionSpec("data")
    with jax.set_mesh(mesh_lib.make_mesh({"data": 2, "expert": 2, "tensor": 2})):
        ours = jax.jit(
            jax.shard_map(with_gradients, in_specs=(heads, heads, heads, heads, rows), out_specs=heads, check_vma=check)
        )(*arrays, spans)
    close(ours, oracle(*arrays, spans))


def test_a_row_with_one_text_is_causal():
    """As a prefill on TPU asks for it; a row may be full, or empty."""
    valid = jnp.arange(90)[None] < jnp.asarray([[90], [41], [0]])
    spans = Spans.of_texts(valid)
    np.testing.assert_array_equal(spans.valid, valid)
    np.testing.assert_array_equal(spans.positions, jnp.where(valid, jnp.arange(90)[None], 0))
    q, k, v, _ = draw(spans)
    ours, theirs = packed_attention(q, k, v, spans), causal_attention(q, k, v, valid)
    mask = valid[:, :, None, None]
    np.testing.assert_allclose(jnp.where(mask, ours, 0), jnp.where(mask, theirs, 0), atol=2e-6)
