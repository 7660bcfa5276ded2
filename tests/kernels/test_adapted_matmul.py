"""Grouped matmuls beside adapters, on TPU in interpret mode and elsewhere, match a dense float64 oracle."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.errors import UserError
from gspo_jax.kernels import adapted_matmul, adapted_matmul_tpu, grouped_matmul_tpu
from gspo_jax.kernels.adapted_matmul import LowRank
from gspo_jax.kernels.grouped_matmul import Scaled
from tests.kernels.test_grouped_matmul_tpu import kernels
from tests.tiny import mostly_slow

D, F = 128, 256
ROWS = {"uneven": (300, [70, 0, 130, 1, 99]), "tail": (300, [20, 0, 33, 0, 0]), "few": (40, [3, 0, 30, 2, 1])}
"""Rows of the buffer, and those of each expert."""
RANKS = {"gate and up": (3, 3), "up alone": (None, 4), "down": (1,)}
"""Rank of each matrix's adapter, None for a matrix without."""
SCALES = (0.75, 3.0)


def draw(rank, bits, seed):
    """Return a matrix and its adapter, and W, A, and B in float64."""
    rng = np.random.default_rng(seed)
    E = len(ROWS["uneven"][1])
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((E, D, rank or 1), (E, rank or 1, F)))
    low = None if rank is None else LowRank(jnp.asarray(a), jnp.asarray(b), SCALES[seed])
    if bits == 8:
        values, scale = rng.integers(-127, 128, (E, D, F)), rng.uniform(0.01, 0.02, (E, F)).astype(np.float32)
        w = Scaled(jnp.asarray(values, jnp.int8), jnp.asarray(scale))
        return w, low, (values * scale.astype(np.float64)[:, None], a.astype(np.float64), b.astype(np.float64))
    w = rng.standard_normal((E, D, F)).astype(np.float32)
    return jnp.asarray(w), low, (w.astype(np.float64), a.astype(np.float64), b.astype(np.float64))


def by_row(x, matrices, sizes):
    """Return the rows in groups times their group's matrix."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    return np.einsum("nd,ndf->nf", x[: len(group)], matrices[group])


def by_expert(x, g, sizes):
    """Return each group's sum of outer products."""
    ends = np.cumsum(sizes)
    return np.stack([x[e - s : e].T @ g[e - s : e] for s, e in zip(sizes, ends, strict=True)])


on_tpu = partial(adapted_matmul._together, layer=None, likely=None, interpret=True)
elsewhere = partial(adapted_matmul._apart, layer=None, likely=None)
TWINS = {"TPU": on_tpu, "elsewhere": elsewhere}


CASES = [(name, "gate and up", 8) for name in ROWS]
CASES += [("uneven", ranks, bits) for ranks in RANKS for bits in (8, 32) if (ranks, bits) != ("gate and up", 8)]


@pytest.mark.parametrize(("name", "ranks", "bits"), mostly_slow(CASES, always=[CASES[3]]))
def test_products_and_gradients_equal_the_dense_oracle(name, ranks, bits):
    """dx = Σ g (W + s A B)ᵀ, dA = s xᵀ (g Bᵀ), dB = s (x A)ᵀ g. Rows beyond the groups are NaN: reading one shows."""
    room, sizes = ROWS[name]
    used, counts, rng = sum(sizes), jnp.asarray(sizes, jnp.int32), np.random.default_rng(9)
    x = rng.standard_normal((room, D)).astype(np.float32)
    grads = [rng.standard_normal((room, F)).astype(np.float32) for _ in RANKS[ranks]]
    weights, lows, whole = zip(*(draw(rank, bits, i) for i, rank in enumerate(RANKS[ranks])), strict=True)
    for array in (x, *grads):
        array[used:] = np.nan

    scales = [0 if low is None else low.scale for low in lows]
    sums = [w + s * a @ b for (w, a, b), s in zip(whole, scales, strict=True)]
    x64, grads64 = x.astype(np.float64), [g.astype(np.float64) for g in grads]
    outs = [by_row(x64, w, sizes) for w in sums]
    d_rows = sum(by_row(g, w.mT, sizes) for g, w in zip(grads64, sums, strict=True))
    d_lows = [
        (s * by_expert(x64, by_row(g, b.mT, sizes), sizes), s * by_expert(by_row(x64, a, sizes), g, sizes))
        for g, (_, a, b), s in zip(grads64, whole, scales, strict=True)
        if s
    ]

    for kind, run in TWINS.items():
        found, pull = jax.vjp(lambda x, lows, run=run: run(x, weights, lows, counts), jnp.asarray(x), lows)
        d_x, d_given = pull([jnp.asarray(g) for g in grads])
        pairs = [*zip(found, outs, strict=True), (d_x, d_rows)]
        for low, expected in zip((low for low in d_given if low is not None), d_lows, strict=True):
            pairs += zip((low.a, low.b), expected, strict=True)
        for got, expected in pairs:
            got = np.asarray(got)[:used] if got.ndim == 2 else got
            assert np.abs(got - expected).max() < 2e-6 * np.abs(expected).max(), kind


