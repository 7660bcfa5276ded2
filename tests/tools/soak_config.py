"""Config of the soak: two short iterations a second, and a reward that hangs if it finds a file named by SOAK_HANG."""

import os
import time
from pathlib import Path

from ml_collections import ConfigDict

from gspo_jax.rewards import functions
from tests.pod_config import get_config as pod_config

_exact_answer = functions.exact_answer


def _may_hang(prompt: str, completion: str, record: dict[str, str]) -> float | None:
    try:
        os.unlink(os.environ["SOAK_HANG"])
    except (KeyError, FileNotFoundError):
        return _exact_answer(prompt, completion, record)
    time.sleep(3600)
    return None


def get_config(arg: str = "partial") -> ConfigDict:
    """Return the config; `arg` as in configs/tiny.py."""
    functions.exact_answer = _may_hang
    config = pod_config(arg)
    config.model.folder = str(Path(__file__).parents[1] / "golden" / "adder")
    config.checkpoint.update({"every": 1, "keep": 4})
    config.eval.every = 10
    config.log.samples_every = 50
    config.processes.deadline_s = 30.0
    return config
