"""A run with a teacher beside a reward: one number per token, and one per answer.

    python -m gspo_jax.train --config=examples/distillation.py --workdir=runs/beside_teacher

The student, of half the teacher's layers, has had too short a cold start to solve much.
"""

from ml_collections import ConfigDict

from gspo_jax.cli import load_config


def get_config() -> ConfigDict:
    """Return the short run of configs/tiny.py, with the model of tests/golden/adder as its teacher."""
    config = load_config("configs/tiny.py:single,runlocal")
    config.data.options.difficulty = "easy"
    config.model.architecture.num_layers = 1
    config.coldstart.steps = 200
    config.teacher.folder = "tests/golden/adder"
    config.teacher.form = "advantage"  # −weight·KL is added to the advantage of each token
    config.teacher.weight = 0.1
    config.objective.name = "gspo_token"  # which has an advantage per token
    config.rewards = ConfigDict({"exact_answer": 1.0})
    return config
