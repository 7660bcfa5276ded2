"""Qwen3 and Qwen3-MoE (arXiv 2505.09388): normed heads, and one stack of dense or routed layers.

Not implemented: mixed dense and routed layers (`decoder_sparse_step`, `mlp_only_layers`) and sliding windows.
"""

import dataclasses
from collections.abc import Callable, Container
from functools import partial
from typing import Any

from flax import nnx

from gspo_jax.models import tensors
from gspo_jax.models.attention import Attention, HeadNorm
from gspo_jax.models.config import ModelConfig, Stack
from gspo_jax.models.config_json import SUPPORTED, ConfigJson, common_fields
from gspo_jax.models.moe import MLP, MoE, softmax_router

MODEL_TYPES = ("qwen3", "qwen3_moe")

_SUPPORTED = SUPPORTED | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}


def read(source: ConfigJson) -> ModelConfig:
    """Return the model of a config.json. Raise a UserError as `ConfigJson`.

    As in transformers, head_dim defaults to 128 for Qwen3, and to hidden size / heads for Qwen3-MoE.
    """
    source.check(_SUPPORTED)
    common = source.common(positions=32768, eps=1e-6, pad=None, eos=None)
    if source.fields["model_type"] == "qwen3":
        return ModelConfig(**common, head_dim=source.size("head_dim", default=128))
    experts = source.size("num_experts", "num_local_experts")
    return ModelConfig(
        **common,
        head_dim=source.size("head_dim", default=common["hidden_size"] // common["num_heads"]),
        num_experts=experts,
        experts_per_token=source.experts_per_token(experts),
        moe_intermediate_size=source.size("moe_intermediate_size"),
        norm_topk_prob=source.flag("norm_topk_prob"),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json."""
    fields = common_fields(config) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": config.head_dim,
        "use_sliding_window": False,
        "sliding_window": None,
    }
    if not config.is_routed:
        return fields
    return fields | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.moe_intermediate_size,
        "norm_topk_prob": config.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def stacks(config: ModelConfig, norm: Callable[..., nnx.Module] | None = HeadNorm) -> tuple[Stack, ...]:
    """Return one stack of all layers, dense or routed, with this norm of queries and keys, if any."""
    routed = config.num_experts > 0
    return (
        Stack(
            layers=config.num_layers,
            attention=partial(Attention, norm=norm),
            feed_forward=partial(MoE, choose=softmax_router) if routed else MLP,
            width=config.moe_intermediate_size if routed else config.intermediate_size,
            experts=config.num_experts,
            experts_per_token=config.experts_per_token,
        ),
    )


def rules(config: ModelConfig, names: Container[str]) -> dict[str, tensors.Rule]:
    """Return the checkpoint tensors of every parameter, by path."""
    feed_forward = tensors.experts(names) if config.is_routed else tensors.DENSE
    return tensors.of_model(config, tensors.ATTENTION | tensors.HEAD_NORMS | feed_forward)


def _shape(layers: int, hidden: int, heads: tuple[int, int], wide: int, *, tied: bool = False) -> ModelConfig:
    """`heads` are of queries and keys."""
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


PUBLISHED = {
    "Qwen3-0.6B": _shape(28, 1024, (16, 8), 3072, tied=True),
    "Qwen3-1.7B": _shape(28, 2048, (16, 8), 6144, tied=True),
    "Qwen3-4B": _shape(36, 2560, (32, 8), 9728, tied=True),
    "Qwen3-8B": _shape(36, 4096, (32, 8), 12288),
    "Qwen3-14B": _shape(40, 5120, (40, 8), 17408),
    "Qwen3-32B": _shape(64, 5120, (64, 8), 25600),
    "Qwen3-30B-A3B": _with_experts(_shape(48, 2048, (32, 4), 6144), 768),
    "Qwen3-235B-A22B": _with_experts(_shape(94, 4096, (64, 4), 12288), 1536),
}
