"""The experience that an update trains on: masks, advantages, returns, corrections; and DAPO's sampling rounds."""

import dataclasses
import io
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import objectives
from gspo_jax.errors import StopRequested
from gspo_jax.objectives.advantages import gae, group_centered, group_steps, group_zscore, leave_one_out
from gspo_jax.objectives.mismatch import make_correction
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.reporting.progress import Progress
from gspo_jax.rewards.scorer import Scores
from gspo_jax.rewards.shaping import differ, fill_failures
from gspo_jax.run.clock import Clock
from gspo_jax.run.log import RunLog, opening_lines
from gspo_jax.run.rounds import Rounds
from gspo_jax.run.scored import Responses, Round, Scored
from gspo_jax.run.shaping import Filter, Shaping
from gspo_jax.training.experience import Rewards, make_experience
from gspo_jax.types import OldPolicy, Rollout

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
        none,
    )


def learn_from(name: str, rewards: Rewards, old: OldPolicy, correction=None, kl_in_reward: float = 0.0):
    make = make_experience(group_size=G, correction=correction, kl_in_reward=kl_in_reward)
    return jax.device_get(make(objectives.make(name), rollout(), old, rewards))


def test_group_advantages_and_what_is_not_learned_from():
    learn = np.array([True, True, False, True])
    found = learn_from("gspo", Rewards(TOTAL, learn), OldPolicy(OLD))
    np.testing.assert_allclose(found.advantages, group_zscore(TOTAL, group_size=G), rtol=1e-6)
    np.testing.assert_array_equal(found.mask, MASK & learn[:, None])
    assert found.returns is None and found.correction is None


def test_step_rewards_are_added_to_the_advantage_of_the_response():
    of_tokens, steps = np.zeros((B, T), np.float32), np.zeros((B, T), bool)
    steps[0, [1, 3]] = steps[1, 0] = True
    of_tokens[0, 1] = 1.0
    found = learn_from("gspo_token", Rewards(TOTAL, np.ones(B, bool), of_tokens, steps), OldPolicy(OLD))
    outcome = np.asarray(group_zscore(TOTAL, group_size=G))[:, None]
    np.testing.assert_allclose(found.advantages, outcome + group_steps(of_tokens, steps, group_size=G), rtol=1e-6)
    # Rewards 1, 0, 0 in the first group: mean 1/3, standard deviation 0.57735, so z = 1.1547 and twice -0.57735.
    np.testing.assert_allclose(found.advantages[0] - outcome[0], [0.57735, 0.57735, -0.57735, -0.57735, 0], atol=1e-4)
    np.testing.assert_allclose(found.advantages[1] - outcome[1], [-0.57735, 0, 0, 0, 0], atol=1e-4)
    np.testing.assert_array_equal(found.advantages[2:], np.zeros((2, T)) + outcome[2:])


def test_a_critic_s_advantages_returns_and_kl_in_the_reward():
    of_tokens, steps = np.zeros((B, T), np.float32), np.zeros((B, T), bool)
    of_tokens[0, 2], steps[0, 2] = 0.25, True
    learn = np.array([True, True, True, False])
    old = OldPolicy(OLD, REFERENCE, VALUES)
    found = learn_from("ppo", Rewards(TOTAL, learn, of_tokens, steps), old, kl_in_reward=0.1)
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
    found = learn_from("gspo", Rewards(TOTAL, np.ones(B, bool)), OldPolicy(OLD), make_correction("tis", cap=1.2))
    np.testing.assert_allclose(found.correction, np.where(MASK, np.minimum(np.exp(OLD - SAMPLER), 1.2), 0), rtol=1e-5)


# --- rounds ---------------------------------------------------------------------------------------


SHAPING = Shaping(group_size=G, limit=T, penalty=0.0, cache=0, drop_truncated=False)


