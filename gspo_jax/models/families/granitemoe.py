"""Granite's mixtures of experts (granite-3.0 and 3.1): all layers routed, four multipliers, no norm of queries or keys.

The router is a softmax over the K largest logits. Not implemented: biases (`attention_bias`), and the kin with shared
experts or state-space layers.
"""

import dataclasses
from collections.abc import Container
from functools import partial
from typing import Any

from gspo_jax.models import tensors
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.config_json import SUPPORTED, ConfigJson, common_fields
from gspo_jax.models.families import qwen3

MODEL_TYPES = ("granitemoe",)

_MULTIPLIERS = "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"


def read(source: ConfigJson) -> ModelConfig:
    """Return the model of a config.json. Raise a UserError as `ConfigJson`.

    `intermediate_size` is an expert's width. Heads divide the hidden size.
    """
    common = source.common(positions=2048, eps=1e-6, pad=None, eos=2)
    head_dim = common["hidden_size"] // common["num_heads"]
    source.check(SUPPORTED | {"head_dim": (head_dim, None)})
    experts = source.size("num_local_experts", default=8)
    factors: dict[str, Any] = {name: source.number(name, source.fields.get(name, 1.0)) for name in _MULTIPLIERS}
    return ModelConfig(
        family="granitemoe",
        **common,
        **factors,
        head_dim=head_dim,
        num_experts=experts,
        experts_per_token=source.experts_per_token(experts, default=2),
        moe_intermediate_size=common["intermediate_size"],
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json."""
    return common_fields(config) | {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "intermediate_size": config.moe_intermediate_size,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        **{name: getattr(config, name) for name in _MULTIPLIERS},
    }


stacks = partial(qwen3.stacks, norm=None)
"""As of a routed Qwen3, without its norms."""

_MOE = "model.layers.{L}.block_sparse_moe."
_EXPERT = _MOE + "experts.{E}."
_ROUTED = {
    "mlp.router": tensors.Rule(_MOE + "router.layer.weight", "L D E -> E D", module=_MOE + "router"),
    "mlp.gate": tensors.Rule(_MOE + "input_linear.weight", "L E D F -> E F D", half=0, module=_EXPERT + "gate_proj"),
    "mlp.up": tensors.Rule(_MOE + "input_linear.weight", "L E D F -> E F D", half=1, module=_EXPERT + "up_proj"),
    "mlp.down": tensors.Rule(_MOE + "output_linear.weight", "L E F D -> E D F", module=_EXPERT + "down_proj"),
}
_RENAMED = {"router.layer.weight": "router.weight", "input_linear.weight": "experts.gate_up_proj"}
_RENAMED |= {"output_linear.weight": "experts.down_proj"}
"""Tensors as transformers 5 has them in memory, and on disk with save_original_format=False."""


def rules(config: ModelConfig, names: Container[str]) -> dict[str, tensors.Rule]:
    """Return the checkpoint tensors of every parameter, by path."""
    routed = _ROUTED
    if _MOE.format(L=0) + "experts.down_proj" in names:
        new = {_MOE + old: _MOE + name for old, name in _RENAMED.items()}
        routed = {path: dataclasses.replace(rule, tensor=new[rule.tensor]) for path, rule in routed.items()}
    return tensors.of_model(config, tensors.ATTENTION | routed)


def _granite31(layers: int, hidden: int, heads: int, experts: int, theta: float) -> ModelConfig:
    return ModelConfig(
        family="granitemoe",
        vocab_size=49155,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=512,
        num_experts=experts,
        experts_per_token=8,
        moe_intermediate_size=512,
        rope_theta=theta,
        attention_multiplier=1 / 64,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=6.0,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
        eos_token_ids=(0,),
        pad_token_id=0,
    )


PUBLISHED = {
    "granite-3.1-1b-a400m": _granite31(24, 1024, 16, 32, 1.5e6),
    "granite-3.1-3b-a800m": _granite31(32, 1536, 24, 40, 1e7),
}
