"""The experience that an update trains on: masks, advantages, returns, corrections; and DAPO's sampling rounds."""

import dataclasses
import io
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import objectives
from gspo_jax.errors import StopRequested
from gspo_jax.objectives.advantages import (
    gae,
    gdpo,
    group_centered,
    group_steps,
    group_turns,
    group_zscore,
    leave_one_out,
    max_rl,
    optimal_token_baseline,
)
from gspo_jax.objectives.mismatch import make_correction
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.progress import Progress
from gspo_jax.rewards.batches import BatchScorer
from gspo_jax.rewards.scorer import Scores
from gspo_jax.rewards.step_scorer import StepScorer, StepScores
from gspo_jax.rollout.rounds import Rounds
from gspo_jax.run.clock import Clock
from gspo_jax.run.log import RunLog, opening_lines
from gspo_jax.training.experience import group_advantages, make_experience
from gspo_jax.training.packing import Packer
from gspo_jax.training.shaping import Filter, Shaping, differ
from gspo_jax.types import Batch, OldPolicy, Rewards, Rollout, RouterRecord
from tests import oracles
from tests.tiny import dealt

B, T, G = 4, 5, 2
LENGTHS = np.array([5, 3, 1, 4])
MASK = np.arange(T)[None] < LENGTHS[:, None]
RNG = np.random.default_rng(0)
OLD = RNG.normal(size=(B, T)).astype(np.float32)
SAMPLER = (OLD + RNG.normal(scale=0.5, size=(B, T))).astype(np.float32)
REFERENCE = (OLD + RNG.normal(scale=0.5, size=(B, T))).astype(np.float32)
VALUES = RNG.normal(size=(B, T)).astype(np.float32)
TOTAL = np.array([1.0, 0.0, 0.5, 0.5], np.float32)


def rollout(tag: int = 0) -> Rollout:
    """Return a rollout whose tokens identify the row and the round; what the mask holds beyond MASK is no action."""
    tokens = np.where(MASK, tag + np.arange(B)[:, None], -1).astype(np.int32)
    none = np.full((B, T, 1, 1), -1, np.int8)
    return Rollout(
        np.zeros((B, 2), np.int32),
        np.full(B, 2),
        tokens,
        np.ones((B, T), bool),
        MASK,
        np.array([True, False, False, True]),
        SAMPLER,
        SAMPLER,
        RouterRecord(none, None),
    )


def learn_from(name: str, rewards: Rewards, old: OldPolicy, correction=None, kl_in_reward: float = 0.0, **changes):
    """Return what is learned from, in the order of the batch, computed in places of two mini-batches."""
    make = make_experience(group_size=G, correction=correction, kl_in_reward=kl_in_reward)
    packing = Packer(group_size=G, minibatches=2, shards=1, row_lengths=(20,))(LENGTHS, np.full(B, 2))
    played = dataclasses.replace(rollout(), action_mask=changes.pop("sampled", MASK))
    objective = dataclasses.replace(objectives.make(name), **changes)
    made = jax.device_get(make(objective, dealt(Batch(rollout=played, old=old), packing), rewards))
    names = ("mask", "advantages", "returns", "correction")
    return Batch(rollout=made.rollout, **{name: packing.in_order(getattr(made, name)) for name in names})


def test_group_advantages_and_what_is_not_learned_from():
    learn = np.array([True, True, False, True])
    found = learn_from("gspo", Rewards(total=TOTAL, learn=learn), OldPolicy(OLD))
    np.testing.assert_allclose(found.advantages, group_zscore(TOTAL, group_size=G), rtol=1e-6)
    np.testing.assert_array_equal(found.mask, MASK & learn[:, None])
    assert found.returns is None and found.correction is None


