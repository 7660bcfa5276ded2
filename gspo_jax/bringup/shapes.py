"""Shapes that fit a machine: a published one, halved where it is largest until its training fits."""

import dataclasses
import math
from typing import Any, TypeAlias

import jax

from gspo_jax.models import transformer
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.published import find
from gspo_jax.parallel.mesh import param_shardings, placed, shard_bytes

SHAPE = "Qwen3-30B-A3B"
"""What an accelerator is tried with, or a part of it."""
TRAINED_BYTES = 16
"""Of a parameter: its value, two moments and a gradient, in float32."""
SHARE = 0.5
"""Of the memory, for these."""
AnyMesh: TypeAlias = Any
"""A mesh, or an abstract one."""
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


def trained_bytes(model: ModelConfig, mesh: AnyMesh) -> int:
    """Return the bytes of a device of the mesh that a model's training holds, without activations."""
    shapes = transformer.abstract(model)[1]
    return TRAINED_BYTES // 4 * shard_bytes(placed(shapes, param_shardings(shapes, mesh)))


def fitting(memory: float, mesh: AnyMesh) -> ModelConfig:
    """Return SHAPE, or the part of it whose training holds at most SHARE of a device's `memory` bytes.

    Layers, experts and vocabulary are halved in turn, whichever saves most, as far as the mesh divides them.
    """
    model = find(SHAPE)
    least = LEAST | {"num_experts": max(2 * model.experts_per_token, mesh.shape["expert"])}
    while trained_bytes(model, mesh) > SHARE * memory:
        tries = [
            dataclasses.replace(model, **{name: getattr(model, name) // 2})
            for name, floor in least.items()
            if getattr(model, name) // 2 >= floor
            and (name != "vocab_size" or getattr(model, name) // 2 % mesh.shape["fsdp"] == 0)
        ]
        if not tries:
            break
        model = min(tries, key=lambda one: trained_bytes(one, mesh))
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
