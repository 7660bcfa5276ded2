"""Shapes of published models, to plan a run without weights or to check a folder."""

import dataclasses

from gspo_jax.errors import UserError, choices
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.families import FAMILIES

MODELS = {name: config for family in FAMILIES.values() for name, config in family.PUBLISHED.items()}


def find(name: str) -> ModelConfig:
    """Return a published model's shape, or raise a UserError."""
    if name not in MODELS:
        raise UserError(f"there is no published model {name!r} here; {choices(name, MODELS)}")
    return MODELS[name]


def check(config: ModelConfig, name: str, folder: str) -> None:
    """Raise a UserError if a folder's model is not the published one.

    Special tokens and the longest position may differ.
    """
    for field in dataclasses.fields(ModelConfig):
        here, there = getattr(config, field.name), getattr(find(name), field.name)
        if here != there and field.name not in ("eos_token_ids", "pad_token_id", "max_position_embeddings"):
            raise UserError(
                f"the model in {folder} has {field.name} {here} and {name} has {there}; give the folder of {name}, or "
                "set model.published to ''"
            )
