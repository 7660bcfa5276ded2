"""Every objective of the catalogue on the task of configs/tiny.py, from the same cold starts.

    python -m gspo_jax.sweep --config=configs/objectives.py

trains all objectives with three seeds, 50 iterations each, and compares them in one page (docs/sweeps.md). A run
takes about a minute on one core: it has one device, where configs/tiny.py simulates eight. Arguments are those of
configs/tiny.py.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

from gspo_jax.objectives import catalogue
from gspo_jax.types import Comparison

TINY = runpy.run_path(str(Path(__file__).with_name("tiny.py")))
"""The module configs/tiny.py, loaded by path: `configs/` is not importable from other directories."""


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of configs/tiny.py on one device, with half its iterations."""
    config = TINY["get_config"](f"single,{arg}")
    config.iterations = min(50, config.iterations)
    return config


def get_sweep(arg: str = "") -> Comparison:
    """Return a run for each objective, with three seeds; they are the same for any `arg`.

    `grpo` is the first, with which the report compares the others.
    """
    del arg
    names = sorted(catalogue.__all__, key=lambda name: name != "grpo")
    wider = {"grpo": {"objective.grpo.high": 0.27}}  # the GSPO paper's tuned baseline
    return Comparison(runs=[{"objective.name": name} | wider.get(name, {}) for name in names], seeds=3)
