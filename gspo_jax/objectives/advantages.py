"""Advantages, from the rewards of a group or from a critic: arrays in, arrays out. Sampling and losses are elsewhere.

In a group every row counts, also one whose response was masked out. From numbers that may all be equal one is
subtracted before the mean is taken: the float32 mean of eight 0.1 is not 0.1, but that of eight differences of 0 is 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from gspo_jax.objectives.checks import check_fraction, check_tokens
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


class _NextToken(NamedTuple):
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
    check_tokens(rewards=rewards, values=values, mask=mask)
    check_fraction("1 discounts nothing, 0 looks one token ahead", gamma=gamma, lam=lam)
    values = widen(values)  # which widens all that is added to them

    def step_back(following: _NextToken, column: tuple[Array, Array, Array]) -> tuple[_NextToken, Array]:
        reward, value, sampled = column
        advantage = reward + gamma * following.value - value + gamma * lam * following.advantage
        here = _NextToken(
            jnp.where(sampled, advantage, following.advantage), jnp.where(sampled, value, following.value)
        )
        return here, jnp.where(sampled, advantage, 0.0)

    rows = mask.shape[:1]
    end = _NextToken(jax.lax.full(rows, 0, jnp.result_type(rewards, values)), jax.lax.full(rows, 0, values.dtype))
    _, columns = jax.lax.scan(step_back, end, (rewards.T, values.T, mask.T), reverse=True)
    return whitened(columns.T, mask) if whiten else columns.T


def group_steps(rewards: Shaped[Array, "B T"], steps: Bool[Array, "B T"], *, group_size: int) -> Float[Array, "B T"]:
    """Process supervision of GRPO: a token's advantage is what the steps from it onwards brought.

    Â_t = Σ_{u ≥ t, u a step} z_u, z = (R − mean R) / (std R + 1e-6) over all steps of all responses of the group, std
    the sample deviation. https://arxiv.org/abs/2402.03300 (4.1.3)

    `steps` is True on the token that ends a step, `rewards` its reward; what stands elsewhere changes nothing. Exactly
    0 in a group without a step, with one, or with equal rewards. Raises ValueError for shapes that do not fit.
    """
    check_tokens(rewards=rewards, steps=steps)
    _check_groups(steps.shape[0], group_size)
    groups = (-1, group_size * steps.shape[1])
    z = jax.vmap(whitened)(widen(rewards).reshape(groups), steps.reshape(groups)).reshape(steps.shape)
    return jax.lax.cumsum(z, axis=1, reverse=True)


def whitened(x: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, "..."]:
    """(x − mean) / (std + 1e-6) over the mask, std the sample deviation; exactly 0 for one token or equal ones."""
    count = jnp.sum(mask)
    x = jnp.where(mask, x - jnp.min(x, initial=jnp.inf, where=mask), 0.0)
    x = jnp.where(mask, x - jnp.sum(x) / count, 0.0)
    return x / (jnp.sqrt(jnp.sum(x**2) / jnp.maximum(count - 1, 1)) + 1e-6)


def _check_groups(rows: int, group_size: int) -> None:
    """The rows split into groups."""
    if group_size < 1 or rows % group_size:
        raise ValueError(
            f"{rows} rewards do not split into groups of {group_size}; "
            "give a positive group_size that divides their number"
        )


def _centered(rewards: Shaped[Array, " B"], group_size: int) -> Float[Array, "P G"]:
    """R − mean_G R, at least float32, one group a line."""
    rewards = widen(rewards)
    if rewards.ndim != 1:
        raise ValueError(f"rewards are {list(rewards.shape)}; they must be [B], one number for each response")
    _check_groups(rewards.shape[0], group_size)
    groups = rewards.reshape(-1, group_size)
    groups = groups - groups[:, :1]
    return groups - jnp.mean(groups, axis=1, keepdims=True)
