"""The TPU grouped matmul kernels, in interpret mode on CPU, match a dense float64 oracle; tiles fit the shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from gspo_jax.errors import UserError
from gspo_jax.kernels import grouped_matmul_tpu, row_sums_tpu, visits_tpu
from tests.tiny import mostly_slow

ROUNDING = {"float32": 1e-6, "bfloat16": 2**-8}
"""Tolerances relative to the largest result; for bfloat16, half a unit in its last place."""


def dense(rows, weights, sizes):
    """Return each row times its group's matrix, in float64; rows beyond the last group are left out."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    return np.einsum("nd,ndf->nf", rows[: len(group)], weights[group])


def dense_outer(rows, grads, sizes):
    """Return each group's sum of outer products, in float64."""
    ends = np.cumsum(sizes)
    return np.stack([rows[e - s : e].T @ grads[e - s : e] for s, e in zip(sizes, ends, strict=True)])


def draw(dtype, *shape, seed):
    """Return random numbers as the dtype and as float64; both hold the same values exactly."""
    x = jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)
    return x, np.asarray(x, np.float64)


def close(x, expected, dtype):
    """Assert the dtype and the error over rows that belong to a group; rows beyond the groups are undefined."""
    assert x.dtype == dtype
    error = np.abs(np.asarray(x, np.float64)[: len(expected)] - expected).max() / np.abs(expected).max()
    assert error < ROUNDING[dtype]


SIZES = {
    "empty group": (300, [70, 0, 130, 1, 99]),
    "one takes all": (300, [0, 0, 0, 300, 0]),
    "tail": (300, [20, 0, 33, 0, 0]),
    "whole tiles": (300, [0, 128, 0, 128, 0]),
    "less than a tile": (40, [3, 0, 30, 2, 1]),
}


CASES = [*((name, 256, "float32") for name in SIZES), ("empty group", 200, "float32"), ("tail", 256, "bfloat16")]


@pytest.mark.parametrize(("name", "F", "dtype"), mostly_slow(CASES, always=[CASES[-2]]))
def test_kernels_equal_the_dense_oracle(name, F, dtype):
    """One matrix and two at once, over two column blocks. Rows beyond the groups are NaN: reading one would show."""
    rows, sizes = SIZES[name]
    D, used, E = 256, sum(sizes), len(sizes)
    x, x64 = draw(dtype, rows, D, seed=0)
    (v, v64), (w, w64) = (draw(dtype, E, D, F, seed=seed) for seed in (1, 2))
    (g, g64), (h, h64) = (draw(dtype, rows, F, seed=seed) for seed in (3, 4))
    x, g, h = (a.at[used:].set(jnp.nan) for a in (x, g, h))
    groups = jnp.asarray(sizes, jnp.int32)

    (one,) = grouped_matmul_tpu.matmuls(x, (w,), groups, interpret=True)
    close(one, dense(x64, w64, sizes), dtype)
    for y, expected in zip(grouped_matmul_tpu.matmuls(x, (v, w), groups, interpret=True), (v64, w64), strict=True):
        close(y, dense(x64, expected, sizes), dtype)

    back = [dense(a, b.swapaxes(1, 2), sizes) for a, b in ((g64, v64), (h64, w64))]
    close(grouped_matmul_tpu.matmuls_transposed((g,), (v,), groups, interpret=True), back[0], dtype)
    close(grouped_matmul_tpu.matmuls_transposed((g, h), (v, w), groups, interpret=True), sum(back), dtype)
    close(grouped_matmul_tpu.outer(x, g, groups, interpret=True), dense_outer(x64, g64, sizes), dtype)


