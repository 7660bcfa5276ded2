"""Model families: one file each, with all that sets its models apart.

To add a family, write its file, with all of `Family`, and name it in `FAMILIES`. Shared modules are one level up.
"""

from collections.abc import Container
from typing import Any, Protocol, runtime_checkable

from gspo_jax.models import config as config_lib
from gspo_jax.models.config import ModelConfig, Stack
from gspo_jax.models.config_json import ConfigJson
from gspo_jax.models.families import (
    deepseek_v3,
    glm4_moe,
    glm4_moe_lite,
    granitemoe,
    llama,
    mistral,
    mixtral,
    olmoe,
    qwen2,
    qwen2_moe,
    qwen3,
)
from gspo_jax.models.tensors import Rule


@runtime_checkable
class Family(Protocol):
    """The contents of a family's file."""

    @property
    def MODEL_TYPES(self) -> tuple[str, ...]:
        """Values of `model_type` in config.json."""
        ...

    @property
    def PUBLISHED(self) -> dict[str, ModelConfig]:
        """Published shapes by name."""
        ...

    def read(self, source: ConfigJson) -> ModelConfig:
        """Return the model of a config.json. Raise a UserError for an unimplemented feature."""
        ...

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Return the fields of config.json: the inverse of `read`."""
        ...

    def stacks(self, config: ModelConfig) -> tuple[Stack, ...]:
        """Return the stacks, first to last."""
        ...

    def rules(self, config: ModelConfig, names: Container[str]) -> dict[str, Rule]:
        """Return the checkpoint tensors of every parameter, by path.

        Args:
          names: the checkpoint's tensors, which tell its layout; empty to write.
        """
        ...


FAMILIES: dict[str, Family] = config_lib.FAMILIES
FAMILIES |= {
    "deepseek_v3": deepseek_v3,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": glm4_moe_lite,
    "granitemoe": granitemoe,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
}

MODEL_TYPES = {model_type: family for family in FAMILIES.values() for model_type in family.MODEL_TYPES}


def of(config: ModelConfig) -> Family:
    """Return a model's family."""
    return FAMILIES[config.family]
