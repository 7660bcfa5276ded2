"""GLM-4.5, 4.5-Air, 4.6 and 4.7 (arXiv 2508.06471): a few dense layers, then routed ones with shared experts.

Half of each head is turned by positions. Routers are DeepSeek-V3's. Left out: the layer that predicts tokens after the
next one (`num_nextn_predict_layers`).
"""

from collections.abc import Container
from functools import partial
from typing import Any

from gspo_jax.models import tensors
from gspo_jax.models.attention import Attention, HeadNorm
from gspo_jax.models.config import ModelConfig, Stack
from gspo_jax.models.config_json import SUPPORTED, ConfigJson, common_fields
from gspo_jax.models.moe import MLP, MoE, sigmoid_router

MODEL_TYPES = ("glm4_moe",)

_SUPPORTED = SUPPORTED | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
_SUPPORTED |= {"attention_bias": (False, True)}
del _SUPPORTED["partial_rotary_factor"]


def read(source: ConfigJson) -> ModelConfig:
    """Return the model of a config.json. Raise a UserError as `ConfigJson`."""
    source.check(_SUPPORTED)
    common = source.common(positions=131072, eps=1e-5, pad=None, eos=None, rotary=0.5)
    experts, width = source.size("n_routed_experts", default=128), source.size("moe_intermediate_size", default=1408)
    return ModelConfig(
        family="glm4_moe",
        **common,
        head_dim=source.size("head_dim", default=common["hidden_size"] // common["num_heads"]),
        qk_norm=source.flag("use_qk_norm"),
        attention_bias=source.flag("attention_bias"),
        dense_layers=min(source.count("first_k_dense_replace", default=1), common["num_layers"]),
        num_experts=experts,
        experts_per_token=source.experts_per_token(experts, default=8),
        moe_intermediate_size=width,
        norm_topk_prob=source.flag("norm_topk_prob", default=True),
        expert_groups=source.size("n_group", default=1),
        groups_per_token=source.size("topk_group", default=1),
        routed_scaling_factor=source.number("routed_scaling_factor", source.fields.get("routed_scaling_factor", 1.0)),
        shared_intermediate_size=width * source.count("n_shared_experts", default=1),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json."""
    fields, share = common_fields(config), {"partial_rotary_factor": config.partial_rotary_factor}
    return fields | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "head_dim": config.head_dim,
        "rope_parameters": fields["rope_parameters"] | share,
        **share,
        "use_qk_norm": config.qk_norm,
        "first_k_dense_replace": config.dense_layers,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "n_shared_experts": config.shared_intermediate_size // config.moe_intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "n_group": config.expert_groups,
        "topk_group": config.groups_per_token,
        "norm_topk_prob": config.norm_topk_prob,
        "routed_scaling_factor": config.routed_scaling_factor,
        "num_nextn_predict_layers": 0,
    }


def stacks(config: ModelConfig) -> tuple[Stack, ...]:
    """Return the dense layers and the routed ones."""
    attention = partial(Attention, norm=HeadNorm if config.qk_norm else None)
    dense = Stack(layers=config.dense_layers, attention=attention, feed_forward=MLP, width=config.intermediate_size)
    routed = Stack(
        layers=config.num_layers - config.dense_layers,
        attention=attention,
        feed_forward=partial(MoE, choose=sigmoid_router, biased=True),
        width=config.moe_intermediate_size,
        experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        shared_width=config.shared_intermediate_size,
    )
    return tuple(stack for stack in (dense, routed) if stack.layers)


def rules(config: ModelConfig, names: Container[str]) -> dict[str, tensors.Rule]:
    """Return the checkpoint tensors of every parameter, by path."""
    attention = tensors.ATTENTION | (tensors.ATTENTION_BIAS if config.attention_bias else {})
    attention |= tensors.HEAD_NORMS if config.qk_norm else {}
    routed = tensors.experts(names, first=config.dense_layers) | tensors.ROUTER_BIAS
    routed |= tensors.shared("shared_experts") if config.shared_intermediate_size else {}
    own = [attention | (routed if stack.is_routed else tensors.DENSE) for stack in stacks(config)]
    return tensors.of_model(config, *own)


def _glm45(layers: int, hidden: int, widths: tuple[int, int], experts: int, **others: Any) -> ModelConfig:
    """`widths` are of dense layers and of experts. GLM-4.6 and 4.7 differ in positions alone."""
    return ModelConfig(
        family="glm4_moe",
        vocab_size=151552,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=96,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=widths[0],
        attention_bias=True,
        num_experts=experts,
        experts_per_token=8,
        moe_intermediate_size=widths[1],
        shared_intermediate_size=widths[1],
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        eos_token_ids=(151329, 151336, 151338),
        pad_token_id=151329,
        **others,
    )


PUBLISHED = {
    "GLM-4.5-Air": _glm45(46, 4096, (10944, 1408), 128, dense_layers=1),
    "GLM-4.5": _glm45(92, 5120, (12288, 1536), 160, dense_layers=3, qk_norm=True, routed_scaling_factor=2.5),
}
