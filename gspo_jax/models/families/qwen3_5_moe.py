"""Qwen3.5, text alone: Qwen3-Next with separate projections of the delta rule; mixtures of experts, and dense models.

A folder of the whole vision-language model is read for its text tensors, `model.language_model.*`. A text model is
written. Left out: vision (`model.visual.*`), and the layer that predicts tokens after the next one (`mtp.*`). All axes
of a token's position are equal in text, so `mrope_section` changes nothing.
"""

import dataclasses
from collections.abc import Container
from functools import partial
from typing import Any

from gspo_jax.models import tensors
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.config_json import ConfigJson
from gspo_jax.models.families import qwen3_next
from gspo_jax.models.families.qwen3_next import FULL, LINEAR

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_text")

_WHOLE = "model.language_model."
"""Prefix of text tensors in the whole model's folder."""


def read(source: ConfigJson) -> ModelConfig:
    """Return the text model of a config.json. Raise a UserError as `ConfigJson`, or as `qwen3_next.read`."""
    fields = source.fields
    if isinstance(fields.get("text_config"), dict):
        outer = {name: fields[name] for name in ("tie_word_embeddings", "quantization_config") if name in fields}
        fields = {**fields["text_config"], "model_type": fields["model_type"], **outer}
    experts = (256, 8) if "moe" in fields["model_type"] else None
    if experts is not None:  # no layer has the dense feed-forward of this width, which few folders tell
        fields = {"intermediate_size": fields.get("moe_intermediate_size", 512), **fields}
    inner = dataclasses.replace(source, fields=fields)
    return ModelConfig(family="qwen3_5_moe", **qwen3_next.hybrid_fields(inner, experts=experts))


def write(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json, for a text model."""
    kind = ("Qwen3_5Moe", "qwen3_5_moe_text") if config.num_experts else ("Qwen3_5", "qwen3_5_text")
    return qwen3_next.written(config) | {"architectures": [f"{kind[0]}ForCausalLM"], "model_type": kind[1]}


stacks = partial(qwen3_next.stacks, grouped=False)


def rules(config: ModelConfig, names: Container[str]) -> dict[str, tensors.Rule]:
    """Return the checkpoint tensors of every parameter, by path."""
    if _WHOLE + "embed_tokens.weight" not in names:
        return qwen3_next.rules(config, names, grouped=False)
    found = qwen3_next.rules(config, _Inner(names), grouped=False)
    return {path: dataclasses.replace(rule, tensor=_whole(rule.tensor)) for path, rule in found.items()}


def _whole(name: str) -> str:
    """Return a text tensor's name in the whole model's folder."""
    return name.replace("model.", _WHOLE, 1) if name.startswith("model.") else name


@dataclasses.dataclass(frozen=True)
class _Inner:
    """The text tensors' own names in a folder of the whole model."""

    names: Container[str]

    def __contains__(self, name: object) -> bool:
        return _whole(str(name)) in self.names


def _shape(
    layers: int,
    hidden: int,
    heads: tuple[int, int],
    value_heads: int,
    wide: int,
    *,
    tied: bool = False,
    experts: int = 0,
) -> ModelConfig:
    """`heads` are of queries and keys; `wide` is the width of the feed-forward, or of one of 8 chosen experts."""
    routed: dict[str, Any] = {
        "num_experts": experts,
        "experts_per_token": 8,
        "moe_intermediate_size": wide,
        "shared_intermediate_size": wide,
    }
    return ModelConfig(
        family="qwen3_5_moe",
        vocab_size=248320,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=256,
        intermediate_size=wide,
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        zero_centred_norms=True,
        layer_types=(LINEAR, LINEAR, LINEAR, FULL) * (layers // 4),
        linear_key_heads=16,
        linear_value_heads=value_heads,
        linear_key_dim=128,
        linear_value_dim=128,
        tie_word_embeddings=tied,
        max_position_embeddings=262144,
        eos_token_ids=(248044,),
        pad_token_id=248044,
        **(routed if experts else {}),
    )


PUBLISHED = {"Qwen3.5-35B-A3B": _shape(40, 2048, (16, 2), 32, 512, experts=256)}
