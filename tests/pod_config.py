"""Runs for the tests of pods: configs/tiny.py:ARGUMENTS, made as small as they can be.

After so short a cold start a policy is hardly ever right. What it learns from is whether a response ends with an answer
of the right form, and the punishment of long ones.
"""

from pathlib import Path

from ml_collections import ConfigDict

from gspo_jax import cli

ROOT = Path(__file__).resolve().parent.parent


def get_config(arg: str = "") -> ConfigDict:
    """`arg` as in configs/tiny.py."""
    config = cli.load_config(f"{ROOT}/configs/tiny.py:{','.join(word for word in (arg, 'runlocal') if word)}")
    config.coldstart.steps = 60
    if "steps" in arg:
        config.data.max_prompt_length = 16  # of countdown, in tokens learned from sums
    config.sampling.group_size = 4
    config.overlong.update({"penalty": 1.0, "cache": 24})
    config.rewards = ConfigDict({"format": 1.0})
    config.eval.correct = "format"
    config.eval.every = 1
    config.processes.heartbeat_s = 5
    return config
