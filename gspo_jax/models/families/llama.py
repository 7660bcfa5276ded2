"""Llama (arXiv 2407.21783) and its kin, such as SmolLM2: dense layers, no norm of queries and keys.

Not implemented: biases (`attention_bias`, `mlp_bias`) and rotary positions other than plain and Llama 3's.
"""

from collections.abc import Container
from typing import Any

from gspo_jax.models import tensors
from gspo_jax.models.attention import Attention
from gspo_jax.models.config import Llama3Rope, ModelConfig, Stack
from gspo_jax.models.config_json import SUPPORTED, ConfigJson, common_fields
from gspo_jax.models.moe import MLP

MODEL_TYPES = ("llama",)

_SUPPORTED = SUPPORTED | {"mlp_bias": (False,), "rope_interleaved": (False,)}


def read(source: ConfigJson) -> ModelConfig:
    """Return the model of a config.json. Raise a UserError as `ConfigJson`."""
    source.check(_SUPPORTED)
    common = source.common(positions=2048, eps=1e-6, pad=None, eos=2)
    head_dim = source.size("head_dim", default=common["hidden_size"] // common["num_heads"])
    return ModelConfig(family="llama", **common, head_dim=head_dim)


def write(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json."""
    return common_fields(config) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": config.head_dim,
        "mlp_bias": False,
    }


def stacks(config: ModelConfig) -> tuple[Stack, ...]:
    """Return one stack of all layers."""
    return (Stack(layers=config.num_layers, attention=Attention, feed_forward=MLP, width=config.intermediate_size),)


def rules(config: ModelConfig, names: Container[str]) -> dict[str, tensors.Rule]:
    """Return the checkpoint tensors of every parameter, by path."""
    return tensors.of_model(config, tensors.ATTENTION | tensors.DENSE)


def _smollm2(layers: int, hidden: int, heads: tuple[int, int], wide: int, theta: float) -> ModelConfig:
    """`heads` are of queries and keys. Special tokens are those of Instruct."""
    return ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=64,
        intermediate_size=wide,
        rope_theta=theta,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        eos_token_ids=(2,),
        pad_token_id=2,
    )


def _llama32(layers: int, hidden: int, heads: int, head_dim: int) -> ModelConfig:
    """Special tokens are those of Instruct, which has no padding token."""
    return ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        intermediate_size=8192,
        rope_theta=5e5,
        rope_scaling=Llama3Rope(
            factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        ),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
        eos_token_ids=(128001, 128008, 128009),
    )


PUBLISHED = {
    "SmolLM2-135M": _smollm2(30, 576, (9, 3), 1536, 1e5),
    "SmolLM2-360M": _smollm2(32, 960, (15, 5), 2560, 1e5),
    "SmolLM2-1.7B": _smollm2(24, 2048, (32, 32), 8192, 1.3e5),
    "Llama-3.2-1B": _llama32(16, 2048, 32, 64),
    "Llama-3.2-3B": _llama32(28, 3072, 24, 128),
}
