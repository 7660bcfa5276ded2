"""The shape of a Qwen3 or Qwen3-MoE transformer, and how a parameter is declared."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.types import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The published fields of Qwen3 and Qwen3-MoE that change the computation."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of the dense feed-forward (unused by an all-MoE model, kept for the Hugging Face config)."""
    num_experts: int = 0
    """Experts per layer; 0 makes every layer dense."""
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    """Renormalise the chosen experts' probabilities to sum to one."""
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 40960
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        """Raises a UserError for sizes that make no transformer."""
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                f"use num_kv_heads of {', '.join(map(str, mesh_lib.divisors(self.num_heads)))}"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd; rotary positions turn pairs, use an even number")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise UserError(
                f"experts_per_token {self.experts_per_token} is outside 1 to num_experts {self.num_experts}; "
                "choose one inside"
            )

    @property
    def expert_dtype(self) -> np.dtype:
        """The smallest signed integer that holds every expert's id, and -1."""
        return np.min_scalar_type(-max(self.num_experts, 1))

    def check_mesh(self, sizes: dict[str, int]) -> None:
        """Raises a UserError where a mesh axis does not divide the dimension it splits."""
        split: dict[str, list[tuple[str, int]]] = {
            "tensor": [
                ("number of heads", self.num_heads),
                ("number of key/value heads", self.num_kv_heads),
                ("vocabulary size", self.vocab_size),
                ("feed-forward width", self.moe_intermediate_size if self.num_experts else self.intermediate_size),
            ],
            "fsdp": [("hidden size", self.hidden_size)],
            "expert": [("number of experts", self.num_experts)] if self.num_experts else [],
        }
        if not self.num_experts and sizes["expert"] > 1:
            raise UserError(f"mesh axis expert = {sizes['expert']} but the model is dense; use expert = 1")
        for axis, dimensions in split.items():
            for what, size in dimensions:
                if size % sizes[axis]:
                    raise UserError(
                        f"mesh axis {axis} = {sizes[axis]} does not divide the {what} {size}; "
                        f"use one of {', '.join(map(str, mesh_lib.divisors(size)))}"
                    )


def normal(stddev: float = 0.02) -> Callable[..., jax.Array]:
    """Qwen3's initialiser: a plain normal."""
    return jax.nn.initializers.normal(stddev)


ones = jax.nn.initializers.ones


def parameter(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    init: Callable[..., Any] | None = None,
    *,
    float32: bool = False,
) -> nnx.Param[jax.Array]:
    """Declares a parameter once: its shape, its logical axes (see parallel/mesh.py) and its initialiser.

    Parameters are stored in float32 by the trainer; `float32` marks those that are read in float32 too, whatever the
    compute dtype, and that the sampler's copy therefore leaves as they are.
    """
    return nnx.Param((init or normal())(rngs.params(), shape, jnp.float32), axes=axes, float32=float32)
