"""DeepSeek-V3 (arXiv 2412.19437) and its kin, Kimi-K2 and Moonlight: latent attention, dense layers before routed ones.

Routers score by sigmoids, choose with a bias, in groups, and every token passes shared experts.

Left out: the layers that predict tokens after the next one (`num_nextn_predict_layers`). Not implemented: other scores
and choices (`scoring_func`, `topk_method`), mixtures in some layers alone (`moe_layer_freq`).
"""

import dataclasses
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any

from flax import nnx

from gspo_jax.errors import UserError
from gspo_jax.models import tensors
from gspo_jax.models.config import Latent, ModelConfig, Stack, YarnRope
from gspo_jax.models.config_json import SUPPORTED, ConfigJson, common_fields
from gspo_jax.models.latent import LatentAttention
from gspo_jax.models.moe import MLP, MoE, sigmoid_router

MODEL_TYPES = ("deepseek_v3", "kimi_k2")

_SUPPORTED = SUPPORTED | {
    "attention_bias": (False, True),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}


def read(source: ConfigJson) -> ModelConfig:
    """Return the model of a config.json. Raise a UserError as `ConfigJson`."""
    common = source.common(positions=4096, eps=1e-6, pad=None, eos=1)
    return ModelConfig(
        family="deepseek_v3",
        **common | latent(source, common["num_heads"]),
        **mixture(source, experts=256, chosen=8, width=2048, groups=(8, 4), factor=2.5),
        dense_layers=min(source.count("first_k_dense_replace", default=3), common["num_layers"]),
    )


def latent(source: ConfigJson, heads: int) -> dict[str, Any]:
    """Return the fields of latent attention. Raise a UserError as `ConfigJson`, and for what no family here has."""
    source.check(_SUPPORTED | {"num_key_value_heads": (heads, None)})
    return {
        "num_kv_heads": heads,
        "head_dim": source.size("qk_rope_head_dim"),
        "latent": Latent(
            rank=source.size("kv_lora_rank"),
            query_rank=None if source.fields.get("q_lora_rank") is None else source.size("q_lora_rank"),
            plain_dim=source.size("qk_nope_head_dim"),
            value_dim=source.size("v_head_dim"),
            interleaved=source.flag("rope_interleave", default=True),
        ),
        "attention_bias": source.flag("attention_bias"),
    }


def mixture(
    source: ConfigJson, *, experts: int, chosen: int, width: int, groups: tuple[int, int], factor: float
) -> dict[str, Any]:
    """Return the fields of router and experts. Raise a UserError as `ConfigJson`.

    Args:
      experts, chosen, width, groups, factor: transformers' defaults: experts, those per token, an expert's width,
        groups and those per token, and the factor of weights.
    """
    count, width = source.size("n_routed_experts", default=experts), source.size("moe_intermediate_size", default=width)
    given = source.fields.get("routed_scaling_factor", factor)
    return {
        "num_experts": count,
        "experts_per_token": source.experts_per_token(count, default=chosen),
        "moe_intermediate_size": width,
        "norm_topk_prob": source.flag("norm_topk_prob", default=True),
        "expert_groups": source.size("n_group", default=groups[0]),
        "groups_per_token": source.size("topk_group", default=groups[1]),
        "routed_scaling_factor": source.number("routed_scaling_factor", given),
        "shared_intermediate_size": width * source.count("n_shared_experts", default=1),
    }


