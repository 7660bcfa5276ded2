"""Digests of arrays, independent of their sharding and computed where the shards live.

A digest is a sum over elements, modulo 2^32, of a hash of index and bits. The hash is a bijection of the bits: changing
one element always changes both words, and any other change goes unnoticed with probability 2^-64. This guards against
damage, not forgery.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Shaped, UInt32

from gspo_jax.parallel import mesh as mesh_lib


class Digest(NamedTuple):
    words: str
    """Both words, in hexadecimal."""
    nonfinite: int
    """NaN or infinite elements, modulo 2^32."""


def digests(arrays: Mapping[str, jax.Array]) -> dict[str, Digest]:
    """Return each array's digest. Every process must call it."""
    if not arrays:
        return {}
    leaves = list(arrays.values())
    facts = np.asarray(digest_all(leaves, places=tuple(x.sharding for x in leaves)))
    return {name: Digest(f"{one:08x}{two:08x}", int(bad)) for name, (one, two, bad) in zip(arrays, facts, strict=True)}


def digest_tree(tree: Any) -> str:
    """Return one digest of a tree's leaves and paths, the same on any mesh. Every process must call it."""
    found = digests({jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)})
    return hashlib.sha256(json.dumps({name: one.words for name, one in found.items()}).encode()).hexdigest()[:16]


@partial(jax.jit, static_argnames="places")
def digest_all(arrays: list[jax.Array], *, places: tuple[Sharding, ...]) -> UInt32[Array, "n 3"]:
    """Return both words of each array's digest, and its number of non-finite elements, on one mesh."""
    mesh = next((place.mesh for place in places if isinstance(place, NamedSharding)), None)
    if not isinstance(mesh, Mesh):
        return jnp.stack([_facts(x, [0] * x.ndim, shape=x.shape) for x in arrays])
    specs = tuple(place.spec if isinstance(place, NamedSharding) else PartitionSpec() for place in places)
    shapes = [x.shape for x in arrays]

    def sum_over_devices(*shards: jax.Array) -> Array:
        facts = [_facts_of_shard(*each, mesh) for each in zip(shards, shapes, specs, strict=True)]
        return jax.lax.psum(jnp.stack(facts), mesh.axis_names)

    return jax.shard_map(sum_over_devices, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(*arrays)


def _facts_of_shard(
    x: Shaped[Array, "..."], shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh
) -> UInt32[Array, "3"]:
    """Return one device's summands for its shard; zeros if another counts it."""
    over = mesh_lib.axes_by_dimension(spec)
    starts = [jax.lax.axis_index(axes) * size if axes else 0 for axes, size in zip_longest(over, x.shape, fillvalue=())]
    copies = tuple(axis for axis in mesh.axis_names if axis not in sum(over, ()))
    counts = jnp.uint32(1) if not copies else (jax.lax.axis_index(copies) == 0).astype(jnp.uint32)
    return counts * _facts(x, starts, shape=shape)


@partial(jax.jit, static_argnames="shape")
def _facts(
    x: Shaped[Array, "..."], starts: Sequence[jax.typing.ArrayLike], *, shape: tuple[int, ...]
) -> UInt32[Array, "3"]:
    """Return the facts of a block, from index `starts`, of an array of this `shape`."""
    place = mix(indices(x.shape, starts, shape))
    # A wide element's halves share the index but need separate hashes.
    halves = _bits(x)
    one = sum(mix(bits ^ (place + jnp.uint32(i))) for i, bits in enumerate(halves))
    two = sum(mix(bits + place * jnp.uint32(0x9E3779B1) + jnp.uint32(i)) for i, bits in enumerate(halves))
    bad = jnp.zeros((), jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        bad = (~jnp.isfinite(x)).sum(dtype=jnp.uint32)
    return jnp.stack([jnp.sum(one, dtype=jnp.uint32), jnp.sum(two, dtype=jnp.uint32), bad])


def indices(
    block: tuple[int, ...], starts: Sequence[jax.typing.ArrayLike], shape: tuple[int, ...]
) -> UInt32[Array, "..."]:
    """Return the elements' places, modulo 2^32, of a block, from index `starts`, of an array of this `shape`."""
    index, stride = jnp.zeros(block, jnp.uint32), 1
    for axis in reversed(range(len(block))):
        along = jax.lax.broadcasted_iota(jnp.uint32, block, axis) + jnp.asarray(starts[axis], jnp.uint32)
        index += along * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return index


def _bits(x: Shaped[Array, "..."]) -> list[UInt32[Array, "..."]]:
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    size = x.dtype.itemsize
    if size == 8:
        words = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return [words[..., 0], words[..., 1]]
    return [jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * size}")).astype(jnp.uint32)]


def mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """MurmurHash3's finalizer, a bijection of 32-bit words: https://github.com/aappleby/smhasher."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
