"""PRNG keys of a run, derived from `config.seed`."""

import jax
from ml_collections import ConfigDict


def init_key(config: ConfigDict) -> jax.Array:
    """Return the key of a cold start's initial weights."""
    return jax.random.split(jax.random.key(config.seed))[0]


def run_key(config: ConfigDict) -> jax.Array:
    """Return the run's key."""
    return jax.random.split(jax.random.key(config.seed))[1]


def adapter_key(config: ConfigDict) -> jax.Array:
    """Return the key of adapters' initial weights."""
    return jax.random.fold_in(init_key(config), 1)


def sample_key(key: jax.Array, iteration: int) -> jax.Array:
    """Return the key of an iteration's rollout, from the run's."""
    return jax.random.fold_in(jax.random.fold_in(key, 0), iteration)


def eval_key(key: jax.Array) -> jax.Array:
    """Return the key shared by all evaluations, from the run's."""
    return jax.random.fold_in(key, 1)