def write(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json."""
    return (
        common_fields(config)
        | latent_fields(config)
        | mixture_fields(config)
        | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "moe_layer_freq": 1,
        }
    )


def latent_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the inverse of `latent`. Raise a UserError for a model without."""
    if config.latent is None:
        sizes = ", ".join(field.name for field in dataclasses.fields(Latent))
        raise UserError(f"latent is None, and models of family {config.family!r} have latent attention; give {sizes}")
    return {
        "q_lora_rank": config.latent.query_rank,
        "kv_lora_rank": config.latent.rank,
        "qk_nope_head_dim": config.latent.plain_dim,
        "qk_rope_head_dim": config.head_dim,
        "v_head_dim": config.latent.value_dim,
        "rope_interleave": config.latent.interleaved,
    }


def mixture_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the inverse of `mixture`, with the dense layers, and what other readers ask for."""
    return {
        "first_k_dense_replace": config.dense_layers,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "n_shared_experts": config.shared_intermediate_size // config.moe_intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "n_group": config.expert_groups,
        "topk_group": config.groups_per_token,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": config.norm_topk_prob,
        "routed_scaling_factor": config.routed_scaling_factor,
        "num_nextn_predict_layers": 0,
    }


def stacks(config: ModelConfig, attention: Callable[..., nnx.Module] = LatentAttention) -> tuple[Stack, ...]:
    """Return the dense layers and the routed ones. Raise a UserError for a part of a shared expert."""
    shared, width = config.shared_intermediate_size, config.moe_intermediate_size
    if config.num_experts and shared % width:
        raise UserError(
            f"shared_intermediate_size {shared} is not a multiple of moe_intermediate_size {width}, as in every model "
            f"of family {config.family}; use {width} or {2 * width}, or 0 for no shared experts"
        )
    dense = Stack(layers=config.dense_layers, attention=attention, feed_forward=MLP, width=config.intermediate_size)
    routed = Stack(
        layers=config.num_layers - config.dense_layers,
        attention=attention,
        feed_forward=partial(MoE, choose=sigmoid_router, biased=True),
        width=width,
        experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        shared_width=shared,
    )
    return tuple(stack for stack in (dense, routed) if stack.layers)


def rules(config: ModelConfig, names: Container[str]) -> dict[str, tensors.Rule]:
    """Return the checkpoint tensors of every parameter, by path."""
    return rules_with(tensors.latent_attention(config), config, names)


def rules_with(
    attention: Mapping[str, tensors.Rule], config: ModelConfig, names: Container[str]
) -> dict[str, tensors.Rule]:
    """Return as `rules`, with these of attention."""
    routed = tensors.experts(names, first=config.dense_layers) | tensors.ROUTER_BIAS
    routed |= tensors.shared("shared_experts") if config.shared_intermediate_size else {}
    own = [{**attention, **(routed if stack.is_routed else tensors.DENSE)} for stack in stacks(config)]
    return tensors.of_model(config, *own)


def _long(factor: float, beta_fast: float) -> YarnRope:
    return YarnRope(
        factor=factor, original_max_position_embeddings=4096, beta_fast=beta_fast, mscale=1.0, mscale_all_dim=1.0
    )


_LATENT = Latent(rank=512, query_rank=1536, plain_dim=128, value_dim=128, interleaved=True)

# Kimi's special tokens are those of Instruct.
PUBLISHED = {
    "DeepSeek-V3": ModelConfig(
        family="deepseek_v3",
        vocab_size=129280,
        hidden_size=7168,
        num_layers=61,
        num_heads=128,
        num_kv_heads=128,
        head_dim=64,
        intermediate_size=18432,
        latent=_LATENT,
        num_experts=256,
        dense_layers=3,
        experts_per_token=8,
        moe_intermediate_size=2048,
        expert_groups=8,
        groups_per_token=4,
        routed_scaling_factor=2.5,
        shared_intermediate_size=2048,
        rope_theta=1e4,
        rope_scaling=_long(40.0, 32.0),
        max_position_embeddings=163840,
        eos_token_ids=(1,),
    ),
    "Kimi-K2": ModelConfig(
        family="deepseek_v3",
        vocab_size=163840,
        hidden_size=7168,
        num_layers=61,
        num_heads=64,
        num_kv_heads=64,
        head_dim=64,
        intermediate_size=18432,
        latent=_LATENT,
        num_experts=384,
        dense_layers=1,
        experts_per_token=8,
        moe_intermediate_size=2048,
        routed_scaling_factor=2.827,
        shared_intermediate_size=2048,
        rope_theta=5e4,
        rope_scaling=_long(32.0, 1.0),
        max_position_embeddings=131072,
        eos_token_ids=(163586,),
    ),
    "Moonlight-16B-A3B": ModelConfig(
        family="deepseek_v3",
        vocab_size=163840,
        hidden_size=2048,
        num_layers=27,
        num_heads=16,
        num_kv_heads=16,
        head_dim=64,
        intermediate_size=11264,
        latent=dataclasses.replace(_LATENT, query_rank=None),
        num_experts=64,
        dense_layers=1,
        experts_per_token=6,
        moe_intermediate_size=1408,
        routed_scaling_factor=2.446,
        shared_intermediate_size=2 * 1408,
        rope_theta=5e4,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        eos_token_ids=(163586,),
    ),
}
