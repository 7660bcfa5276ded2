"""Train by several commands in one process, whose programs are traced and compiled once.

    python -m tests.trainings < commands.json

Reads a JSON list of commands, each the arguments of gspo_jax.train.
"""

import json
import sys

from absl import flags
from ml_collections import ConfigDict, config_flags

from gspo_jax import cli
from gspo_jax.train import train


def parse(words: list[str]) -> tuple[ConfigDict, str]:
    """Return the config and the workdir that a command's arguments mean to gspo_jax.train."""
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values)
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    cli._parse(["train", *words], values, needs_config=True)
    return values.config, values.workdir


if __name__ == "__main__":
    for words in json.load(sys.stdin):
        train(*parse(words))
