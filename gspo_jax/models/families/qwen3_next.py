"""Qwen3-Next: gated delta rule layers with a gated full-attention layer after every third, all with routed experts.

A quarter of each attention head is turned by positions. Each layer has a gated shared expert. Norms are zero-centred.
Left out: the layer that predicts tokens after the next one (tensors `mtp.*`). Not implemented: biases, mixed dense and
routed layers (`decoder_sparse_step`, `mlp_only_layers`), and models without a full-attention layer.
"""

from collections.abc import Container
from functools import partial
from typing import Any

from gspo_jax.errors import UserError
from gspo_jax.models import tensors
from gspo_jax.models.attention import Attention, HeadNorm
from gspo_jax.models.config import ModelConfig, Stack, periods
from gspo_jax.models.config_json import SUPPORTED, ConfigJson, common_fields
from gspo_jax.models.delta import DeltaMixer, DeltaState
from gspo_jax.models.moe import MLP, MoE, softmax_router

MODEL_TYPES = ("qwen3_next",)

LINEAR, FULL = "linear_attention", "full_attention"

SUPPORTED = SUPPORTED | {
    "layer_types": ([FULL, LINEAR], [FULL], []),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}
del SUPPORTED["partial_rotary_factor"]


def read(source: ConfigJson) -> ModelConfig:
    """Return the model of a config.json. Raise a UserError as `ConfigJson`, or for a wrong list of layers."""
    return ModelConfig(
        family="qwen3_next",
        **hybrid_fields(source, experts=(512, 10)),
        norm_topk_prob=source.flag("norm_topk_prob", default=True),
    )


def hybrid_fields(source: ConfigJson, *, experts: tuple[int, int] | None) -> dict[str, Any]:
    """Return the `ModelConfig` fields that Qwen3-Next and Qwen3.5 share. Raise as `read`.

    Args:
      experts: transformers' defaults of how many there are and how many a token chooses; None: the model is dense.
    """
    source.check(SUPPORTED)
    common = source.common(positions=32768, eps=1e-6, pad=None, eos=None, rotary=0.25)
    layers, types = common["num_layers"], source.fields.get("layer_types")
    if not types:
        interval = source.size("full_attention_interval", default=4)
        types = [LINEAR if (i + 1) % interval else FULL for i in range(layers)]
    if len(types) != layers or FULL not in types:
        raise UserError(
            f"{source.file}: layer_types has {len(types)} layers, {types.count(FULL)} of them {FULL}; it must have "
            f"num_hidden_layers = {layers}, with one or more {FULL}"
        )
    heads = source.size("linear_num_key_heads", default=16), source.size("linear_num_value_heads", default=32)
    if heads[1] % heads[0]:
        raise UserError(
            f"{source.file}: linear_num_value_heads {heads[1]} is not a multiple of linear_num_key_heads {heads[0]}; "
            "download the file again"
        )
    if experts is not None:
        count = source.size("num_experts", "num_local_experts", default=experts[0])
        common |= {
            "num_experts": count,
            "experts_per_token": source.experts_per_token(count, default=experts[1]),
            "moe_intermediate_size": source.size("moe_intermediate_size", default=512),
            "shared_intermediate_size": source.size("shared_expert_intermediate_size", default=512),
        }
    return common | {
        "head_dim": source.size("head_dim", default=256),
        "zero_centred_norms": True,
        "layer_types": tuple(types),
        "linear_key_heads": heads[0],
        "linear_value_heads": heads[1],
        "linear_key_dim": source.size("linear_key_head_dim", default=128),
        "linear_value_dim": source.size("linear_value_head_dim", default=128),
        "linear_conv_width": source.size("linear_conv_kernel_dim", default=4),
    }