def a_round(tag: int, total: list[float], *, after: threading.Event | None = None, **changes) -> Round:
    """Return a round of two groups with the given rewards, which are there once `after` is set."""
    names = np.array([f"{tag}.{row}" for row in range(B)], object)
    total = np.array(total, np.float32)
    responses = Responses(
        rollout=rollout(tag),
        texts=names,
        lengths=LENGTHS,
        drawn=LENGTHS,
        truncated=np.zeros(B, bool),
        turns=np.ones(B),
        stale_tokens=np.zeros(B),
        records=names,
    )
    by_name, without = {"right": total}, np.array([True, True, True, False])
    scores = Scores(total, by_name, 0, seconds=2.0, queued_s=[1.0], without_worker=without)
    columns = {"total": total, "by_name": by_name, "learn": np.isfinite(total), "without_worker": without} | changes

    def work():
        assert after is None or after.wait(20.0)
        return scores, columns

    return Round(responses, work, lambda columns: columns)


def collect(*rounds: Round, limit: int) -> Rounds:
    keeps = Filter(objective=objectives.gspo(), shaping=SHAPING, reward="").keeps
    collected = Rounds(groups=2, group_size=G, limit=limit, keeps=keeps)
    for each in rounds:
        assert not collected.full
        collected.add(each)
    return collected


MESH = mesh_lib.make_mesh({"data": 2}, devices=jax.devices()[:2])


def test_one_round_is_taken_as_it_is():
    only = a_round(0, [1, 1, 0, 0])
    rounds = collect(only, limit=1)
    batch = rounds.batch(MESH)
    assert rounds.full and batch is only.responses and rounds.metrics() == {}
    scored = rounds.scored(dataclasses.replace(batch, lengths=LENGTHS + 1))
    assert scored.total.tolist() == [1, 1, 0, 0] and scored.lengths.tolist() == (LENGTHS + 1).tolist()


def test_the_batch_of_one_round_does_not_wait_for_its_rewards():
    finish = threading.Event()
    rounds = collect(a_round(0, [1, 1, 0, 0], after=finish), limit=1)
    batch = rounds.batch(MESH)
    assert rounds.full and rounds.sampled == B and not rounds._rounds[0]._found.done()
    finish.set()
    assert rounds.scored(batch).total.tolist() == [1, 1, 0, 0]
    keeps_up = {"throughput/answers_per_s": 4 / 2.0, "timing/queue_s": 1.0, "reward/without_worker": 0.75}
    assert rounds.reward_metrics() == keeps_up


@pytest.mark.parametrize("error", [RuntimeError("raised on all 4 completions"), StopRequested()])
def test_what_the_thread_of_the_reward_functions_raises_is_raised_where_the_run_waits(error):
    def work():
        raise error

    rounds = collect(Round(a_round(0, [0] * B).responses, work, dict), limit=1)
    batch = rounds.batch(MESH)
    with pytest.raises(type(error), match=f"^{error}$"):
        rounds.scored(batch)


def test_groups_without_contrast_are_replaced():
    rounds = collect(a_round(0, [1, 1, 0, 1]), a_round(10, [0, 1, 0, 0]), limit=5)
    assert rounds.full and rounds.sampled == 8 and rounds.failures == 0
    batch = rounds.batch(MESH)
    assert batch.texts.tolist() == ["0.2", "0.3", "10.0", "10.1"]
    assert np.asarray(batch.rollout.tokens)[:, 0].tolist() == [2, 3, 10, 11]
    scored = rounds.scored(batch)
    assert scored.total.tolist() == scored.by_name["right"].tolist() == [0, 1, 0, 1] and scored.learn.all()
    assert batch.rollout.tokens.sharding == mesh_lib.rows_sharding(MESH)
    want = {"dynamic/rounds": 2, "dynamic/dropped": 0.5, "dynamic/filled": 0.0, "dynamic/reward_mean": 4 / 8}
    assert rounds.metrics() == want