@pytest.mark.parametrize(
    ("name", "dtype"), mostly_slow(INT8 := [("tail", "bfloat16"), ("empty group", "float32")], always=INT8[:1])
)
def test_int8_weights_equal_the_dense_oracle(name, dtype):
    """Two matrices with a scale for each column; rows beyond the groups are NaN. Of layers, the second is read."""
    rows, sizes = SIZES[name]
    D, F, used, E, rng = 256, 384, sum(sizes), len(sizes), np.random.default_rng(5)
    x, x64 = draw(dtype, rows, D, seed=0)
    (g, g64), (h, h64) = (draw(dtype, rows, F, seed=seed) for seed in (3, 4))
    x, g, h = (a.at[used:].set(jnp.nan) for a in (x, g, h))
    v, w = (rng.integers(-127, 128, (2 * E, D, F)).astype(np.int8) for _ in range(2))
    scales = [rng.uniform(0.5, 2, (E, F)).astype(np.float32) for _ in range(2)]
    groups = jnp.asarray(sizes, jnp.int32)
    options = {"scales": [jnp.asarray(s) for s in scales], "interpret": True}

    found = grouped_matmul_tpu.matmuls(x, (jnp.asarray(v), jnp.asarray(w)), groups, layer=jnp.int32(1), **options)
    whole = [m[E:] * s.astype(np.float64)[:, None] for m, s in zip((v, w), scales, strict=True)]
    for y, expected in zip(found, whole, strict=True):
        close(y, dense(x64, expected, sizes), dtype)
    back = grouped_matmul_tpu.matmuls_transposed((g, h), (jnp.asarray(v[E:]), jnp.asarray(w[E:])), groups, **options)
    close(back, sum(dense(a, m.swapaxes(1, 2), sizes) for a, m in zip((g64, h64), whole, strict=True)), dtype)


LOADS = {
    "random": [300, 513, 90, 633],
    "empty": [0, 1100, 0, 436],
    "full": [512, 512, 0, 512],
    "skewed": [1, 1500, 2, 3],
    "each number of parts": [700, 70, 200, 400],
    "tail": [640, 0, 40, 0],
}
"""Sizes of four groups in 1536 rows."""


PARTED = [((512, 384)[n % 2], load) for n, load in enumerate(LOADS)]


@pytest.mark.parametrize(("rows", "load"), mostly_slow(PARTED, always=[(384, "skewed"), (512, "random")]))
def test_parts_of_a_tile_equal_the_dense_oracle(rows, load, monkeypatch):
    """A group that has some rows of a tile computes some of its three or four parts. Rows beyond the groups are NaN."""
    sizes, N, D, F = LOADS[load], 1536, 16, 24
    monkeypatch.setattr(grouped_matmul_tpu, "row_tile", lambda *_: rows)
    used, groups = sum(sizes), jnp.asarray(sizes, jnp.int32)
    x, x64 = draw("float32", N, D, seed=0)
    w, w64 = draw("float32", len(sizes), D, F, seed=1)
    g, g64 = draw("float32", N, F, seed=2)
    x, g = (a.at[used:].set(jnp.nan) for a in (x, g))
    (out,) = grouped_matmul_tpu.matmuls(x, (w,), groups, interpret=True)
    close(out, dense(x64, w64, sizes), "float32")
    back = grouped_matmul_tpu.matmuls_transposed((g,), (w,), groups, interpret=True)
    close(back, dense(g64, w64.swapaxes(1, 2), sizes), "float32")
    close(grouped_matmul_tpu.outer(x, g, groups, interpret=True), dense_outer(x64, g64, sizes), "float32")


def computed(sizes, rows, tile):
    """Return the rows that the kernels compute for these groups, counted over the slices of every visit."""
    visits, counts = visits_tpu.schedule(jnp.asarray(sizes, jnp.int32), rows, tile, interpret=True)

    def kernel(first, end, counts, total):
        def add(at, *_):
            total[0] += at.size

        total[0] = 0

        @pl.loop(0, counts[1])
        def _(v):
            visits_tpu.for_parts(first[v], end[v], tile, add)

    total = jax.ShapeDtypeStruct((1,), jnp.int32)
    return int(pl.pallas_call(kernel, out_shape=total, interpret=True)(visits.first, visits.end, counts)[0])


