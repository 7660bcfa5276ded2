"""What `first` times and trains on a slice, for `plan`: --config=gspo_jax/bringup/recipe.py:v5e-2x4."""

import dataclasses
from pathlib import Path

from ml_collections import ConfigDict

from gspo_jax.bringup import programs
from gspo_jax.models.config import ModelConfig
from gspo_jax.planning.topology import CHIPS, describe, generation, topology_mesh


def get_config(arg: str = "v5e-2x4") -> ConfigDict:
    """Return the config for a slice, GENERATION-SIDES."""
    name = arg.replace("-", ":")
    devices = len(describe(name))
    mesh = topology_mesh(name, programs.sizes_of(devices, 1))
    model, _ = programs.chosen("", "accelerator", CHIPS[generation(name)].memory, mesh)
    work = programs.workload_of(Path(), model, "accelerator", devices)
    config = work.config
    config.model.folder, config.model.random = "", True
    for field in dataclasses.fields(ModelConfig):
        value = getattr(model, field.name)
        if field.name == "vocab_size":
            config.coldstart.vocab_size = value
        elif value != field.default and not field.name.endswith(("token_id", "token_ids")):
            config.model.architecture[field.name] = value
    config.mesh.update(work.mesh)
    config.data.task, config.rewards.exact_answer = "arithmetic", 1.0  # of a run, which plan's checks expect
    return config
