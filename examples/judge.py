"""A run with a judge: half of the reward is for correct answers, half for what a rubric asks.

    python -m gspo_jax.train --config=examples/judge.py --workdir=runs/judge

`python examples/judge_server.py 8000` stands in for a real judge; `--config=examples/judge.py:pairwise` has it compare.
"""

from pathlib import Path

from ml_collections import ConfigDict

from gspo_jax.cli import load_config

HERE = Path(__file__).parent


def get_config(form: str = "") -> ConfigDict:
    """Return the short run of configs/tiny.py with a judge; as `pairwise`, one that compares a group's responses."""
    config = load_config("configs/tiny.py:runlocal")
    config.rewards = ConfigDict({"exact_answer": 0.5, "judge": 0.5})
    config.judge.url = "http://127.0.0.1:8000/v1"
    config.judge.model = "stand-in"
    config.judge.rubric = str(HERE / "rubric.txt")
    config.judge.max_tokens = 512
    if form == "pairwise":
        config.judge.pairwise = True
        config.judge.rubric = str(HERE / "comparison.txt")
        config.judge.pairs = 2  # not with all others, as each comparison takes two calls
    return config
