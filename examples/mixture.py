"""Train on two files, three prompts of the first to one of the second, each with its own reward.

    python -m gspo_jax.train --config=examples/mixture.py --workdir=runs/mixture

The fields of a source, and what rows look like, are in docs/data.md.
"""

from pathlib import Path

from ml_collections import ConfigDict

from configs import tiny
from gspo_jax.config import source

HERE = Path(__file__).parent


def get_config() -> ConfigDict:
    """Return configs/tiny.py:runlocal on the two files."""
    config = tiny.get_config("runlocal")
    config.data.task = "jsonl"
    config.data.options = ConfigDict()
    config.data.sources.sums = source(f"{HERE}/sums.jsonl", weight=3.0, rewards=("exact_answer",))
    config.data.sources.products = source(
        f"{HERE}/products.jsonl", rewards=("answer_format",), correct="answer_format", instruction="Use ####: "
    )
    config.data.held_out = 0.2
    config.data.max_prompt_length = 32
    config.rewards = ConfigDict({"exact_answer": 1.0, "answer_format": 0.2})
    config.eval.correct = "exact_answer"
    return config
