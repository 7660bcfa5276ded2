"""Every kernel matches its plain counterpart, forward and backward."""

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gspo_jax.kernels import grouped_matmul as gm
from gspo_jax.kernels.attention import SlotRows, causal_attention, decode_attention
from gspo_jax.kernels.logprobs import KeptIds, _chunks, log_softmax_at, token_logprobs
from gspo_jax.models.cache import stored
from gspo_jax.parallel import mesh as mesh_lib
from tests.tiny import mostly_slow

GROUPS = {
    "even": [40, 40, 40, 40],
    "uneven": [3, 0, 90, 61],
    "all-in-one": [0, 0, 160, 0],
    "tail": [10, 20, 0, 7],
    "none": [0, 0, 0, 0],
}


def dense(rows, weights, sizes):
    """Return the float64 oracle: each row times its own expert's matrix; zero beyond the groups."""
    experts = np.repeat(np.arange(len(sizes)), sizes)
    out = np.zeros((rows.shape[0], weights.shape[2]))
    for i, e in enumerate(experts):
        out[i] = rows[i].astype(np.float64) @ weights[e].astype(np.float64)
    return out


def backends():
    ragged = {"products": gm._ragged_products, "transposed": gm._ragged_transposed, "outer": gm._ragged_outer}
    blocked = {"products": gm._blocked_products, "transposed": gm._blocked_transposed, "outer": gm._blocked_outer}
    gpu = {"products": gm._gpu_products, "transposed": gm._gpu_transposed, "outer": gm._gpu_outer}
    gpu = {name: partial(kernel, interpret=True) for name, kernel in gpu.items()}
    return [pytest.param(blocked, id="blocked"), pytest.param(ragged, id="ragged"), pytest.param(gpu, id="gpu")]


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("backend", backends())
def test_grouped_matmul_equals_the_dense_oracle(backend, sizes):
    rng = np.random.default_rng(0)
    rows, weights = rng.standard_normal((160, 48)), rng.standard_normal((2, 4, 48, 16))
    grads = rng.standard_normal((2, 160, 16))
    counts = jnp.asarray(sizes, jnp.int32)
    rows32, weights32, grads32 = (jnp.asarray(a, jnp.float32) for a in (rows, weights, grads))
    out = backend["products"](rows32, tuple(weights32), counts)
    np.testing.assert_allclose(out, np.stack([dense(rows, w, sizes) for w in weights]), atol=1e-4)
    back = backend["transposed"](tuple(grads32), tuple(weights32), counts)
    expected = sum(dense(g, w.transpose(0, 2, 1), sizes) for g, w in zip(grads, weights, strict=True))
    np.testing.assert_allclose(back, expected, atol=1e-4)
    outer = backend["outer"](rows32, tuple(grads32), counts)
    ends = np.cumsum([0, *sizes])
    expected = [[rows[a:b].T @ g[a:b] for a, b in itertools.pairwise(ends)] for g in grads]
    np.testing.assert_allclose(outer, np.asarray(expected), atol=1e-4)


