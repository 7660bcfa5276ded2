"""The PRNG keys of a run, all derived from `config.seed`."""

import jax
from ml_collections import ConfigDict


def init_key(config: ConfigDict) -> jax.Array:
    """Key for the initial weights of a cold start."""
    return jax.random.split(jax.random.key(config.seed))[0]


def run_key(config: ConfigDict) -> jax.Array:
    """Key of the run, from which those of rollouts and evaluations are derived."""
    return jax.random.split(jax.random.key(config.seed))[1]


def adapter_key(config: ConfigDict) -> jax.Array:
    """Key for the initial weights of adapters."""
    return jax.random.fold_in(init_key(config), 1)


def sample_key(key: jax.Array, iteration: int) -> jax.Array:
    """Key for the rollout of one iteration; `key` is the run's."""
    return jax.random.fold_in(jax.random.fold_in(key, 0), iteration)


def eval_key(key: jax.Array) -> jax.Array:
    """Key shared by all evaluations, so that they sample with the same noise; `key` is the run's."""
    return jax.random.fold_in(key, 1)
