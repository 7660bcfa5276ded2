"""The TPU attention kernels, in interpret mode on CPU, match the plain XLA forms, forward and backward."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info
from jax.sharding import NamedSharding

from gspo_jax.kernels import attention, attention_tpu
from gspo_jax.models.attention import attend_segments
from gspo_jax.parallel import mesh as mesh_lib
from tests.tiny import mostly_slow

ROUNDING = {"float32": 2e-6, "bfloat16": 2e-2}
"""Tolerances relative to the largest entry; bfloat16 rounds the scaled queries, the probabilities and partial dq."""


def draw(rows, queries, keys, dtype, heads=4, kv_heads=2, width=128):
    """Return random queries, keys and values, the mask of valid keys, and an output cotangent.

    The last row is all padding. The cotangent is zero for queries that see no key: their output carries no loss.
    """
    rng = np.random.default_rng(queries)
    shapes = [(rows, queries, heads, width), *[(rows, keys, kv_heads, width)] * 2, (rows, queries, heads, width)]
    q, k, v, grads = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    valid = jnp.asarray(rng.random((rows, keys)) < 0.8).at[0, :5].set(False).at[-1].set(False)
    return q, k, v, valid, jnp.where(seeing(valid, queries), grads, 0)


def seeing(valid, queries):
    """Return which queries see a valid key, [B, queries, 1, 1]; with segments, exact only if the prompt has one."""
    return (jnp.cumsum(valid, axis=1)[:, -queries:] > 0)[:, :, None, None]


@partial(jax.jit, static_argnames="attend")
def with_gradients(attend, q, k, v, valid, grads):
    out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, valid), q, k, v)
    return jnp.where(seeing(valid, q.shape[1]), out, 0 * out), *vjp(
        grads
    )  # zero, but NaN if an output without loss is not finite


def close(ours, theirs, dtype):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype == dtype
        scale = float(jnp.abs(b.astype(jnp.float32)).max())
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=ROUNDING[dtype] * scale, rtol=0)


@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], always=["float32"]))
@pytest.mark.parametrize(
    ("prompt", "responses", "length"),
    mostly_slow([(150, 1, 50), (70, 4, 40)], always=[(70, 4, 40)]),
    ids=["one response", "a prompt and four"],
)
def test_rows_of_segments_equal_the_xla_form(prompt, responses, length, dtype):
    """Rows have holes, one is all padding, and no length is a multiple of the block; each row spans two blocks."""
    N = prompt + responses * length
    arrays = draw(2, N, N, dtype)
    ours = partial(attention_tpu.attention, prompt=prompt, responses=responses, interpret=True)
    theirs = partial(attention.segment_attention, prompt=prompt, responses=responses)
    out, *gradients = ours = with_gradients(ours, *arrays)
    close(ours, with_gradients(theirs, *arrays), dtype)
    for x in (out, *gradients):
        assert not x[-1].any(), "padding gets zero output and sends zero gradient"


def test_dq_in_a_kernel_of_its_own(monkeypatch):
    """The separate dq kernel, which long rows use instead of one partial dq per key block; also covers narrow heads."""
    monkeypatch.setattr(attention_tpu, "_MAX_DQ_PARTIALS", 1)
    arrays = draw(2, 230, 230, "float32", width=32)
    ours = partial(attention_tpu.attention, prompt=70, responses=4, interpret=True)
    close(
        with_gradients(ours, *arrays),
        with_gradients(partial(attention.segment_attention, prompt=70, responses=4), *arrays),
        "float32",
    )


def test_the_last_queries_of_a_row():
    arrays = draw(2, 70, 200, "float32")
    ours = with_gradients(partial(attention_tpu.attention, interpret=True), *arrays)
    close(ours, with_gradients(attention.causal_attention, *arrays), "float32")


def test_every_shard_of_a_mesh_has_its_own_rows_and_heads(monkeypatch):
    *arrays, grads = draw(4, 140, 140, "float32")
    theirs = with_gradients(partial(attend_segments, prompt=20, responses=3), *arrays, grads)
    monkeypatch.setattr(attention, "platform", lambda: "tpu")
    monkeypatch.setattr(attention_tpu, "attention", partial(attention_tpu.attention, interpret=True))
    mesh = mesh_lib.make_mesh({"data": 2, "expert": 2, "tensor": 2})
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, mesh_lib.spec(("batch", None, "heads"), mesh_lib.TRAINER))
        ours = with_gradients(partial(attend_segments, prompt=20, responses=3), *arrays, grads)
        assert ours[0].sharding.is_equivalent_to(split, 4)
    close(ours, theirs, "float32")


def test_the_mask_is_what_responses_see():
    S, G, T = 70, 4, 40
    N, mask = S + G * T, attention_tpu._Mask(256, 256, S, T)
    segment = np.r_[np.zeros(S), np.repeat(np.arange(1, G + 1), T)]
    expected = np.tril(np.ones((N, N), bool)) & ((segment == 0)[None] | (segment[:, None] == segment[None]))
    np.testing.assert_array_equal(mask[0:N, 0:N], expected)
    np.testing.assert_array_equal(mask[100:200, 50:150], expected[100:200, 50:150])


def test_work_follows_what_is_seen():
    """A prompt and eight responses of one block each: one block for the prompt, two for every response."""
    mask = masks.MultiHeadMask([attention_tpu._Mask(9 * 512, 9 * 512, 512, 512)])
    info, _ = mask_info.process_mask(mask, (512, 512))
    assert info.block_mask.shape == (1, 9, 2)
    assert (info.block_mask > 0).sum() == 1 + 8 * 2


@pytest.mark.parametrize(
    ("tokens", "longest", "block"),
    [(4096, 4096, 1024), (4608, 4608, 1024), (4200, 4200, 512), (4608, 512, 512), (4608, 100, 128), (300, 300, 128)],
)
def test_blocks_lengthen_a_row_by_an_eighth_at_most(tokens, longest, block):
    assert attention_tpu._block(tokens, longest) == block


def test_long_rows_have_a_kernel_for_dq():
    assert attention_tpu._block_sizes(8192, 8192, 8192).use_fused_bwd_kernel
    assert not attention_tpu._block_sizes(32768, 32768, 32768).use_fused_bwd_kernel


def inner_jaxprs(equation):
    """Return the jaxprs among an equation's parameters."""
    values = [x for v in equation.params.values() for x in (v if isinstance(v, tuple | list) else (v,))]
    return [getattr(x, "jaxpr", x) for x in values if hasattr(x, "eqns") or hasattr(x, "jaxpr")]