@pytest.mark.parametrize(
    ("sizes", "tile", "rows"),
    [([100, 0, 300], 512, 128 + 512), ([128, 128], 512, 256), ([10, 20], 16, 16 + 32), ([512, 1], 512, 640)],
)
def test_rows_computed_by_hand(sizes, tile, rows):
    """Rows [0, 100) are in one part of 128, [100, 400) in four; of tiles of 16, [0, 10) is in one, [10, 30) in two."""
    assert visits_tpu.executed_rows(np.array(sizes), tile) == rows == computed(sizes, 1024, tile)


@pytest.mark.parametrize("seed", range(3))
def test_rows_computed_at_random_loads(seed):
    """16,384 tokens choose 8 of 128 experts each: 1.12 times the rows that came are computed; whole tiles were 1.5.

    A group of n rows that begins anywhere in a part is in (n + 127) / 128 parts on average, here 1 + 127 / 1024.
    """
    tokens, E, K = 16384, 128, 8
    rng = np.random.default_rng(seed)
    sizes = np.bincount(rng.permuted(np.tile(np.arange(E), (tokens, 1)), axis=1)[:, :K].reshape(-1), minlength=E)
    tile = visits_tpu.row_tile(tokens * K, E, tokens * K, 2048, 2)
    rows = visits_tpu.executed_rows(sizes, tile)
    assert (tile, rows) == (512, computed(sizes, tokens * K, tile))
    assert 1.11 * tokens * K < rows < 1.13 * tokens * K


def test_a_layer_s_matrices_are_read_where_they_lie():
    """The kernel reads layer 1 of a stack of three, in place; the other layers are NaN."""
    rows, sizes = 40, [25, 10]
    x, x64 = draw("float32", rows, 128, seed=0)
    w, w64 = draw("float32", 2, 128, 256, seed=1)
    stack = jnp.full((6, 128, 256), jnp.nan).at[2:4].set(w)
    groups = jnp.asarray(sizes, jnp.int32)
    (out,) = grouped_matmul_tpu.matmuls(x, (stack,), groups, layer=jnp.int32(1), interpret=True)
    close(out, dense(x64, w64, sizes), "float32")


def test_without_rows_the_weights_gradient_is_zero():
    """With no rows, `outer` still writes zeros; the other kernels visit no tile and leave their output undefined."""
    x, g, none = jnp.full((40, 16), jnp.nan), jnp.full((40, 24), jnp.nan), jnp.zeros(3, jnp.int32)
    (out,) = grouped_matmul_tpu.matmuls(x, (jnp.ones((3, 16, 24)),), none, interpret=True)
    assert out.shape == (40, 24)
    np.testing.assert_array_equal(grouped_matmul_tpu.outer(x, g, none, interpret=True), np.zeros((3, 16, 24)))


@pytest.mark.parametrize(
    ("rows", "groups", "likely", "tile"),
    [
        (524288, 32, 131072, 512),
        (8192, 32, 8192, 256),
        (2048, 8, 2048, 256),
        (2048, 8, 128, 128),
        (64, 32, 64, 64),
        (5, 2, 5, 5),
    ],
)
def test_a_tile_of_rows_is_no_longer_than_a_group_fills(rows, groups, likely, tile):
    assert visits_tpu.row_tile(rows, groups, likely, 2048, 2) == tile


def test_wide_rows_have_shorter_tiles():
    """Wide rows get tiles of fewer rows: two buffers of a tile may take a third of 14 MiB.

    512 rows of 4096 numbers take 8 MiB in bfloat16 and 16 MiB in float32, which has to be divided by 2 and by 4.
    """
    tiles = [visits_tpu.row_tile(131072, 32, 131072, 4096, size) for size in (2, 4)]
    assert tiles == [256, 128]