def test_rounds_are_bounded_and_what_fills_the_batch_is_not_learned_from():
    rounds = collect(a_round(0, [1, 1, 0, 0]), a_round(10, [0, 0, 0, 1]), limit=2)
    batch = rounds.batch(MESH)
    assert batch.texts.tolist() == ["10.2", "10.3", "0.0", "0.1"]
    assert rounds.scored(batch).learn.tolist() == [True, True, False, False]
    assert rounds.metrics()["dynamic/filled"] == 0.5


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
        # One of two without a score: the mean in its place is the other's reward.
        ({}, {"total": [1, nan, nan, nan]}, [False, False]),
        ({}, {"total": [nan] * 4}, [False, False]),
        # Two equal step rewards of the first group have no spread; with a third there is one.
        ({"name": "gspo_token"}, {"total": [1] * 4, "step_rewards": ONE_STEP, "steps": ONE_STEP > 0}, [False, False]),
        ({"name": "gspo_token"}, {"total": [1] * 4, "step_rewards": TWO_STEPS, "steps": TWO_STEPS > 0}, [True, False]),
        # A critic's advantages are not known: the rewards decide.
        ({"name": "ppo"}, {"total": [0, 1, 1, 1]}, [True, False]),
        # A reward for the format alone keeps both groups alive, but not if the answer's reward is to judge.
        ({}, {"total": [0, 0.1, 1, 1.1], "by_name": {"right": [0, 0, 1, 0]}}, [True, True]),
        ({"reward": "right"}, {"total": [0, 0.1, 1, 1.1], "by_name": {"right": [0, 0, 1, 0]}}, [False, True]),
        # Scores that differ while the rewards do not, as with weight 0, teach nothing.
        ({"reward": "right"}, {"total": [1] * 4, "by_name": {"right": [0, 1, 1, 0]}}, [False, False]),
        # The second group is of a source that the reward does not score.
        ({"reward": "right"}, {"total": [0, 1, 0, 1], "by_name": {"right": [1, nan, nan, nan]}}, [False, True]),
    ],
)
def test_dynamic_sampling_keeps_groups_whose_advantages_differ(settings, rewards, expected):
    settings = {"name": "gspo", "reward": ""} | settings
    name, reward = settings.pop("name"), settings.pop("reward")
    shaping = dataclasses.replace(SHAPING, **settings)
    columns = {key: np.array(x) for key, x in rewards.items() if key not in ("total", "by_name", "truncated")}
    if "by_name" in rewards:
        columns["by_name"] = {key: np.array(x, np.float32) for key, x in rewards["by_name"].items()}
    made = a_round(0, rewards["total"], **columns)
    responses = dataclasses.replace(made.responses, truncated=np.array(rewards.get("truncated", [0] * B), bool))
    kept = Filter(objective=objectives.make(name), shaping=shaping, reward=reward)
    assert kept.keeps(Scored.of(responses, made.wait())).tolist() == expected


def test_failures_are_counted_and_left_out_of_the_mean():
    rounds = collect(a_round(0, [1, nan, 0, 1]), a_round(10, [0, 1, 0, nan]), limit=3)
    assert rounds.scored(rounds.batch(MESH)).learn.tolist() == [True] * 4 and rounds.failures == 2
    assert rounds.metrics()["dynamic/reward_mean"] == pytest.approx(3 / 6)


def test_a_phase_that_comes_again_adds_up(monkeypatch):
    """Every round has its own data, sampling and reward phases; the clock sums them by name."""
    times = iter([0.0, 1.0, 2.0, 4.0, 7.0, 7.0])
    monkeypatch.setattr("gspo_jax.run.clock.time.perf_counter", lambda: next(times))
    clock = Clock(type("Silent", (), {"enter": lambda self, name: None})())
    for phase in ("data", "sample", "data"):
        clock.phase(phase)
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
            first = {"clip_fraction/sequence": np.float32(gated + more * bool(says))}
            run.guard_rounding(objectives.gspo(), first, stale=stale, recomputed=recomputed)
    assert stream.getvalue().count("warning: ") == bool(says) and says in stream.getvalue()


def test_a_response_that_could_not_be_scored_gets_its_groups_mean():
    rewards = np.array([1.0, np.nan, 0.0, np.nan, np.nan, np.nan], np.float32)
    np.testing.assert_array_equal(fill_failures(rewards, group_size=3), [1.0, 0.5, 0.0, 0.0, 0.0, 0.0])
    with pytest.raises(RuntimeError, match="none of the batch's responses"):
        fill_failures(np.full(4, np.nan, np.float32), group_size=2)


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
            responses = dataclasses.replace(only.responses, lengths=lengths)
            rewards = shaping.rewards(Scored.of(responses, dataclasses.replace(only.wait(), total=total)))
            for advantage in (group_zscore, group_centered, leave_one_out):
                assert not np.any(advantage(rewards, group_size=G)), (G, failed)
