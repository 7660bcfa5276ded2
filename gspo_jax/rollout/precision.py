"""Sampler weights rounded to fewer bits than the trainer's.

Only values are rounded: matrices keep their size in memory and are multiplied in the compute dtype.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from gspo_jax.models.int8 import quantize

Precision = Literal["bfloat16", "int8"]


def rounded(x: Float[Array, "..."], precision: Precision, *, inputs: int) -> Float[Array, "..."]:
    """Round matrices to values that `precision` can hold, keeping the dtype.

    With int8, each output channel's scale is its largest magnitude over the axis `inputs`, divided by 127.
    """
    if precision == "bfloat16":
        return x.astype(jnp.bfloat16).astype(x.dtype)
    values, scale = quantize(x, inputs=inputs)
    return jnp.asarray(values * scale).astype(x.dtype)
