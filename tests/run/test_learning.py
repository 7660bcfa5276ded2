"""A tiny policy learns what only an environment's object rewards: a short run; docs/decoding.md has whole ones."""

import pytest

from gspo_jax import cli
from gspo_jax.train import train
from tests.pods import ROOT
from tests.tiny import full_optimisation


@pytest.mark.slow
def test_a_tool_with_a_state_is_called_until_it_has_the_answer(tmp_path):
    config = cli.load_config(str(ROOT / "configs/tiny.py:tool,single"))
    config.data.data_dir, config.data.options.difficulty = str(tmp_path / "data"), "easy"
    config.coldstart.steps, config.iterations = 400, 12
    config.eval.update({"prompts": 16, "every": config.iterations})
    config.sampling.group_size = 4  # with fewer episodes, fewer sizes of the sampler's batches are compiled
    with full_optimisation():
        facts = train(config, tmp_path / "run")
    assert facts["last"]["eval/accuracy"] - facts["first"]["eval/accuracy"] > 0.15
