"""Conversion: exact round trips, export of a run's newest checkpoint, and an error for what cannot be converted."""

import json
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from gspo_jax import convert
from gspo_jax.config import base
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import UserError
from gspo_jax.folder.notes import write_config
from gspo_jax.models import huggingface
from gspo_jax.setup import learning
from gspo_jax.training.checkpoint import Checkpointer
from gspo_jax.training.state import new_state
from gspo_jax.types import Weights
from tests.tiny import load_model, save_model

GOLDEN = pathlib.Path(__file__).parent / "golden"


def assert_same_tensors(a: pathlib.Path, b: pathlib.Path) -> None:
    theirs, ours = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert theirs.keys() == ours.keys()
    for key in theirs:
        np.testing.assert_array_equal(theirs[key], ours[key], err_msg=key, strict=True)


def run(*arguments: Any) -> int:
    return convert.main([str(a) for a in arguments])


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_tied"])
def test_there_and_back(tmp_path: pathlib.Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = shutil.copytree(GOLDEN / name, tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    assert run(f"--from={source}", f"--to={tmp_path / 'ours'}") == 0
    assert run(f"--from={tmp_path / 'ours'}", f"--to={tmp_path / 'theirs'}", f"--json={tmp_path / 'facts.json'}") == 0
    assert_same_tensors(GOLDEN / name, tmp_path / "theirs")
    assert huggingface.read_config(tmp_path / "theirs") == huggingface.read_config(GOLDEN / name)
    for folder in ("ours", "theirs"):
        assert (tmp_path / folder / "tokenizer.json").read_text() == "{}"
        assert (tmp_path / folder / "generation_config.json").is_file()
        assert not (tmp_path / folder / "reference.npz").exists()
    facts = json.loads((tmp_path / "facts.json").read_text())
    count = sum(tensor.size for tensor in load_file(GOLDEN / name / "model.safetensors").values())
    assert (facts["parameters"], facts["dtype"], facts["format"]) == (count, "float32", "huggingface")
    assert f"in orbax format, {count / 1e6:.2f} M parameters, float32" in capsys.readouterr().out


def test_bfloat16_stays_and_is_chosen(tmp_path: pathlib.Path) -> None:
    assert run(f"--from={GOLDEN / 'qwen3'}", f"--to={tmp_path / 'ours'}", "--dtype=bfloat16") == 0
    assert run(f"--from={tmp_path / 'ours'}", f"--to={tmp_path / 'theirs'}") == 0
    save_model(*load_model(GOLDEN / "qwen3"), tmp_path / "direct", dtype=jnp.bfloat16)
    original, found = (load_file(tmp_path / f / "model.safetensors") for f in ("direct", "theirs"))
    assert {str(tensor.dtype) for tensor in found.values()} == {"bfloat16"}
    for key, tensor in original.items():
        np.testing.assert_array_equal(tensor, found[key], strict=True)


@pytest.fixture(scope="module")
def training_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Any]:
    """Return a run folder as train leaves it, and the newest parameters.

    The folder has the initial model, the config, and two checkpoints with different parameters.
    """
    folder = tmp_path_factory.mktemp("run")
    shutil.copytree(GOLDEN / "qwen3_tied", folder / "coldstart")
    Tokenizer.train(["1 + 2 = 3"], 288).save(folder / "coldstart")
    params = huggingface.load_params(folder / "coldstart", huggingface.read_config(folder / "coldstart"))
    config = base()
    write_config(folder, config.to_dict(), command="train")
    optimizer, _ = learning.make_update_rule(config)
    checkpointer = Checkpointer(folder / "checkpoints")
    for step in (1, 2):
        moved = jax.tree.map(lambda x, step=step: x + step, params)
        checkpointer.save(step, new_state(Weights.full(moved), optimizer), run={"iteration": step})
    checkpointer.close()
    return folder, moved


def test_run_folder(tmp_path: pathlib.Path, training_run: tuple[pathlib.Path, Any]) -> None:
    folder, newest = training_run
    assert run(f"--from={folder}", f"--to={tmp_path / 'out'}") == 0
    config = huggingface.read_config(tmp_path / "out")
    assert config == huggingface.read_config(folder / "coldstart")
    found = huggingface.load_params(tmp_path / "out", config)
    jax.tree.map(np.testing.assert_array_equal, found, newest)
    assert Tokenizer.load(tmp_path / "out").encode("1 + 2") == Tokenizer.load(folder / "coldstart").encode("1 + 2")


def test_a_run_s_export_names_the_tokens_that_ended_its_responses(tmp_path: pathlib.Path, training_run) -> None:
    """A base model's files know <|endoftext|> alone, and its chat template ends turns with <|im_end|>."""
    folder = shutil.copytree(training_run[0], tmp_path / "run")
    first = folder / "coldstart"
    (first / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}")
    (first / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (first / "generation_config.json").write_text('{"eos_token_id": 0, "temperature": 0.6}')
    assert run(f"--from={folder}", f"--to={tmp_path / 'out'}") == 0
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["eos_token_id"][:2] == [1, 0] and written["temperature"] == 0.6


def test_refusals(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    def message(*arguments: Any) -> str:
        assert run(*arguments) == 2
        return capsys.readouterr().err

    moe, new = GOLDEN / "qwen3_moe", tmp_path / "new"
    assert "nowhere is not a folder; give a Hugging Face folder" in message("--from=nowhere", f"--to={new}")
    assert "exists and is not an empty folder" in message(f"--from={moe}", f"--to={GOLDEN}")
    assert "dtype is 'float8'; use float32 or bfloat16" in message(f"--from={moe}", f"--to={new}", "--dtype=float8")
    assert "is a folder; give a file in it" in message(f"--from={moe}", f"--to={new}", f"--json={tmp_path}")
    assert "the following arguments are required: --to" in message(f"--from={moe}")
    assert "config.json does not exist" in message(f"--from={tmp_path}", f"--to={new}")
    (tmp_path / "half" / "checkpoints").mkdir(parents=True)
    assert "has checkpoints but no config.json" in message(f"--from={tmp_path / 'half'}", f"--to={new}")
    shutil.copy(moe / "config.json", tmp_path / "half" / "config.json")
    fields = json.loads((moe / "config.json").read_text()) | {"torch_dtype": "float32"}
    (tmp_path / "half" / "config.json").write_text(json.dumps(fields))
    assert "holds no checkpoint" in message(f"--from={tmp_path / 'half'}", f"--to={new}")
    assert not new.exists()


def test_run_whose_first_model_is_gone(tmp_path: pathlib.Path, training_run: tuple[pathlib.Path, Any]) -> None:
    folder = shutil.copytree(training_run[0], tmp_path / "run", ignore=shutil.ignore_patterns("coldstart"))
    with pytest.raises(UserError, match="coldstart is not a folder"):
        convert.convert(folder, tmp_path / "out")


def test_command(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "gspo_jax.convert", f"--from={GOLDEN / 'qwen3_tied'}", f"--to={tmp_path / 'out'}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=GOLDEN.parent.parent, check=True)
    assert "qwen3 in orbax format, 0.06 M parameters, float32" in done.stdout
