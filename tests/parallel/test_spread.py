"""Matrices sharded over `expert` beside rows that are: tokens or weights move, and nothing else changes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gspo_jax.models import transformer
from gspo_jax.models.config import by_path
from gspo_jax.models.matrices import Matrix
from gspo_jax.models.published import find
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel import spread
from tests.tiny import CONFIG, mesh_id

D, WIDTHS = 16, (24, 8)
MESHES = [{"expert": 4}, {"data": 2, "expert": 2, "tensor": 2}]


def drawn(*shape, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def mesh_of(sizes):
    return mesh_lib.make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])


@pytest.mark.parametrize("sizes", MESHES, ids=mesh_id)
@pytest.mark.parametrize("tokens", [1, 64])
def test_products_in_the_sampler(sizes, tokens):
    """One matrix is int8. Few tokens visit the columns of every shard, and for many the columns are gathered."""
    mesh = mesh_of(sizes)
    values, scale = jnp.asarray(np.random.default_rng(1).integers(-9, 9, (D, WIDTHS[0])), jnp.int8), drawn(24, seed=2)
    matrices = [Matrix(values, scale), Matrix(drawn(D, WIDTHS[1], seed=3))]
    x, rows, last = drawn(8, tokens, D, seed=4), PartitionSpec(mesh_lib.BATCH_AXES), PartitionSpec(None, "expert")
    specs = [Matrix(last, PartitionSpec("expert")), Matrix(last)]
    run = jax.jit(
        jax.shard_map(
            lambda m, x: spread.products(m, ["heads", "kv_heads"], x),
            in_specs=(specs, rows),
            out_specs=[rows, rows],
            axis_names=set(mesh_lib.BATCH_AXES),
        )
    )
    with jax.set_mesh(mesh):
        found, text = run(matrices, x), run.lower(matrices, x).as_text()
    for y, matrix in zip(found, matrices, strict=True):
        np.testing.assert_allclose(y, matrix(x), rtol=1e-5, atol=1e-5)
    assert ("all_to_all" in text) == (tokens == 1)


@pytest.mark.parametrize("sizes", MESHES, ids=mesh_id)
def test_products_in_the_trainer(sizes):
    mesh = mesh_of(sizes)
    w, x = drawn(D, 24, seed=1), drawn(8, 3, D, seed=2)
    with jax.set_mesh(mesh):
        placed = jax.device_put(w, NamedSharding(mesh, PartitionSpec(None, ("expert", "tensor"))))
        (found,) = jax.jit(lambda w, x: spread.products([Matrix(w)], ["heads"], x))(placed, x)
    np.testing.assert_allclose(found, x @ w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", MESHES, ids=mesh_id)
@pytest.mark.parametrize("sampler", [True, False])
def test_lookup_and_logits(sizes, sampler):
    mesh = mesh_of(sizes)
    table, tokens = drawn(40, D, seed=1).astype(jnp.bfloat16), np.random.default_rng(2).integers(0, 40, (8, 3))
    rows, hidden = PartitionSpec(mesh_lib.BATCH_AXES), drawn(8, 3, D, seed=3)

    def both(table, tokens, hidden):
        return spread.lookup(table, tokens), spread.logits(lambda x: x @ table.T.astype(x.dtype), hidden)

    with jax.set_mesh(mesh):
        if not sampler:
            np.testing.assert_array_equal(jax.jit(spread.lookup)(table, tokens), table[tokens])
            return
        specs = {"in_specs": (PartitionSpec("expert"), rows, rows), "out_specs": (rows, rows)}
        found, logits = jax.jit(jax.shard_map(both, **specs, axis_names=set(mesh_lib.BATCH_AXES)))(
            table, tokens, hidden
        )
    np.testing.assert_array_equal(found, table[tokens])
    np.testing.assert_allclose(logits, hidden @ table.T.astype(jnp.float32), rtol=1e-5, atol=1e-5)


def test_what_is_spread_and_what_is_not():
    """All matrices but experts and routers, where the mesh divides them; in the layouts of trainer and sampler."""
    _, base = transformer.abstract(CONFIG, base="int8")
    sizes = {"data": 1, "fsdp": 2, "expert": 4, "tensor": 1}
    for rules in (mesh_lib.TRAINER, mesh_lib.SAMPLER):
        specs = mesh_lib.param_specs(base, rules, sizes)
        over, within = by_path(specs), rules["embed"]
        assert over["layers.0.attention.q"] == PartitionSpec(None, within or None, ("expert", "tensor"))
        assert over["layers.0.attention.o"] == PartitionSpec(None, ("tensor",), ("expert", *within))
        assert over["layers.0.attention.o_scale"] == PartitionSpec(None, ("expert", *within))
        assert over["embed"] == PartitionSpec(("expert", "tensor"), within or None)
        assert over["head"] == PartitionSpec(within or None, ("expert", "tensor"))
        assert "expert" not in str(over["layers.0.mlp.router"]) and "expert" not in str(over["layers.0.mlp_norm"])
    odd = mesh_lib.param_specs(base, mesh_lib.SAMPLER, sizes | {"expert": 128})
    assert by_path(odd)["embed"] == PartitionSpec(("tensor",), None)
    _, trained = transformer.abstract(CONFIG)
    assert mesh_lib.param_specs(trained, mesh_lib.SAMPLER, sizes)["embed"].get_value() == PartitionSpec(
        ("tensor",), None
    )


def test_a_large_head_is_spread_in_the_sampler_alone():
    """Qwen3-235B's head takes 1.2 GB, Qwen3-30B's 0.6."""
    sizes, whole = {"data": 1, "fsdp": 2, "expert": 4, "tensor": 1}, PartitionSpec(None, ("tensor",))
    over = PartitionSpec(None, ("expert", "tensor"))
    for name, expected in (("Qwen3-235B-A22B", over), ("Qwen3-30B-A3B", whole)):
        _, params = transformer.abstract(find(name))
        assert mesh_lib.param_specs(params, mesh_lib.SAMPLER, sizes)["head"].get_value() == expected
        trained = mesh_lib.param_specs(params, mesh_lib.TRAINER, sizes)["head"].get_value()
        assert trained == PartitionSpec(("fsdp",), ("tensor",))