def test_blocks_divide_the_dimension_where_they_can():
    """768 = 6 · 128 splits into 1, 2, 3 or 6 times 128; 200 has no such divisor: whole, or 128 with a masked tail."""
    assert grouped_matmul_tpu._splits(768) == [128, 256, 384, 768]
    assert grouped_matmul_tpu._splits(200) == [200, 128]


def test_columns_are_shared_by_two_cores():
    """Each core takes half of the columns if they fit; 3 · 128 columns use blocks of 128, and 64 stay whole."""
    columns = grouped_matmul_tpu._columns
    assert columns(768, lambda n: True) == 384
    assert columns(768, lambda n: n < 384) == 128
    assert columns(384, lambda n: True) == 128
    assert columns(64, lambda n: True) == 64
    with pytest.raises(UserError, match="no block of 768 columns fits a kernel's 14680064 bytes of VMEM; use bfloat16"):
        columns(768, lambda n: False)


def test_blocks_of_a_weight_s_gradient_move_the_fewest_bytes():
    """1/1024 + 1/768 < 1/2048 + 1/384: blocks of 1024 × 768 move fewer bytes than 2048 × 384.

    One block for the whole gradient would leave the second core idle.
    """
    assert grouped_matmul_tpu._tiles(2048, 768, lambda d, f: d * f <= 2**20) == (1024, 768)
    assert grouped_matmul_tpu._tiles(2048, 768, lambda d, f: True) == (1024, 768)
    assert grouped_matmul_tpu._tiles(64, 96, lambda d, f: True) == (64, 96)


@pytest.mark.parametrize("name", SIZES)
def test_visits_are_the_tiles_of_each_group(name):
    """The visits equal an explicit enumeration of (group, tile, first row, end); groups without rows come last."""
    rows, sizes = SIZES[name]
    tile, ends = 16, np.cumsum(sizes)
    expected = [
        (e, t, max(end - size - t * tile, 0), min(end - t * tile, tile))
        for e, (size, end) in enumerate(zip(sizes, ends, strict=True))
        for t in range((end - size) // tile, -(-end // tile))
        if size
    ]
    empty = [e for e, size in enumerate(sizes) if not size]
    visits, counts = visits_tpu.schedule(jnp.asarray(sizes, jnp.int32), rows, tile, interpret=True)
    found = list(zip(*(x.tolist() for x in visits), strict=True))
    assert counts.tolist() == [len(expected), len(expected) + len(empty)]
    assert found[: len(expected)] == expected
    rest = found[len(expected) : counts[1]]
    assert [(e, first == end) for e, _, first, end in rest] == [(e, True) for e in empty]


@pytest.mark.parametrize(("size", "used"), [(300, 500), (128, 0), (40, 37)])
def test_row_sums_equal_a_plain_sum(size, used):
    """Rows beyond those in use are NaN, and have targets like others; some targets have no row."""
    rng = np.random.default_rng(0)
    targets, (x, x64) = rng.integers(0, size, 512), draw("bfloat16", 512, 256, seed=1)
    targets[targets == 7] = 8
    expected = np.zeros((size, 256))
    np.add.at(expected, targets[:used], x64[:used])
    x = x.at[used:].set(jnp.nan)
    by = row_sums_tpu.by_target(jnp.asarray(targets), jnp.int32(used), size)
    found = row_sums_tpu.row_sums(x, by, size, interpret=True)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "dtype"), mostly_slow([(300, "float32"), (7, "float32"), (300, "bfloat16")], always=[(300, "float32")])
)
def test_masked_sums_equal_a_plain_sum(size, dtype):
    """Rows that are not to be added are NaN."""
    rng = np.random.default_rng(0)
    x, x64 = draw(dtype, 3, size, 128, seed=0)
    has = rng.random((size, 3)) < 0.7
    found = row_sums_tpu.masked_sum(jnp.where(has.T[..., None], x, jnp.nan), jnp.asarray(has), interpret=True)
    close(found, np.where(has.T[..., None], x64, 0).sum(axis=0), dtype)


