"""A frozen base in int8: each column of a matrix, an output channel, has one scale, its largest magnitude / 127.

Embedding, head, norms, routers and the delta rule's steps and decays are not int8. Products are scaled, not weights.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int8

from gspo_jax.models.config import by_path, ones, parameter
from gspo_jax.models.lora import matrices
from gspo_jax.models.matrices import SCALE

LARGEST = 127
"""Largest magnitude used. -128 is not, for symmetry."""


class Scale(nnx.Param):
    """Scales of a matrix's columns."""


def quantize(
    w: Float[Array | np.ndarray, "*L n m"], *, inputs: int = -2
) -> tuple[Int8[Array | np.ndarray, "*L n m"], Float32[Array | np.ndarray, "..."]]:
    """Return int8 values and the scales to multiply them with, which keep the axis `inputs` with size 1.

    Numpy arrays are quantised on the host.
    """
    xp: Any = w.__array_namespace__()
    w = w.astype(xp.float32)
    scale = xp.max(xp.abs(w), axis=inputs, keepdims=True) * xp.float32(1 / LARGEST)  # as XLA divides by a constant
    return xp.round(w / xp.where(scale > 0, scale, xp.float32(1))).astype(xp.int8), scale


def add(model: Any) -> None:
    """Make a transformer's matrices int8, with a `Scale` each. Values are set later."""
    rngs = nnx.Rngs(0)
    for module, own in (place for block in model.layers for place in matrices(block)):
        matrix = getattr(module, own)
        axes, shape = (tuple(x[:-2]) + tuple(x[-1:]) for x in (matrix.get_metadata("axes"), matrix.shape))
        setattr(module, own + SCALE, parameter(rngs, shape, axes, ones, float32=True, kind=Scale))
        matrix.set_value(jnp.zeros(matrix.shape, jnp.int8))


def split(params: nnx.State) -> tuple[dict[str, Any], nnx.State]:
    """Split off the scales, by their matrix's path."""
    scales, others = nnx.split_state(params, Scale, ...)
    return {path.removesuffix(SCALE): scale for path, scale in by_path(scales).items()}, others