def test_step_rewards_are_added_to_the_advantage_of_the_response():
    of_tokens, steps = np.zeros((B, T), np.float32), np.zeros((B, T), bool)
    steps[0, [1, 3]] = steps[1, 0] = True
    of_tokens[0, 1] = 1.0
    found = learn_from(
        "gspo_token", Rewards(total=TOTAL, learn=np.ones(B, bool), of_steps=of_tokens, steps=steps), OldPolicy(OLD)
    )
    outcome = np.asarray(group_zscore(TOTAL, group_size=G))[:, None]
    np.testing.assert_allclose(found.advantages, outcome + group_steps(of_tokens, steps, group_size=G), rtol=1e-6)
    # Rewards 1, 0, 0 in the first group: mean 1/3, standard deviation 0.57735, so z = 1.1547 and twice -0.57735.
    np.testing.assert_allclose(found.advantages[0] - outcome[0], [0.57735, 0.57735, -0.57735, -0.57735, 0], atol=1e-4)
    np.testing.assert_allclose(found.advantages[1] - outcome[1], [-0.57735, 0, 0, 0, 0], atol=1e-4)
    np.testing.assert_array_equal(found.advantages[2:], np.zeros((2, T)) + outcome[2:])


def test_turns_have_returns_of_their_own():
    """The first response has two turns; what lies between them, and the order of the places, changes nothing."""
    sampled = MASK.copy()
    sampled[0, 2] = False
    of_tokens = RNG.normal(size=(B, T)).astype(np.float32)
    rewards = Rewards(total=TOTAL, learn=np.ones(B, bool), of_steps=of_tokens, steps=of_tokens != 0)
    found = learn_from("gspo_token", rewards, OldPolicy(OLD), turn_discount=0.5, sampled=sampled)
    want = group_turns(of_tokens, TOTAL, sampled, group_size=G, discount=0.5)
    np.testing.assert_allclose(found.advantages, want, rtol=1e-6)
    np.testing.assert_array_equal(found.advantages[0, 3:], 0, err_msg="the group's only second turn")
    assert np.abs(found.advantages[:2, 0]).min() > 0.1
    plain = learn_from("gspo_token", Rewards(total=TOTAL, learn=np.ones(B, bool)), OldPolicy(OLD), turn_discount=1.0)
    outcome = np.asarray(group_zscore(TOTAL, group_size=G))[:, None]
    np.testing.assert_array_equal(plain.advantages, np.where(MASK, outcome, 0), err_msg="one turn, as without turns")


def test_rewards_are_compared_one_by_one_where_the_advantage_takes_them_so():
    by_name = {"right": TOTAL, "short": np.array([0, 1, 5, nan], np.float32)}
    given = {"advantage": partial(gdpo, weights={"right": 1.0, "short": 0.5}), "by_reward": True}
    found = learn_from("gspo", Rewards(total=TOTAL, learn=np.ones(B, bool), by_name=by_name), OldPolicy(OLD), **given)
    want = gdpo(by_name, weights={"right": 1.0, "short": 0.5}, group_size=G)
    np.testing.assert_allclose(found.advantages, want, rtol=1e-6)


def test_energies_reach_the_token_baseline_in_the_order_of_the_batch_and_steps_are_added():
    """A response that is not learned from still counts in its group's baseline."""
    given, energy = {"advantage": optimal_token_baseline, "by_energy": True}, RNG.random((B, T)).astype(np.float32)
    rewards, old = Rewards(total=TOTAL, learn=np.array([True, False, True, True])), OldPolicy(OLD, energy=energy)
    found = learn_from("grpo", rewards, old, **given)
    want = oracles.optimal_token_baseline(TOTAL.astype(float), energy.astype(float), MASK, G)
    np.testing.assert_allclose(found.advantages, want, rtol=1e-5, atol=1e-6)
    assert np.ptp(want[0, :3]) > 0.01
    of_tokens, steps = np.zeros((B, T), np.float32), np.zeros((B, T), bool)
    of_tokens[0, 1], steps[0, [1, 3]] = 1.0, True
    rewards = dataclasses.replace(rewards, of_steps=of_tokens, steps=steps)
    found = learn_from("grpo", rewards, old, **given)
    want += group_steps(of_tokens, steps, group_size=G)
    np.testing.assert_allclose(found.advantages, want, rtol=1e-5, atol=1e-6)