def test_work_follows_the_rows_in_the_groups():
    """131072 rows in a buffer for four times as many: 256 tiles of 512, plus 31 for groups that start mid-tile."""
    groups = jnp.full(32, 4096, jnp.int32).at[::2].add(100).at[1::2].add(-100)
    visits, counts = visits_tpu.schedule(groups, 524288, 512, interpret=True)
    assert 256 < counts[0] == counts[1] <= 256 + 31
    assert visits.tile.size == 1024 + 31


def kernels(jaxpr):
    """Return the cost estimates of the Pallas kernels that a jaxpr calls, by kernel name."""
    found = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            found[equation.params["name"]] = equation.params["cost_estimate"]
        elif equation.primitive.name == "jit":
            found |= kernels(equation.params["jaxpr"].jaxpr)
    return found


def test_kernels_say_what_they_cost():
    """Cost estimates match hand counts: flops for every row of the buffer, bytes for two bfloat16 matrices.

    Forward, two blocks of 384 columns: the rows are read twice, 2 · 1024 · 2048; the weights of one layer out of three,
    2 · 8 · 2048 · 768; the output, 2 · 1024 · 768.
    Backward, two blocks of 1024: 2 · 2 · 1024 · 768 for the cotangents, the same weights, and 1024 · 2048 for the
    output.
    Weight gradient of one matrix, in blocks of 1024 · 768: 1024 · 2048, twice 1024 · 768, and one set of weights.
    """
    N, D, F, E = 1024, 2048, 768, 8
    x, g, w, sizes = jnp.ones((N, D)), jnp.ones((N, F)), jnp.ones((3 * E, D, F)), jnp.full(E, N // E, jnp.int32)
    x, g, w = (a.astype(jnp.bfloat16) for a in (x, g, w))

    def every():
        grouped_matmul_tpu.matmuls(x, (w, w), sizes, layer=1)
        grouped_matmul_tpu.matmuls_transposed((g, g), (w[:E], w[:E]), sizes)
        grouped_matmul_tpu.outer(x, g, sizes)

    costs = kernels(jax.make_jaxpr(every)().jaxpr)
    weights = 2 * E * D * F
    expected = {
        "grouped_matmul_128": (4 * N * D * F, 2 * (2 * N * D + weights + 2 * N * F)),
        "grouped_matmul_transposed_128": (4 * N * D * F, 2 * (4 * N * F + weights + N * D)),
        "grouped_outer_128": (2 * N * D * F, 2 * (N * D + 2 * N * F + weights // 2)),
    }
    assert {k: (costs[k].flops, costs[k].bytes_accessed) for k in expected} == expected
    assert set(costs) == {"grouped_visits", *expected}, (
        "every kernel has a cost estimate; without one the planner cannot count it"
    )


@pytest.mark.parametrize("sizes", [[40, 40, 40, 0, 40], [0, 0, 0, 300, 0], [64, 64, 64, 64, 44], [0, 0, 0, 0, 0]])
def test_executed_rows_are_those_of_the_tiles_that_the_kernel_visits(sizes):
    _, counts = visits_tpu.schedule(jnp.array(sizes), 300, 64, interpret=True)
    assert visits_tpu.executed_rows(np.array(sizes), 64) == 64 * counts[0]


def test_weighted_sums_leave_out_rows_of_weight_0():
    rng = np.random.default_rng(0)
    factors = np.where(rng.random((40, 3)) < 0.6, rng.standard_normal((40, 3)), 0).astype(np.float32)
    x = rng.standard_normal((3, 40, 128)).astype(np.float32)
    found = row_sums_tpu.masked_sum(
        jnp.where(factors.T[..., None] != 0, x, jnp.nan), jnp.asarray(factors), interpret=True
    )
    np.testing.assert_allclose(found, np.einsum("jnd,nj->nd", x, factors), atol=1e-5)
