"""A policy that answers: the sampler's responses, the trainer's log-probs, prompts of every form."""

import dataclasses
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from gspo_jax import sample
from gspo_jax.errors import UserError
from gspo_jax.measuring.opened import open_policy
from gspo_jax.measuring.responder import PromptTooLong, Responder
from gspo_jax.training.scoring import Scoring, score
from gspo_jax.types import Prompts
from tests.alone import Alone
from tests.checkpointed import ADDER, WIDTH, T, settings, write_run

QUESTIONS = ["1+2=?", "5+4=?", "14+7=?", "31+24=?", "9+9=?", "2+2=?", "60+12=?", "8+3=?"]
N, SEED = 2, 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "run", settings())


@pytest.fixture(scope="module")
def policy(folder):
    with sample.open(folder) as opened:
        yield opened


def tokens_of(responses) -> list[list[int]]:
    return [response.tokens.tolist() for response in responses]


def asked(tokenizer) -> Prompts:
    """Return the questions as the run's own pipeline would."""
    ids = tokenizer.encode_batch(QUESTIONS)
    tokens = np.zeros((8, WIDTH), np.int32)
    for row, own in zip(tokens, ids, strict=True):
        row[: len(own)] = own
    records = [{"answer": ""}] * 8
    return Prompts(tokens, np.array(list(map(len, ids)), np.int32), QUESTIONS, records, np.ones(8, bool))


def assert_same(found, rollout, places) -> None:
    """Assert that responses are these rows of a rollout on the host."""
    for response, place in zip(found, places, strict=True):
        kept = rollout.mask[place]
        np.testing.assert_array_equal(response.tokens, rollout.tokens[place][kept])
        np.testing.assert_array_equal(response.sampled, rollout.action_mask[place][kept])
        np.testing.assert_allclose(response.logprobs, rollout.logprobs[place][kept], atol=1e-5, rtol=0)
        assert response.finish == ("length" if rollout.truncated[place] else "eos")
        if response.routes is not None:
            np.testing.assert_array_equal(response.routes, rollout.routes.experts[place, WIDTH:][kept])
            assert (response.routes[:-1] >= 0).all() and (response.routes[-1] == -1).all()