def kernels_of(jaxpr, products):
    """Add to `products`, by kernel name, the flops of the matrix products in one grid step of each Pallas kernel."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            products[equation.params["name"]] = sum(map(flops_of, inner_jaxprs(equation)))
        else:
            for inner in inner_jaxprs(equation):
                kernels_of(inner, products)
    return products


def flops_of(jaxpr):
    """Return the flops of all matrix products of a jaxpr, those of loops times their length."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            ((inner, _), _), shape = equation.params["dimension_numbers"], equation.invars[0].aval.shape
            total += 2 * np.prod(equation.outvars[0].aval.shape) * np.prod([shape[d] for d in inner])
        total += equation.params.get("length", 1) * sum(map(flops_of, inner_jaxprs(equation)))
    return int(total)


@pytest.mark.parametrize("partials", [8, 1], ids=["fused", "dq apart"])
@pytest.mark.parametrize(("prompt", "responses", "length"), [(150, 1, 50), (300, 3, 320), (256, 4, 256)])
def test_computed_products_are_those_of_the_visited_blocks(prompt, responses, length, partials, monkeypatch):
    """Visited blocks are counted on the whole mask; products of a block in the kernels as traced."""
    monkeypatch.setattr(attention_tpu, "_MAX_DQ_PARTIALS", partials)
    N, heads, width = prompt + responses * length, 2, 128
    found = attention_tpu.computed_products(N, N, heads=heads, prompt=prompt, responses=responses)
    at = np.arange(N)
    own = np.where(at < prompt, 0, 1 + (at - prompt) // length)
    seen = (at[None] <= at[:, None]) & ((own[None] == 0) | (own[None] == own[:, None]))
    blocks = attention_tpu._block_sizes(N, N, N if responses == 1 else length)
    q, k = blocks.block_q, blocks.block_kv
    pad = np.pad(seen, ((0, -N % q), (0, -N % k)))
    visited = pad.reshape(pad.shape[0] // q, q, pad.shape[1] // k, k).any(axis=(1, 3)).sum()
    x = [jax.ShapeDtypeStruct((1, N, h, width), jnp.bfloat16) for h in (heads, 1, 1)]

    def loss(*x):
        valid = jnp.ones((1, N), bool)
        return attention_tpu.attention(*x, valid, prompt=prompt, responses=responses).astype(jnp.float32).sum()

    traced = kernels_of(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*x).jaxpr, {})
    expected = {name: next(n for kernel, n in traced.items() if kernel.startswith(name)) for name in found}
    assert len(expected) == len(traced) == (3 if partials == 1 and pad.shape[1] > k else 2)
    assert {name: 2 * width * n for name, n in found.items()} == {
        name: heads * visited * flops for name, flops in expected.items()
    }