def test_a_critic_s_advantages_returns_and_kl_in_the_reward():
    of_tokens, steps = np.zeros((B, T), np.float32), np.zeros((B, T), bool)
    of_tokens[0, 2], steps[0, 2] = 0.25, True
    learn = np.array([True, True, True, False])
    old = OldPolicy(OLD, REFERENCE, VALUES)
    found = learn_from("ppo", Rewards(total=TOTAL, learn=learn, of_steps=of_tokens, steps=steps), old, kl_in_reward=0.1)
    mask = MASK & learn[:, None]
    earned = np.where(mask, of_tokens - 0.1 * (OLD - REFERENCE), 0)
    for row in range(3):
        earned[row, LENGTHS[row] - 1] += TOTAL[row]
    plain = np.asarray(gae(jnp.asarray(earned), jnp.asarray(VALUES), jnp.asarray(mask)))
    np.testing.assert_allclose(found.returns, np.where(mask, plain + VALUES, 0), atol=1e-5)
    np.testing.assert_allclose(found.returns[0, 0], earned[0].sum(), atol=1e-5, err_msg="all still to come")
    inside = plain[mask]
    want = np.where(mask, (plain - inside.mean()) / (inside.std(ddof=1) + 1e-6), 0)
    np.testing.assert_allclose(found.advantages, want, atol=1e-5, err_msg="whitened over what is learned from")


def test_a_correction_weighs_the_trainer_against_the_sampler():
    found = learn_from(
        "gspo", Rewards(total=TOTAL, learn=np.ones(B, bool)), OldPolicy(OLD), make_correction("tis", cap=1.2)
    )
    np.testing.assert_allclose(found.correction, np.where(MASK, np.minimum(np.exp(OLD - SAMPLER), 1.2), 0), rtol=1e-5)


# --- rounds ---------------------------------------------------------------------------------------


UNEQUAL = np.zeros((B, T), np.float32)
UNEQUAL[0, 1] = 1
SHAPING = Shaping(group_size=G, limit=T, penalty=0.0, cache=0, drop_truncated=False)


def a_round(tag: int, total: list[float], **changes) -> Batch:
    """Return a rewarded round of two groups."""
    names = np.array([f"{tag}.{row}" for row in range(B)], object)
    scores = np.array(total, np.float32)
    fields = {"total": scores, "by_name": {"right": scores}, "learn": np.isfinite(scores)} | changes
    return Batch(
        rollout=jax.device_put(rollout(tag), mesh_lib.rows_sharding(MESH)),
        texts=names,
        records=names,
        prompt_lengths=np.full(B, 2),
        lengths=LENGTHS,
        drawn=LENGTHS,
        truncated=np.zeros(B, bool),
        turns=np.ones(B),
        stale_tokens=np.zeros(B),
        rewards=Rewards(**fields),
    )


class Given:
    """A player of given batches, and what gives them their rewards."""

    def __init__(self, *rounds: Batch):
        self.rounds, self.first, self.phases = list(rounds), [], []

    def play(self, prompts, key, *, first: int = 0) -> Batch:
        self.first.append(first)
        return dataclasses.replace(self.rounds[len(self.first) - 1], rewards=None)

    def score(self, batch: Batch) -> Rewards:
        return self.rounds[len(self.first) - 1].rewards


def collect(*rounds: Batch, limit: int) -> tuple[Batch, Rounds]:
    """Return the batch of some rounds, all of which it takes."""
    keeps, given = Filter(objective=objectives.gspo(), shaping=SHAPING, reward="").keeps, Given(*rounds)
    settings = {"groups": 2, "group_size": G, "limit": limit, "mesh": MESH, "enter": given.phases.append}
    collected = Rounds(given, given.score, keeps, **settings)
    batch = collected.play(iter(()), jax.random.key(0))
    assert given.first == [number * B for number in range(len(rounds))]
    assert given.phases == ["sample", "reward"] * len(rounds)
    assert batch.rollout.tokens.sharding.is_equivalent_to(mesh_lib.rows_sharding(MESH), 2)
    return batch, collected


