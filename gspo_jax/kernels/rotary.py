"""Heads as attention takes them: normed in some families, then turned by their positions.

On TPU one Pallas kernel (rotary_tpu.py) does both where the heads lie; XLA would write float32 heads, and move them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from gspo_jax.kernels import rotary_tpu
from gspo_jax.kernels.backend import platform


def rms_norm(x: Float[Array, "*b D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*b D"]:
    """Return x / rms(x) · scale, computed in float32, in x's dtype. `jax.checkpoint` may keep 1 / rms(x), a "dot"."""
    y = x.astype(jnp.float32)
    inverse = checkpoint_name(jax.lax.rsqrt(jnp.mean(y * y, axis=-1) + eps), "dot")
    y = y * inverse[..., None]
    return (y * scale.reshape((1,) * (y.ndim - 1) + (-1,))).astype(x.dtype)


class Rotation(NamedTuple):
    """Cosine and sine of position · frequency_i, times an amplitude, for all layers: they cost more than rotating."""

    cos: Float[Array, "B 1 T half"]
    sin: Float[Array, "B 1 T half"]

    @classmethod
    def of(cls, positions: Int[Array, "B T"], frequencies: Float[Array, " half"], amplitude: float = 1.0) -> "Rotation":
        """Return those of positions, with frequencies in radians per position."""
        angle = positions[:, None, :, None].astype(jnp.float32) * frequencies.reshape(1, 1, 1, -1)
        turns = cls(jnp.cos(angle), jnp.sin(angle))
        return turns if amplitude == 1 else cls(*(amplitude * x for x in turns))


def rope(x: Float[Array, "B N T h"], rotation: Rotation) -> Float[Array, "B N T h"]:
    """Rotate pairs (x_i, x_{i+n/2}) by position · frequency_i (arXiv 2104.09864, half-split layout).

    With n/2 frequencies the first n dimensions are rotated, and others left alone.
    """
    cos, sin = rotation
    half = cos.shape[-1]
    a, b = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return turned if x.shape[-1] == 2 * half else jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)


def halves(x: Float[Array, "B N T h"]) -> Float[Array, "B N T h"]:
    """Return heads whose pairs are adjacent, (x_0, x_1), (x_2, x_3), …, as `rope` takes them."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2), -1, -2).reshape(x.shape)


def in_place(tokens: int, width: int, rotation: Rotation) -> bool:
    """Return True where `normed_rope` has a kernel: on TPU, for more than a few tokens and heads of whole lanes, all
    rotated.
    """
    whole = width == rotary_tpu.LANES == 2 * rotation.cos.shape[-1]
    return platform() == "tpu" and whole and tokens >= rotary_tpu.LANES


def normed_rope(
    x: Float[Array, "B T Nh"], rotation: Rotation, scale: Float[Array, " h"] | None, *, eps: float
) -> Float[Array, "B T Nh"]:
    """Return `rope` of every head's `rms_norm`, heads side by side; without a scale they are not normed.

    Only where `in_place`.
    """
    B, T, _ = x.shape
    turn = jnp.concatenate(rotation, axis=-1).reshape(B * T, -1)
    return rotary_tpu.normed_rope(x.reshape(B * T, -1), turn, scale, eps=eps).reshape(x.shape)
