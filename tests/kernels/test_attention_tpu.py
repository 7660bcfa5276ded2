"""The TPU attention kernel, in interpret mode on CPU, matches the plain XLA form."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from gspo_jax.kernels import attention, attention_tpu
from gspo_jax.models.attention import attend_causal
from gspo_jax.parallel import mesh as mesh_lib
from tests.tiny import mostly_slow

ROUNDING = {"float32": 2e-6, "bfloat16": 2e-2}
"""Tolerances relative to the largest entry; bfloat16 rounds the scaled queries and the probabilities."""


def draw(rows, tokens, dtype, heads=4, kv_heads=2, width=128):
    """Return random queries, keys and values, and the mask of valid keys; the last row is all padding."""
    rng = np.random.default_rng(tokens)
    shapes = [(rows, tokens, heads, width), *[(rows, tokens, kv_heads, width)] * 2]
    q, k, v = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    valid = jnp.asarray(rng.random((rows, tokens)) < 0.8).at[0, :5].set(False).at[-1].set(False)
    return q, k, v, valid


def close(ours, theirs, valid, dtype):
    """Assert that the outputs agree where a query sees a key, and are finite everywhere."""
    assert ours.dtype == theirs.dtype == dtype
    assert np.isfinite(ours.astype(jnp.float32)).all()
    a, b = (np.asarray(x.astype(jnp.float32)) for x in (ours, theirs))
    seeing = np.asarray(jnp.cumsum(valid, axis=1) > 0)
    np.testing.assert_allclose(a[seeing], b[seeing], atol=ROUNDING[dtype] * np.abs(b).max(), rtol=0)


@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], always=["float32"]))
@pytest.mark.parametrize(("tokens", "width"), [(230, 128), (140, 32)], ids=["two blocks", "narrow heads"])
def test_the_kernel_equals_the_xla_form(tokens, width, dtype):
    """Rows have holes, one is all padding, and no length is a multiple of the block."""
    *arrays, valid = draw(2, tokens, dtype, width=width)
    ours = jax.jit(partial(attention_tpu.attention, interpret=True))(*arrays, valid)
    close(ours, jax.jit(attention.causal_attention)(*arrays, valid), valid, dtype)


def test_every_shard_of_a_mesh_has_its_own_rows_and_heads(monkeypatch):
    *arrays, valid = draw(4, 140, "float32")
    theirs = jax.jit(attend_causal)(*arrays, valid)
    monkeypatch.setattr(attention, "platform", lambda: "tpu")
    monkeypatch.setattr(attention_tpu, "attention", partial(attention_tpu.attention, interpret=True))
    mesh = mesh_lib.make_mesh({"data": 2, "expert": 2, "tensor": 2})
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, mesh_lib.spec(("batch", None, "heads"), mesh_lib.TRAINER))
        ours = jax.jit(lambda *x: attend_causal(*x))(*arrays, valid)
        assert ours.sharding.is_equivalent_to(split, 4)
    close(ours, theirs, valid, "float32")


@pytest.mark.parametrize(("tokens", "block"), [(4096, 1024), (4608, 1024), (4200, 512), (512, 512), (300, 128)])
def test_blocks_lengthen_a_row_by_an_eighth_at_most(tokens, block):
    assert attention_tpu._block(tokens) == block


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


@pytest.mark.parametrize("tokens", [200, 1260, 2048])
def test_computed_products_are_those_of_the_visited_blocks(tokens):
    """Visited blocks are counted on the whole mask; products of a block in the kernel as traced."""
    heads, width, block = 2, 128, attention_tpu._block(tokens)
    pad = np.pad(np.tril(np.ones((tokens, tokens), bool)), ((0, -tokens % block),) * 2)
    visited = pad.reshape(len(pad) // block, block, len(pad) // block, block).any(axis=(1, 3)).sum()
    x = [jax.ShapeDtypeStruct((1, tokens, h, width), jnp.bfloat16) for h in (heads, 1, 1)]
    (flops,) = kernels_of(jax.make_jaxpr(attention_tpu.attention)(*x, jnp.ones((1, tokens), bool)).jaxpr, {}).values()
    assert 2 * width * attention_tpu.computed_products(tokens, heads=heads) == heads * visited * flops
