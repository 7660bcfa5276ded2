"""Model families: one file each, with all that tells its models apart from others'.

A family's file says how its config.json is read and written, which stacks of equal layers make the model (their
attention, router, feed-forward and flops), what its tensors are called in a Hugging Face checkpoint, and which shapes
are published. Modules that several families share are one level up. To add a family, write its file and name it in
`FAMILIES`.
"""

from collections.abc import Container
from typing import Any, Protocol, runtime_checkable

from gspo_jax.models import config as config_lib
from gspo_jax.models.config import ModelConfig, Stack
from gspo_jax.models.config_json import ConfigJson
from gspo_jax.models.families import olmoe, qwen3
from gspo_jax.models.tensors import Rule


@runtime_checkable
class Family(Protocol):
    """The contents of a family's file."""

    @property
    def MODEL_TYPES(self) -> tuple[str, ...]:
        """Values of `model_type` in config.json that are this family."""
        ...

    @property
    def PUBLISHED(self) -> dict[str, ModelConfig]:
        """Shapes of the published models, by name."""
        ...

    def read(self, source: ConfigJson) -> ModelConfig:
        """Return the model that a config.json describes; raise a UserError for a feature that is not implemented."""
        ...

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Return the fields of config.json, from which `read` returns the same model."""
        ...

    def stacks(self, config: ModelConfig) -> tuple[Stack, ...]:
        """Return the stacks of layers, first to last."""
        ...

    def rules(self, config: ModelConfig, names: Container[str]) -> dict[str, Rule]:
        """Return the checkpoint tensors of every parameter, by its path.

        Args:
          config: the model.
          names: all tensors of the checkpoint to read, which may have more than one layout; empty to write one.
        """
        ...


FAMILIES: dict[str, Family] = config_lib.FAMILIES
FAMILIES |= {"olmoe": olmoe, "qwen3": qwen3}

MODEL_TYPES = {model_type: family for family in FAMILIES.values() for model_type in family.MODEL_TYPES}
"""The family of each `model_type` of Hugging Face."""


def of(config: ModelConfig) -> Family:
    """Return the family of a model."""
    return FAMILIES[config.family]
