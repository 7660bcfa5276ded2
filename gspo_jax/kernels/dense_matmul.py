"""Matmul of tokens with one matrix for all."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from gspo_jax.kernels.backend import platform


def matmul(x: Float[Array, "*N n"], w: Float[Array, "n m"], *, dtype: Any = None) -> Float[Array, "*N m"]:
    """Return x @ w in `dtype`, None for x's.

    On CPU as a product of two matrices. For the gradient of w, XLA would otherwise copy an operand, transposed, and
    multiply at up to a third of the speed.
    """
    rows = x.reshape(-1, x.shape[-1]) if platform() == "cpu" else x
    return jnp.matmul(rows, w, preferred_element_type=dtype).reshape(*x.shape[:-1], w.shape[-1])