MESH = mesh_lib.make_mesh({"data": 2}, devices=jax.devices()[:2])


class Slow:
    """Reward functions that return what they are given, or raise it, once `finish` is set."""

    def __init__(self, result):
        self.result, self.finish = result, threading.Event()

    def score_here(self, prompts, completions, records, lost=None) -> Scores:
        assert self.finish.wait(20.0)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    def confirm(self, failed, by_name, lost=None) -> None:
        pass

    def take_metrics(self):
        return {}


def test_rewards_are_scored_beside_the_caller_who_waits_for_them_once():
    without = np.array([True, True, True, False])
    times = {"seconds": 2.0, "queued_s": [1.0], "since": 1.0, "until": 6.0}
    slow = Slow(Scores(TOTAL, {"right": TOTAL}, 0, without_worker=without, **times))
    scorer, batch = BatchScorer(slow, str, MESH), dataclasses.replace(a_round(0, [0] * B), rewards=None)
    wait = scorer.begin(batch)
    assert "rewards" in [thread.name for thread in threading.enumerate()]
    slow.finish.set()
    rewards = wait()
    assert rewards.total.tolist() == TOTAL.tolist() and rewards.learn.all()
    found = scorer.metrics()
    assert 0.9 < found.pop("timing/scoring_hidden") <= 1 and found.pop("timing/scoring_s") == 5.0
    assert found == {"throughput/answers_per_s": 4 / 2.0, "timing/queue_s": 1.0}
    assert scorer.begin(dataclasses.replace(batch, rewards=rewards))() is rewards, "it is not scored again"


@pytest.mark.parametrize("error", [RuntimeError("raised on all 4 completions"), StopRequested()])
def test_what_the_thread_of_the_reward_functions_raises_is_raised_where_the_run_waits(error):
    slow = Slow(error)
    slow.finish.set()
    wait = BatchScorer(slow, str, MESH).begin(dataclasses.replace(a_round(0, [0] * B), rewards=None))
    with pytest.raises(type(error), match=f"^{error}$"):
        wait()


class OfSteps:
    """Step rewards that find two steps in every text, and fail on the last."""

    def score(self, prompts, completions, records) -> StepScores:
        assert completions == ["x" * T] * B, "the environment's tokens are part of the text"
        by_name = {"halves": np.full(B, 1.75, np.float32)}
        return StepScores([[(2, 1.5), (5, 2.0)]] * B, by_name, failed=np.arange(B) == B - 1)


def test_steps_are_rewarded_where_the_policy_ends_them():
    """Not at tokens of the environment; and nothing is learned from a response whose steps have no score."""
    slow = Slow(Scores(TOTAL, {"right": TOTAL}, 0, seconds=1.0, queued_s=[], without_worker=None))
    slow.finish.set()
    scorer = BatchScorer(slow, lambda ids: "x" * len(ids), MESH, steps=OfSteps())
    rewards = scorer.score(dataclasses.replace(a_round(0, [0] * B), rewards=None))
    second, last = ([0, value, 0, 0, 0] for value in (1.5, 0.0))
    np.testing.assert_array_equal(rewards.of_steps, [[0, 1.5, 0, 0, 2.0], second, last, second])
    np.testing.assert_array_equal(rewards.steps, rewards.of_steps != 0)
    assert rewards.learn.tolist() == [True, True, True, False] and np.isnan(rewards.total[-1])
    assert rewards.by_name.keys() == {"right", "halves"}


