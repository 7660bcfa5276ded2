"""Advantage estimators, from the rewards of a group or from a critic.

Every scored row of a group counts, even if masked out. A NaN reward is no score: the row leaves the group's statistics
and gets 0. Groups of one or of equal rewards get exactly 0: one value is subtracted before the mean, since in float32
the mean of eight 0.1s is not 0.1.

`__all__` are the estimators that a config may choose.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from gspo_jax.errors import choices
from gspo_jax.objectives.checks import check_fraction, check_tokens
from gspo_jax.objectives.surrogates import widen

__all__ = ["gdpo", "group_centered", "group_zscore", "leave_one_out", "max_rl", "optimal_token_baseline"]


def group_zscore(rewards: Shaped[Array, " B"], *, group_size: int) -> Float[Array, " B"]:
    """Return group-normalised rewards, as in GRPO.

    Â = (R − mean_G R) / (std_G R + 1e-6), std the sample standard deviation (G − 1). https://arxiv.org/abs/2402.03300

    Raises ValueError if B is not a multiple of `group_size`.
    """
    x, scored = _centered(rewards, group_size)
    variance = jnp.sum(x**2, axis=1, keepdims=True) / jnp.maximum(_count(scored) - 1, 1)
    return (x / (jnp.sqrt(variance) + 1e-6)).reshape(-1)


def group_centered(rewards: Shaped[Array, " B"], *, group_size: int) -> Float[Array, " B"]:
    """Return rewards minus their group's mean, as in Dr. GRPO.

    Â = R − mean_G R. https://arxiv.org/abs/2503.20783

    Raises ValueError if B is not a multiple of `group_size`.
    """
    return _centered(rewards, group_size)[0].reshape(-1)


def leave_one_out(rewards: Shaped[Array, " B"], *, group_size: int) -> Float[Array, " B"]:
    """Return rewards minus the mean of the group's other rewards, as in RLOO.

    Â = R − mean of the other G − 1 = G/(G − 1) · (R − mean_G R). https://arxiv.org/abs/2402.14740

    Raises ValueError if B is not a multiple of `group_size`.
    """
    x, scored = _centered(rewards, group_size)
    return (x * (_count(scored) / jnp.maximum(_count(scored) - 1, 1))).reshape(-1)


def max_rl(rewards: Shaped[Array, " B"], *, group_size: int) -> Float[Array, " B"]:
    """Return centred rewards over the group's mean, as in maximum-likelihood RL.

    Â = (R − mean_G R) / mean_G R; 0 where the mean is not above 0, as in a group without a success.
    https://arxiv.org/abs/2602.02710 (Algorithm 1)

    With R in {0, 1} and p the probability of 1, E[mean_G Â·∇log π] = (1 − (1 − p)^(G−1))/p · ∇p, which tends to ∇log p
    as G grows. The paper assumes such rewards. Others of 0 or above are accepted; negative ones may bring the mean near
    0, where Â has no bound. The authors' code adds a small constant to the mean. Raises ValueError if B is not a
    multiple of `group_size`.
    """
    x, scored = _centered(rewards, group_size)
    groups = jnp.where(scored, widen(rewards).reshape(x.shape), 0.0)
    mean = jnp.sum(groups, axis=1, keepdims=True) / jnp.maximum(_count(scored), 1)
    return jnp.where(mean > 0, x / jnp.where(mean > 0, mean, 1.0), 0.0).reshape(-1)


def gdpo(
    rewards: Mapping[str, Shaped[Array, " B"]], *, weights: Mapping[str, float], group_size: int
) -> Float[Array, " B"]:
    """Return advantages of several rewards, each normalised within its group before they are added.

    Â = S / (std_B S + 1e-6), S = Σ_k w_k·(R_k − mean_G R_k) / (std_G R_k + 1e-6), sample standard deviations, std_B
    over the responses of the batch with any score. https://arxiv.org/abs/2601.05242 (equations 4 to 7)

    `rewards` are by name, one for each of `weights`. A missing score, NaN, adds 0 and leaves its own reward's
    statistics alone. The paper also subtracts the batch's mean of S. That is 0, because every group's is; without the
    subtraction, equal rewards give exactly 0. verl takes the batch's statistics over tokens, so that long responses
    count more, TRL over responses, as here, with 1e-4 for both 1e-6. Raises ValueError if a reward is missing, or B is
    not a multiple of `group_size`.
    """
    if missing := [name for name in weights if name not in rewards]:
        raise ValueError(f"no rewards {missing[0]!r}; {choices(missing[0], list(rewards))}")
    columns = {name: widen(rewards[name]) for name in weights}
    total = sum(weight * group_zscore(columns[name], group_size=group_size) for name, weight in weights.items())
    scored = jnp.any(jnp.stack([jnp.isfinite(column) for column in columns.values()]), axis=0)
    variance = jnp.sum(total**2) / jnp.maximum(jnp.sum(scored) - 1, 1)
    return total / (jnp.sqrt(variance) + 1e-6)


def optimal_token_baseline(
    rewards: Shaped[Array, " B"],
    energy: Shaped[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    group_size: int,
) -> Float[Array, "B T"]:
    """Return rewards minus a baseline per token, the group's mean reward weighted by the energy spent so far.

    Â[i,k] = R_i − b[k], b[k] = Σ_i W[i,k]·R_i / Σ_i W[i,k], W[i,k] = Σ_{j≤k} `energy`[i,j], over the responses i of the
    group that have a k-th sampled token. https://arxiv.org/abs/2602.07078

    With W the squared norm of the response's score so far, this is the baseline of least variance; `score_energy` sums
    to the paper's proxy of it. Nothing is divided by the standard deviation. `mask` is True on sampled tokens; values
    outside have no effect, NaN included, and the result is 0 there. Replies between turns are not counted, as in verl's
    variant for several turns. A token past the end of all other responses of its group gets 0. There verl 0.9.1 sets
    the baseline to 0, so that Â is R_i, unless `handle_zero_tail` is off, and it multiplies energies by the squared
    weights of a mismatch correction. Raises ValueError for mismatched shapes.
    """
    check_tokens(energy=energy, mask=mask)
    x, scored = _centered(rewards, group_size)
    rows, T = mask.shape
    row, place = jax.lax.iota(jnp.int32, rows)[:, None], jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    counts = mask & scored.reshape(-1, 1)
    spent = jnp.where(counts, jnp.cumsum(jnp.where(mask, widen(energy), 0.0), axis=1), 0.0)

    def by_place(each: Array) -> Array:
        """Return a token's value at its number in the response, [P, G, T]."""
        return jax.lax.full((rows, T), 0, each.dtype).at[row, place].add(each).reshape(-1, group_size, T)

    weights = by_place(spent)
    total = jnp.sum(weights, axis=1)
    baseline = jnp.sum(weights * x[..., None], axis=1) / jnp.where(total > 0, total, 1.0)
    compared = jnp.sum(by_place(counts.astype(jnp.int32)), axis=1) > 1
    advantages = jnp.where(compared[:, None], x[..., None] - baseline[:, None], 0.0).reshape(rows, T)
    return jnp.where(counts, jnp.take_along_axis(advantages, place, axis=1), 0.0)


