"""A run whose only reward is a judge's: the policy learns what the rubric asks, to show its steps.

    python examples/judge_server.py 8000 steps
    python -m gspo_jax.train --config=examples/judged.py --workdir=runs/judged

Whether the answer is right earns nothing, and is only recorded. The server stands in for a model. Results are in
docs/rewards.md.
"""

from ml_collections import ConfigDict

from examples import judge
from gspo_jax.cli import load_config


def get_config() -> ConfigDict:
    """Return the config."""
    config = load_config("configs/tiny.py:single")
    config.iterations = 40
    config.model.architecture.update({"num_layers": 2, "num_experts": 8, "experts_per_token": 2})
    config.coldstart.steps = 600
    config.data.options.difficulty = "medium"
    config.data.prompts_per_batch = 16
    config.rewards = ConfigDict({"judge": 1.0, "exact_answer": 0.0})
    config.judge = judge.get_config().judge
    config.eval.prompts = 64
    config.eval.every = 20
    return config
