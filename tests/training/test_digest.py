"""Digests of arrays: an oracle in NumPy, any sharding, and every single bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.training.digest import digests


def mix(x):
    """Return MurmurHash3's finalizer of 32-bit words, with Python's integers."""
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def oracle(x):
    """Return the digest of an array, element by element."""
    size = x.dtype.itemsize
    one = two = 0
    for i, bits in enumerate(x.reshape(-1).view(f"uint{8 * size}").tolist()):
        for half in range(max(size // 4, 1)):
            word, place = bits >> 32 * half & 0xFFFFFFFF, mix(i)
            one += mix(word ^ (place + half) % 2**32)
            two += mix((word + place * 0x9E3779B1 + half) % 2**32)
    return f"{one % 2**32:08x}{two % 2**32:08x}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "uint32"])
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 8, 2)])
def test_the_digest_is_that_of_the_oracle(dtype, shape):
    x = np.random.default_rng(0).normal(size=shape).astype(jnp.dtype(dtype))
    assert digests({"x": jnp.asarray(x)})["x"].words == oracle(np.atleast_1d(x))


def test_wide_elements():
    x = np.random.default_rng(0).normal(size=(3, 5))
    with jax.enable_x64(True):
        assert digests({"x": jnp.asarray(x)})["x"].words == oracle(x)


def test_every_sharding_has_the_same_digest():
    mesh = mesh_lib.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    for spec in ((), ("data",), ("fsdp", "data"), (None, ("data", "fsdp")), (("data", "fsdp", "tensor"),)):
        sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        assert digests({"x": sharded})["x"].words == oracle(x), spec


def test_arrays_with_and_without_a_mesh_can_be_mixed():
    mesh = mesh_lib.make_mesh({"data": 8})
    x, y = np.arange(32, dtype=np.float32), np.arange(3, dtype=np.int32)
    found = digests({"y": jnp.asarray(y), "x": jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))})
    assert [found["x"].words, found["y"].words] == [oracle(x), oracle(y)]


def test_every_bit_and_every_place_counts():
    x = np.zeros(6, np.float32)
    seen = {digests({"x": jnp.asarray(x)})["x"].words}
    for bit in range(8 * x.nbytes):
        flipped = x.copy()
        flipped.view(np.uint8)[bit // 8] ^= 1 << bit % 8
        seen.add(digests({"x": jnp.asarray(flipped)})["x"].words)
    assert len(seen) == 1 + 8 * x.nbytes
    a, b = (digests({"x": jnp.asarray(v, jnp.float32)})["x"].words for v in ([1, 2], [2, 1]))
    assert a != b, "two elements that change places"


def test_elements_that_are_not_finite_are_counted():
    x = {"a": jnp.array([jnp.nan, 1, jnp.inf]), "b": jnp.ones(3), "c": jnp.arange(3)}
    assert [found.nonfinite for found in digests(x).values()] == [2, 0, 0]
