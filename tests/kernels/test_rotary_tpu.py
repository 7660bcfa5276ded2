"""The TPU kernels of heads' norm and rotation, in interpret mode on CPU, equal their XLA twin, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.kernels import rotary, rotary_tpu
from tests.tiny import mostly_slow

B, H, N = 2, 128, 3
EPS = 1e-6
CASES = [
    (75, "float32", True), (75, "float32", False), (1, "float32", True), (300, "float32", True),
    (75, "bfloat16", True),
]  # fmt: skip


def twin(x, rotation, scale):
    heads = jnp.swapaxes(x.reshape(*x.shape[:2], N, H), 1, 2)
    heads = heads if scale is None else rotary.rms_norm(heads, scale, EPS)
    return jnp.swapaxes(rotary.rope(heads, rotation), 1, 2).reshape(x.shape)


@pytest.mark.parametrize(("tokens", "dtype", "normed"), mostly_slow(CASES, always=CASES[:2]))
def test_kernels_equal_the_twin(tokens, dtype, normed, monkeypatch):
    """Several heads, tiles with a rest, positions far out. Bfloat16's norm is rounded alike, its gradient is not."""
    rng = np.random.default_rng(0)
    monkeypatch.setattr(rotary_tpu, "VMEM", 2 * 256 * (3 * 4 * N * H + 4 * H))
    kernel = rotary_tpu.normed_rope
    monkeypatch.setattr(rotary_tpu, "normed_rope", lambda *a, **options: kernel(*a, **options, interpret=True))
    x, g = (jnp.asarray(rng.standard_normal((B, tokens, N * H)), dtype) for _ in range(2))
    positions = jnp.asarray(rng.integers(0, 40_000, (B, tokens)), jnp.int32)
    frequencies = jnp.asarray(1e6 ** -np.linspace(0, 1, H // 2), jnp.float32)
    rotation = rotary.Rotation.of(positions, frequencies)
    scale = (jnp.asarray(rng.uniform(0.5, 2, H), jnp.float32),) if normed else ()

    def found(run):
        out, pull = jax.vjp(lambda x, *scale: run(x, rotation, *(scale or (None,))), x, *scale)
        return out, *pull(g)

    limits = {"float32": (4e-7, 4e-7, 2e-6), "bfloat16": (2**-8, 2**-7, 2**-7)}[dtype]
    pairs = zip(found(lambda *a: rotary.normed_rope(*a, eps=EPS)), found(twin), limits, strict=False)
    for got, expected, limit in pairs:
        assert got.dtype == expected.dtype
        expected = np.asarray(expected, np.float64)
        assert np.abs(np.asarray(got, np.float64) - expected).max() <= limit * np.abs(expected).max()
