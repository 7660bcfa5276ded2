"""Random inputs of a decode step's kernels, and what a matrix with scales and an adapter stands for, in float64."""

import jax.numpy as jnp
import numpy as np

from gspo_jax.kernels.decode_tpu import Adapter, Stacked

EXACT = {"float32": 1e-5, "bfloat16": 3e-2}
"""Tolerances relative to the largest result."""


def draw(rng, dtype, *shape):
    """Return random numbers as the dtype and as float64; both hold the same values exactly."""
    x = jnp.asarray(rng.standard_normal(shape), dtype)
    return x, np.asarray(x, np.float64)


def matrix(rng, dtype, *shape, int8=False, rank=0):
    """Return a matrix as the kernels take it, and in float64."""
    x, whole = draw(rng, dtype, *shape)
    scale = low = None
    if int8:
        x = jnp.asarray(rng.integers(-127, 128, shape), jnp.int8)
        scale = jnp.asarray(rng.uniform(0.005, 0.02, (*shape[:-2], 1, shape[-1])), jnp.float32)
        whole = np.asarray(x, np.float64) * np.asarray(scale, np.float64)
    if rank:
        (a, a64), (b, b64) = (draw(rng, dtype, *shape[:-2], rank, n) for n in shape[-2:])
        low = Adapter(a, b, 0.5)
        whole = whole + 0.5 * np.swapaxes(a64, -2, -1) @ b64
    return Stacked(x, scale, low), whole


def close(found, expected, dtype):
    """Assert a small error relative to the largest result."""
    error = np.abs(np.asarray(found, np.float64) - expected).max()
    assert error <= EXACT[dtype] * max(1.0, np.abs(expected).max())


def rms(x, scale, eps, axis=-1):
    """Return the RMS norm in float64."""
    return x / np.sqrt(np.mean(x * x, axis=axis, keepdims=True) + eps) * scale


def silu(x):
    return x / (1 + np.exp(-x))
