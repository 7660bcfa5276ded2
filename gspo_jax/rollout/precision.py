"""Weights of the sampler rounded to fewer bits than the trainer's, as in rollout engines that store them so.

What is rounded is the values alone: matrices are multiplied in the compute dtype, and in memory they are as large as
without. So the sampler's policy differs from the trainer's by the weights' precision and by nothing else.
"""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float

from gspo_jax.models.int8 import quantize

Precision = Literal["bfloat16", "int8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
"""Precisions that weights may be rounded to."""


def rounded(x: Float[Array, "..."], precision: Precision, *, inputs: int) -> Float[Array, "..."]:
    """Round a matrix, or a stack of them, to values that `precision` can hold; its dtype stays.

    With int8 each output channel has a scale of its own, the largest magnitude over the axis `inputs`, the matrix's
    input, divided by 127. A channel of zeros stays 0.
    """
    if precision == "bfloat16":
        return x.astype(jnp.bfloat16).astype(x.dtype)
    values, scale = quantize(x, inputs=inputs)
    return jnp.asarray(values * scale).astype(x.dtype)
