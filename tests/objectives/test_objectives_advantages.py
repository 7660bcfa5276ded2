"""Advantages: numbers worked by hand, and an independent float64 oracle of `gae`."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_jax.errors import UserError
from gspo_jax.objectives import advantages
from tests import oracles

gae = jax.jit(advantages.gae, static_argnames=("gamma", "lam", "whiten"))
group_zscore, group_centered, leave_one_out, group_steps = (
    jax.jit(f, static_argnames="group_size")
    for f in (advantages.group_zscore, advantages.group_centered, advantages.leave_one_out, advantages.group_steps)
)
max_rl = jax.jit(advantages.max_rl, static_argnames="group_size")
OF_SUMS = {
    "group_zscore": group_zscore,
    "group_centered": group_centered,
    "leave_one_out": leave_one_out,
    "max_rl": max_rl,
}
ALL = pytest.mark.parametrize("advantage", OF_SUMS.values(), ids=OF_SUMS)


def test_zscore_by_hand():
    # [1, 0, 0, 1]: mean 1/2, sum of squares 4 · 1/4 = 1, sample variance 1/3, so ±(1/2)·√3 = ±0.8660 (less the 1e-6).
    # [3, 1, 2, 2]: mean 2, sum of squares 2, sample variance 2/3, so ±√(3/2) = ±1.2247 and 0.
    got = group_zscore(jnp.array([1.0, 0, 0, 1, 3, 1, 2, 2]), group_size=4)
    np.testing.assert_allclose(got, [0.866024, -0.866024, -0.866024, 0.866024, 1.224743, -1.224743, 0, 0], atol=2e-6)


def test_zscore_damps_a_spread_of_the_size_of_epsilon():
    # ±1e-6 about the mean: std = √2 · 1e-6, so 1e-6 / (√2 · 1e-6 + 1e-6) = 1 / (1 + √2) = √2 − 1.
    got = group_zscore(jnp.array([0.0, 2e-6]), group_size=2)
    np.testing.assert_allclose(got, [1 - np.sqrt(2), np.sqrt(2) - 1], rtol=1e-5)


def test_centered_by_hand():
    # Groups of three with means 2 and 5: the level of one group does not affect the other.
    got = group_centered(jnp.array([3.0, 1, 2, 4, 4, 7]), group_size=3)
    np.testing.assert_allclose(got, [1, -1, 0, -1, -1, 2], atol=1e-6)


def test_leave_one_out_by_hand():
    # [3, 1, 2]: 3 − (1 + 2)/2 = 1.5, 1 − (3 + 2)/2 = −1.5, 2 − (3 + 1)/2 = 0.
    # [4, 4, 7]: 4 − 5.5 = −1.5 twice, 7 − 4 = 3.
    got = leave_one_out(jnp.array([3.0, 1, 2, 4, 4, 7]), group_size=3)
    np.testing.assert_allclose(got, [1.5, -1.5, 0, -1.5, -1.5, 3], atol=1e-6)


@ALL
@pytest.mark.parametrize("group_size", [1, 3, 7, 8])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, -1e-3, 1e6, 123.456])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(advantage, group_size, reward):
    constant = advantage(jnp.full(2 * group_size, reward, jnp.float32), group_size=group_size)
    np.testing.assert_array_equal(constant, np.zeros(2 * group_size))
    alone = advantage(jnp.array([reward, -reward, 3.0]), group_size=1)
    np.testing.assert_array_equal(alone, np.zeros(3))


@ALL
def test_rewards_of_other_types_are_widened(advantage):
    # In bf16 the deviation of [256, 257] would be that of [256, 256]; only the inputs are bf16.
    rewards = np.array([1, 0, 0, 0, 1, 1, 1, 0])
    want = advantage(jnp.asarray(rewards, jnp.float32), group_size=4)
    for dtype in (jnp.bfloat16, jnp.int32, jnp.bool_):
        got = advantage(jnp.asarray(rewards, dtype), group_size=4)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, want)


@ALL
@pytest.mark.parametrize("group_size", [3, 0, -2, 16])
def test_rewards_that_do_not_split_into_groups(advantage, group_size):
    with pytest.raises(ValueError, match=f"8 rewards do not split into groups of {group_size}; use a positive"):
        advantage(jnp.zeros(8), group_size=group_size)


@ALL
def test_rewards_of_the_wrong_rank(advantage):
    with pytest.raises(ValueError, match=r"rewards have shape \[2, 4\]; it must be \[B\]"):
        advantage(jnp.zeros((2, 4)), group_size=4)


def test_max_rl_by_hand():
    # One of four: mean 1/4, so (1 − 1/4)/(1/4) = 3 and −1. None: 0. Two of four: ±1. Shares 1/2, 0, 1, 1/2: mean 1/2.
    got = max_rl(jnp.array([1.0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0.5, 0, 1, 0.5]), group_size=4)
    np.testing.assert_allclose(got, [3, -1, -1, -1, 0, 0, 0, 0, 1, -1, -1, 1, 0, -1, 1, 0], rtol=1e-6)
    np.testing.assert_array_equal(max_rl(jnp.array([-1.0, 0, -2, 2]), group_size=2), np.zeros(4))  # no mean above 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("G", [2, 3, 6])
def test_max_rl_is_in_expectation_the_truncated_likelihood_s_gradient(p, G):
    """Over all outcomes of a policy with one parameter, p: ∇log π is 1/p of a success, −1/(1 − p) of a failure."""
    outcomes = np.array(list(itertools.product([0.0, 1.0], repeat=G)))
    found = np.asarray(max_rl(outcomes.reshape(-1).astype(np.float32), group_size=G)).reshape(outcomes.shape)
    slopes = np.where(outcomes == 1, 1 / p, -1 / (1 - p))
    chance = np.prod(np.where(outcomes == 1, p, 1 - p), axis=1)
    np.testing.assert_allclose(chance @ (found * slopes).mean(axis=1), (1 - (1 - p) ** (G - 1)) / p, rtol=1e-5)


@pytest.mark.parametrize("name", OF_SUMS)
@settings(deadline=None, max_examples=30, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32 - 1), group_size=st.sampled_from([1, 2, 4, 8]), missing=st.sampled_from([0, 0.3, 1]))
def test_group_advantages_equal_the_oracle_and_a_missing_score_leaves_the_group(name, seed, group_size, missing):
    rng = np.random.default_rng(seed)
    rewards = rng.choice([0.0, 0.1, 0.5, 1.0, 2.5], size=16).astype(np.float32)
    rewards[rng.random(16) < missing] = np.nan
    got = OF_SUMS[name](rewards, group_size=group_size)
    np.testing.assert_allclose(got, oracles.of_groups(name, rewards.astype(float), group_size), rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(np.asarray(got)[np.isnan(rewards)], 0)


# --- gdpo -----------------------------------------------------------------------------------------

gdpo = jax.jit(
    lambda rewards, weights, group_size: advantages.gdpo(rewards, weights=dict(weights), group_size=group_size),
    static_argnums=(1, 2),
)


def test_gdpo_by_hand():
    # Groups of two. `right` differs in both, z = ±1/√2; `short` in the second alone, and against it, with weight 1/2:
    # S = ±1/√2, then ±(1/√2)(1 − 1/2). Their squares sum to 2 · 1/2 + 2 · 1/8 = 5/4, over 3: std = √(5/12) = 0.6455.
    rewards = {"right": jnp.array([1.0, 0, 1, 0]), "short": jnp.array([3.0, 3, -40, 60])}
    got = gdpo(rewards, (("right", 1.0), ("short", 0.5)), 2)
    np.testing.assert_allclose(got, np.array([1, -1, 0.5, -0.5]) / np.sqrt(2) / np.sqrt(5 / 12), rtol=1e-5)
    # GRPO of the sum sees `short` alone in the second group, with the opposite sign.
    assert group_zscore(rewards["right"] + 0.5 * rewards["short"], group_size=2)[2] < 0


@settings(deadline=None, max_examples=40, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32 - 1), group_size=st.sampled_from([1, 2, 4, 8]), missing=st.sampled_from([0, 0.3, 1]))
def test_gdpo_equals_the_oracle_and_ignores_missing_scores(seed, group_size, missing):
    rng = np.random.default_rng(seed)
    scales = {"verdict": 1.0, "length": 100.0, "punishment": -0.5, "logged": 9.0}
    rewards = {name: (scale * rng.integers(0, 3, 16)).astype(np.float32) for name, scale in scales.items()}
    for x in rewards.values():
        x[rng.random(16) < missing] = np.nan
    weights = {"verdict": 1.0, "length": 0.25, "punishment": 2.0}
    got = gdpo(rewards, tuple(weights.items()), group_size)
    want = oracles.gdpo({name: x.astype(float) for name, x in rewards.items()}, weights, group_size)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_gdpo_of_equal_rewards_is_exactly_zero_and_of_one_reward_has_grpo_s_directions():
    rewards = {"a": jnp.array([0.1, 0.1, 0.1, 0.1, 1, 0, 1, 0]), "b": jnp.full(8, 0.7)}
    got = np.asarray(gdpo(rewards, (("a", 1.0), ("b", 1.0)), 4))
    np.testing.assert_array_equal(got[:4], np.zeros(4))
    z = np.asarray(group_zscore(rewards["a"], group_size=4))
    np.testing.assert_allclose(got, z / z.std(ddof=1), rtol=1e-5)


def test_gdpo_of_a_reward_that_is_not_there():
    with pytest.raises(ValueError, match="no rewards 'rihgt'; did you mean 'right'"):
        advantages.gdpo({"right": jnp.zeros(4)}, weights={"rihgt": 1.0}, group_size=2)


# --- optimal_token_baseline -----------------------------------------------------------------------

token_baseline = jax.jit(advantages.optimal_token_baseline, static_argnames="group_size")


def test_the_token_baseline_by_hand():
    # First tokens: (1·1 + 3·0)/(1 + 3) = 1/4. Second: W = 1 + 3 and 3 + 1, so 1/2. The third has nothing to compare.
    rewards, mask = jnp.array([1.0, 0.0]), jnp.array([[True, True, True], [True, True, False]])
    energy = jnp.array([[1.0, 3.0, 1.0], [3.0, 1.0, jnp.nan]])
    got = token_baseline(rewards, energy, mask, group_size=2)
    np.testing.assert_allclose(got, [[0.75, 0.5, 0], [-0.25, -0.5, 0]], rtol=1e-6)
    # A reply between the first response's tokens changes no token's number.
    spread, holes = jnp.array([[1.0, 9.0, 3.0, 1.0], [3.0, 1.0, 9.0, 9.0]]), jnp.array([[1, 0, 1, 1], [1, 1, 0, 0]]) > 0
    got = token_baseline(rewards, spread, holes, group_size=2)
    np.testing.assert_allclose(got, [[0.75, 0, 0.5, 0], [-0.25, -0.5, 0, 0]], rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), group_size=st.sampled_from([1, 2, 4]), missing=st.booleans())
def test_the_token_baseline_equals_the_oracle_whatever_lies_in_padding(seed, group_size, missing):
    rng = np.random.default_rng(seed)
    rewards = rng.integers(-2, 3, 8).astype(np.float32)
    if missing:
        rewards[rng.random(8) < 0.3] = np.nan
    mask = rng.random((8, 6)) < rng.choice([0.3, 0.8, 1.0])
    energy = (rng.random((8, 6)) * rng.choice([0.0, 1.0, 1.0], size=(8, 6))).astype(np.float32)
    want = oracles.optimal_token_baseline(rewards.astype(float), energy.astype(float), mask, group_size)
    got = token_baseline(rewards, np.where(mask, energy, np.nan), mask, group_size=group_size)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_the_token_baseline_of_equal_rewards_is_exactly_zero_and_of_equal_energies_the_group_s_mean():
    rng = np.random.default_rng(0)
    energy, mask = jnp.asarray(rng.random((8, 5)), jnp.float32), jnp.asarray(np.arange(5) < np.arange(1, 9)[:, None])
    np.testing.assert_array_equal(token_baseline(jnp.full(8, 0.1), energy, mask, group_size=8), np.zeros((8, 5)))
    rewards, all_of_it = jnp.asarray(rng.random(8), jnp.float32), jnp.ones((8, 5), bool)
    got = token_baseline(rewards, jnp.full((8, 5), 0.3), all_of_it, group_size=4)
    want = np.asarray(group_centered(rewards, group_size=4))[:, None] * np.ones((8, 5))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_token_baseline_needs_energies_of_the_mask_s_shape():
    with pytest.raises(ValueError, match=r"energy \[2, 3\], mask \[2, 2\]; all must be the same"):
        advantages.optimal_token_baseline(jnp.zeros(2), jnp.zeros((2, 3)), jnp.ones((2, 2), bool), group_size=2)


def test_the_energy_is_the_squared_norm_of_the_score_in_the_logits():
    logits = jnp.asarray(np.random.default_rng(0).normal(scale=3.0, size=(40, 7)), jnp.float32)
    tokens = jnp.arange(40) % 7
    at = jax.vmap(lambda row, token: jax.nn.log_softmax(row)[token])
    score = jax.vmap(jax.grad(lambda row, token: jax.nn.log_softmax(row)[token]))(logits, tokens)
    got = advantages.score_energy(at(logits, tokens)[None], at(2 * logits, tokens)[None])[0]
    np.testing.assert_allclose(got, np.sum(np.square(score, dtype=np.float64), axis=1), rtol=1e-4)
    # One of two tokens, with 10 or −300 more than the other: 2·(1 − p)², where 1 − 2p + Σ p² rounds to 0 or overflows.
    for more, want in ((10.0, 2 / (1 + np.exp(10.0)) ** 2), (-300.0, 2.0)):
        both = [jax.nn.log_sigmoid(jnp.full((1, 1), times * more)) for times in (1, 2)]
        np.testing.assert_allclose(advantages.score_energy(*both), [[want]], rtol=1e-3)


# --- group_turns ----------------------------------------------------------------------------------

group_turns = jax.jit(advantages.group_turns, static_argnames=("group_size", "discount", "advantage"))
# Two turns; two turns with a longer reply; one turn; a reply at the beginning, then one turn.
TURNS = np.array([[1, 1, 0, 1, 1], [1, 0, 0, 0, 1], [1, 1, 1, 0, 0], [0, 1, 1, 0, 0]], bool)


def test_group_turns_by_hand():
    # γ = 1/2, groups of two. Returns of the first turns: 1 + 1/2·(2 + 4) = 4 and 0 + 1/2·(0 + 2) = 1, mean 2.5; of the
    # second turns 2 + 4 = 6 and 2, mean 4. Second group: outcomes 1 and 3, and a reward 1 within the first's turn.
    rewards = np.array([[0, 1, 7, 0, 2], [0, 7, 7, 7, 0], [0, 1, 0, 7, 7], [7, 0, 0, 7, 7]])
    outcome = np.array([4.0, 2, 1, 3])
    given = {"group_size": 2, "discount": 0.5, "advantage": advantages.group_centered}
    got = group_turns(jnp.array(rewards), jnp.array(outcome), jnp.array(TURNS), **given)
    want = [[1.5, 1.5, 0, 2, 2], [-1.5, 0, 0, 0, -2], [-0.5, -0.5, -0.5, 0, 0], [0, 0.5, 0.5, 0, 0]]
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_turn_that_one_episode_alone_reached_gets_zero_and_an_unscored_episode_leaves_the_baselines():
    # A group of four: the second turns of rows 0 and 1 are compared; without row 1, row 0's is alone.
    outcome, none = jnp.array([1.0, 0, 1, 0]), jnp.zeros((4, 5))
    both = group_turns(none, outcome, jnp.array(TURNS), group_size=4)
    np.testing.assert_allclose(both[0, 3:], [1 / np.sqrt(2)] * 2, rtol=1e-5)
    alone = np.asarray(group_turns(none, outcome.at[1].set(jnp.nan), jnp.array(TURNS), group_size=4))
    np.testing.assert_array_equal(alone[0, 3:], 0)
    np.testing.assert_array_equal(alone[1], 0)
    z = group_zscore(jnp.array([1.0, jnp.nan, 1, 0]), group_size=4)
    np.testing.assert_allclose(alone[[0, 2, 3], [0, 0, 1]], np.asarray(z)[[0, 2, 3]], rtol=1e-6)


@pytest.mark.parametrize("name", OF_SUMS)
@pytest.mark.parametrize("several", [False, True])
def test_without_discount_and_with_a_reward_at_the_end_alone_a_turn_has_the_response_s_advantage(name, several):
    mask = np.zeros((8, 6), bool)
    mask[:, :2] = mask[:, 4:] = True
    if not several:  # one turn each, of different lengths
        mask = np.arange(6)[None] < np.array([[1, 6, 3, 2, 4, 5, 6, 1]]).T
    rewards = np.array([1.0, 0, 0, 0.25, 0, 1, np.nan, 1], np.float32)
    got = group_turns(jnp.zeros((8, 6)), rewards, jnp.array(mask), group_size=4, advantage=getattr(advantages, name))
    want = np.asarray(OF_SUMS[name](rewards, group_size=4))
    np.testing.assert_array_equal(got, np.where(mask, want[:, None], 0))


@settings(deadline=None, max_examples=40, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(4, 1), (8, 9)]),
    density=st.sampled_from([0.0, 0.4, 0.8, 1.0]),
    discount=st.sampled_from([0.0, 0.9, 1.0]),
    name=st.sampled_from(list(OF_SUMS)),
    padding=st.sampled_from([0.0, np.nan, np.inf, -1e30]),
)
def test_group_turns_equal_the_oracle_whatever_lies_in_replies(seed, shape, density, discount, name, padding):
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) < density
    rewards = rng.integers(0, 4, shape).astype(np.float32) / 2
    outcome = np.where(rng.random(shape[0]) < 0.1, np.nan, rng.integers(0, 3, shape[0])).astype(np.float32)
    want = oracles.group_turns(name, rewards.astype(float), outcome.astype(float), mask, 4, discount)
    spoilt = np.where(mask, rewards, np.float32(padding))
    given = {"group_size": 4, "discount": discount, "advantage": getattr(advantages, name)}
    got = group_turns(spoilt, outcome, mask, **given)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(np.asarray(got)[~mask], 0)


@settings(deadline=None, max_examples=30, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    discount=st.sampled_from([0.0, 0.9, 1.0]),
    name=st.sampled_from(list(OF_SUMS)),
)
def test_group_turns_of_given_ends_equal_the_oracle(seed, discount, name):
    """Replies before and between turns may be empty, turns a single token, and episodes without a turn."""
    rng = np.random.default_rng(seed)
    rewards, mask, ends = rng.integers(0, 4, (8, 9)).astype(np.float32) / 2, np.zeros((8, 9), bool), []
    for row in mask:
        cuts = np.sort(rng.choice(np.arange(1, 10), size=rng.integers(0, 5), replace=False)).tolist()
        ends.append(cuts)
        for begin, end in itertools.pairwise([0, *cuts]):
            row[rng.integers(begin, end) : end] = True  # the rest is a reply
    outcome = np.where(rng.random(8) < 0.1, np.nan, rng.integers(0, 3, 8)).astype(np.float32)
    want = oracles.group_turns(name, rewards.astype(float), outcome.astype(float), mask, 4, discount, ends)
    filled = np.array([cuts + [0] * (4 - len(cuts)) for cuts in ends])
    given = {"group_size": 4, "discount": discount, "advantage": getattr(advantages, name)}
    np.testing.assert_allclose(group_turns(rewards, outcome, mask, filled, **given), want, rtol=1e-4, atol=1e-4)


def test_group_turns_of_what_does_not_fit():
    with pytest.raises(UserError, match=r"discount=1.5 lies outside \[0, 1\]; 1 means no discount, 0 looks at each"):
        group_turns(jnp.zeros((2, 3)), jnp.zeros(2), jnp.ones((2, 3), bool), group_size=2, discount=1.5)
    with pytest.raises(ValueError, match=r"the shapes are rewards \[2, 3\], mask \[2, 4\]; all must be the same"):
        group_turns(jnp.zeros((2, 3)), jnp.zeros(2), jnp.ones((2, 4), bool), group_size=2)


# --- gae ------------------------------------------------------------------------------------------

# Row 0 is full, row 1 has a hole that is skipped, row 2 has one token, row 3 none.
MASK = np.array([[1, 1, 1], [1, 0, 1], [0, 1, 0], [0, 0, 0]], bool)
REWARDS = np.array([[0.0, 0, 1], [2, 0, 4], [0, 3, 0], [0, 0, 0]])
VALUES = np.array([[0.5, 0.25, 0.75], [1, 0, 2], [0, 1, 0], [0, 0, 0]])


def test_gae_by_hand():
    # γ = λ = 1/2. Row 0: δ = 0 + 1/8 − 1/2 = −3/8, 0 + 3/8 − 1/4 = 1/8, 1 − 3/4 = 1/4; backwards 1/4, 1/8 + 1/4 · 1/4 =
    # 3/16, −3/8 + 1/4 · 3/16 = −21/64. Row 1: 4 − 2 = 2, then 2 + 1 − 1 + 1/4 · 2 = 5/2. Row 2: 3 − 1.
    got = gae(jnp.array(REWARDS), jnp.array(VALUES), jnp.array(MASK), gamma=0.5, lam=0.5)
    np.testing.assert_array_equal(got, [[-21 / 64, 3 / 16, 1 / 4], [5 / 2, 0, 2], [0, 2, 0], [0, 0, 0]])


def test_gae_by_default_is_the_return_less_the_value():
    defaults = {name: p.default for name, p in inspect.signature(gae).parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert defaults == {"gamma": 1.0, "lam": 1.0, "whiten": False}
    got = gae(jnp.array(REWARDS), jnp.array(VALUES), jnp.array(MASK))
    np.testing.assert_array_equal(got, [[0.5, 0.75, 0.25], [6 - 1, 0, 4 - 2], [0, 2, 0], [0, 0, 0]])


def test_gae_without_lambda_looks_one_token_ahead():
    got = gae(jnp.array(REWARDS), jnp.array(VALUES), jnp.array(MASK), lam=0.0)
    np.testing.assert_array_equal(got, [[-0.25, 0.5, 0.25], [3, 0, 2], [0, 2, 0], [0, 0, 0]])


def test_gae_whitened_by_hand():
    # Advantages 1, 2 and 3 over two rows: mean 2, sample deviation 1; padding counts in neither.
    rewards = jnp.array([[1.0, 0], [1, 2]])
    mask = jnp.array([[True, False], [True, True]])
    got = gae(rewards, jnp.zeros((2, 2)), mask, whiten=True)
    np.testing.assert_allclose(got, [[-1, 0], [1, 0]], atol=2e-6)
    # ±1e-6 about the mean: std = √2 · 1e-6, so 1 / (√2 + 1) = √2 − 1.
    small = gae(jnp.array([[0.0], [2e-6]]), jnp.zeros((2, 1)), jnp.ones((2, 1), bool), whiten=True)
    np.testing.assert_allclose(small, [[1 - np.sqrt(2)], [np.sqrt(2) - 1]], rtol=1e-5)


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, 123.456, -123.456])
def test_gae_whitened_of_equal_advantages_of_one_token_and_of_none_is_exactly_zero(reward):
    ends = np.zeros((7, 3), bool)
    ends[:, 1] = True
    one = np.zeros((7, 3), bool)
    one[4, 2] = True
    for mask in (ends, one, np.zeros((7, 3), bool)):
        got = gae(jnp.full((7, 3), reward), jnp.zeros((7, 3)), jnp.array(mask), whiten=True)
        np.testing.assert_array_equal(got, np.zeros((7, 3)))


@settings(deadline=None, max_examples=40, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(3, 1), (4, 6)]),
    density=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    factors=st.sampled_from([(0.99, 0.95), (1.0, 0.0), (0.0, 1.0)]),
    whiten=st.booleans(),
    padding=st.sampled_from([0.0, np.nan, np.inf, 1e30, -1e30]),
)
def test_gae_equals_the_oracle_whatever_lies_in_padding(seed, shape, density, factors, whiten, padding):
    (gamma, lam), rng = factors, np.random.default_rng(seed)
    mask = rng.random(shape) < density
    rewards, values = rng.normal(size=(2, *shape)).astype(np.float32)
    want = oracles.gae(rewards.astype(float), values.astype(float), mask, gamma, lam, whiten)
    rewards, values = (jnp.where(mask, x, padding) for x in (rewards, values))
    got = gae(rewards, values, mask, gamma=gamma, lam=lam, whiten=whiten)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 if whiten else 1e-5)
    np.testing.assert_array_equal(np.asarray(got)[~mask], 0)


@pytest.mark.parametrize("whiten", [False, True])
def test_padding_does_not_reach_the_gradient_of_gae(whiten):
    def total(rewards, values):
        return jnp.sum(gae(rewards, values, jnp.array(MASK), gamma=0.9, lam=0.8, whiten=whiten) ** 3)

    gradient = jax.jit(jax.grad(total, argnums=(0, 1)))
    clean, spoilt = gradient(REWARDS, VALUES), gradient(*(np.where(MASK, x, np.nan) for x in (REWARDS, VALUES)))
    for got, want in zip(spoilt, clean, strict=True):
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.asarray(got)[~MASK], 0)
        assert np.isfinite(got).all() and np.abs(got).sum() > 0.1


def test_gae_is_at_least_float32_and_float64_where_it_can_be():
    # 1 + 0.999 · 0.25 − 0.5; bf16 would round the product to 0.25.
    rewards, values = jnp.array([[1, 0]]), jnp.array([[0.5, 0.25]], jnp.bfloat16)
    got = gae(rewards, values, jnp.ones((1, 2), bool), gamma=0.999, lam=0.0)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, [[0.74975, -0.25]], rtol=1e-6)
    with jax.enable_x64(True):
        for kinds in ((jnp.float64, jnp.float32), (jnp.float32, jnp.float64)):
            rewards, values = (jnp.asarray(x, kind) for x, kind in zip((REWARDS, VALUES), kinds, strict=True))
            assert gae(rewards, values, jnp.array(MASK)).dtype == jnp.float64


@pytest.mark.parametrize(
    ("rewards", "values", "mask", "says"),
    [
        ((2, 3), (2, 4), (2, 3), r"rewards \[2, 3\], values \[2, 4\], mask \[2, 3\]; all must be the same"),
        ((2, 3), (2, 3), (3, 2), r"mask \[3, 2\]; all must be the same \[B, T\]"),
        ((3,), (3,), (3,), r"the shapes are rewards \[3\], values \[3\], mask \[3\]; all must"),
    ],
)
def test_gae_of_shapes_that_do_not_fit(rewards, values, mask, says):
    with pytest.raises(ValueError, match=says):
        gae(jnp.zeros(rewards), jnp.zeros(values), jnp.ones(mask, bool))


def test_gae_of_a_mask_that_is_not_boolean():
    with pytest.raises(ValueError, match="mask is float32, not bool; use mask != 0"):
        gae(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.ones((2, 3)))


@pytest.mark.parametrize("name", ["gamma", "lam"])
@pytest.mark.parametrize("factor", [-0.1, 1.01, float("nan")])
def test_gae_of_a_factor_outside_its_range(name, factor):
    with pytest.raises(UserError, match=rf"{name}={factor} lies outside \[0, 1\]; 1 means no discount"):
        gae(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.ones((2, 3), bool), **{name: factor})


# --- group_steps ----------------------------------------------------------------------------------


def test_group_steps_by_hand():
    # One group of two rows with step rewards 1, 2 and 3: mean 2, sample deviation 1, z = −1, 0, 1. Row 0: tokens up to
    # the first step get −1 + 1, those after it the remaining 1. Row 1 has one step, with z = 0.
    rewards = jnp.array([[9.0, 1, 9, 3], [9, 9, 2, 9]])
    steps = jnp.array([[False, True, False, True], [False, False, True, False]])
    got = group_steps(rewards, steps, group_size=2)
    np.testing.assert_allclose(got, [[0, 0, 1, 1], [0, 0, 0, 0]], atol=2e-6)
    # As a group of its own, row 0 has z = ±√½; row 1, with one step, has 0.
    got = group_steps(rewards, steps, group_size=1)
    np.testing.assert_allclose(got, [[0, 0, np.sqrt(0.5), np.sqrt(0.5)], [0, 0, 0, 0]], atol=2e-6)


@pytest.mark.parametrize("reward", [0.1, 0.7, 123.456])
def test_group_steps_of_no_step_one_step_or_equal_rewards_are_exactly_zero(reward):
    steps = np.zeros((6, 5), bool)
    steps[2, 3] = steps[4:, 1:4] = True
    got = group_steps(jnp.where(steps, reward, 5.0), jnp.array(steps), group_size=2)
    np.testing.assert_array_equal(got, np.zeros((6, 5)))


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(6, 1), (12, 4)]),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    group_size=st.sampled_from([1, 2, 3, 6]),
    padding=st.sampled_from([0.0, np.nan, np.inf, 1e30]),
)
def test_group_steps_equal_the_oracle_whatever_lies_elsewhere(seed, shape, density, group_size, padding):
    rng = np.random.default_rng(seed)
    steps = rng.random(shape) < density
    rewards = rng.choice([0.0, 1.0, 0.25], size=shape).astype(np.float32)
    want = oracles.group_steps(rewards.astype(float), steps, group_size)
    spoilt = np.where(steps, rewards, np.float32(padding))
    got = group_steps(spoilt, steps, group_size=group_size)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_group_steps_of_other_types_are_widened():
    steps = jnp.ones((2, 3), bool)
    rewards = np.array([[1, 0, 0], [0, 1, 1]])
    want = group_steps(jnp.asarray(rewards, jnp.float32), steps, group_size=2)
    for dtype in (jnp.bfloat16, jnp.int32, jnp.bool_):
        got = group_steps(jnp.asarray(rewards, dtype), steps, group_size=2)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, want)


def test_group_steps_of_what_does_not_fit():
    with pytest.raises(ValueError, match=r"rewards \[2, 3\], steps \[2, 4\]; all must be the same \[B, T\]"):
        group_steps(jnp.zeros((2, 3)), jnp.ones((2, 4), bool), group_size=2)
    with pytest.raises(ValueError, match="steps is int32, not bool; use steps != 0"):
        group_steps(jnp.zeros((2, 3)), jnp.ones((2, 3), jnp.int32), group_size=2)
    with pytest.raises(ValueError, match="4 rewards do not split into groups of 3; use a positive"):
        group_steps(jnp.zeros((4, 3)), jnp.ones((4, 3), bool), group_size=3)
