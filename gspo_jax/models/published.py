"""The shapes of the published Qwen3 models (arXiv 2505.09388; their config.json on Hugging Face): to plan a run before
its weights are there, and to check that a folder holds the model that a recipe is written for.
"""

import dataclasses

from gspo_jax.models.config import ModelConfig
from gspo_jax.types import UserError, choices


def _qwen3(layers: int, hidden: int, heads: tuple[int, int], wide: int, *, tied: bool = False) -> ModelConfig:
    return ModelConfig(
        vocab_size=151936,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=128,
        intermediate_size=wide,
        tie_word_embeddings=tied,
        eos_token_ids=(151645, 151643),
        pad_token_id=151643,
    )


def _with_experts(config: ModelConfig, width: int) -> ModelConfig:
    return dataclasses.replace(config, num_experts=128, experts_per_token=8, moe_intermediate_size=width)


MODELS = {
    "Qwen3-0.6B": _qwen3(28, 1024, (16, 8), 3072, tied=True),
    "Qwen3-1.7B": _qwen3(28, 2048, (16, 8), 6144, tied=True),
    "Qwen3-4B": _qwen3(36, 2560, (32, 8), 9728, tied=True),
    "Qwen3-8B": _qwen3(36, 4096, (32, 8), 12288),
    "Qwen3-14B": _qwen3(40, 5120, (40, 8), 17408),
    "Qwen3-32B": _qwen3(64, 5120, (64, 8), 25600),
    "Qwen3-30B-A3B": _with_experts(_qwen3(48, 2048, (32, 4), 6144), 768),
    "Qwen3-235B-A22B": _with_experts(_qwen3(94, 4096, (64, 4), 12288), 1536),
}


def find(name: str) -> ModelConfig:
    """The shape of a published model; raises a UserError for a name that there is not."""
    if name not in MODELS:
        raise UserError(f"there is no published model {name!r} here; {choices(name, MODELS)}")
    return MODELS[name]


def check(config: ModelConfig, name: str, folder: str) -> None:
    """Raises a UserError where a folder's model is another than the published one, with the first difference."""
    for field in dataclasses.fields(ModelConfig):
        here, there = getattr(config, field.name), getattr(find(name), field.name)
        if here != there and field.name not in ("eos_token_ids", "pad_token_id", "max_position_embeddings"):
            raise UserError(
                f"the model in {folder} has {field.name} {here} and {name} has {there}; give the folder of {name}, or "
                "set model.published to ''"
            )
