"""Keys and values in a decoder's cache, in their compute dtype or in int8.

In int8 each token and head has a scale, applied to scores and probabilities. Converted keys and values are never
written out.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8


class ScaledKV(NamedTuple):
    """Int8 keys or values, with a scale per token and head."""

    values: Int8[Array, "*b h"]
    scale: Float[Array, "*b"]
    """float32."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.values.shape


KV = Array | ScaledKV
"""Functions below take indices and sizes of the values. Scales lack the last axis."""

Values = KV | None
"""None where a layer's keys are its values too: latent attention. Functions below return it as it is."""

Stored = TypeVar("Stored", bound=Values)


def head_bytes(width: int, dtype: DTypeLike, *, scaled: bool) -> int:
    """Return the bytes of a token's key or value in one head."""
    return width * jnp.dtype(dtype).itemsize + (4 if scaled else 0)


def parts(x: KV) -> tuple[Array, Array | None]:
    """Return the stored values, and their scales if any."""
    return x if isinstance(x, ScaledKV) else (x, None)


def each(change: Callable[..., Array], *kv: Stored) -> Stored:
    """Apply `change` to values and scales."""
    return jax.tree.map(change, *kv)


def take(x: Stored, starts: Sequence[Array | int], sizes: Sequence[int]) -> Stored:
    """Apply `jax.lax.dynamic_slice`."""
    return each(lambda a: jax.lax.dynamic_slice(a, tuple(starts)[: a.ndim], tuple(sizes)[: a.ndim]), x)


def put(x: Stored, new: Stored, starts: Sequence[Array | int]) -> Stored:
    """Apply `jax.lax.dynamic_update_slice`."""
    return each(lambda a, b: jax.lax.dynamic_update_slice(a, b, tuple(starts)[: a.ndim]), x, new)
