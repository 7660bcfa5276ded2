"""The TPU kernels of the grouped matmul, interpreted on the CPU, equal a dense oracle; their tiles fit the shapes."""

import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.kernels import grouped_matmul_tpu

ROUNDING = {"float32": 1e-6, "bfloat16": 2**-8}
"""Half a unit in the last place of the largest result, for bfloat16."""


def dense(rows, weights, sizes):
    """float64: each row times the matrix of its group; rows beyond the last group are zero."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    out = np.einsum("nd,ndf->nf", rows[: len(group)], weights[group])
    return np.pad(out, ((0, len(rows) - len(group)), (0, 0)))


def dense_outer(rows, grads, sizes):
    """float64: the sum of each group's outer products."""
    ends = np.cumsum(sizes)
    return np.stack([rows[e - s : e].T @ grads[e - s : e] for s, e in zip(sizes, ends, strict=True)])


def draw(dtype, *shape, seed):
    """Numbers that the dtype holds exactly, for jax and for the oracle."""
    x = jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)
    return x, np.asarray(x, np.float64)


def close(x, expected, dtype):
    assert x.dtype == dtype
    error = np.abs(np.asarray(x, np.float64) - expected).max() / np.abs(expected).max()
    assert error < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "sizes", "vmem"),
    [
        (300, [70, 0, 130, 1, 99], grouped_matmul_tpu._VMEM),
        (300, [0, 0, 0, 300, 0], grouped_matmul_tpu._VMEM),
        (300, [20, 0, 33, 0, 0], grouped_matmul_tpu._VMEM),
        (300, [0, 128, 0, 128, 0], grouped_matmul_tpu._VMEM),
        (40, [3, 0, 30, 2, 1], grouped_matmul_tpu._VMEM),
        (300, [70, 0, 130, 1, 90], 5 * 2**17),
    ],
    ids=["empty group", "one takes all", "tail", "whole tiles", "less than a tile", "weights in blocks"],
)
def test_kernels_equal_the_dense_oracle(rows, sizes, vmem, dtype, monkeypatch):
    monkeypatch.setattr(grouped_matmul_tpu, "_VMEM", vmem)
    D, F = 256, 256
    x, x64 = draw(dtype, rows, D, seed=0)
    w, w64 = draw(dtype, len(sizes), D, F, seed=1)
    g, g64 = draw(dtype, rows, F, seed=2)
    groups = jnp.asarray(sizes, jnp.int32)
    close(grouped_matmul_tpu.matmul(x, w, groups, transposed=False, interpret=True), dense(x64, w64, sizes), dtype)
    back = grouped_matmul_tpu.matmul(g, w, groups, transposed=True, interpret=True)
    close(back, dense(g64, w64.swapaxes(1, 2), sizes), dtype)
    close(grouped_matmul_tpu.outer(x, g, groups, interpret=True), dense_outer(x64, g64, sizes), dtype)


def test_no_rows_at_all_is_all_zero():
    """The kernels visit no tile then, and leave whatever memory holds."""
    x, w, none = jnp.ones((40, 16)), jnp.ones((3, 16, 24)), jnp.zeros(3, jnp.int32)
    assert not grouped_matmul_tpu.matmul(x, w, none, transposed=False, interpret=True).any()
    assert not grouped_matmul_tpu.outer(x, jnp.ones((40, 24)), none, interpret=True).any()


@pytest.mark.parametrize(
    ("rows", "groups", "tile"), [(131072, 32, 512), (8192, 32, 256), (2048, 32, 128), (64, 32, 64), (5, 2, 16)]
)
def test_a_tile_of_rows_is_no_longer_than_a_group_fills(rows, groups, tile):
    assert grouped_matmul_tpu._row_tile(rows, groups) == tile


def test_tiles_divide_the_dimension_where_they_can():
    """768 = 6 · 128 has the divisors 6, 3, 2 and 1 times 128; 200 has none, and is taken whole or with a masked end."""
    assert grouped_matmul_tpu._splits(768) == [128, 256, 384, 768]
    assert grouped_matmul_tpu._splits(200) == [200, 128]
    assert grouped_matmul_tpu._tiles(2048, 768, lambda k, n: k * n <= 2**20) == (2048, 384)
    assert grouped_matmul_tpu._tiles(768, 2048, lambda k, n: k * n <= 2**20) == (768, 1024)


def test_work_follows_the_rows_in_the_groups():
    """131072 rows in a buffer for four times as many: 256 tiles of 512, and 31 groups begin inside one."""
    groups = jnp.full(32, 4096, jnp.int32).at[::2].add(100).at[1::2].add(-100)
    _, tiles = grouped_matmul_tpu._kernels.make_group_metadata(
        group_sizes=groups, m=524288, tm=512, start_group=jnp.int32(0), num_nonzero_groups=32
    )
    assert 256 <= tiles <= 256 + 31