@pytest.mark.parametrize("sizes", [[0, 64, 0], [40, 3, 21], [5, 0, 0]])
def test_rows_of_one_block_on_a_cpu(sizes):
    rng = np.random.default_rng(0)
    rows, weights, grads = (rng.standard_normal(shape) for shape in ((64, 8), (3, 8, 4), (64, 4)))
    rows32, weights32, grads32 = (jnp.asarray(a, jnp.float32) for a in (rows, weights, grads))
    counts = jnp.asarray(sizes, jnp.int32)
    (out,) = gm._blocked_products(rows32, (weights32,), counts)
    np.testing.assert_allclose(out, dense(rows, weights, sizes), atol=1e-5)
    (outer,) = gm._blocked_outer(rows32, (grads32,), counts)
    ends = np.cumsum([0, *sizes])
    np.testing.assert_allclose(outer, [rows[a:b].T @ grads[a:b] for a, b in itertools.pairwise(ends)], atol=1e-5)


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("backend", backends())
def test_grouped_matmul_of_int8_equals_the_dense_oracle(backend, sizes):
    """One matrix in int8 with a scale for each column, beside one in float32, on GPU in int8 too."""
    rng = np.random.default_rng(0)
    rows, grads = rng.standard_normal((160, 48)), rng.standard_normal((2, 160, 16))
    values, scales = rng.integers(-127, 128, (2, 4, 48, 16)), rng.uniform(0.01, 0.02, (2, 4, 16)).astype(np.float32)
    whole = values * scales.astype(np.float64)[:, :, None]
    weights = tuple(gm.Scaled(jnp.asarray(v, jnp.int8), jnp.asarray(s)) for v, s in zip(values, scales, strict=True))
    if "interpret" not in getattr(backend["products"], "keywords", {}):
        weights = weights[0], jnp.asarray(whole[1], jnp.float32)
    rows32, grads32, counts = jnp.asarray(rows, jnp.float32), jnp.asarray(grads, jnp.float32), jnp.asarray(sizes)
    out = backend["products"](rows32, weights, counts)
    np.testing.assert_allclose(out, np.stack([dense(rows, w, sizes) for w in whole]), atol=1e-4)
    back = backend["transposed"](tuple(grads32), weights, counts)
    expected = sum(dense(g, w.transpose(0, 2, 1), sizes) for g, w in zip(grads, whole, strict=True))
    np.testing.assert_allclose(back, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_grouped_matmul_gradient_is_its_own(dtype):
    """Gradients in the rows, which two products share, and in both weights, equal those of a plain einsum."""
    rng = np.random.default_rng(1)
    rows = jnp.asarray(rng.standard_normal((96, 8)), dtype)
    weights = tuple(jnp.asarray(rng.standard_normal((3, 8, 4)), dtype) for _ in range(2))
    sizes = [50, 0, 30]
    targets = jnp.asarray(rng.standard_normal((2, 96, 4)), jnp.float32)

    def loss(rows, weights):
        out = gm.grouped_matmuls(rows, weights, jnp.asarray(sizes, jnp.int32))
        return sum((y.astype(jnp.float32) * target).sum() for y, target in zip(out, targets, strict=True))

    def plain(rows, weights):
        chosen = jnp.stack(weights)[:, np.repeat([0, 2], [50, 30])].astype(jnp.float32)
        return (jnp.einsum("nd,wndf->wnf", rows[:80].astype(jnp.float32), chosen) * targets[:, :80]).sum()

    ours, theirs = (jax.tree.leaves(jax.jit(jax.grad(f, argnums=(0, 1)))(rows, weights)) for f in (loss, plain))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(
            a.astype(jnp.float32),
            b.astype(jnp.float32),
            rtol=0 if dtype == jnp.float32 else 0.05,
            atol=1e-5 if dtype == jnp.float32 else 0.1,
        )
    assert not ours[0][80:].any(), "rows beyond the groups get no gradient"


def test_the_head_s_gradient_is_a_product_of_two_matrices():
    """XLA copies an operand with more axes, transposed."""
    loss = partial(token_logprobs, targets=jnp.zeros((2, 6), int), chunk=6)
    gradient = jax.jit(jax.grad(lambda h, w: loss(h, w)[0].sum(), argnums=(0, 1)))
    lowered = gradient.lower(jnp.zeros((2, 6, 8)), jnp.zeros((8, 16))).as_text()
    products = [line for line in lowered.splitlines() if "dot_general" in line]
    assert len(products) == 4, "one recomputed, and two gradients"
    assert all(re.fullmatch(r"tensor<\d+x\d+xf32>", t) for line in products for t in re.findall(r"tensor<.*?>", line))


@pytest.mark.parametrize("backend", backends())
def test_what_lies_beyond_the_groups_is_not_read(backend):
    rows, grads = (jnp.full((40, width), jnp.nan).at[:20].set(1.0) for width in (32, 16))
    counts = jnp.asarray([7, 13], jnp.int32)
    assert np.isfinite(backend["products"](rows, [jnp.ones((2, 32, 16))], counts)[0]).all()
    assert np.isfinite(backend["transposed"]([grads], [jnp.ones((2, 32, 16))], counts)).all()
    np.testing.assert_array_equal(backend["outer"](rows, [grads], counts)[0][:, 0, 0], [7, 13])


def naive_attention(q, k, v, mask):
    out = np.zeros_like(q)
    for b, t, n in np.ndindex(q.shape[:3]):
        kv = n // (q.shape[2] // k.shape[2])
        scores = np.array([q[b, t, n] @ k[b, s, kv] for s in range(k.shape[1])]) / np.sqrt(q.shape[-1])
        scores = np.where(mask[b, t], scores, -np.inf)
        probs = np.exp(scores - scores.max())
        out[b, t, n] = (probs / probs.sum()) @ v[b, :, kv]
    return out


@pytest.mark.parametrize("T", [5, 150])
def test_causal_attention_is_softmax_over_the_valid_keys_so_far(T):
    """Covers one chunk, and several of unequal length; agrees with naive softmax to 1e-5. The first query sees none."""
    rng = np.random.default_rng(2)
    q = rng.standard_normal((2, T, 4, 4))
    k, v = rng.standard_normal((2, 2, T, 2, 4))
    valid = rng.random((2, T)) < 0.8
    valid[0, :2], valid[1, 0] = (False, True), True
    got = jax.jit(causal_attention)(*(jnp.asarray(a, jnp.float32) for a in (q, k, v)), jnp.asarray(valid))
    assert not got[0, 0].any()
    seeing = valid.cumsum(axis=1) > 0
    seen = np.tril(np.ones((T, T), bool))[None] & valid[:, None]
    expected = naive_attention(q, k, v, seen | ~seeing[..., None])
    np.testing.assert_allclose(got[seeing], expected[seeing], atol=1e-5)


@pytest.mark.parametrize("slots", ["aligned", "few", "one"])
@pytest.mark.parametrize(("longest", "cache_dtype"), [(1, None), (3, None), (7, None), (7, "int8")])
def test_prompt_and_pages_are_one_softmax(slots, longest, cache_dtype):
    """Shared prompt keys and pages of own keys, under one softmax, equal naive attention over one contiguous row.

    Checked to 1e-5 for slots in row order, few slots, and one, with pages in random order, and for two queries of each,
    of which the first sees a token less. With int8 they equal attention over the values that are stored.
    """
    rng = np.random.default_rng(longest)
    L, P, G, S, Kv, h, layer = 2, 3, 2, 4, 2, 8, 1
    W, C, n = 3, 3, P * G
    responses = {"aligned": np.arange(n), "few": np.array([5, 0, 4, 1]), "one": np.array([3])}[slots]
    B = len(responses)
    lengths = np.array([2, 4, 1])
    ages = rng.integers(1, longest + 1, B)
    ages[0] = longest
    if B > 1:
        ages[1] = 0  # an idle slot
    ages = np.stack([np.maximum(ages - 1, ages > 0), ages], axis=1)
    table = rng.permutation(B * W).reshape(B, W)
    q = rng.standard_normal((B, 2, 4, h)).astype(np.float32)
    prompt_k, prompt_v = rng.standard_normal((2, L, P, Kv, S, h)).astype(np.float32)
    k, v = rng.standard_normal((2, L, B * W, Kv, C, h)).astype(np.float32)
    rows = None
    if slots != "aligned":
        rows = SlotRows.of(jnp.asarray(responses), jnp.asarray(ages[:, 0] > 0), P, G)
    kv = [stored(jnp.asarray(a), cache_dtype) for a in (prompt_k, prompt_v, k, v)]
    if cache_dtype is not None:
        prompt_k, prompt_v, k, v = (np.asarray(a.values * a.scale[..., None]) for a in kv)
    arrays = jnp.asarray(q), *kv[:2], jnp.asarray(lengths), *kv[2:]
    where = {"layer": jnp.asarray(layer), "table": jnp.asarray(table), "ages": jnp.asarray(ages), "rows": rows}
    got = jax.jit(decode_attention)(*arrays, **where)

    for b, i in np.argwhere(ages > 0):
        p = responses[b] // G
        own_k, own_v = (
            np.concatenate([a[layer, p][:, : lengths[p]], *pool[layer, table[b]]], axis=1)[:, : lengths[p] + ages[b, i]]
            for a, pool in ((prompt_k, k), (prompt_v, v))
        )
        own_k, own_v = (np.swapaxes(a, 0, 1)[None] for a in (own_k, own_v))
        expected = naive_attention(q[b, i][None, None], own_k, own_v, np.ones((1, 1, own_k.shape[1]), bool))
        np.testing.assert_allclose(got[b, i], expected[0, 0], atol=1e-5)


@pytest.mark.parametrize("chunk", mostly_slow([1, 6, 14, 1000], always=[6, 1000]))
def test_chunked_logprobs_equal_whole_ones(chunk):
    rng = np.random.default_rng(4)
    hidden, head = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 7, 8), (8, 33)))
    targets = jnp.asarray(rng.integers(0, 33, (2, 7)))

    def whole(hidden, head):
        logits = hidden @ head / 0.7
        logprobs = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(logprobs, targets[..., None], -1)[..., 0]
        return picked, -(jnp.exp(logprobs) * logprobs).sum(-1)

    def ours(hidden, head):
        return token_logprobs(hidden, head, targets, temperature=0.7, chunk=chunk)[:2]

    @partial(jax.jit, static_argnums=0)
    def with_gradients(f, *of):
        return f(*of), [jax.grad(lambda *of, i=i: f(*of)[i].sum(), argnums=(0, 1))(*of) for i in (0, 1)]

    (found, found_gradients), (expected, gradients) = (with_gradients(f, hidden, head) for f in (ours, whole))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), found, expected)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), found_gradients, gradients)


