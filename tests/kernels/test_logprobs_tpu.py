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


def defined(hidden, head, targets, temperature):
    """Return the sums in float64; 0 for targets outside the vocabulary."""
    logits = hidden.astype(np.float64) @ head / temperature
    top, inside = logits.max(axis=1), (targets >= 0) & (targets < head.shape[1])
    shifted = logits - top[:, None]
    picked = logits[np.arange(len(hidden)), np.where(inside, targets, 0)]
    return top, np.exp(shifted).sum(axis=1), (np.exp(shifted) * shifted).sum(axis=1), np.where(inside, picked, 0)


@pytest.mark.parametrize(("N", "D", "V"), mostly_slow(SIZES, always=SIZES[:1]))
def test_sums_equal_the_definition(N, D, V):
    hidden, head, targets = made(N, D, V)
    targets[::7] += V
    targets[::5] -= V + 40
    found = logprobs_tpu.softmax_sums(*map(jnp.asarray, (hidden, head, targets)), temperature=0.7, interpret=True)
    for got, expected in zip(found, defined(hidden, head, targets, 0.7), strict=True):
        np.testing.assert_allclose(got, expected, rtol=3e-6, atol=1e-4)


def test_shards_of_the_vocabulary_are_added_up(monkeypatch):
    N, D, V = 64, 128, 512
    hidden, head, targets = made(N, D, V)
    monkeypatch.setattr(logprobs_tpu, "softmax_sums", partial(logprobs_tpu.softmax_sums, interpret=True))
    mesh = mesh_lib.make_mesh({"fsdp": 2, "tensor": 4}, devices=jax.devices()[:8])
    with jax.set_mesh(mesh):
        given = jnp.asarray(hidden.reshape(2, N // 2, D)), jnp.asarray(head), jnp.asarray(targets.reshape(2, -1))
        sums = jax.jit(partial(logprobs._on_shards, temperature=0.7))(*given)
    top, z, weighted, picked = defined(hidden, head, targets, 0.7)
    for got, expected in zip(sums, (top, z, weighted, picked - top), strict=True):
        np.testing.assert_allclose(got.reshape(-1), expected, rtol=3e-6, atol=1e-4)
