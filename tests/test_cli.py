"""What a user sees who types something wrong: one sentence with value, limit and remedy."""

import subprocess
import sys
from pathlib import Path

import pytest

from gspo_jax import cli, experiment
from gspo_jax.types import UserError

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs/tiny.py")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--config.iteratons=3", ["'iteratons'", "did you mean 'iterations'"]),
        ("--config.optimizer.learning_rat=1", ["did you mean 'optimizer.learning_rate'"]),
        ("--config.mesh.pipeline=2", ["section 'mesh' has data, expert, fsdp, tensor"]),
        ("--config.learning_rate=1", ["did you mean 'coldstart.optimizer.learning_rate'"]),
        ("--config.seed.x=1", ["'seed.x'", "'seed' is a single value"]),
    ],
)
def test_a_field_that_does_not_exist(word, says):
    with pytest.raises(UserError) as error:
        cli.check_overrides(["train", word], cli.load_config(TINY))
    assert all(part in str(error.value) for part in says), error.value


def test_a_config_file_that_does_not_exist():
    with pytest.raises(UserError, match=r"there is no config .*tinny.py.*did you mean .*tiny.py"):
        cli.load_config(str(ROOT / "configs/tinny.py"))


@pytest.mark.parametrize("name", ["tiny", "gsm8k"])
def test_a_config_argument_that_does_not_exist(name):
    with pytest.raises(UserError, match=r"takes no argument 'runlokal'; .*runlocal"):
        cli.load_config(str(ROOT / f"configs/{name}.py:runlokal"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"data.prompts_per_batch": 60},
            "prompts_per_batch 60 is not divisible by what data×fsdp×expert = 8, 4 mini-.* = 8; use 56 or 64",
        ),
        (
            {"training.minibatches": 3},
            "prompts_per_batch 32 is not divisible by .*3 mini-batches.* = 24; use 24 or 48",
        ),
        (
            {"training.microbatches": 16},
            "prompts_per_batch 32 is not divisible by .*16 micro-batches need = 64; use 64",
        ),
        ({"coldstart.batch": 12}, "coldstart.batch 12 is not divisible by data×fsdp×expert = 8; use 8 or 16"),
        ({"training.old_logprobs": "samplr"}, "'samplr'; use 'sampler' or 'recompute'"),
        ({"objective.name": "gsop"}, "no objective 'gsop'; did you mean 'gspo'"),
        ({"objective.gspo.low": 2.0}, "low=2.0 lies outside"),
        ({"optimizer.schedule": "linear"}, "'linear'; use constant or cosine"),
        ({"model.dtype": "float16"}, "'float16'; use 'float32' or 'bfloat16'"),
        ({"iterations": 0}, "iterations is 0; it must be at least 1"),
        ({"sampling.group_size": 0}, "sampling.group_size is 0; it must be at least 1"),
        ({"sampling.temperature": 0.0}, "sampling.temperature is 0.*use a positive number"),
        ({"eval.prompts": -1}, "eval.prompts is -1; use a positive number, or 0 for all"),
        ({"coldstart.log_every": 0}, "coldstart.log_every is 0; it must be at least 1"),
        ({"sampling.top_p": 0.0}, r"top_p 0.0 is outside \(0, 1\]"),
        ({"coldstart.steps": 0}, "model.folder is empty.*--config.model.folder=DIR"),
        ({"coldstart.terse": 1.5}, r"coldstart.terse is 1.5; it is a share, from 0 to 1"),
        (
            {"eval.correct": "format"},
            "'format', which is no reward of this config; use one of exact_answer",
        ),
        ({"mesh.data": 0}, "data=0.*sizes are positive"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_config_that_cannot_run_is_refused_before_devices_are_touched(changes, says):
    config = cli.load_config(TINY)
    config.update_from_flattened_dict(changes)
    with pytest.raises(UserError, match=says):
        experiment.check(config)


def run(*words):
    command = [sys.executable, "-m", "gspo_jax.train", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--config=configs/tiny.py", "--workdir=x", "--config.iteratons=3"], "did you mean 'iterations'"),
        (["--config=configs/tiny.py", "--workdr=x"], "workdir"),
        (["--workdir=x"], "--config is missing"),
        (["--config=configs/tiny.py", "--workdir=x", "--config.iterations=many"], "many"),
        (["--config=configs/tiny.py", "--workdir=x", "--config.mesh.data=4"], "needs 16 devices but there are 8"),
        (["--config=configs/gsm8k.py", "--workdir=x", "--config.model.folder=no/such"], "no/such is not a folder"),
    ],
    ids=lambda x: x[-1] if isinstance(x, list) else "",
)
def test_the_command_ends_with_one_sentence(words, says, tmp_path):
    result = run(*[word.replace("=x", f"={tmp_path}") for word in words])
    assert result.returncode != 0
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 3, result.stderr
