"""Qwen2 and Qwen2.5 (arXiv 2412.15115): dense layers whose queries, keys and values have a bias.

Not implemented: sliding windows.
"""

from collections.abc import Container
from typing import Any

from gspo_jax.models import tensors
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.config_json import SUPPORTED, ConfigJson, common_fields
from gspo_jax.models.families import llama

MODEL_TYPES = ("qwen2",)


def read(source: ConfigJson) -> ModelConfig:
    """Return the model of a config.json. Raise a UserError as `ConfigJson`."""
    source.check(SUPPORTED | {"attention_bias": (True,)})
    common = source.common(positions=32768, eps=1e-6, pad=None, eos=None)
    head_dim = source.size("head_dim", default=common["hidden_size"] // common["num_heads"])
    return ModelConfig(family="qwen2", **common, head_dim=head_dim, attention_bias=True)


def write(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json."""
    return common_fields(config) | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "head_dim": config.head_dim,
        "use_sliding_window": False,
        "sliding_window": None,
    }


stacks = llama.stacks


def rules(config: ModelConfig, names: Container[str]) -> dict[str, tensors.Rule]:
    """Return the checkpoint tensors of every parameter, by path."""
    return tensors.of_model(config, tensors.ATTENTION | tensors.ATTENTION_BIAS | tensors.DENSE)


def _qwen25(layers: int, hidden: int, heads: tuple[int, int], wide: int, *, small: bool = False) -> ModelConfig:
    """`heads` are of queries and keys. Special tokens are those of Instruct."""
    return ModelConfig(
        family="qwen2",
        vocab_size=151936 if small else 152064,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=hidden // heads[0],
        intermediate_size=wide,
        attention_bias=True,
        tie_word_embeddings=small,
        max_position_embeddings=32768,
        eos_token_ids=(151645, 151643),
        pad_token_id=151643,
    )


PUBLISHED = {
    "Qwen2.5-0.5B-Instruct": _qwen25(24, 896, (14, 2), 4864, small=True),
    "Qwen2.5-1.5B-Instruct": _qwen25(28, 1536, (12, 2), 8960, small=True),
    "Qwen2.5-3B-Instruct": _qwen25(36, 2048, (16, 2), 11008, small=True),
    "Qwen2.5-7B-Instruct": _qwen25(28, 3584, (28, 4), 18944),
    "Qwen2.5-14B-Instruct": _qwen25(48, 5120, (40, 8), 13824),
    "Qwen2.5-32B-Instruct": _qwen25(64, 5120, (40, 8), 27648),
    "Qwen2.5-72B-Instruct": _qwen25(80, 8192, (64, 8), 29568),
}
