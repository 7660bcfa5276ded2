"""Shapes that fit a machine: a published one, halved where it is largest until its training fits."""

import dataclasses
import math

import jax

from gspo_jax.models import transformer
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.published import find

SHAPE = "Qwen3-30B-A3B"
"""What an accelerator is tried with, or a part of it."""
TRAINED_BYTES = 16
"""Of a parameter: its value, two moments and a gradient, in float32."""
SHARE = 0.4
"""Of the memory, for these."""
LEAST = {"num_layers": 2, "vocab_size": 4096}
SMALL = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    num_experts=8,
    experts_per_token=2,
    moe_intermediate_size=32,
)
"""What a CPU is tried with."""


def parameters(model: ModelConfig) -> int:
    """Return the number of a model's parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(transformer.abstract(model)[1]))


def fitting(memory: float, *, shards: int, experts: int) -> ModelConfig:
    """Return SHAPE, or the part of it whose training takes at most SHARE of `memory` bytes.

    Layers, experts and vocabulary are halved in turn, whichever saves most, as far as `shards` of the vocabulary and
    `experts` shards of experts allow.
    """
    model = find(SHAPE)
    least = LEAST | {"num_experts": max(2 * model.experts_per_token, experts)}
    while TRAINED_BYTES * parameters(model) > SHARE * memory:
        tries = [
            dataclasses.replace(model, **{name: getattr(model, name) // 2})
            for name, floor in least.items()
            if getattr(model, name) // 2 >= floor and (name != "vocab_size" or getattr(model, name) // 2 % shards == 0)
        ]
        if not tries:
            break
        model = min(tries, key=parameters)
    return model


def described(model: ModelConfig, whole: ModelConfig) -> str:
    """Return what is left of a shape, such as "12 of 48 layers"."""
    names = {"num_layers": "layers", "num_experts": "experts", "vocab_size": "tokens"}
    cut = [
        f"{getattr(model, field)} of {getattr(whole, field)} {name}"
        for field, name in names.items()
        if getattr(model, field) != getattr(whole, field)
    ]
    return f" with {', '.join(cut)}" if cut else ""
