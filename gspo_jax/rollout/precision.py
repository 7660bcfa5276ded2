"""Weights of the sampler rounded to fewer bits than the trainer's, as in rollout engines that store them so.

What is rounded is the values alone: matrices are multiplied in the compute dtype, and in memory they are as large as
without. So the sampler's policy differs from the trainer's by the weights' precision and by nothing else.
"""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float

Precision = Literal["bfloat16", "int8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
"""Precisions that weights may be rounded to."""
_LARGEST = 127
"""Largest magnitude of the symmetric int8 that is used; -128 is not."""


def rounded(x: Float[Array, "..."], precision: Precision, *, inputs: int) -> Float[Array, "..."]:
    """Round a matrix, or a stack of them, to values that `precision` can hold; its dtype stays.

    With int8 each output channel has a scale of its own, the largest magnitude over the axis `inputs`, the matrix's
    input, divided by 127. A channel of zeros stays 0.
    """
    if precision == "bfloat16":
        return x.astype(jnp.bfloat16).astype(x.dtype)
    values = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(values), axis=inputs, keepdims=True) / _LARGEST
    return (jnp.round(values / jnp.where(scale > 0, scale, 1)) * scale).astype(x.dtype)
