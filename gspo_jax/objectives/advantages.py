"""Advantage estimators, from the rewards of a group or from a critic.

Every row of a group counts, even if masked out. Groups of one or of equal rewards get exactly 0: one value is
subtracted before the mean, since in float32 the mean of eight 0.1s is not 0.1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from gspo_jax.objectives.checks import check_fraction, check_tokens
from gspo_jax.objectives.surrogates import widen


def group_zscore(rewards: Shaped[Array, " B"], *, group_size: int) -> Float[Array, " B"]:
    """Return group-normalised rewards, as in GRPO.

    Â = (R − mean_G R) / (std_G R + 1e-6), std the sample standard deviation (G − 1). https://arxiv.org/abs/2402.03300

    Raises ValueError if B is not a multiple of `group_size`.
    """
    centered = _centered(rewards, group_size)
    variance = jnp.sum(centered**2, axis=1, keepdims=True) / max(group_size - 1, 1)
    return (centered / (jnp.sqrt(variance) + 1e-6)).reshape(-1)


def group_centered(rewards: Shaped[Array, " B"], *, group_size: int) -> Float[Array, " B"]:
    """Return rewards minus their group's mean, as in Dr. GRPO.

    Â = R − mean_G R. https://arxiv.org/abs/2503.20783

    Raises ValueError if B is not a multiple of `group_size`.
    """
    return _centered(rewards, group_size).reshape(-1)


def leave_one_out(rewards: Shaped[Array, " B"], *, group_size: int) -> Float[Array, " B"]:
    """Return rewards minus the mean of the group's other rewards, as in RLOO.

    Â = R − mean of the other G − 1 = G/(G − 1) · (R − mean_G R). https://arxiv.org/abs/2402.14740

    Raises ValueError if B is not a multiple of `group_size`.
    """
    return (_centered(rewards, group_size) * (group_size / max(group_size - 1, 1))).reshape(-1)


class _NextToken(NamedTuple):
    """Advantage and value of each row's next sampled token; 0 after the last."""

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
    """Return generalized advantage estimates over the tokens of a response, as in PPO.

    Â_t = δ_t + γλ·Â_{t+1}, δ_t = R_t + γ·V_{t+1} − V_t, with Â and V 0 after the last token.
    https://arxiv.org/abs/1506.02438

    `values` are estimates just before each token. `mask` is True on the tokens that the policy sampled, and t + 1 is
    the next of these. Values outside the mask have no effect, NaN included; the result is 0 there. `whiten` normalises
    to mean 0 and sample standard deviation 1 (std + 1e-6) over all sampled tokens, so pass a whole mini-batch.

    Raises ValueError for mismatched shapes, UserError for `gamma` or `lam` outside [0, 1].
    """
    check_tokens(rewards=rewards, values=values, mask=mask)
    check_fraction("1 means no discount, 0 looks one token ahead", gamma=gamma, lam=lam)
    values = widen(values)

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
    """Return GRPO's process-supervision advantages: the sum of normalised step rewards from each token onwards.

    Â_t = Σ_{u ≥ t, u a step} z_u, z = (R − mean R) / (std R + 1e-6) over all steps of the group, std the sample
    standard deviation. https://arxiv.org/abs/2402.03300 (4.1.3)

    `steps` is True on each step's last token, where `rewards` holds its reward. Other rewards have no effect. Exactly 0
    for a group with no step, a single step, or equal step rewards. Raises ValueError for mismatched shapes.
    """
    check_tokens(rewards=rewards, steps=steps)
    _check_groups(steps.shape[0], group_size)
    groups = (-1, group_size * steps.shape[1])
    z = jax.vmap(whitened)(widen(rewards).reshape(groups), steps.reshape(groups)).reshape(steps.shape)
    return jax.lax.cumsum(z, axis=1, reverse=True)


def whitened(x: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, "..."]:
    """Return (x − mean) / (std + 1e-6) over the mask, std the sample standard deviation; 0 outside.

    Exactly 0 for one value or equal ones.
    """
    count = jnp.sum(mask)
    x = jnp.where(mask, x - jnp.min(x, initial=jnp.inf, where=mask), 0.0)
    x = jnp.where(mask, x - jnp.sum(x) / count, 0.0)
    return x / (jnp.sqrt(jnp.sum(x**2) / jnp.maximum(count - 1, 1)) + 1e-6)


def _check_groups(rows: int, group_size: int) -> None:
    if group_size < 1 or rows % group_size:
        raise ValueError(
            f"{rows} rewards do not split into groups of {group_size}; "
            "use a positive group_size that divides the number of rewards"
        )


def _centered(rewards: Shaped[Array, " B"], group_size: int) -> Float[Array, "P G"]:
    rewards = widen(rewards)
    if rewards.ndim != 1:
        raise ValueError(f"rewards have shape {list(rewards.shape)}; it must be [B], one reward per response")
    _check_groups(rewards.shape[0], group_size)
    groups = rewards.reshape(-1, group_size)
    groups = groups - groups[:, :1]
    return groups - jnp.mean(groups, axis=1, keepdims=True)