def score_energy(logprobs: Float[Array, "B T"], sharpened: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Return the squared norm of ∇log p(y) in the logits, 1 − 2·p(y) + Σ_v p(v)², up to the temperature's square.

    `logprobs` are log p(y) at the sampling temperature, `sharpened` log-probs of the same tokens at half of it, where
    the probabilities are p(v)² / Σ_u p(u)²: so log Σ_v p(v)² = 2·logprobs − sharpened. https://arxiv.org/abs/2602.07078

    Computed as (1 − p(y))² + Σ_v p(v)² − p(y)², of terms that are never negative and keep their digits near p(y) = 1.
    """
    return jnp.expm1(logprobs) ** 2 - jnp.exp(2 * logprobs - sharpened) * jnp.expm1(sharpened)


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


def group_turns(
    rewards: Shaped[Array, "B T"],
    outcome: Shaped[Array, " B"],
    mask: Bool[Array, "B T"],
    ends: Int[Array, "B turns"] | None = None,
    *,
    group_size: int,
    discount: float = 1.0,
    advantage: Callable[..., Float[Array, " B"]] = group_zscore,
) -> Float[Array, "B T"]:
    """Return one advantage per turn of an episode, from the return that follows it.

    Â_{i,t} = A_{i,k} for the tokens t of turn k, A_{·,k} = `advantage` of the returns R_{·,k} of the group's episodes
    that have a turn k, R_{i,k} = Σ_{j≥k} γ^{j−k}·r_{i,j}, γ = `discount` per turn.

    `mask` is True on the tokens that the policy sampled. `ends` counts a row's tokens up to the end of each turn, all
    tokens before the first and between two ends included, 0 past the last; without it, a turn is a run of sampled
    tokens. r_{i,j} is the sum of `rewards` over turn j, plus `outcome` at the last turn. Values of `rewards` where
    nothing was sampled have no effect. An episode with an `outcome` of NaN leaves all baselines and gets 0.

    Groups with unequal numbers of turns: turn k is compared among the episodes that reached it, and gets 0 where only
    one did. Since returns are compared, and not rewards whose advantages are then summed as in
    https://arxiv.org/abs/2505.11821, the baseline depends on k and not on when the policy ends its episode. With
    one turn, or with γ = 1 and no `rewards` where all have as many turns, Â is that of the outcomes.

    Raises ValueError for mismatched shapes, UserError for `discount` outside [0, 1].
    """
    check_tokens(rewards=rewards, mask=mask)
    check_fraction("1 means no discount, 0 looks at each turn's own reward alone", discount=discount)
    rows, T = mask.shape
    if ends is None:
        begins = mask & ~jax.lax.pad(mask, False, ((0, 0, 0), (1, -1, 0)))
        turn, count, most = jnp.maximum(jnp.cumsum(begins, axis=1) - 1, 0), jnp.sum(begins, axis=1), (T + 1) // 2
    else:
        most, there = ends.shape[1], ends[:, None] > 0
        over = jnp.sum(there & (ends[:, None] <= jax.lax.iota(jnp.int32, T)[None, :, None]), axis=2)
        turn, count = jnp.minimum(over, most - 1), jnp.sum(there[:, 0], axis=1)
    row, number = jax.lax.iota(jnp.int32, rows)[:, None], jax.lax.iota(jnp.int32, most)[None]
    given = jnp.where(mask, widen(rewards), 0.0)
    earned = jax.lax.full((rows, most), 0, given.dtype).at[row, turn].add(given)
    exists, ends = number < count[:, None], number == count[:, None] - 1
    earned += jnp.where(ends, widen(outcome)[:, None], 0.0)

    def step_back(following: Array, column: Array) -> tuple[Array, Array]:
        here = column + discount * following
        return here, here

    _, columns = jax.lax.scan(step_back, jax.lax.full((rows,), 0, earned.dtype), earned.T, reverse=True)
    returns = jnp.where(exists, columns.T, jnp.nan)
    each = jax.vmap(partial(advantage, group_size=group_size), in_axes=1, out_axes=1)(returns)
    return jnp.where(mask, jnp.take_along_axis(each, turn, axis=1), 0.0)


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


def _centered(rewards: Shaped[Array, " B"], group_size: int) -> tuple[Float[Array, "P G"], Bool[Array, "P G"]]:
    """Return rewards minus their group's mean, 0 without a score, and where there is one."""
    rewards = widen(rewards)
    if rewards.ndim != 1:
        raise ValueError(f"rewards have shape {list(rewards.shape)}; it must be [B], one reward per response")
    _check_groups(rewards.shape[0], group_size)
    groups = rewards.reshape(-1, group_size)
    scored = jnp.isfinite(groups)
    first = jnp.take_along_axis(groups, jnp.argmax(scored, axis=1)[:, None], axis=1)
    groups = jnp.where(scored, groups - first, 0.0)
    mean = jnp.sum(groups, axis=1, keepdims=True) / jnp.maximum(_count(scored), 1)
    return jnp.where(scored, groups - mean, 0.0), scored


def _count(scored: Bool[Array, "P G"]) -> Int[Array, "P 1"]:
    return jnp.sum(scored, axis=1, keepdims=True)
