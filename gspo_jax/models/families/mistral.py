"""Mistral (arXiv 2310.06825) where no sliding window is in use, as from version 0.2 on: Llama's layers."""

from typing import Any

from gspo_jax.models.config import ModelConfig
from gspo_jax.models.config_json import SUPPORTED, ConfigJson, common_fields
from gspo_jax.models.families import llama

MODEL_TYPES = ("mistral",)


def read(source: ConfigJson) -> ModelConfig:
    """Return the model of a config.json. Raise a UserError as `ConfigJson`.

    As in transformers, an absent `sliding_window` is one of 4096 tokens.
    """
    source.check(SUPPORTED)
    common = source.common(positions=131072, eps=1e-6, pad=None, eos=2)
    source.check_window(common["max_position_embeddings"], default=4096)
    head_dim = source.size("head_dim", default=common["hidden_size"] // common["num_heads"])
    return ModelConfig(family="mistral", **common, head_dim=head_dim)


def write(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json."""
    return common_fields(config) | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": config.head_dim,
        "sliding_window": None,
    }


stacks, rules = llama.stacks, llama.rules

PUBLISHED = {
    "Mistral-7B-v0.3": ModelConfig(
        family="mistral",
        vocab_size=32768,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        rms_norm_eps=1e-5,
        max_position_embeddings=32768,
        eos_token_ids=(2,),
    ),
}
