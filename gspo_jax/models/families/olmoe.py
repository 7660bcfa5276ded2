"""OLMoE (arXiv 2409.02060): queries and keys normed over their whole projection, every layer routed.

Not implemented: `clip_qkv`.
"""

from collections.abc import Container
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gspo_jax.kernels.decode_qkv_tpu import HeadNorms
from gspo_jax.models import tensors
from gspo_jax.models.config import ModelConfig, Stack, ones, parameter
from gspo_jax.models.config_json import SUPPORTED, ConfigJson, common_fields
from gspo_jax.models.families import qwen3

MODEL_TYPES = ("olmoe",)


def read(source: ConfigJson) -> ModelConfig:
    """Return the model of a config.json. Raise a UserError as `ConfigJson`.

    `intermediate_size` is an expert's width. Heads divide the hidden size.
    """
    common = source.common(positions=4096, eps=1e-5, pad=1, eos=50279)
    head_dim = common["hidden_size"] // common["num_heads"]
    source.check(SUPPORTED | {"clip_qkv": (None,), "head_dim": (head_dim, None)})
    experts = source.size("num_experts", "num_local_experts")
    return ModelConfig(
        family="olmoe",
        **common,
        head_dim=head_dim,
        num_experts=experts,
        experts_per_token=source.experts_per_token(experts),
        moe_intermediate_size=common["intermediate_size"],
        norm_topk_prob=source.flag("norm_topk_prob"),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json."""
    return common_fields(config) | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "intermediate_size": config.moe_intermediate_size,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.norm_topk_prob,
        "clip_qkv": None,
    }


class ProjectionNorm(nnx.Module):
    """RMS norm over all heads of a projection together, with a scale [N·h]."""

    over: HeadNorms = "projection"

    def __init__(self, config: ModelConfig, stack: Stack, axis: str, *, rngs: nnx.Rngs):
        heads = config.num_heads if axis == "heads" else config.num_kv_heads
        self.eps = config.rms_norm_eps
        self.scale = parameter(rngs, (stack.layers, heads * config.head_dim), ("layers", axis), ones, float32=True)

    def __call__(self, x: Float[Array, "B N T h"]) -> Float[Array, "B N T h"]:
        """Return the normed heads."""
        _, N, _, h = x.shape
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=(1, 3), keepdims=True) + self.eps)
        return (y * self.scale[...].reshape(1, N, 1, h)).astype(x.dtype)


stacks = partial(qwen3.stacks, norm=ProjectionNorm)
"""As of a routed Qwen3, but for the norm."""

_NORMS = {
    f"attention.{name}.scale": tensors.Rule(f"model.layers.{{L}}.self_attn.{name}.weight", "L H -> H")
    for name in ("q_norm", "k_norm")
}


def rules(config: ModelConfig, names: Container[str]) -> dict[str, tensors.Rule]:
    """Return the checkpoint tensors of every parameter, by path."""
    return tensors.of_model(config, tensors.ATTENTION | _NORMS | tensors.experts(names))


PUBLISHED = {
    "OLMoE-1B-7B-0924": ModelConfig(
        family="olmoe",
        vocab_size=50304,
        hidden_size=2048,
        num_layers=16,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        intermediate_size=1024,
        num_experts=64,
        experts_per_token=8,
        moe_intermediate_size=1024,
        norm_topk_prob=False,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        eos_token_ids=(50279,),
        pad_token_id=1,
    ),
}