def test_every_turn_s_reward_is_that_of_its_own_tokens():
    """From batch to advantage: turns of an end of sequence alone, without text, and turns with no reply between them.

    Token 9 is the end of a turn, which has no text. The first response is 9, then 2 9, then a reply of two tokens and 9
    again; the second 9 9 after each other; the third is cut off in its second turn, without a reward for it.
    """
    ends = [[1, 3, 6], [1, 2], [2, 5], [4]]
    tokens, drawn = np.zeros((B, 6), np.int32), np.zeros((B, 6), bool)
    for i, row in enumerate([[9, 2, 9, 5, 5, 9], [9, 9], [2, 9, 5, 2, 2], [2, 2, 2, 9]]):
        tokens[i, : len(row)], drawn[i, : len(row)] = row, np.array(row) != 5
    mask = tokens > 0
    given = np.float32([[1, 2, 4], [8, 0.5, nan], [3, nan, nan], [0.25, nan, nan]])
    settings = {"tokens": tokens, "mask": mask, "action_mask": drawn}
    settings |= {name: np.zeros((B, 6), np.float32) for name in ("logprobs", "behaviour_logprobs")}
    played = jax.device_put(dataclasses.replace(rollout(), **settings), mesh_lib.rows_sharding(MESH))
    batch = a_round(0, [0] * B)
    filled = np.array([each + [0] * (3 - len(each)) for each in ends])
    batch = dataclasses.replace(
        batch, rollout=played, rewards=None, turn_ends=filled, turn_rewards=given, records=np.array([{}] * B)
    )
    slow = Slow(Scores(TOTAL, {"right": TOTAL}, 0, seconds=1.0, queued_s=[], without_worker=None))
    slow.finish.set()
    decode, steps = (lambda ids: "".join(str(i) for i in ids if i != 9)), StepScorer({"environment": 0.5})
    scored = BatchScorer(slow, decode, MESH, steps=steps).score(batch)
    want = np.zeros((B, 6))
    for i, turns in enumerate(ends):
        for end, reward in zip(turns, given[i], strict=False):
            want[i, end - 1] = 0 if np.isnan(reward) else 0.5 * reward
    np.testing.assert_array_equal(scored.of_steps, want)
    np.testing.assert_array_equal(scored.steps, want != 0)
    np.testing.assert_allclose(scored.by_name["environment"], [7 / 3, 4.25, 3, 0.25], rtol=1e-6)

    objective = dataclasses.replace(objectives.make("gspo_token"), turn_discount=0.9)
    batch = dataclasses.replace(batch, rewards=scored)
    shaped = dataclasses.replace(SHAPING, limit=6).rewards(batch)
    found = group_advantages(objective, shaped, drawn, group_size=G)
    oracle = oracles.group_turns("group_zscore", want, TOTAL.astype(float), drawn, G, 0.9, ends)
    np.testing.assert_allclose(found, oracle, rtol=1e-5, atol=1e-6)
    assert len(set(np.asarray(found)[0, [0, 1, 5]].tolist())) == 3, "three turns"


def test_groups_without_contrast_are_replaced():
    batch, rounds = collect(a_round(0, [1, 1, 0, 1]), a_round(10, [0, 1, 0, 0]), limit=5)
    assert batch.texts.tolist() == ["0.2", "0.3", "10.0", "10.1"]
    assert np.asarray(batch.rollout.tokens)[:, 0].tolist() == [2, 3, 10, 11]
    rewards = batch.rewards
    assert rewards.total.tolist() == rewards.by_name["right"].tolist() == [0, 1, 0, 1] and rewards.learn.all()
    want = {"dynamic/rounds": 2, "dynamic/dropped": 0.5, "dynamic/filled": 0.0, "dynamic/reward_mean": 4 / 8}
    assert rounds.metrics() == want and len(rounds.rewards) == 2


