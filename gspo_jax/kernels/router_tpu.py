"""A softmax router without a gradient on TPU: logits, their log softmax and its top K in one kernel."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from gspo_jax.kernels.backend import platform, unchecked
from gspo_jax.kernels.decode_tpu import dot
from gspo_jax.kernels.visits_tpu import LANES

_TILE = 256
"""Most tokens per grid step."""


def applies(tokens: int, width: int, experts: int) -> bool:
    """Return True if the kernel computes this many tokens and experts on the platform in scope."""
    return platform() == "tpu" and tokens % LANES == 0 and width % LANES == 0 and experts % LANES == 0


def _kernel(x: Any, router: Any, ids: Any, logprobs: Any, shares: Any, *, renormalise: bool) -> None:
    logits = dot(x[...], router[...]).T  # tokens along lanes
    highest = jnp.max(logits, axis=0, keepdims=True)
    left = logits - highest - jnp.log(jnp.sum(jnp.exp(logits - highest), axis=0, keepdims=True))
    row, (experts, _) = jax.lax.broadcasted_iota(jnp.int32, left.shape, 0), left.shape
    values = []
    for i in range(ids.shape[0]):
        value = jnp.max(left, axis=0, keepdims=True)
        first = jnp.min(jnp.where(left == value, row, experts), axis=0, keepdims=True)
        left = jnp.where(row == first, -jnp.inf, left)
        ids[i : i + 1, :] = first
        values.append(value)
    found = jnp.concatenate(values, axis=0)
    logprobs[...] = found
    share = jnp.exp(found - found[:1] if renormalise else found)
    shares[...] = share / jnp.sum(share, axis=0, keepdims=True) if renormalise else share


def choose(
    x: Float[Array, "N D"], router: Float[Array, "D E"], *, k: int, renormalise: bool, interpret: bool = False
) -> tuple[Int[Array, "K N"], Float[Array, "K N"], Float[Array, "K N"]]:
    """Return each token's K experts, most probable first, the router's log softmax there, and their weights.

    Of equal experts the first is chosen, as by `jax.lax.top_k`. Weights are probabilities, or sum to one if
    `renormalise`. Logits are products in x's dtype, accumulated in float32, as is all that follows.
    """
    (N, D), E = x.shape, router.shape[1]
    tile = next(t for t in (_TILE, LANES) if N % t == 0)
    by_token = pl.BlockSpec((k, tile), lambda i: (0, i))
    run = pl.pallas_call(
        functools.partial(_kernel, renormalise=renormalise),
        out_shape=[jax.ShapeDtypeStruct((k, N), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32)],
        in_specs=(pl.BlockSpec((tile, D), lambda i: (i, 0)), pl.BlockSpec((D, E), lambda i: (0, 0))),
        out_specs=[by_token] * 3,
        grid=(N // tile,),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=2 * N * D * E,
            bytes_accessed=x.dtype.itemsize * (N + E) * D + 12 * k * N,
            transcendentals=N * (E + k),
        ),
        interpret=interpret,
        name="router",
    )
    ids, logprobs, shares = unchecked(run, x, router.astype(x.dtype))
    return ids, logprobs, shares
