"""Digests of arrays that do not depend on how the arrays are sharded, computed where their shards live.

The digest of an array is a sum over its elements, modulo 2^32, of a hash of the element's index and bits. A sum has no
order, so every device adds up its own elements, and two words per array are all that devices exchange. The hash is a
bijection of the bits at every index: a change to a single element always changes both words, and any other change
leaves them equal with a probability of 2^-64. It guards against damage, not against forgery.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Shaped, UInt32


class Digest(NamedTuple):
    """Digest of an array, and the number of its elements that are not finite."""

    words: str
    """The two words of the digest, in hexadecimal."""
    nonfinite: int
    """Elements that are NaN or infinite, modulo 2^32."""


def digests(arrays: Mapping[str, jax.Array]) -> dict[str, Digest]:
    """The digest of each array; one program reads all of them once. Every process has to call it."""
    if not arrays:
        return {}
    facts = np.asarray(_program(_everywhere(next(iter(arrays.values()))))(list(arrays.values())))
    return {name: Digest(f"{one:08x}{two:08x}", int(bad)) for name, (one, two, bad) in zip(arrays, facts, strict=True)}


def _everywhere(array: jax.Array) -> Sharding | None:
    """The replicated sharding on the array's mesh; None, for the compiler to choose, if it has no mesh."""
    mesh = array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


@functools.cache
def _program(place: Sharding | None) -> jax.stages.Wrapped:
    return jax.jit(digest_all, out_shardings=place)


def digest_all(arrays: list[jax.Array]) -> UInt32[Array, "n 3"]:
    """Both words of each array's digest, and the number of its elements that are not finite."""
    return jnp.stack([_facts(x) for x in arrays])


def _facts(x: Shaped[Array, "..."]) -> UInt32[Array, "3"]:
    """Both words of the digest, and the number of elements that are not finite."""
    place = _mix(_indices(x.shape))
    # The index counts elements, so the halves of a wide element need hashes of their own.
    halves = _bits(x)
    one = sum(_mix(bits ^ (place + jnp.uint32(i))) for i, bits in enumerate(halves))
    two = sum(_mix(bits + place * jnp.uint32(0x9E3779B1) + jnp.uint32(i)) for i, bits in enumerate(halves))
    bad = jnp.zeros((), jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        bad = (~jnp.isfinite(x)).sum(dtype=jnp.uint32)
    return jnp.stack([jnp.sum(one, dtype=jnp.uint32), jnp.sum(two, dtype=jnp.uint32), bad])


def _indices(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Row-major index of every element, modulo 2^32."""
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return index


def _bits(x: Shaped[Array, "..."]) -> list[UInt32[Array, "..."]]:
    """The bits of every element, as one word of 32 bits or two."""
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    size = x.dtype.itemsize
    if size == 8:
        words = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return [words[..., 0], words[..., 1]]
    return [jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * size}")).astype(jnp.uint32)]


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """MurmurHash3's finalizer, a bijection of 32-bit words: https://github.com/aappleby/smhasher."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
