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
from gspo_jax.models.families import deepseek_v3

MODEL_TYPES = ("glm4_moe",)

_SUPPORTED = SUPPORTED | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
_SUPPORTED |= {"attention_bias": (False, True)}
del _SUPPORTED["partial_rotary_factor"]


def read(source: ConfigJson) -> ModelConfig:
    """Return the model of a config.json. Raise a UserError as `ConfigJson`."""
    source.check(_SUPPORTED)
    common = source.common(positions=131072, eps=1e-5, pad=None, eos=None, rotary=0.5)
    return ModelConfig(
        family="glm4_moe",
        **common,
        head_dim=source.size("head_dim", default=common["hidden_size"] // common["num_heads"]),
        qk_norm=source.flag("use_qk_norm"),
        attention_bias=source.flag("attention_bias"),
        **deepseek_v3.mixture(source, experts=128, chosen=8, width=1408, groups=(1, 1), factor=1.0),
        dense_layers=min(source.count("first_k_dense_replace", default=1), common["num_layers"]),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json."""
    fields, share = common_fields(config), {"partial_rotary_factor": config.partial_rotary_factor}
    return (
        fields
        | deepseek_v3.mixture_fields(config)
        | {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "head_dim": config.head_dim,
            "rope_parameters": fields["rope_parameters"] | share,
            **share,
            "use_qk_norm": config.qk_norm,
        }
    )


def stacks(config: ModelConfig) -> tuple[Stack, ...]:
    """Return the dense layers and the routed ones."""
    return deepseek_v3.stacks(config, partial(Attention, norm=HeadNorm if config.qk_norm else None))


def rules(config: ModelConfig, names: Container[str]) -> dict[str, tensors.Rule]:
    """Return the checkpoint tensors of every parameter, by path."""
    attention = tensors.ATTENTION | (tensors.ATTENTION_BIAS if config.attention_bias else {})
    return deepseek_v3.rules_with(attention | (tensors.HEAD_NORMS if config.qk_norm else {}), config, names)


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
