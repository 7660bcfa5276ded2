"""docs/objectives.md matches the code: its table, its commands, and its example of a new objective."""

import ast
import inspect
import math
import re
import shlex
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from gspo_jax import cli, config_files, objectives
from gspo_jax.config import base
from gspo_jax.errors import UserError
from gspo_jax.objectives import advantages, catalogue, surrogates
from gspo_jax.parser import make_parser
from gspo_jax.setup import data, learning
from gspo_jax.setup.checks import check
from tests.pods import drawer

ROOT = Path(__file__).parents[1]
DOC = (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")


def _blocks(language: str, text: str = DOC) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def _table() -> dict[str, dict[str, str]]:
    """Return the rows of the table under "The catalogue", by objective."""
    lines = [line for line in DOC.partition("## The catalogue")[2].splitlines() if line]
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[first:]]
    end = next(i for i, line in enumerate(lines[first:]) if not line.startswith("|"))
    return {row[0].strip("`"): dict(zip(rows[0], row, strict=True)) for row in rows[2:end]}


def _call(text: str) -> tuple[str, dict[str, object]]:
    """Parse a call: "f(a=1)" gives ("f", {"a": 1}), "f" gives ("f", {})."""
    node = ast.parse(text if "(" in text else f"{text}()", mode="eval").body
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return node.func.id, {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in node.keywords}


def test_the_table_lists_the_catalogue():
    assert sorted(_table()) == sorted(catalogue.__all__)


@pytest.mark.parametrize("name", catalogue.__all__)
def test_a_row_of_the_table_is_true(name):
    row, objective = _table()[name], objectives.make(name)
    parameters = inspect.signature(getattr(catalogue, name)).parameters
    _, defaults = _call(f"f({row['defaults'].strip('`–')})")
    assert defaults == {key: parameter.default for key, parameter in parameters.items()}
    assert (row["Â per token"] == "yes") is objective.token_advantages

    weights, arguments = _call(row["weights"].strip("`"))
    if weights == "constant_length":
        arguments = {"length": None} | arguments
    mask = jnp.array([[True, True, False], [True, True, True], [False, False, False]])
    expected = partial(getattr(surrogates, weights), **arguments)(mask)
    np.testing.assert_array_equal(objective.weights(mask), expected)

    advantage = getattr(advantages, row["advantage"].strip("`"))
    assert objective.advantage is advantage or (objective.advantage is None and advantage is advantages.gae)


def test_configs_begin_with_the_defaults():
    sections = base().objective
    for name in catalogue.__all__:
        parameters = inspect.signature(getattr(catalogue, name)).parameters
        assert sections[name].to_dict() == {key: parameter.default for key, parameter in parameters.items()}


def _commands() -> list[list[str]]:
    """Return every command in a bash block or in backticks, without the interpreter: [module or script, flag …]."""
    shown = [command for block in _blocks("bash") for command in block.replace("\\\n", " ").splitlines()]
    shown += re.findall(r"`((?:bash|python|\.venv/bin/python) [^`]*)`", DOC)
    return [
        shlex.split(re.sub(r"^(\.venv/bin/)?python (-m )?|^bash ", "", command), comments=True) for command in shown
    ]


@pytest.fixture
def train_config(monkeypatch):
    """Return a function from arguments of `train` to their config; it raises UserError as train would."""

    def parse(arguments: list[str]) -> ConfigDict:
        monkeypatch.chdir(ROOT)
        config = cli.read_config(config_files.config_words(arguments))
        if config.model.folder:  # a model that a reader has, here one of 512 positions
            config.model.folder = str(ROOT / "tests/golden/qwen3_moe")
            config.data.max_prompt_length = config.sampling.max_response_length = 256
        check(config)
        return config

    return parse


@pytest.mark.parametrize("command", _commands(), ids=" ".join)
def test_a_command_of_the_doc_is_accepted(command, train_config):
    program, *arguments = command
    if program in ("gspo_jax.train", "gspo_jax.sweep"):
        train_config(arguments)
    elif program.startswith("launch/"):
        script = (ROOT / program).read_text(encoding="utf-8")
        fields = [argument for argument in arguments if argument.startswith("--config.")]  # passed on to train
        train_config(["--config=configs/tiny.py", "--workdir=x", *fields])
        assert all(f"{argument.partition('=')[0]}=" in script for argument in arguments if argument not in fields)
    else:
        parser = make_parser("report") if program == "gspo_jax.report" else drawer("atlas").parser()
        parser.parse_args(arguments)


