"""Keys and values as a decoder's cache keeps them: in the dtype that they were computed in, or in int8.

In int8 each token of each head has a scale, which is a factor of its score, or of its probability: attention scales
these, and never writes out keys and values in another dtype.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8


class ScaledKV(NamedTuple):
    """Keys or values in int8, with a scale for each token and head to multiply them with."""

    values: Int8[Array, "*b h"]
    scale: Float[Array, "*b"]
    """float32."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the keys or values."""
        return self.values.shape


KV = Array | ScaledKV
"""Keys or values. The functions below take indices and sizes of values; scales lack the last axis."""


def head_bytes(width: int, dtype: DTypeLike, *, scaled: bool) -> int:
    """Bytes of a token's key, or value, of one head: of values of this dtype, and of their scale if they have one."""
    return width * jnp.dtype(dtype).itemsize + (4 if scaled else 0)


def parts(x: KV) -> tuple[Array, Array | None]:
    """The keys or values as they are in memory, and their scales, if they have any."""
    return x if isinstance(x, ScaledKV) else (x, None)


def each(change: Callable[..., Array], *kv: KV) -> KV:
    """`change` of the values, and of the scales."""
    return jax.tree.map(change, *kv)


def take(x: KV, starts: Sequence[Array | int], sizes: Sequence[int]) -> KV:
    """`jax.lax.dynamic_slice`."""
    return each(lambda a: jax.lax.dynamic_slice(a, tuple(starts)[: a.ndim], tuple(sizes)[: a.ndim]), x)


def put(x: KV, new: KV, starts: Sequence[Array | int]) -> KV:
    """`jax.lax.dynamic_update_slice`."""
    return each(lambda a, b: jax.lax.dynamic_update_slice(a, b, tuple(starts)[: a.ndim]), x, new)