def test_rounds_are_bounded_and_what_fills_the_batch_is_not_learned_from():
    batch, rounds = collect(a_round(0, [1, 1, 0, 0]), a_round(10, [0, 0, 0, 1]), limit=2)
    assert batch.texts.tolist() == ["10.2", "10.3", "0.0", "0.1"]
    assert np.asarray(batch.rollout.tokens)[:, 0].tolist() == [12, 13, 0, 1]
    assert batch.rewards.learn.tolist() == [True, True, False, False]
    assert rounds.metrics()["dynamic/filled"] == 0.5


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_is_what_all_rounds_in_a_row_would_give(seed):
    """The kept groups of all rounds in turn, and behind them the dropped ones; whatever the number of rounds."""
    rng = np.random.default_rng(seed)
    rounds = [a_round(10 * number, rng.integers(2, size=B).tolist()) for number in range(5)]
    kept = [np.diff(each.rewards.total.reshape(-1, G), axis=1).any(axis=1) for each in rounds]
    taken = next((n for n in range(1, 6) if np.concatenate(kept[:n]).sum() >= 2), 5)
    batch, _ = collect(*rounds[:taken], limit=5)
    every, kept = np.concatenate([each.texts for each in rounds[:taken]]).reshape(-1, G), np.concatenate(kept[:taken])
    chosen = np.concatenate([np.flatnonzero(kept), np.flatnonzero(~kept)])[:2]
    assert batch.texts.tolist() == every[chosen].reshape(-1).tolist()
    number = [int(text.split(".")[0]) + int(text.split(".")[1]) for text in batch.texts]
    assert np.asarray(batch.rollout.tokens)[:, 0].tolist() == number
    assert batch.rewards.learn.tolist() == np.repeat(kept[chosen], G).tolist()


nan = np.nan


@pytest.mark.parametrize(
    ("values", "group_size", "expected"),
    [([1, nan, nan, nan], 2, [False, False]), ([0.5, 0.25, -1, -1], 2, [True, False]), ([1, nan, 0, 1], 4, [True])],
)
def test_values_differ_between_responses_that_have_one(values, group_size, expected):
    assert differ(np.array(values, np.float32), group_size=group_size).tolist() == expected


ONE_STEP = np.zeros((B, T), np.float32)
ONE_STEP[0, 2] = ONE_STEP[1, 1] = 1.0  # in a response of 5 tokens and one of 3
TWO_STEPS = ONE_STEP + np.eye(1, T, 4, dtype=np.float32) * 0.5 * np.eye(B, 1, dtype=np.float32)


