"""The experts' SwiGLU with TPU kernels, in interpret mode on CPU, equals its definition in float64, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from gspo_jax.kernels import swiglu_tpu
from gspo_jax.kernels.adapted_matmul import LowRank
from gspo_jax.kernels.grouped_matmul import Scaled
from gspo_jax.parallel.mesh import make_mesh
from tests.tiny import mostly_slow

D, F, E = 128, 256, 5
LOADS = {
    "random": (300, [70, 0, 130, 1, 99]),
    "one takes all": (300, [0, 0, 0, 300, 0]),
    "tail": (300, [20, 0, 33, 0, 0]),
    "empty": (40, [0, 0, 0, 0, 0]),
    "full": (256, [128, 128, 0, 0, 0]),
    "tiles of 512": (2560, [700, 513, 2, 600, 745]),
}
"""Rows of the buffer, and those of each expert."""
KINDS = ("trained", "frozen", "adapted", "adapted int8", "down adapted")
CASES = [*((load, "trained") for load in LOADS), *(("random", kind) for kind in KINDS[1:])]


def matrices(kind, rng):
    """Return gate, up and down, their adapters, and each in float64 as (W, A, B, s)."""
    given = []
    for i, (n, m) in enumerate(((D, F), (D, F), (F, D))):
        a, b = (rng.standard_normal(shape).astype(np.float32) / 8 for shape in ((E, n, 3), (E, 3, m)))
        has_low = "adapted" in kind and (kind != "down adapted" or i == 2)
        low = LowRank(jnp.asarray(a), jnp.asarray(b), 0.75) if has_low else None
        w = rng.standard_normal((E, n, m)).astype(np.float32) / 12
        weights, whole = jnp.asarray(w), w.astype(np.float64)
        if "int8" in kind:
            values, scale = rng.integers(-127, 128, w.shape), rng.uniform(5e-4, 1e-3, (E, m)).astype(np.float32)
            weights = Scaled(jnp.asarray(values, jnp.int8), jnp.asarray(scale))
            whole = values * scale.astype(np.float64)[:, None]
        given.append((weights, low, (whole, a.astype(np.float64), b.astype(np.float64), 0.75 * has_low)))
    return zip(*given, strict=True)


def defined(x, share, whole, sizes):
    """Return the outputs of the rows in groups, by the definition; with jax, in float64."""
    group = np.repeat(np.arange(E), sizes)
    gate, up, down = (w + s * a @ b for w, a, b, s in whole)
    x, share = x[: len(group)], share[: len(group)]
    gated, raised = (jnp.einsum("nd,ndf->nf", x, w[group]) for w in (gate, up))
    return jnp.einsum("nf,nfd->nd", jax.nn.silu(gated) * raised * share[:, None], down[group])


@pytest.mark.parametrize(("load", "kind"), mostly_slow(CASES, always=[CASES[0], ("random", "adapted int8")]))
def test_outputs_and_gradients_equal_the_definition(load, kind):
    """Rows beyond the groups are NaN: reading one would show. Frozen weights get no gradient."""
    (rows, sizes), rng = LOADS[load], np.random.default_rng(0)
    used, counts = sum(sizes), jnp.asarray(sizes, jnp.int32)
    weights, lows, whole = matrices(kind, rng)
    x, g = (rng.standard_normal((rows, D)).astype(np.float32) for _ in range(2))
    share = rng.uniform(0, 1, rows).astype(np.float32)
    for array in (x, g, share):
        array[used:] = np.nan
    trained = kind == "trained"

    def run(x, share, lows, w):
        return swiglu_tpu.swiglu(x, share, w if trained else weights, lows, counts, interpret=True)

    out, pull = jax.vjp(run, jnp.asarray(x), jnp.asarray(share), lows, weights if trained else ())
    d_x, d_share, d_lows, d_weights = pull(jnp.asarray(g))
    with jax.enable_x64(True):
        arguments = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (x, share, whole))
        expected, back = jax.vjp(lambda *a: defined(*a, sizes), *arguments)
        e_x, e_share, e_whole = back(jnp.asarray(g[:used], jnp.float64))
    pairs = [(out[:used], expected), (d_x[:used], e_x[:used]), (d_share[:used], e_share[:used])]
    for low, (_, a, b, _) in zip(d_lows, e_whole, strict=True):
        pairs += [] if low is None else [(low.a, a), (low.b, b)]
    pairs += [(d, e[0]) for d, e in zip(d_weights, e_whole, strict=False)]
    for got, wanted in pairs:
        assert np.abs(np.asarray(got, np.float64) - np.asarray(wanted)).max(initial=0) <= 4e-6 * (
            np.abs(wanted).max(initial=0)
        )
    plain = swiglu_tpu.swiglu(jnp.asarray(x), jnp.asarray(share), weights, lows, counts, interpret=True)
    np.testing.assert_array_equal(plain[:used], out[:used], err_msg="without a gradient")


def test_a_layer_s_matrices_are_read_where_they_lie():
    """Of two layers the second is read; the first is NaN."""
    (rows, sizes), rng = LOADS["random"], np.random.default_rng(1)
    weights, lows, whole = matrices("trained", rng)
    x, share = rng.standard_normal((rows, D)).astype(np.float32), rng.uniform(0, 1, rows).astype(np.float32)
    stacks = tuple(jnp.stack([jnp.full_like(w, jnp.nan), w]) for w in weights)
    counts = jnp.asarray(sizes, jnp.int32)
    out = swiglu_tpu.swiglu(
        jnp.asarray(x), jnp.asarray(share), stacks, lows, counts, layer=jnp.int32(1), interpret=True
    )
    expected = defined(x, share, whole, sizes)
    assert np.abs(out - expected).max() < 4e-6 * np.abs(expected).max()


def test_checkpointed_it_keeps_the_two_products():
    """With the policy "dots", the backward pass computes only the gradient's kernels."""
    (rows, sizes), rng = LOADS["random"], np.random.default_rng(1)
    weights, lows, _ = matrices("trained", rng)
    x, share, counts = jnp.ones((rows, D)), jnp.ones(rows), jnp.asarray(sizes, jnp.int32)

    def run(x, weights):
        return swiglu_tpu.swiglu(x, share, weights, lows, counts, interpret=True)

    kept = jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names("dot"))
    text = str(jax.make_jaxpr(jax.grad(lambda *a: kept(*a).sum(), argnums=(0, 1)))(x, weights))
    assert text.count("name=grouped_matmul_gated") == 1 and text.count("name=grouped_matmul_transposed_gated") == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trained", "adapted int8"])
