"""Train by several commands in one process, whose programs are traced and compiled once.

    python -m tests.trainings < commands.json

Reads a JSON list of commands, each the arguments of gspo_jax.train.
"""

import json
import sys

from ml_collections import ConfigDict

from gspo_jax import cli, config_files
from gspo_jax.train import train


def parse(words: list[str]) -> tuple[ConfigDict, str]:
    """Return the config and the workdir that a command's arguments mean to gspo_jax.train."""
    workdir = [word.partition("=")[2] for word in words if word.startswith("--workdir=")]
    return cli.read_config(config_files.config_words(words)), workdir[-1]


if __name__ == "__main__":
    for words in json.load(sys.stdin):
        config, workdir = parse(words)
        cli.prepare(config)
        train(config, workdir)
