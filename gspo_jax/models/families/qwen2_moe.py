"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B; arXiv 2407.10671): routed layers, each beside a gated shared expert.

Queries, keys and values have a bias. Not implemented: mixed dense and routed layers (`decoder_sparse_step`,
`mlp_only_layers`), which no published model has, and sliding windows.
"""

import dataclasses
from collections.abc import Container
from functools import partial
from typing import Any

from gspo_jax.models import tensors
from gspo_jax.models.config import ModelConfig, Stack
from gspo_jax.models.config_json import SUPPORTED, ConfigJson, common_fields
from gspo_jax.models.families import qwen3
from gspo_jax.models.moe import MoE, softmax_router

MODEL_TYPES = ("qwen2_moe",)

_SUPPORTED = SUPPORTED | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}


def read(source: ConfigJson) -> ModelConfig:
    """Return the model of a config.json. Raise a UserError as `ConfigJson`. Heads divide the hidden size."""
    common = source.common(positions=32768, eps=1e-6, pad=None, eos=None)
    head_dim = common["hidden_size"] // common["num_heads"]
    source.check(_SUPPORTED | {"head_dim": (head_dim, None)})
    experts = source.size("num_experts", "num_local_experts", default=60)
    return ModelConfig(
        family="qwen2_moe",
        **common,
        head_dim=head_dim,
        num_experts=experts,
        experts_per_token=source.experts_per_token(experts, default=4),
        moe_intermediate_size=source.size("moe_intermediate_size", default=1408),
        shared_intermediate_size=source.size("shared_expert_intermediate_size", default=5632),
        norm_topk_prob=source.flag("norm_topk_prob"),
        attention_bias=source.flag("qkv_bias", default=True),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json."""
    fields = common_fields(config)
    return fields | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "qkv_bias": fields.pop("attention_bias"),
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.moe_intermediate_size,
        "shared_expert_intermediate_size": config.shared_intermediate_size,
        "norm_topk_prob": config.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
    }


def stacks(config: ModelConfig) -> tuple[Stack, ...]:
    """Return one stack of all layers."""
    (stack,) = qwen3.stacks(config, norm=None)
    routed = partial(MoE, choose=softmax_router, gated=True)
    return (dataclasses.replace(stack, feed_forward=routed, shared_width=config.shared_intermediate_size),)


_GATE = {"mlp.shared_gate": tensors.Rule("model.layers.{L}.mlp.shared_expert_gate.weight", "L D G -> G D")}


def rules(config: ModelConfig, names: Container[str]) -> dict[str, tensors.Rule]:
    """Return the checkpoint tensors of every parameter, by path."""
    attention = tensors.ATTENTION | (tensors.ATTENTION_BIAS if config.attention_bias else {})
    return tensors.of_model(config, attention | tensors.experts(names) | tensors.shared("shared_expert") | _GATE)


PUBLISHED = {
    "Qwen1.5-MoE-A2.7B": ModelConfig(
        family="qwen2_moe",
        vocab_size=151936,
        hidden_size=2048,
        num_layers=24,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        intermediate_size=5632,
        num_experts=60,
        experts_per_token=4,
        moe_intermediate_size=1408,
        shared_intermediate_size=5632,
        norm_topk_prob=False,
        attention_bias=True,
        max_position_embeddings=8192,
        eos_token_ids=(151643,),
        pad_token_id=151643,
    ),
}