def test_a_layer_s_base_is_read_where_it_lies():
    """The base is that of the second of two layers; adapters are the layer's alone."""
    room, sizes = ROWS["few"]
    x = jnp.asarray(np.random.default_rng(3).standard_normal((room, D)), jnp.float32)
    w, low, (w64, a, b) = draw(3, 32, 0)
    stack = (jnp.stack([jnp.full_like(w, jnp.nan), w]),)
    expected = by_row(np.asarray(x, np.float64), w64 + SCALES[0] * a @ b, sizes)
    for kind, run in TWINS.items():
        (found,) = run(x, stack, (low,), jnp.asarray(sizes, jnp.int32), layer=jnp.int32(1))
        assert np.abs(found[: sum(sizes)] - expected).max() < 2e-6 * np.abs(expected).max(), kind


def test_in_bfloat16_an_adapter_of_zeros_changes_no_bit():
    """And with others only the thin product and the sum are rounded, the sum to half a unit in the last place."""
    (room, sizes), used = ROWS["few"], sum(ROWS["few"][1])
    x = jnp.asarray(np.random.default_rng(4).standard_normal((room, D)), jnp.bfloat16)
    w, low, (w64, _, _) = draw(3, 8, 0)
    low, counts = jax.tree.map(lambda p: p.astype(jnp.bfloat16), low), jnp.asarray(sizes, jnp.int32)
    (plain,) = grouped_matmul_tpu.matmuls(x, (w.values,), counts, scales=(w.scale,), interpret=True)
    (found,) = on_tpu(x, (w,), (low.replace(b=jnp.zeros_like(low.b)),), counts)
    np.testing.assert_array_equal(found[:used], plain[:used])

    (found,) = on_tpu(x, (w,), (low,), counts)
    x64, a64, b64 = (np.asarray(part, np.float64) for part in (x, low.a, low.b))
    thin = np.asarray(jnp.asarray(SCALES[0] * by_row(x64, a64, sizes), jnp.bfloat16), np.float64)
    expected = by_row(x64, w64, sizes) + by_row(thin, b64, sizes)
    assert found.dtype == jnp.bfloat16
    assert np.abs(np.asarray(found, np.float64)[:used] - expected).max() < 2**-8 * np.abs(expected).max()


def test_kernels_say_what_they_cost():
    """Flops and bytes beyond those of the base, by hand, for two matrices of rank 4: R = 8 columns.

    Forward, D columns to R and R to twice F, 2 · N · 8 · (2048 + 2 · 768), and so backward. The gradient's kernel has
    these products twice, as thin ones and as outer ones. It reads rows and cotangents, and reads and writes matrices.
    """
    N, D, F, E, r = 1024, 2048, 768, 8, 4
    x, a, b, w = (jnp.ones(s, jnp.bfloat16) for s in ((N, D), (E, D, r), (E, r, F), (E, D, F)))
    grads, sizes = [jnp.ones((N, F), jnp.bfloat16)] * 2, jnp.full(E, N // E, jnp.int32)
    thin = adapted_matmul.side_by_side((LowRank(a, b, 1.0),) * 2, x.dtype)

    def every(thin):
        grouped_matmul_tpu.matmuls(x, (w, w), sizes, thin=thin)
        grouped_matmul_tpu.matmuls_transposed(grads, (w, w), sizes, thin=None if thin is None else thin.back)
        if thin is not None:
            adapted_matmul_tpu.gradient(x, grads, thin, sizes)

    plain, found = (kernels(jax.make_jaxpr(partial(every, thin))().jaxpr) for thin in (None, thin))
    wide = D + 2 * F
    for name in ("grouped_matmul_128", "grouped_matmul_transposed_128"):
        assert found[name].flops - plain[name].flops == 2 * N * 8 * wide
        assert found[name].bytes_accessed - plain[name].bytes_accessed == 2 * E * 8 * wide
    gradient = found["grouped_outer_thin_128"]
    assert gradient.flops == 4 * N * 8 * wide and gradient.bytes_accessed == 2 * wide * (N + 2 * E * 8)
    assert set(found) == {"grouped_visits", "grouped_outer_thin_128", *plain}


def test_rows_in_vmem_leave_room_for_gradients():
    """Tiles are shorter where a rank's gradients need their VMEM, and a rank that leaves room for none is refused.

    Of 2048 and twice 768 columns, 256 rows take 7.3 MB with their float32, gradients of rank 128 for two 11.0 MB.
    """
    N, D, F, E = 4096, 2048, 768, 4
    x, sizes = jnp.ones((N, D), jnp.bfloat16), jnp.full(E, N // E, jnp.int32)

    def run(rank):
        low = LowRank(jnp.ones((E, D, rank), x.dtype), jnp.ones((E, rank, F), x.dtype), 1.0)
        thin = adapted_matmul.side_by_side((low, low), x.dtype)
        return adapted_matmul_tpu.gradient(x, [x[:, :F]] * 2, thin, sizes)

    for rank, tile in ((16, 256), (128, 128)):
        assert f"grouped_outer_thin_{tile}" in kernels(jax.make_jaxpr(partial(run, rank))().jaxpr)
    with pytest.raises(UserError, match="gradients of 512 × 3584 exceed a kernel's 14680064 bytes of VMEM; lower the"):
        jax.make_jaxpr(partial(run, 256))()
