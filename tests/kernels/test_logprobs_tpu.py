"""Sums of softmaxes with a TPU kernel, in interpret mode on CPU, equal their definition in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.kernels import logprobs, logprobs_tpu
from gspo_jax.parallel import mesh as mesh_lib
from tests.tiny import mostly_slow

SIZES = [(300, 128, 1000), (40, 256, 512), (700, 128, 300)]
"""Tokens, width and vocabulary: full and partial blocks."""


def made(N, D, V):
    rng = np.random.default_rng(0)
    hidden, head = (rng.standard_normal(shape).astype(np.float32) for shape in ((N, D), (D, V)))
    hidden[1] *= 10  # one logit has nearly all of the softmax
    return hidden, head, rng.integers(0, V, N)


def defined(hidden, head, targets, ids, temperature):
    """Return the sums in float64; 0 for targets and ids outside the vocabulary."""
    logits = hidden.astype(np.float64) @ head / temperature
    top = logits.max(axis=1)
    shifted = logits - top[:, None]

    def at(ids):
        inside = (ids >= 0) & (ids < head.shape[1])
        return np.where(inside, np.take_along_axis(logits, np.where(inside, ids, 0), axis=1), 0)

    sums = np.exp(shifted).sum(axis=1), (np.exp(shifted) * shifted).sum(axis=1)
    return top, *sums, at(targets[:, None])[:, 0], at(ids)


def some_ids(N, V, K):
    """Return distinct ids, some of them next to each other, and unused entries."""
    rng = np.random.default_rng(1)
    ids = np.stack([rng.permutation(V)[:K] for _ in range(N)])
    ids[::3] = (rng.integers(0, V, (len(ids[::3]), 1)) + np.arange(K)) % V
    return np.where(np.arange(K) < rng.integers(0, K + 1, (N, 1)), ids, -1)


@pytest.mark.parametrize(("N", "D", "V"), mostly_slow(SIZES, always=SIZES[:1]))
def test_sums_equal_the_definition(N, D, V):
    hidden, head, targets = made(N, D, V)
    targets[::7] += V
    targets[::5] -= V + 40
    ids = some_ids(N, V, 20 if N == 300 else 140)  # at most 128 are looked up at a time
    ids[:, 3] += V
    expected = defined(hidden, head, targets, ids, 0.7)
    given = hidden, head, targets, ids
    for count in (3, 4):
        found = logprobs_tpu.softmax_sums(*map(jnp.asarray, given[:count]), temperature=0.7, interpret=True)
        for got, x in zip(found, expected[: count + 1], strict=True):
            np.testing.assert_allclose(got, x, rtol=3e-6, atol=1e-4)


def test_shards_of_the_vocabulary_are_added_up(monkeypatch):
    N, D, V = 64, 128, 512
    (hidden, head, targets), ids = made(N, D, V), some_ids(N, V, 20)
    monkeypatch.setattr(logprobs_tpu, "softmax_sums", partial(logprobs_tpu.softmax_sums, interpret=True))
    mesh = mesh_lib.make_mesh({"fsdp": 2, "tensor": 4}, devices=jax.devices()[:8])
    with jax.set_mesh(mesh):
        given = hidden.reshape(2, N // 2, D), head, targets.reshape(2, -1), ids.reshape(2, N // 2, -1)
        sums = jax.jit(partial(logprobs._on_shards, temperature=0.7))(*map(jnp.asarray, given))
    top, z, weighted, picked, kept = defined(hidden, head, targets, ids, 0.7)
    for got, expected in zip(sums, (top, z, weighted, picked - top, kept - top[:, None]), strict=True):
        np.testing.assert_allclose(got.reshape(expected.shape), expected, rtol=3e-6, atol=1e-4)
