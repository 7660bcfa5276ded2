"""GLM-4.7-Flash: DeepSeek-V3's layers, with other defaults, and a list that names the dense layers.

Not implemented: dense layers after routed ones.
"""

from typing import Any

from gspo_jax.errors import UserError
from gspo_jax.models.config import Latent, ModelConfig
from gspo_jax.models.config_json import ConfigJson, common_fields
from gspo_jax.models.families import deepseek_v3

MODEL_TYPES = ("glm4_moe_lite",)

stacks, rules = deepseek_v3.stacks, deepseek_v3.rules


def read(source: ConfigJson) -> ModelConfig:
    """Return the model of a config.json. Raise a UserError as `ConfigJson`.

    Without `mlp_layer_types` the first layer is dense.
    """
    common = source.common(positions=202752, eps=1e-5, pad=None, eos=1)
    kinds = source.fields.get("mlp_layer_types")
    dense = min(1, common["num_layers"]) if kinds is None else kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds is not None and kinds != _kinds(dense, common["num_layers"]):
        raise UserError(
            f'{source.file}: mlp_layer_types is not some "dense" and then "sparse", as many as num_hidden_layers '
            f"{common['num_layers']}; only that is supported"
        )
    return ModelConfig(
        family="glm4_moe_lite",
        **common | deepseek_v3.latent(source, common["num_heads"]),
        **deepseek_v3.mixture(source, experts=64, chosen=4, width=1536, groups=(1, 1), factor=1.8),
        dense_layers=dense,
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json."""
    own = deepseek_v3.latent_fields(config) | deepseek_v3.mixture_fields(config)
    return (
        common_fields(config)
        | own
        | {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "model_type": "glm4_moe_lite",
            "mlp_layer_types": _kinds(config.dense_layers, config.num_layers),
        }
    )


def _kinds(dense: int, layers: int) -> list[str]:
    return ["dense"] * dense + ["sparse"] * (layers - dense)


PUBLISHED = {
    "GLM-4.7-Flash": ModelConfig(
        family="glm4_moe_lite",
        vocab_size=154880,
        hidden_size=2048,
        num_layers=47,
        num_heads=20,
        num_kv_heads=20,
        head_dim=64,
        intermediate_size=10240,
        latent=Latent(rank=512, query_rank=768, plain_dim=192, value_dim=256, interleaved=True),
        num_experts=64,
        dense_layers=1,
        experts_per_token=4,
        moe_intermediate_size=1536,
        routed_scaling_factor=1.8,
        shared_intermediate_size=1536,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        max_position_embeddings=202752,
        eos_token_ids=(154820, 154827, 154829),
        pad_token_id=154820,
    ),
}