def test_chunks_are_of_equal_lengths():
    split, join = _chunks((1, 2176), 512)
    x = jnp.arange(2176)[None]
    assert split(x).shape == (5, 1, 448)
    np.testing.assert_array_equal(join(split(x)), x)
    assert _chunks((8, 4096), 4096)[0](jnp.zeros((8, 4096))).shape == (8, 8, 512)


@pytest.mark.parametrize(("chunk", "shards"), [(6, 1), (1000, 2)])
def test_log_probs_at_kept_ids_are_their_definition(chunk, shards):
    """In value and gradient, on one device and with a vocabulary on two.

    Some entries are unused, sets whole or not, and targets beyond those that are not.
    """
    rng, V, K = np.random.default_rng(5), 34, 9
    ids = np.stack([rng.permutation(V)[:K] for _ in range(14)]).reshape(2, 7, K)
    used = np.arange(K) < rng.integers(1, K + 1, (2, 7, 1))
    used[1, 5:] = False  # of padding
    ids, whole = np.where(used, ids, -1), used.any(axis=2) & (rng.random((2, 7)) < 0.5)
    targets = np.where(whole, ids[..., 0], rng.integers(0, V, (2, 7)))
    hidden, head = rng.standard_normal((2, 7, 8)), rng.standard_normal((8, V))
    pull = rng.standard_normal((2, 7)), rng.standard_normal((2, 7)), rng.standard_normal((2, 7, K))

    def definition(hidden, head):
        p = jnp.exp(hidden @ head / 0.7)
        p /= p.sum(axis=2, keepdims=True)
        S = (ids[..., None] == np.arange(V)).any(axis=2)
        mass = jnp.where(whole, (p * S).sum(axis=2), 1.0)[..., None]
        at = jnp.log(jnp.take_along_axis(p, jnp.asarray(np.maximum(ids, 0)), axis=2) / mass)
        target = jnp.log(jnp.take_along_axis(p, jnp.asarray(targets[..., None]), axis=2) / mass)[..., 0]
        return target, -(p * jnp.log(p)).sum(axis=2), jnp.where(used, at, 0)

    def ours(hidden, head):
        kept = KeptIds(jnp.asarray(ids), jnp.asarray(whole))
        return token_logprobs(hidden, head, jnp.asarray(targets), kept=kept, temperature=0.7, chunk=chunk)

    def with_gradients(f, dtype):
        def total(*of):
            found = f(*of)
            return sum((x * jnp.asarray(y, dtype)).sum() for x, y in zip(found, pull, strict=True)), found

        return jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(*(jnp.asarray(x, dtype) for x in (hidden, head)))

    with jax.enable_x64(True):
        expected_gradients, expected = jax.device_get(with_gradients(definition, jnp.float64))
    mesh = mesh_lib.make_mesh({"fsdp": 1, "tensor": shards}, devices=jax.devices()[:shards])
    with jax.set_mesh(mesh):
        head = jax.device_put(head, NamedSharding(mesh, PartitionSpec(None, "tensor")))
        gradients, found = jax.device_get(with_gradients(ours, jnp.float32))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    for a, b in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_log_softmax_survives_large_and_masked_logits():
    logits = jnp.asarray([[1e4, 0.0, -1e4], [3.0, -jnp.inf, 3.0]])
    logprob, entropy = log_softmax_at(logits, jnp.asarray([0, 2]))
    np.testing.assert_allclose(logprob, [0.0, -np.log(2)], atol=1e-6)
    assert entropy[0] == 0
