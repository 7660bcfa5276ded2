"""DeepSeek-V3 (arXiv 2412.19437) and its kin, Kimi-K2 and Moonlight: latent attention, dense layers before routed ones.

Routers score by sigmoids, choose with a bias, in groups, and every token passes shared experts.

Left out: the layers that predict tokens after the next one (`num_nextn_predict_layers`). Not implemented: other scores
and choices (`scoring_func`, `topk_method`), mixtures in some layers alone (`moe_layer_freq`).
"""

import dataclasses
from collections.abc import Container
from functools import partial
from typing import Any

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
    dense = source.count("first_k_dense_replace", default=3)
    return of_fields(source, common | {"family": "deepseek_v3", "dense_layers": dense}, groups=8, chosen=4, factor=2.5)


def of_fields(source: ConfigJson, common: dict[str, Any], *, groups: int, chosen: int, factor: float) -> ModelConfig:
    """Return the model of the other fields, beside `common` ones.

    Args:
      groups, chosen, factor: transformers' defaults of the experts' groups, of those per token, and of the weights'
        factor.
    """
    source.check(_SUPPORTED | {"num_key_value_heads": (common["num_heads"], None)})
    experts, width = source.size("n_routed_experts", "num_local_experts"), source.size("moe_intermediate_size")
    factor = source.fields.get("routed_scaling_factor", factor)
    return ModelConfig(
        **common,
        head_dim=source.size("qk_rope_head_dim"),
        latent=Latent(
            rank=source.size("kv_lora_rank"),
            query_rank=None if source.fields.get("q_lora_rank") is None else source.size("q_lora_rank"),
            plain_dim=source.size("qk_nope_head_dim"),
            value_dim=source.size("v_head_dim"),
            interleaved=source.flag("rope_interleave", default=True),
            biased=source.flag("attention_bias"),
        ),
        num_experts=experts,
        experts_per_token=source.experts_per_token(experts),
        moe_intermediate_size=width,
        norm_topk_prob=source.flag("norm_topk_prob", default=True),
        expert_groups=source.size("n_group", default=groups),
        groups_per_token=source.size("topk_group", default=chosen),
        routed_scaling_factor=source.number("routed_scaling_factor", factor),
        shared_intermediate_size=width * source.size("n_shared_experts", default=1),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json."""
    return fields(config) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "first_k_dense_replace": config.dense_layers,
    }


def fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that `of_fields` reads, and common ones."""
    latent = config.latent
    assert latent is not None, "read and PUBLISHED set it"
    return common_fields(config) | {
        "attention_bias": latent.biased,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank,
        "qk_nope_head_dim": latent.plain_dim,
        "qk_rope_head_dim": config.head_dim,
        "v_head_dim": latent.value_dim,
        "rope_interleave": latent.interleaved,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "n_shared_experts": config.shared_intermediate_size // config.moe_intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "moe_layer_freq": 1,
        "n_group": config.expert_groups,
        "topk_group": config.groups_per_token,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": config.norm_topk_prob,
        "routed_scaling_factor": config.routed_scaling_factor,
        "num_nextn_predict_layers": 0,
    }


def stacks(config: ModelConfig) -> tuple[Stack, ...]:
    """Return the dense layers and the routed ones."""
    dense = Stack(
        layers=config.dense_layers, attention=LatentAttention, feed_forward=MLP, width=config.intermediate_size
    )
    routed = Stack(
        layers=config.num_layers - config.dense_layers,
        attention=LatentAttention,
        feed_forward=partial(MoE, choose=sigmoid_router, biased=True),
        width=config.moe_intermediate_size,
        experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        shared_width=config.shared_intermediate_size,
    )
    return tuple(stack for stack in (dense, routed) if stack.layers)


def rules(config: ModelConfig, names: Container[str]) -> dict[str, tensors.Rule]:
    """Return the checkpoint tensors of every parameter, by path."""
    assert config.latent is not None, "read and PUBLISHED set it"
    attention = tensors.latent_attention(config.latent)
    shared = tensors.shared("shared_experts")
    routed = tensors.experts(names, first=config.dense_layers) | tensors.ROUTER_BIAS | shared
    own = [attention | (routed if stack.is_routed else tensors.DENSE) for stack in stacks(config)]
    return tensors.of_model(config, *own)


def _long(factor: float, beta_fast: float) -> YarnRope:
    return YarnRope(
        factor=factor, original_max_position_embeddings=4096, beta_fast=beta_fast, mscale=1.0, mscale_all_dim=1.0
    )


_LATENT = Latent(rank=512, query_rank=1536, plain_dim=128, value_dim=128, interleaved=True)

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
        eos_token_ids=(163585,),
        pad_token_id=163839,
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
        eos_token_ids=(163585,),
        pad_token_id=163839,
    ),
}
