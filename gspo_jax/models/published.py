"""Shapes of published models: plan a run before its weights are there, check that a folder holds the model meant."""

import dataclasses

from gspo_jax.errors import UserError, choices
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.families import FAMILIES

MODELS = {name: config for family in FAMILIES.values() for name, config in family.PUBLISHED.items()}
"""Shapes of every family, by name."""


def find(name: str) -> ModelConfig:
    """Return the shape of a published model; raise a UserError for an unknown name."""
    if name not in MODELS:
        raise UserError(f"there is no published model {name!r} here; {choices(name, MODELS)}")
    return MODELS[name]


def check(config: ModelConfig, name: str, folder: str) -> None:
    """Raise a UserError, with the first difference, if a folder's model is not the published one.

    Special tokens and the longest position may differ.
    """
    for field in dataclasses.fields(ModelConfig):
        here, there = getattr(config, field.name), getattr(find(name), field.name)
        if here != there and field.name not in ("eos_token_ids", "pad_token_id", "max_position_embeddings"):
            raise UserError(
                f"the model in {folder} has {field.name} {here} and {name} has {there}; give the folder of {name}, or "
                "set model.published to ''"
            )
