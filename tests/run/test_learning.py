"""A tiny policy learns what only an environment's object, or only a judge, rewards.

Short runs of one seed; docs/decoding.md and docs/own/judge.md have whole ones.
"""

import pytest
from ml_collections import ConfigDict

from examples import judge_server
from gspo_jax import cli
from gspo_jax.train import train
from tests.pods import ROOT
from tests.tiny import full_optimisation


def rise(config: ConfigDict, folder, name: str) -> float:
    """Return the rise of a reward on held-out prompts."""
    config.data.data_dir = str(folder / "data")
    config.eval.update({"prompts": 16, "every": config.iterations})
    with full_optimisation():
        facts = train(config, folder / "run")
    return facts["last"][name] - facts["first"][name]


@pytest.mark.slow
def test_a_tool_with_a_state_is_called_until_it_has_the_answer(tmp_path):
    config = cli.load_config(str(ROOT / "configs/tiny.py:tool,single"))
    config.data.options.difficulty = "easy"
    config.coldstart.steps, config.iterations = 400, 12
    config.sampling.group_size = 4  # with fewer episodes, fewer sizes of the sampler's batches are compiled
    assert rise(config, tmp_path, "eval/accuracy") > 0.15


@pytest.mark.slow
def test_steps_are_shown_when_a_judge_asks_for_them(tmp_path):
    config = cli.load_config(str(ROOT / "examples/judged.py"))
    config.judge.url = judge_server.start(rule=judge_server.steps)
    config.iterations = 12
    assert rise(config, tmp_path, "eval/reward/judge") > 0.15
