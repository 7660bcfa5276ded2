"""Runs with a teacher: without rewards and beside them, resumed, and refused."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file

from gspo_jax import cli, evaluate
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import UserError
from gspo_jax.folder.metrics import read_metrics
from gspo_jax.measuring.opened import open_policy
from gspo_jax.setup import data as setup_data
from gspo_jax.setup import teacher
from gspo_jax.setup.checks import check, check_elsewhere
from gspo_jax.train import train
from tests import tiny

ROOT = Path(__file__).parents[2]
ADDER = ROOT / "tests" / "golden" / "adder"


@pytest.fixture(scope="module")
def blurred(tmp_path_factory) -> Path:
    """Return a folder with a policy to be taught."""
    return tiny.blurred(ADDER, tmp_path_factory.mktemp("blurred") / "model")


def settings(data: Path, student: Path, **fields) -> ConfigDict:
    """Return the config of a run without rewards on one device, whose teacher is the adder."""
    config = cli.load_config(str(ROOT / "configs/tiny.py:single,runlocal"))
    config.data.data_dir, config.data.options.difficulty = str(data), "easy"
    config.model.folder, config.teacher.folder = str(student), str(ADDER)
    config.data.prompts_per_batch, config.sampling.group_size, config.sampling.slots = 16, 1, 16
    config.rewards, config.eval.correct = ConfigDict(), ""
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in fields.items()})
    return config


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_without_rewards_resumes_with_the_same_teacher_alone(data, blurred, tmp_path, capsys):
    """By the exact KL, with gspo, one response to a prompt and no evaluation."""
    taught_by = shutil.copytree(ADDER, tmp_path / "teacher")
    config = settings(data, blurred, iterations=1, training__minibatches=1, teacher__form="full")
    config.teacher.folder, config.sampling.slots = str(taught_by), 4
    assert train(config, tmp_path / "run") == {}
    (row,) = [row for row in read_metrics(tmp_path / "run") if "minibatch" in row]
    assert row["teacher/kl"] > 0.1 and row["actor/loss"] == pytest.approx(row["teacher/kl"], rel=1e-5)
    assert row["actor/grad_norm"] > 0.01 and row["response/learned"] == 1
    assert not {name for name in row if name.startswith(("reward/", "eval/"))} - {"reward/failed"}
    said = capsys.readouterr().out
    assert "teacher_kl" in said and "warning" not in said
    for file, change, says in (
        ("model.safetensors", halve_norm, "^the weights of the teacher changed since the run in"),
        ("config.json", other_theta, "^config.json of the teacher changed since the run in"),
    ):
        before = (taught_by / file).read_bytes()
        change(taught_by / file)
        config.iterations = 2
        with pytest.raises(UserError, match=says):
            train(config, tmp_path / "run")
        (taught_by / file).write_bytes(before)


def test_what_has_no_reward_is_not_evaluated(data, blurred, tmp_path):
    with pytest.raises(UserError, match=r"^the run has no rewards, so that nothing can be evaluated; give one"):
        evaluate.evaluate_folder(settings(data, blurred, teacher__form="full"), tmp_path)


def halve_norm(file: Path) -> None:
    weights = load_file(file)
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"] / 2}, file, metadata={"format": "pt"})


def other_theta(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 5e5}))


def held_out_kl(config: ConfigDict, workdir: Path | None) -> float:
    """Return log π − log π_T, mean over tokens sampled for held-out prompts by a run's newest policy, or the first."""
    with open_policy(config, workdir) as opened:
        engine, state, _ = opened.start()
        records = setup_data.load_records(config, "test")
        (prompts, *_) = setup_data.held_out_prompts(config, opened.tokenizer, records)
        engine.sync(state)
        batch = engine.pack(opened.player.answer(prompts, jax.random.key(7)))
        old, mask = engine.score(state, batch), batch.rollout.action_mask
        return float(jnp.where(mask, old.logprobs - old.teacher_logprobs, 0).sum() / mask.sum())


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_teacher_lifts_a_policy(data, blurred, tmp_path):
    """Its held-out KL to the teacher falls to less than half in 20 updates."""
    config = settings(data, blurred, iterations=20, training__minibatches=1, teacher__form="advantage")
    config.objective.name, config.optimizer.learning_rate = "reinforce", 1e-3
    config.data.prompts_per_batch, config.eval.prompts, config.sampling.slots = 32, 32, 4
    train(config, tmp_path / "run")
    config.teacher.form, config.objective.name = "k2", "gspo"  # scores the teacher, whatever the run's form
    before, after = held_out_kl(config, None), held_out_kl(config, tmp_path / "run")
    assert after < 0.5 * before, (before, after)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "^gspo has one advantage per response, but teacher.form 'advantage' gives one per token; use gspo_token"),
        ({"teacher.form": "k1"}, "teacher.form is 'k1'; use 'advantage', 'k2', 'k3' or 'full'"),
        ({"teacher.weight": 0.0}, "teacher.weight is 0.0; use a finite number above 0"),
        ({"teacher.dtype": "int4"}, "teacher.dtype is 'int4'; use 'float32', 'bfloat16', 'int8' or ''"),
        ({"teacher.folder": ""}, "no rewards; name at least one with its weight, .* or a teacher.folder to learn from"),
        ({"teacher.folder": "no/where"}, "no/where is not a folder"),
        ({"eval.correct": "exact_answer"}, "eval.correct is 'exact_answer' and the config has no rewards; add it"),
        (
            {"sampling.rounds": 2},
            "sampling.rounds is 2, which replaces groups with equal rewards, and the config has no",
        ),
        ({"sampling.max_response_length": 40953}, "need 40961 positions, and the teacher in .* has 40960, its"),
        (
            {"mesh.tensor": 8},
            "the teacher in .*: mesh axis tensor = 8 does not divide the number of heads 4; use one of",
        ),
    ],
    ids=lambda x: next(iter(x), "objective") if isinstance(x, dict) else "",
)
def test_what_a_config_with_a_teacher_can_get_wrong(data, blurred, changes, says, tmp_path):
    larger = tmp_path / "larger"
    shutil.copytree(blurred, larger)
    fields = {"max_position_embeddings": 50000, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16}
    (larger / "config.json").write_text(json.dumps(json.loads((larger / "config.json").read_text()) | fields))
    config = settings(data, larger)
    if changes:
        config.teacher.form = "full"
    config.update_from_flattened_dict(changes)
    config.mesh.fsdp = 1
    with pytest.raises(UserError, match=says):
        check(config)


