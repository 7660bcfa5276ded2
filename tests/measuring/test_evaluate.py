"""Evaluation of responses that could not all be scored."""

import dataclasses
import math
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.measuring.gamed import gamed
from gspo_jax.measuring.held_out import _mean_over_responses, evaluate, rewards_in, summarize
from gspo_jax.parallel import hosts
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rewards.batches import BatchScorer
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.rewards.step_scorer import StepScorer
from gspo_jax.rollout.episodes import new_batch
from gspo_jax.types import Prompts, Rollout, RouterRecord

NAN = math.nan
P, G, T = 3, 4, 2
LENGTHS = np.arange(P * G)
CUT, ALL = LENGTHS < 3, np.ones((P, G), bool)

JUDGE = """
def judge(prompt, completion, record):
    return {"a": 1.0, "b": 0.0, "c": None}[completion]

def share(prompt, completion, record):
    return {"a": 1.0, "b": 0.25, "c": 0.0}[completion]

def mute(prompt, completion, record):
    return None

def thirds(prompt, completion, record):
    return [(1, {"a": 1.0, "b": 0.0, "c": 0.5}[completion])]
"""


def test_what_could_not_be_scored_is_left_out_and_counted():
    # Prompt 0: 2 of 3 right; prompt 1: none scored, so it is left out; prompt 2: 0 of 1 right.
    scores = np.array([[1, NAN, 0, 1], [NAN] * 4, [NAN, NAN, NAN, 0]], np.float32)
    rewards = np.array([[2, NAN, 0, 2], [NAN] * 4, [NAN, NAN, NAN, 1]], np.float32)
    found = summarize(scores, rewards, LENGTHS, CUT, asked=ALL)
    assert found.accuracy == pytest.approx(1 / 3)  # (2/3 + 0) / 2
    assert found.reward == pytest.approx((4 / 3 + 1) / 2) and found.reward_stderr == pytest.approx(1 / 6)
    unscored = summarize(scores, np.full((P, G), NAN), LENGTHS, CUT, asked=ALL)
    assert unscored.reward is None and "eval/reward" not in unscored.metrics()
    assert found.accuracy_stderr == pytest.approx(1 / 3)  # both are 1/3 off: sqrt(2/9) / sqrt(2)
    assert found.pass_at_k == 0.5
    assert found.metrics()["eval/failed"] == found.failed == pytest.approx(8 / 12)
    assert (found.prompts, found.samples, found.response_length, found.truncated) == (3, 4, 5.5, 0.25)
    assert str(found).endswith(", 25.0% cut, 66.7% could not be scored")


def test_without_failures_it_is_the_plain_mean():
    scores = np.random.default_rng(0).integers(0, 2, (P, G)).astype(np.float32)
    found, means = summarize(scores, scores, LENGTHS, CUT, asked=ALL), (scores > 0.5).mean(axis=1)
    assert found.accuracy == float(means.mean()) and found.failed == 0
    assert found.accuracy_stderr == float(means.std(ddof=1) / np.sqrt(P))
    assert found.pass_at_k == float(scores.any(axis=1).mean())
    assert str(found).endswith(", 25.0% cut")