@pytest.mark.parametrize(
    ("settings", "rewards", "expected"),
    [
        # Rewards of all four, by group: their advantages differ or do not.
        ({}, {"total": [0, 1, 1, 1]}, [True, False]),
        # Lengths 5, 3, 1, 4 with a penalty from 4 tokens on: equal rewards differ by it, and different ones may not.
        ({"penalty": 1.0, "cache": 2}, {"total": [1, 1, 0, 0]}, [True, True]),
        ({"penalty": 1.0, "cache": 2}, {"total": [1, 0, 1, 1.5]}, [False, False]),
        # Responses cut off at the limit carry no gradient, whatever their advantages.
        ({"drop_truncated": True}, {"total": [0, 1, 0, 1], "truncated": [0, 0, 1, 1]}, [True, False]),
        ({"drop_truncated": True}, {"total": [0, 1, 0, 1], "truncated": [0, 1, 0, 0]}, [True, True]),
        # One of two without a score: the other has no one to be compared with.
        ({}, {"total": [1, nan, nan, nan]}, [False, False]),
        ({}, {"total": [nan] * 4}, [False, False]),
        # Two equal step rewards of the first group have no spread; with a third there is one.
        ({"name": "gspo_token"}, {"total": [1] * 4, "of_steps": ONE_STEP, "steps": ONE_STEP > 0}, [False, False]),
        ({"name": "gspo_token"}, {"total": [1] * 4, "of_steps": TWO_STEPS, "steps": TWO_STEPS > 0}, [True, False]),
        # A critic's advantages are not known: the rewards decide.
        ({"name": "ppo"}, {"total": [0, 1, 1, 1]}, [True, False]),
        ({"name": "grpo", "by_energy": True}, {"total": [0, 1, 1, 1]}, [True, False]),
        # A reward for the format alone keeps both groups alive, but not if the answer's reward is to judge.
        ({}, {"total": [0, 0.1, 1, 1.1], "by_name": {"right": [0, 0, 1, 0]}}, [True, True]),
        ({"reward": "right"}, {"total": [0, 0.1, 1, 1.1], "by_name": {"right": [0, 0, 1, 0]}}, [False, True]),
        # Scores that differ while the rewards do not, as with weight 0, teach nothing.
        ({"reward": "right"}, {"total": [1] * 4, "by_name": {"right": [0, 1, 1, 0]}}, [False, False]),
        # Turns: equal outcomes, but rewards of tokens differ in the first group.
        ({"name": "gspo_token", "turn_discount": 1.0}, {"total": [1, 1, 0, 0], "of_steps": UNEQUAL}, [True, False]),
        # The second group is of a source that the reward does not score.
        ({"reward": "right"}, {"total": [0, 1, 0, 1], "by_name": {"right": [1, nan, nan, nan]}}, [False, True]),
    ],
)
def test_dynamic_sampling_keeps_groups_whose_advantages_differ(settings, rewards, expected):
    settings = {"name": "gspo", "reward": ""} | settings
    name, reward = settings.pop("name"), settings.pop("reward")
    changes = {key: settings.pop(key) for key in ("turn_discount", "by_energy") if key in settings}
    objective = dataclasses.replace(objectives.make(name), **changes)
    shaping = dataclasses.replace(SHAPING, **settings)
    columns = {key: np.array(rewards[key]) for key in ("of_steps", "steps") if key in rewards}
    if "by_name" in rewards:
        columns["by_name"] = {key: np.array(x, np.float32) for key, x in rewards["by_name"].items()}
    truncated = np.array(rewards.get("truncated", [0] * B), bool)
    batch = dataclasses.replace(a_round(0, rewards["total"], **columns), truncated=truncated)
    kept = Filter(objective=objective, shaping=shaping, reward=reward)
    assert kept.keeps(batch).tolist() == expected


def test_failures_are_counted_and_left_out_of_the_mean():
    batch, rounds = collect(a_round(0, [1, nan, 0, 1]), a_round(10, [0, 1, 0, nan]), limit=3)
    assert batch.rewards.learn.tolist() == [True] * 4
    assert sum(int(np.isnan(each.total).sum()) for each in rounds.rewards) == 2
    assert rounds.metrics()["dynamic/reward_mean"] == pytest.approx(3 / 6)


def test_a_phase_that_comes_again_adds_up(monkeypatch):
    """Every round has its own data, sampling and reward phases; the clock sums them by name."""
    times = iter([0.0, 1.0, 2.0, 4.0, 7.0, 7.0])
    monkeypatch.setattr("gspo_jax.run.clock.time.perf_counter", lambda: next(times))
    clock = Clock(type("Silent", (), {"enter": lambda self, name: None, "poll": lambda self: None})())
    for phase in ("data", "sample", "data"):
        clock.enter(phase)
    clock.stop()
    assert clock.seconds == {"data": 4.0, "sample": 2.0, "iteration": 7.0}


def test_ratios_of_one_after_an_update_are_warned_of_once():
    stream = io.StringIO()
    moved = {"actor/grad_norm": 1.0, "actor/lr": 1e-3, "update/tokens": 8.0, "ratio/token_log_max": 1e-7}
    stuck = moved | {"ratio/token_log_max": 0.0}
    with Progress(1, label="run", stream=stream) as progress:
        run = RunLog(progress)
        run.guard_ratios([stuck, moved, moved])  # the first update of an iteration is on-policy
        run.guard_ratios([moved | {"actor/lr": 0.0}, stuck])  # a learning rate of 0 moves nothing
        run.guard_ratios([moved, stuck | {"update/tokens": 0.0}])  # an update without tokens trains nothing
        assert "warning" not in stream.getvalue()
        run.guard_ratios([stuck, stuck, stuck])
        run.guard_ratios([moved, stuck])
    assert stream.getvalue().count("warning: the importance ratio is exactly 1 for every token") == 1