def test_a_teacher_with_other_tokens_is_refused_by_the_first_of_them(data, blurred, tmp_path):
    """Before anything is compiled; the size of its embedding and its chat template do not matter."""
    config, other = settings(data, blurred, teacher__form="k2"), tmp_path / "other"
    with pytest.raises(
        UserError, match=r"^id 260 is '.*' in the policy's tokenizer and '.*' in that of the teacher in"
    ):
        config.teacher.folder = str(ROOT / "tests" / "golden" / "counter")
        train(config, tmp_path / "run")
    shutil.copytree(ADDER, other)
    config.teacher.folder = str(other)
    settings_file = other / "tokenizer_config.json"
    kept = json.loads(settings_file.read_text())
    settings_file.write_text(json.dumps(kept | {"chat_template": "{{ nothing }}"}))
    tokenizer = Tokenizer.load(blurred)
    teacher.check_tokens(config, tokenizer)
    settings_file.write_text(json.dumps(kept | {"additional_special_tokens": ["<more>"]}))
    with pytest.raises(UserError, match=r"^id 263 is no token in the policy's tokenizer and '<more>' in that of"):
        teacher.check_tokens(config, tokenizer)


def test_a_config_is_checked_where_its_teacher_is_not(data, blurred):
    config = settings(data, blurred, teacher__form="k2", teacher__folder="/elsewhere/Qwen3-32B")
    assert "the teacher in /elsewhere/Qwen3-32B" in check_elsewhere(config, devices=1)
    config.teacher.folder = str(ADDER)
    assert check_elsewhere(config, devices=1) == []