@pytest.fixture
def judges(tmp_path, monkeypatch):
    (tmp_path / "judges.py").write_text(JUDGE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return "judges"


class Said:
    """A player of whose episodes the responses are given, one character each, G to a prompt."""

    def __init__(self, tokenizer: Tokenizer, responses: str, mesh: Mesh, *, batches: int = 2) -> None:
        self._mesh = mesh
        tokens = np.array([[tokenizer.encode(said)[0], tokenizer.eos_ids[0]] for said in responses], np.int32)
        self._tokens = iter(tokens.reshape(batches, -1, T))

    def answer(self, prompts, key):
        tokens, P = next(self._tokens), len(prompts.texts)
        everywhere, none = np.ones(tokens.shape, bool), np.zeros(tokens.shape, np.float32)
        rollout = Rollout(
            prompts=np.repeat(prompts.tokens, G, axis=0),
            prompt_lengths=np.repeat(prompts.lengths, G),
            tokens=tokens,
            mask=everywhere,
            action_mask=everywhere,
            truncated=np.zeros(P * G, bool),
            behaviour_logprobs=none,
            logprobs=none,
            routes=RouterRecord(np.zeros((P * G, 1 + T, 0, 0), np.int8), None),
        )
        return new_batch(hosts.shard_rows(self._mesh, rollout), prompts)


def held_out(judges, correct, responses, *, keep=None):
    """Evaluate two batches of two prompts, the last prompt of which is padding."""
    tokenizer = Tokenizer.train(["abc"], 300)
    batch = Prompts(
        np.ones((2, 1), np.int32),
        np.ones(2, np.int32),
        ["p", "q"],
        [{"answer": "1"}, {"answer": "2"}],
        np.ones(2, bool),
    )
    batches = [batch, dataclasses.replace(batch, valid=np.array([True, False]))]
    mesh = mesh_lib.make_mesh({"data": 1}, devices=jax.devices()[:1])
    weights = {"judge": 1.0, "mute": 0.0} | ({"share": 0.5} if correct != "judge" else {})
    functions = Scorer(weights, own={name: f"{judges}:{name}" for name in weights})
    steps = StepScorer({"thirds": 1.0}, own={"thirds": f"{judges}:thirds"}) if correct != "judge" else None
    scorer = BatchScorer(functions, tokenizer.decode, mesh, steps=steps)
    return evaluate(
        Said(tokenizer, responses, mesh),
        batches,
        scorer,
        jax.random.key(0),
        correct=lambda record: correct,
        tokenizer=tokenizer,
        keep=keep,
    )


def test_all_responses_are_kept_as_they_come(judges):
    """The four of each prompt, but none of the row that pads the last batch."""
    batches = []
    held_out(judges, "judge", "aabb" + "accc" + "bbcc" + "aaaa", keep=lambda rows: batches.append(list(rows)))
    lines = [row for batch in batches for row in batch]
    assert list(map(len, batches)) == [8, 4]
    assert "".join(row["completion"] for row in lines) == "aabbacccbbcc"
    assert [row["sample"] for row in lines] == [0, 1, 2, 3] * 3
    assert [row["reward"] for row in lines] == [1, 1, 0, 0, 1, None, None, None, 0, 0, None, None]
    assert lines[2] == {
        "answer": "1",
        "prompt": "p",
        "completion": "b",
        "sample": 2,
        "finish": "eos",
        "tokens": 2,
        "reward": 0.0,
        "scores": {"judge": 0.0, "mute": None},
    }


@pytest.mark.faults
def test_an_evaluation_leaves_out_what_the_scorer_could_not_score(judges):
    found = held_out(judges, "judge", "aabb" + "accc" + "bbcc" + "aaaa")
    assert found.accuracy == pytest.approx((0.5 + 1 + 0) / 3) and found.pass_at_k == pytest.approx(2 / 3)
    assert found.failed == pytest.approx(5 / 12) and (found.prompts, found.samples) == (3, G)
    # The same here, as the only weighted function decides; but means of single functions are over responses.
    assert found.reward == found.accuracy and found.scores == {"judge": pytest.approx(3 / 7)}
    assert found.metrics()["eval/reward/judge"] == found.scores["judge"]
    # The first response to each prompt, without the one that pads the last batch.
    kept = [(one["prompt"], one["completion"], one["reward"], one["answer"]) for one in found.examples]
    end = found.examples[0]["special"]
    assert [one["special"] for one in found.examples] == [end] * 3 and len(end) == 1
    assert kept == [("p", f"a{end[0]}", 1.0, "1"), ("q", f"a{end[0]}", 1.0, "2"), ("p", f"b{end[0]}", 0.0, "1")]
    assert found.examples[2]["scores"] == {"judge": 0.0, "mute": None}


@pytest.mark.parametrize("correct", ["", "share"])
def test_without_verdicts_an_evaluation_has_mean_rewards_and_no_accuracy(judges, correct):
    """No reward decides, or one whose scores turn out to be shares; a share of 0.9 is no 90% solved."""
    found = held_out(judges, correct, "aabb" + "accc" + "bbcc" + "aaaa")
    assert found.accuracy is found.accuracy_stderr is found.pass_at_k is None
    # Half the share and the verdict; c has no verdict, so no reward: 1.5 and 0.125, twice each; 1.5; 0.125.
    assert found.reward == pytest.approx((0.8125 + 1.5 + 0.125) / 3) and found.failed == pytest.approx(5 / 12)
    assert found.quality == {"reward": found.reward}
    assert found.scores == {
        "judge": pytest.approx(3 / 7),
        "share": pytest.approx((2.5 + 1 + 0.5) / 12),
        "thirds": pytest.approx((2 + 2.5 + 1) / 12),
    }
    # Means of the three prompts: 0.625, 0.25, 0.125, as many responses each.
    means = np.array([0.625, 0.25, 0.125])
    assert found.scores_stderr["share"] == pytest.approx(means.std(ddof=1) / np.sqrt(3))
    written = found.metrics()
    assert written["eval/reward/thirds_stderr"] == found.scores_stderr["thirds"] > 0
    assert not [name for name in written if "accuracy" in name or "pass" in name]
    assert rewards_in(written) == {name: f"eval/reward/{name}" for name in ("judge", "share", "thirds")}
    assert str(found).startswith(f"reward {found.reward:.3f} ± ") and "@" not in str(found)
    assert bool(found.warning) is bool(correct) and list(found.graded) == [correct] * bool(correct)
    assert not correct or found.warning.startswith("the reward 'share' is to decide what is correct, but has scores")


def test_the_error_of_a_mean_over_responses_takes_a_prompt_s_together():
    # One prompt has a single score: mean (4 · 1 + 0)/5 = 0.8, deviations 4 · (1 − 0.8) and −0.8, so √(2 · 1.28) / 5.
    found = _mean_over_responses(np.array([[1, 1, 1, 1], [NAN, 0, NAN, NAN], [NAN] * 4]))
    assert found == (pytest.approx(0.8), pytest.approx(np.sqrt(2 * 1.28) / 5))
    assert _mean_over_responses(np.array([[1, 0.0]])) == (0.5, 0.0)


def metrics(reward, accuracy, *, error=0.01, **scores):
    means = {
        "eval/reward": reward,
        "eval/reward_stderr": error,
        "eval/accuracy": accuracy,
        "eval/accuracy_stderr": error,
    }
    return means | {f"eval/reward/{name}": score for name, score in scores.items()}


def test_a_reward_that_rises_without_the_accuracy_is_gamed():
    first = metrics(0.2, 0.1, count=0.2)
    note = gamed(first, metrics(0.9, 0.105, count=0.9))
    assert note.startswith(
        "the reward may be gamed: on held-out prompts it rose from 0.2 to 0.9 (count from 0.2 to 0.9), while the "
        "accuracy went from 0.1 to 0.105. Read"
    )
    assert gamed(first, metrics(0.9, 0.05)), "the accuracy fell"
    assert not gamed(first, metrics(0.9, 0.12)), "the accuracy rose, by 1.4 standard errors"
    assert not gamed(first, metrics(0.24, 0.1)), "the reward may not have risen"
    assert (
        not gamed(first, first)
        and not gamed({}, first)
        and not gamed(first, {})
        and not gamed(first, metrics(None, 0.1))
        and not gamed(metrics(0.2, None), metrics(0.9, None))
    )
    assert not gamed(metrics(0.2, 0.985), metrics(0.9, 0.99)), "the accuracy has no room to rise"
    sure = metrics(0.2, 0.1, error=0.0)
    assert not gamed(sure, metrics(0.3, 0.1, error=0.0)), "a single prompt has no error, and proves nothing"
    assert not gamed(metrics(0.2, 0.0) | {"eval/accuracy_stderr": 0.0}, metrics(0.9, 0.5))
    assert gamed(metrics(0.2, 0.0) | {"eval/accuracy_stderr": 0.0}, metrics(0.9, 0.0) | {"eval/accuracy_stderr": 0.0})


def test_examples_are_spread_over_batches_of_any_size(judges):
    """40 prompts in batches of 12, the last of which has four and eight that pad it."""
    tokenizer, mesh = Tokenizer.train(["abc"], 300), mesh_lib.make_mesh({"data": 1}, devices=jax.devices()[:1])
    batches = []
    for start in range(0, 48, 12):
        texts = [f"p{start + i}" for i in range(12)]
        records = [{"answer": text} for text in texts]
        valid = np.arange(start, start + 12) < 40
        batches.append(Prompts(np.ones((12, 1), np.int32), np.ones(12, np.int32), texts, records, valid))
    scorer = BatchScorer(Scorer({"judge": 1.0}, own={"judge": f"{judges}:judge"}), tokenizer.decode, mesh)
    found = evaluate(
        Said(tokenizer, "a" * 48 * G, mesh, batches=4),
        batches,
        scorer,
        jax.random.key(0),
        correct=lambda record: "judge",
        tokenizer=tokenizer,
    )
    assert [one["prompt"] for one in found.examples] == [
        f"p{start + i}" for start in (0, 12, 24) for i in (0, 3, 6, 9)
    ] + ["p36", "p37", "p38", "p39"]


def test_an_evaluation_without_any_score_is_an_error(judges):
    with pytest.raises(
        RuntimeError, match=r"^none of the 12 held-out responses could be scored; check the reward function"
    ):
        held_out(judges, "mute", "aabb" * 4)