def write(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json."""
    return written(config) | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "norm_topk_prob": config.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def written(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that Qwen3-Next and Qwen3.5 share."""
    fields, share = common_fields(config), {"partial_rotary_factor": config.partial_rotary_factor}
    routed = {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.moe_intermediate_size,
        "shared_expert_intermediate_size": config.shared_intermediate_size,
    }
    return fields | {
        "head_dim": config.head_dim,
        "rope_parameters": fields["rope_parameters"] | share,
        **share,
        "layer_types": list(config.layer_types),
        "linear_num_key_heads": config.linear_key_heads,
        "linear_num_value_heads": config.linear_value_heads,
        "linear_key_head_dim": config.linear_key_dim,
        "linear_value_head_dim": config.linear_value_dim,
        "linear_conv_kernel_dim": config.linear_conv_width,
        **(routed if config.num_experts else {}),
    }


def stacks(config: ModelConfig, *, grouped: bool = True) -> tuple[Stack, ...]:
    """Return the stacks of the layers' pattern, one of each layer in it. `grouped` is as in `DeltaMixer`."""
    routed = config.num_experts > 0
    shared: dict[str, Any] = {
        "feed_forward": partial(MoE, choose=softmax_router, gated=True) if routed else MLP,
        "width": config.moe_intermediate_size if routed else config.intermediate_size,
        "experts": config.num_experts,
        "experts_per_token": config.experts_per_token,
        "shared_width": config.shared_intermediate_size,
    }
    mixers = {
        LINEAR: {"attention": partial(DeltaMixer, grouped=grouped), "state": DeltaState.shapes},
        FULL: {"attention": partial(Attention, norm=HeadNorm, gated=True)},
    }
    return tuple(
        Stack(layers=times, turns=len(pattern), **mixers[kind], **shared)
        for pattern, times in periods(config.layer_types)
        for kind in pattern
    )


_LINEAR = "model.layers.{L}.linear_attn."
_PROJECTED = {
    f"attention.{name}": tensors.Rule(f"{_LINEAR}in_proj_{name}.weight", "L D H -> H D")
    for name in ("qkvz", "ba", "qkv", "z", "b", "a")
}
_DELTA = {
    "attention_norm": tensors.ATTENTION["attention_norm"],
    "attention.conv": tensors.Rule(f"{_LINEAR}conv1d.weight", "L C i W -> C i W"),
    "attention.a_log": tensors.Rule(f"{_LINEAR}A_log", "L H -> H"),
    "attention.dt_bias": tensors.Rule(f"{_LINEAR}dt_bias", "L H -> H"),
    "attention.norm": tensors.Rule(f"{_LINEAR}norm.weight", "L h -> h"),
    "attention.out": tensors.Rule(f"{_LINEAR}out_proj.weight", "L H D -> D H"),
    "mlp_norm": tensors.ATTENTION["mlp_norm"],
}


def rules(config: ModelConfig, names: Container[str], *, grouped: bool = True) -> dict[str, tensors.Rule]:
    """Return the checkpoint tensors of every parameter, by path."""
    projections = ("qkvz", "ba") if grouped else ("qkv", "z", "b", "a")
    mixers = {
        LINEAR: _DELTA | {path: _PROJECTED[path] for path in (f"attention.{name}" for name in projections)},
        FULL: tensors.ATTENTION | tensors.HEAD_NORMS,
    }
    routed = tensors.experts(names) | tensors.shared("shared_expert") | tensors.SHARED_GATE
    feed_forward = routed if config.num_experts else tensors.DENSE
    kinds = [kind for pattern, _ in periods(config.layer_types) for kind in pattern]
    return tensors.of_model(config, *(mixers[kind] | feed_forward for kind in kinds))


PUBLISHED = {
    "Qwen3-Next-80B-A3B": ModelConfig(
        family="qwen3_next",
        vocab_size=151936,
        hidden_size=2048,
        num_layers=48,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        intermediate_size=5120,
        num_experts=512,
        experts_per_token=10,
        moe_intermediate_size=512,
        shared_intermediate_size=512,
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        zero_centred_norms=True,
        layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 12,
        linear_key_heads=16,
        linear_value_heads=32,
        linear_key_dim=128,
        linear_value_dim=128,
        max_position_embeddings=262144,
        eos_token_ids=(151645,),
        pad_token_id=151643,
    ),
}