@pytest.mark.slow
def test_responses_to_prompts_of_all_forms_are_the_runs_samplers(folder, policy):
    """Questions, a conversation and a row, in one call: what the run's own player says with that key."""
    row = {"question": QUESTIONS[7], "answer": "11"}
    prompts = [*QUESTIONS[:6], [{"role": "user", "content": QUESTIONS[6]}], row]
    each = policy.sample(prompts, n=N, seed=SEED, routes=True, score=True)
    found = [response for responses in each for response in responses]
    with open_policy(settings(), folder) as opened:
        opened.load()
        opened.engine.sampler.cuts_prompts = False  # samples with the same programs
        rollout = jax.device_get(opened.player.answer(asked(opened.tokenizer), jax.random.key(SEED)).rollout)
    assert policy.name == f"{folder}, iteration 5"
    assert_same(found, rollout, range(8 * N))
    for place, response in enumerate(found):
        assert response.prompt == QUESTIONS[place // N]
        assert response.text == policy.tokenizer.decode(response.tokens)
    assert {response.finish for response in found} == {"eos", "length"}
    right = [float(response.text.endswith("#### 11")) for response in each[7]]
    assert [response.scores for response in each[7]] == [{"exact_answer": score} for score in right]
    assert [response.reward for response in each[7]] == right


def test_a_prompt_that_cannot_be_answered_is_one_sentence(policy):
    turn = {"role": "user", "content": "1+1=?"}
    for prompt, options, says in (
        (" ", {}, "the prompt is empty; write something"),
        ([], {}, "the conversation cannot be answered: no messages; correct them"),
        ([turn, turn | {"role": "assistant"}], {}, "ends with the assistant's turn; add the user's"),
        ([turn | {"role": "judge"}], {}, "cannot be answered: role is not system, user, assistant or tool"),
        ("1" * 41_000, {}, r"^the prompt has 41000 tokens, and a response of up to 12 leaves it 40948 of the model's "),
        ("1", {"n": 0}, "n is 0; use 1 or more"),
        ("1", {"temperature": -1}, "temperature -1.0 is not in"),
        ("1", {"max_tokens": 40_960}, "max_tokens is 40960 and the model has 40960 positions"),
    ):
        with pytest.raises(UserError, match=says):
            policy.sample([prompt], **options)
    with pytest.raises(PromptTooLong):
        policy.chat([turn, turn | {"content": "1" * 41_000}])


@pytest.mark.slow
def test_fewer_prompts_than_shards_and_the_trainers_log_probs(folder, policy):
    """Three questions, padded to a prompt per shard, get what they get among eight, in the trainer's log-probs.

    A second call goes on with the numbers of responses.
    """
    found = [response for responses in policy.sample(QUESTIONS[:3], n=N, seed=SEED) for response in responses]
    with open_policy(settings(), folder) as opened:
        weights, _ = opened.load()
        batch = opened.player.answer(asked(opened.tokenizer), jax.random.key(SEED))
        second = opened.player.answer(asked(opened.tokenizer), jax.random.key(SEED), first=8 * N)
        graph = opened.engine.policy.graph
        scored = jax.jit(lambda w, r: score(graph, w, Alone(r), Scoring(logprob_chunk=64)))(weights, batch.rollout)
    rollout = dataclasses.replace(jax.device_get(batch.rollout), logprobs=jax.device_get(scored).logprobs)
    assert_same(found, rollout, range(3 * N))
    twice = [response for responses in policy.sample(QUESTIONS * 2, n=N, seed=SEED) for response in responses]
    assert_same(twice[8 * N :], jax.device_get(second.rollout), range(8 * N))


@pytest.mark.slow
def test_a_chat_goes_on(policy):
    turn = {"role": "user", "content": QUESTIONS[0]}
    first = policy.chat([turn], temperature=0)
    again = [turn, {"role": "assistant", "content": "3"}, turn]
    assert policy.chat(again, temperature=0).prompt == "1+2=?31+2=?"
    assert policy.chat([turn], temperature=0).text == first.text
    longer = [*again, *again[1:]] * 8
    assert len(policy.chat(longer, temperature=0, max_tokens=4).tokens) <= 4, "a prompt wider than the run's"


@pytest.mark.slow
def test_weights_are_those_of_the_step(folder, policy):
    newest = tokens_of(policy.sample(QUESTIONS, seed=SEED)[0])
    found = {}
    for step in (0, 3, 5):
        with sample.open(folder, step) as opened:
            found[step] = opened.name, tokens_of(opened.sample(QUESTIONS, seed=SEED)[0])
    assert {step: name for step, (name, _) in found.items()} == {
        0: f"{folder}, the first policy",
        3: f"{folder}, iteration 3",
        5: f"{folder}, iteration 5",
    }
    assert found[0][1] == found[5][1] == newest != found[3][1]
    with pytest.raises(UserError, match=r"checkpoints has no checkpoint of iteration 4; there are 3, 5$"):
        sample.open(folder, 4)


@pytest.mark.slow
def test_the_environment_answers_too(tmp_path):
    """An episode with turns and replies is the player's, whose replies are not the policy's tokens."""
    changes = {"sampling__stop_ids": ("=",), "environment__name": "calculator", "environment__turns": 2}
    config = settings(**changes)
    with sample.open(write_run(tmp_path / "run", config)) as opened:
        responses = [each for found in opened.sample(QUESTIONS, n=N, seed=SEED) for each in found]
    with open_policy(config, tmp_path / "run") as opened:
        opened.load()
        rollout = jax.device_get(opened.player.answer(asked(opened.tokenizer), jax.random.key(SEED)).rollout)
    assert_same(responses, rollout, range(8 * N))
    assert any(not response.sampled.all() for response in responses), "no turn had a reply"


@pytest.mark.slow
def test_a_hugging_face_folder_is_enough(tmp_path):
    """With the system prompt, few-shot examples and the instruction of a config, if one is given."""
    config = sample.folder_config(ADDER)
    config.cpu_devices, config.model.dtype = jax.device_count(), "float32"
    config.data.instruction, config.data.system = "Add.", "You add."
    shutil.copytree(ADDER, tmp_path / "model")
    with sample.open(tmp_path / "model", config=config) as opened:
        assert isinstance(opened, Responder) and opened.name == str(tmp_path / "model")
        (response,) = opened.sample(["1+2=?"], max_tokens=T)[0]
    assert response.prompt == "You add.1+2=?\nAdd."
    with pytest.raises(UserError, match="is a model without iterations; leave it out"):
        sample.open(ADDER, 3, config=config)