def test_a_wrong_command_would_be_noticed(train_config):
    good = ["--config=configs/tiny.py", "--workdir=x"]
    for wrong in ("--config.sampling.round=2", "--config.reference.place=reward", "--config.critic.trunk=mine"):
        with pytest.raises(UserError):
            train_config([*good, wrong])
    assert len([command for command in _commands() if command[0] == "gspo_jax.train"]) >= 5
    assert train_config([*good, "--config.objective.name=dapo"]).objective.name == "dapo"


def test_flags_and_fields_in_the_text_exist():
    for flag in re.findall(r"`--config\.([a-z_.]+)=", DOC):
        cli.check_overrides([f"--config.{flag}="], base())
    sections = "|".join(name for name, value in base().items() if isinstance(value, ConfigDict))
    fields = re.findall(rf"`((?:{sections})\.[a-z_.]+)", DOC)
    assert len(set(fields)) > 5
    cli.check_overrides([f"--config.{field}=" for field in fields], base())


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", DOC) if "://" not in link]
    assert "objectives/atlas.png" in links and "objectives/results.md" in links
    made_by_a_sweep = {"objectives/results.md"}
    assert [link for link in set(links) - made_by_a_sweep if not (ROOT / "docs" / link).exists()] == []


def test_step_rewards_are_set_as_the_doc_does():
    (lines,) = [block for block in _blocks("python") if "step_rewards" in block]
    config = base()
    exec(lines, {"config": config, "ConfigDict": ConfigDict})
    assert data.make_step_scorer(config) is not None
    assert learning.make_objective(config).token_advantages


@pytest.fixture
def another(monkeypatch):
    """Add the doc's example to the catalogue; return its name and a config with the doc's line."""
    function, line = _blocks("python", DOC.partition("## How to add another")[2])
    namespace = dict(vars(catalogue))
    before = set(namespace)
    exec(compile(function, "docs/objectives.md", "exec"), namespace)
    (name,) = set(namespace) - before
    monkeypatch.setattr(catalogue, name, namespace[name], raising=False)
    monkeypatch.setattr(catalogue, "__all__", [*catalogue.__all__, name])
    assert len(line.strip().splitlines()) == 1
    config = base()
    exec(line, {"config": config, "ConfigDict": ConfigDict})
    config.objective.name = name
    return name, config


def test_another_is_made_by_name_and_by_config(another):
    name, config = another
    made = objectives.make(name, log_clip=0.5)
    assert (made.name, made.bounds) == (name, {"log_clip": 0.5})
    by_config = learning.make_objective(config)
    assert by_config.bounds == objectives.make(name).bounds == {"log_clip": 0.4}
    with pytest.raises(UserError, match="log_clip=0 is not a positive number"):
        objectives.make(name, log_clip=0)
    assert f"--config.objective.name={name}" in DOC


def test_another_by_hand(another):
    name, _ = another
    objective = objectives.make(name, log_clip=0.5)
    # Log-ratios 0 and 0.5 in a response with Â = 2, −0.25 in one with Â = −1; NaN and 1e30 outside the mask.
    old = jnp.array([[-1.0, -2.0], [-3.0, jnp.nan]])
    logprobs = old + jnp.array([[0.0, 0.5], [-0.25, 1e30]])
    batch = {
        "old_logprobs": old,
        "mask": jnp.array([[True, True], [True, False]]),
        "advantages": jnp.array([2.0, -1.0]),
    }

    (loss, info), gradient = jax.value_and_grad(
        lambda logprobs: objectives.loss(objective, logprobs, **batch), has_aux=True
    )(logprobs)
    one, half = math.tanh(1), math.tanh(0.5)
    # −1/3·(2·0.5·tanh 0 + 2·0.5·tanh 1 + 1·0.5·tanh 0.5): three tokens of equal weight.
    np.testing.assert_allclose(loss, -(one + 0.5 * half) / 3, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[-2 / 3, -2 / 3 * (1 - one**2)], [(1 - half**2) / 3, 0]], rtol=1e-6)
    assert info.gated_high.tolist() == [[False, True], [False, False]]  # 1 − tanh²(1) = 0.42, 1 − tanh²(0.5) = 0.79
    assert not info.gated_low.any()
    np.testing.assert_allclose(info.ratio, [[1, math.exp(0.5)], [math.exp(-0.25), 1]], rtol=1e-6)


def test_the_sweep_asks_the_catalogue_for_its_names():
    get_sweep = config_files.sweep_function(str(ROOT / "configs" / "objectives.py"))
    assert get_sweep is not None
    named = [run["objective.name"] for run in get_sweep().runs]
    assert sorted(named) == sorted(catalogue.__all__) and named[0] == "grpo"  # the baseline of the report
