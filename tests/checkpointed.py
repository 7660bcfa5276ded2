"""A run folder without a training: config and checkpoints of tests/golden/adder, which adds small numbers."""

from pathlib import Path

import jax
from ml_collections import ConfigDict

from gspo_jax import cli
from gspo_jax.folder.notes import write_config
from gspo_jax.folder.storage import CHECKPOINTS
from gspo_jax.models import huggingface
from gspo_jax.training.checkpoint import Checkpointer

ROOT = Path(__file__).parents[1]
ADDER = ROOT / "tests" / "golden" / "adder"
T, WIDTH = 12, 64
"""Most tokens of its responses, and of its prompts."""


def settings(model: Path = ADDER, **changes) -> ConfigDict:
    """Return the run's config, with changes of fields, `__` for a dot."""
    config = cli.load_config(str(ROOT / "configs/tiny.py:runlocal"))
    config.model.folder = str(model)
    config.data.max_prompt_length, config.data.prompts_per_batch = WIDTH, 8
    config.sampling.group_size, config.sampling.max_response_length = 2, T
    config.training.minibatches = 1
    config.mesh.update({"data": 8, "fsdp": 1, "expert": 1})  # compiles in half the time
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return config


def write_run(folder: Path, config: ConfigDict) -> Path:
    """Write a run folder with checkpoints of two iterations: of 3 with weights halved, of 5 with the adder's."""
    write_config(folder, config.to_dict(), command="train")
    model = huggingface.read_config(config.model.folder)
    params = huggingface.load_params(config.model.folder, model)
    checkpointer = Checkpointer(folder / CHECKPOINTS)
    for step, scale in ((3, 0.5), (5, 1.0)):
        state = {"policy": {"params": jax.tree.map(lambda x, scale=scale: x * scale, params)}}
        checkpointer.save(step, state, {"config": config.to_dict()})
    checkpointer.close()
    return folder
