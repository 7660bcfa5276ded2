"""Time the grouped matmul against a plain one of the same flops, and with many experts; medians of 20 calls.

    JAX_PLATFORMS=cpu python -m tests.tools.time_grouped_matmul

8192 rows of 256, matrices of 256 × 128, groups of very uneven sizes. One line per number of experts.
"""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.kernels.grouped_matmul import grouped_matmuls

N, D, F = 8192, 256, 128


def milliseconds(f: Callable, *arguments: jax.Array) -> float:
    """Return the median milliseconds of 20 calls."""
    jax.block_until_ready(f(*arguments))
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        jax.block_until_ready(f(*arguments))
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times)


def main() -> None:
    """Print the times."""
    rng = np.random.default_rng(0)
    rows, grads = (jnp.asarray(rng.standard_normal((N, width)), jnp.float32) for width in (D, F))
    one = jnp.asarray(rng.standard_normal((D, F)), jnp.float32)
    plain = milliseconds(jax.jit(jnp.matmul), rows, one)
    plain_gradient = milliseconds(jax.jit(lambda x, w, g: (g @ w.T, x.T @ g)), rows, one, grads)
    gradient = jax.jit(lambda x, w, n, g: jax.vjp(lambda x, w: grouped_matmuls(x, (w,), n), x, w)[1]((g,)))
    for experts in (16, 128):
        sizes = np.floor(rng.dirichlet(np.ones(experts)) * N).astype(np.int32)
        sizes[0] += N - sizes.sum()
        weights = jnp.asarray(rng.standard_normal((experts, D, F)), jnp.float32)
        forward = milliseconds(jax.jit(grouped_matmuls), rows, (weights,), jnp.asarray(sizes))
        backward = milliseconds(gradient, rows, weights, jnp.asarray(sizes), grads)
        print(
            f"{experts:4d} experts: forward {forward:.2f} ms, {forward / plain:.2f} × plain; "
            f"gradient {backward:.2f} ms, {backward / plain_gradient:.2f} × plain"
        )


if __name__ == "__main__":
    main()
