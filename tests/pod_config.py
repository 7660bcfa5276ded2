"""Config for runs in processes of their own: configs/tiny.py:ARGUMENTS with easy problems, as small as possible.

The policies of tests/golden solve some of these problems.
"""

from functools import partial
from pathlib import Path

from ml_collections import ConfigDict

from gspo_jax import cli
from gspo_jax.parallel import processes

ROOT = Path(__file__).resolve().parent.parent
processes.start = partial(processes.start, heartbeat_s=5)  # the command calls it after it has read this file


def get_config(arg: str = "") -> ConfigDict:
    """Return the config; `arg` as in configs/tiny.py."""
    config = cli.load_config(f"{ROOT}/configs/tiny.py:{','.join(word for word in (arg, 'runlocal') if word)}")
    config.data.options.difficulty = "easy"
    config.coldstart.steps = 10
    config.sampling.group_size = 4
    config.overlong.update({"penalty": 1.0, "cache": 24})
    if config.sampling.rounds > 1:
        config.sampling.filter = "exact_answer"  # the penalty alone would keep groups of wrong answers
    config.eval.every = 1
    return config
