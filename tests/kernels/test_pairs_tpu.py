"""The TPU kernels of pairs' places and moves, interpreted, against plain jnp (see tests/models/test_dispatch.py)."""

import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.kernels import pairs, pairs_tpu

BLOCK = 8


def ids(load, k, tokens, experts):
    """Return experts [k, tokens], distinct within a token; `experts` and -1 are none."""
    rng = np.random.default_rng(0)
    found = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)], axis=1).astype(np.int32)
    if load == "one expert":
        found[0], found[1:] = 3, np.where(found[1:] == 3, experts, found[1:])
    if load == "padded":
        found[:, rng.random(tokens) < 0.5] = experts
        found[:, rng.random(tokens) < 0.1] = -1
    if load == "empty":
        found[:] = experts
    return jnp.asarray(found)


@pytest.mark.parametrize("load", ["random", "one expert", "padded", "empty"])
@pytest.mark.parametrize(("k", "tokens", "experts"), [(8, 128, 16), (4, 640, 160)])
def test_places(load, k, tokens, experts):
    """Pairs and what fills up their blocks have every place from 0 on once, in order of experts."""
    chosen, none = ids(load, k, tokens, experts), k * tokens + BLOCK * experts
    own, spare, blocks = pairs.places(chosen, experts, block=BLOCK, none=none)
    found, more, counted = pairs_tpu.places(chosen, experts, block=BLOCK, none=none, interpret=True)
    np.testing.assert_array_equal(found, own)
    np.testing.assert_array_equal(more[:, :experts], spare)
    assert (more[:, experts:] == none).all()
    np.testing.assert_array_equal(counted, blocks)
    expert = np.repeat(np.arange(experts), BLOCK * np.asarray(blocks))
    every = np.sort(np.concatenate([own.reshape(-1), spare.reshape(-1)]))
    np.testing.assert_array_equal(every[every < none], np.arange(len(expert)))
    real = np.asarray(own) < none
    np.testing.assert_array_equal(expert[np.asarray(own)[real]], np.asarray(chosen)[real])


@pytest.mark.parametrize("load", ["random", "one shard", "empty", "full"])
@pytest.mark.parametrize(("shards", "experts"), [(32, 128), (4, 256)])
@pytest.mark.parametrize(("first", "room"), [(0, 100_000), (50, 50)])
def test_moves(load, shards, experts, first, room):
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 9, (shards, experts))
    counts *= {"random": 1, "empty": 0, "full": 500}.get(load, np.arange(experts) // (experts // shards) == 1)
    for me in (0, 1, shards - 1):
        given = jnp.asarray(counts, jnp.int32), jnp.asarray(me), first
        for own, found in zip(
            pairs.moves(*given, room=room), pairs_tpu.moves(*given, room=room, interpret=True), strict=True
        ):
            np.testing.assert_array_equal(np.stack(found), np.stack(own))
