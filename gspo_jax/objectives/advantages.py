"""Advantages, from the rewards of a group or from a critic: arrays in, arrays out. Sampling and losses are elsewhere.

In a group every row counts, also one whose response was masked out. From numbers that may all be equal one is
subtracted before the mean is taken: the float32 mean of eight 0.1 is not 0.1, but that of eight differences of 0 is 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from gspo_jax.objectives.surrogates import widen
from gspo_jax.types import UserError


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


class _Following(NamedTuple):
    """What a token looks ahead to: the next sampled one of its row, 0 where there is none."""

    advantage: Float[Array, " B"]
    value: Float[Array, " B"]


def gae(
    rewards: Shaped[Array, "B T"],
    values: Shaped[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = False,
) -> Float[Array, "B T"]:
    """Generalized advantage estimation over the tokens of a response, as in PPO.

    Â_t = δ_t + γλ·Â_{t+1}, δ_t = R_t + γ·V_{t+1} − V_t, both 0 behind the last token. https://arxiv.org/abs/1506.02438

    `rewards` are those of each token, `values` the critic's before it. `mask` is True on the tokens that the policy
    sampled, and t + 1 is the next of them: what stands elsewhere changes nothing, NaN included, and gets 0. With
    `whiten`, the result has mean 0 and sample deviation 1 (std + 1e-6) over all sampled tokens: give a whole
    mini-batch, not its parts.

    Raises ValueError for shapes that do not fit, UserError for `gamma` or `lam` outside [0, 1].
    """
    _check_tokens(rewards, values, mask)
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0 <= factor <= 1:
            raise UserError(f"{name}={factor} lies outside [0, 1]; 1 discounts nothing, 0 looks one token ahead")
    values = widen(values)  # which widens all that is added to them

    def step_back(after: _Following, column: tuple[Array, Array, Array]) -> tuple[_Following, Array]:
        reward, value, sampled = column
        advantage = reward + gamma * after.value - value + gamma * lam * after.advantage
        here = _Following(jnp.where(sampled, advantage, after.advantage), jnp.where(sampled, value, after.value))
        return here, jnp.where(sampled, advantage, 0.0)

    rows = mask.shape[0]
    end = _Following(jnp.zeros(rows, jnp.result_type(rewards, values)), jnp.zeros(rows, values.dtype))
    _, columns = jax.lax.scan(step_back, end, (rewards.T, values.T, mask.T), reverse=True)
    return _whitened(columns.T, mask) if whiten else columns.T


def _whitened(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """(x − mean) / (std + 1e-6) over the mask, std the sample deviation; exactly 0 for one token or equal ones."""
    count = jnp.sum(mask)
    x = jnp.where(mask, x - jnp.min(x, initial=jnp.inf, where=mask), 0.0)
    x = jnp.where(mask, x - jnp.sum(x) / count, 0.0)
    return x / (jnp.sqrt(jnp.sum(x**2) / jnp.maximum(count - 1, 1)) + 1e-6)


def _check_tokens(rewards: Array, values: Array, mask: Array) -> None:
    """The three are [B, T] alike, and the mask is boolean."""
    shapes = [list(jnp.shape(x)) for x in (rewards, values, mask)]
    if len(shapes[0]) != 2 or shapes != [shapes[0]] * 3:
        raise ValueError("rewards are {}, values {}, mask {}; all three must be the same [B, T]".format(*shapes))
    if mask.dtype != bool:
        raise ValueError(f"mask is {mask.dtype}, not bool; use mask != 0")


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