@pytest.mark.parametrize(
    ("done", "installed", "extensible", "says"),
    [
        (0, True, True, ["curves: tensorboard --logdir=runs/a/tb"]),
        (0, False, True, []),
        (3, False, True, ["resuming from iteration 3 in runs/a"]),
        (9, False, True, ["already finished: 9 iterations are done in runs/a; --config.iterations=18 goes on"]),
        (9, False, False, ["already finished: 9 iterations are done in runs/a"]),
    ],
)
def test_what_a_run_says_at_its_start(done, installed, extensible, says, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    assert opening_lines("runs/a", done=done, total=9, resumed=done > 0, extensible=extensible) == says


def test_sets_that_are_larger_than_what_is_recorded_are_warned_of_once():
    stream = io.StringIO()
    with Progress(1, label="run", stream=stream) as progress:
        run = RunLog(progress)
        for whole in (1.0, 0.9, 0.55, 0.5):
            run.guard_kept(whole)
    assert stream.getvalue().count("warning: ") == 1 and "for 45% of the tokens" in stream.getvalue()


@pytest.mark.parametrize(
    ("gated", "stale", "recomputed", "says"),
    [
        (0.02, 0, False, ""),
        (0.25, 0, False, "old_logprobs=recompute"),
        (0.25, 9, False, ""),  # partial rollouts: older policies sampled some of it
        (0.25, 9, True, "a fault to report"),
    ],
)
def test_what_rounding_gates_is_warned_of_once(gated, stale, recomputed, says):
    stream = io.StringIO()
    with Progress(1, label="run", stream=stream) as progress:
        run = RunLog(progress)
        for more in (0.0, 0.01):
            first = {"clip_fraction/learning": np.float32(gated + more * bool(says))}
            run.guard_rounding(objectives.gspo(), first, stale=stale, recomputed=recomputed)
    assert stream.getvalue().count("warning: ") == bool(says) and says in stream.getvalue()


def test_an_unscored_response_leaves_the_baseline_and_a_batch_without_any_score_is_an_error():
    batch = a_round(0, [1, nan, 0.5, 0])
    total = SHAPING.rewards(batch).total
    np.testing.assert_array_equal(total, [1, nan, 0.5, 0])
    np.testing.assert_allclose(group_centered(total, group_size=4), [0.5, 0, 0, -0.5], atol=1e-7)
    with pytest.raises(RuntimeError, match="none of the batch's responses could be scored; check the reward"):
        SHAPING.rewards(a_round(0, [nan] * B))


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1.1, -1 / 3, 1e-30, 12345.678])
def test_equal_rewards_stay_equal_when_one_response_of_the_group_fails(reward, penalty):
    """Whatever fails, and however long it is: the others have the same reward and length, so no advantage."""
    for G in (2, 4, 8, 7):
        shaping = Shaping(group_size=G, limit=T, penalty=penalty, cache=2, drop_truncated=False)
        only = a_round(0, [0] * B)
        for failed in (0, G - 1):
            total, lengths = np.full(G, reward, np.float32), np.full(G, 4)
            total[failed], lengths[failed] = nan, T
            earned = Rewards(total=total, learn=np.isfinite(total))
            batch = dataclasses.replace(only, lengths=lengths, truncated=lengths == 0, rewards=earned)
            rewards = shaping.rewards(batch).total
            for advantage in (group_zscore, group_centered, leave_one_out, max_rl):
                assert not np.any(advantage(rewards, group_size=G)), (G, failed)
