"""Mixtral (arXiv 2401.04088): Mistral's attention, every layer routed by a softmax over the K largest logits.

Not implemented: a sliding window in use.
"""

from collections.abc import Container
from functools import partial
from typing import Any

from gspo_jax.models import tensors
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.config_json import SUPPORTED, ConfigJson, common_fields
from gspo_jax.models.families import qwen3

MODEL_TYPES = ("mixtral",)


def read(source: ConfigJson) -> ModelConfig:
    """Return the model of a config.json. Raise a UserError as `ConfigJson`.

    `intermediate_size` is an expert's width.
    """
    source.check(SUPPORTED)
    common = source.common(positions=131072, eps=1e-5, pad=None, eos=2, theta=1e6)
    source.check_window(common["max_position_embeddings"], default=None)
    experts = source.size("num_local_experts", "num_experts", default=8)
    return ModelConfig(
        family="mixtral",
        **common,
        head_dim=source.size("head_dim", default=common["hidden_size"] // common["num_heads"]),
        num_experts=experts,
        experts_per_token=source.experts_per_token(experts, default=2),
        moe_intermediate_size=common["intermediate_size"],
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json."""
    return common_fields(config) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "head_dim": config.head_dim,
        "intermediate_size": config.moe_intermediate_size,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
    }


stacks = partial(qwen3.stacks, norm=None)
"""As of a routed Qwen3, without its norms."""

_MOE, _MODULE = "model.layers.{L}.block_sparse_moe.", "model.layers.{L}.mlp."
_ROUTED = {
    "mlp.router": tensors.Rule(_MOE + "gate.weight", "L D E -> E D", module=_MODULE + "gate"),
    **{
        f"mlp.{ours}": tensors.Rule(
            _MOE + f"experts.{{E}}.{theirs}.weight", axes, module=_MODULE + f"experts.{{E}}.{ours}_proj"
        )
        for ours, theirs, axes in (
            ("gate", "w1", "L E D F -> F D"),
            ("up", "w3", "L E D F -> F D"),
            ("down", "w2", "L E F D -> D F"),
        )
    },
}


def rules(config: ModelConfig, names: Container[str]) -> dict[str, tensors.Rule]:
    """Return the checkpoint tensors of every parameter, by path."""
    fused = _MODULE.format(L=0) + "experts.gate_up_proj" in names
    return tensors.of_model(config, tensors.ATTENTION | (tensors.experts(names) if fused else _ROUTED))


PUBLISHED = {
    "Mixtral-8x7B-v0.1": ModelConfig(
        family="mixtral",
        vocab_size=32000,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        num_experts=8,
        experts_per_token=2,
        moe_intermediate_size=14336,
        rms_norm_eps=1e-5,
        max_position_embeddings=32768,
        eos_token_ids=(2,),
    ),
}
