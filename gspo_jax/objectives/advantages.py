"""Advantages from the rewards of a group: arrays in, arrays out. Sampling, masks and losses are elsewhere.

Every row counts, also one whose response was masked out. The first reward of a group is subtracted before the mean is
taken: the float32 mean of eight rewards of 0.1 is not 0.1, while eight differences of 0 have the mean 0 exactly.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from gspo_jax.objectives.surrogates import widen


def group_zscore(rewards: Shaped[Array, " B"], *, group_size: int) -> Float[Array, " B"]:
    """Rewards in units of their group's spread, as in GRPO.

    Â = (R − mean_G R) / (std_G R + 1e-6), std the sample deviation (G − 1). https://arxiv.org/abs/2402.03300

    Exactly 0 in a group of one or of equal rewards. Raises ValueError where B is not a multiple of `group_size`.
    """
    centered = _centered(rewards, group_size)
    variance = jnp.sum(centered**2, axis=1, keepdims=True) / max(group_size - 1, 1)
    return (centered / (jnp.sqrt(variance) + 1e-6)).reshape(-1)


def group_centered(rewards: Shaped[Array, " B"], *, group_size: int) -> Float[Array, " B"]:
    """Rewards less their group's mean, as in Dr. GRPO.

    Â = R − mean_G R. https://arxiv.org/abs/2503.20783

    Exactly 0 in a group of one or of equal rewards. Raises ValueError where B is not a multiple of `group_size`.
    """
    return _centered(rewards, group_size).reshape(-1)


def leave_one_out(rewards: Shaped[Array, " B"], *, group_size: int) -> Float[Array, " B"]:
    """Rewards less the mean of the others in their group, as in RLOO.

    Â = R − mean of the other G − 1 = G/(G − 1) · (R − mean_G R). https://arxiv.org/abs/2402.14740

    Exactly 0 in a group of one or of equal rewards. Raises ValueError where B is not a multiple of `group_size`.
    """
    return (_centered(rewards, group_size) * (group_size / max(group_size - 1, 1))).reshape(-1)


def _centered(rewards: Shaped[Array, " B"], group_size: int) -> Float[Array, "P G"]:
    """R − mean_G R, at least float32, one group a line."""
    rewards = widen(rewards)
    if rewards.ndim != 1:
        raise ValueError(f"rewards are {list(rewards.shape)}; they must be [B], one number for each response")
    if group_size < 1 or rewards.shape[0] % group_size:
        raise ValueError(
            f"{rewards.shape[0]} rewards do not split into groups of {group_size}; "
            "give a positive group_size that divides their number"
        )
    groups = rewards.reshape(-1, group_size)
    groups = groups - groups[:, :1]
    return groups - jnp.mean(groups, axis=1, keepdims=True)