def test_weights_gathered_again_give_the_same_gradients(kind):
    """Gradients equal those of kept weights, with experts on two shards."""
    (rows, sizes), rng = (64, [30, 0, 20, 14]), np.random.default_rng(2)
    weights, lows, _ = matrices(kind, rng)
    weights, lows = jax.tree.map(lambda w: w[:4], (weights, lows))
    x, g = (jnp.asarray(rng.standard_normal((2 * rows, D)), jnp.float32) for _ in range(2))
    share = jnp.asarray(rng.uniform(0, 1, 2 * rows), jnp.float32)
    mesh, spread = make_mesh({"fsdp": 2}, devices=jax.devices()[:2]), PartitionSpec("fsdp")

    def gradients(again):
        def run(x, share, g, weights, lows):
            def out(x, share, lows, trained):
                own = weights if "int8" in kind else trained
                whole, adapters = jax.tree.map(lambda w: jax.lax.all_gather(w, "fsdp", axis=0, tiled=True), (own, lows))
                parts = tuple(w.values if isinstance(w, Scaled) else w for w in own)
                shards = jax.lax.stop_gradient(parts) if again else None
                counts = jnp.asarray(sizes, jnp.int32)
                return swiglu_tpu.swiglu(x, share, whole, adapters, counts, shards=shards, interpret=True)

            return jax.vjp(out, x, share, lows, () if "int8" in kind else weights)[1](g)

        sharded = jax.shard_map(run, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False)
        return jax.jit(sharded)(x, share, g, weights, lows)

    for got, expected in zip(*(jax.tree.leaves(gradients(again)) for again in (True, False)), strict=True):
        np.testing.assert_array_equal(got, expected)
