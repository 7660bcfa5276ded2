"""Model shapes: a transformer's sizes, its stacks of equal layers, and the declaration of a parameter."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gspo_jax.errors import UserError, choices
from gspo_jax.parallel import mesh as mesh_lib

FAMILIES: dict[str, Any] = {}
"""Every family, by the name of its file; `models/families` fills it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The sizes and constants of a model that change its computation; `families` says how they become layers."""

    family: str = "qwen3"
    """File in `models/families` that builds the model and reads and writes its Hugging Face folders."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of the dense feed-forward (unused by an all-MoE model, kept for the Hugging Face config)."""
    num_experts: int = 0
    """Experts per routed layer; 0 for a dense model."""
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
        """Raise a UserError for sizes that make no transformer."""
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
    def stacks(self) -> tuple["Stack", ...]:
        """The model's layers as its family stacks them, first to last.

        Raises:
          UserError: no family has this name.
        """
        if self.family not in FAMILIES:
            raise UserError(f"unknown model family {self.family!r}; {choices(self.family, FAMILIES)}")
        return FAMILIES[self.family].stacks(self)

    @property
    def routed_layers(self) -> int:
        """Layers with a router: the leading dimension L of routes, of load and of drift. 0 for a dense model."""
        return sum(stack.layers for stack in self.stacks if stack.is_routed)

    @property
    def is_routed(self) -> bool:
        """True if any layer has a router."""
        return self.routed_layers > 0

    @property
    def route_shape(self) -> tuple[int, int]:
        """[L, K] of a token's route: routed layers, experts per token; (0, 0) for a dense model."""
        return (self.routed_layers, self.experts_per_token) if self.is_routed else (0, 0)

    @property
    def expert_dtype(self) -> np.dtype:
        """The smallest signed integer dtype that holds every expert id, and -1."""
        return np.min_scalar_type(-max(self.num_experts, 1))

    def check_mesh(self, sizes: dict[str, int]) -> None:
        """Raise a UserError if a mesh axis does not divide the dimension it splits."""
        if not self.is_routed and sizes["expert"] > 1:
            raise UserError(f"mesh axis expert = {sizes['expert']} but the model is dense; use expert = 1")
        routed = [stack for stack in self.stacks if stack.is_routed]
        split: dict[str, list[tuple[str, int]]] = {
            "tensor": [
                ("number of heads", self.num_heads),
                ("number of key/value heads", self.num_kv_heads),
                ("vocabulary size", self.vocab_size),
                *(("feed-forward width", stack.width) for stack in self.stacks),
            ],
            "fsdp": [("hidden size", self.hidden_size)],
            "expert": [("number of experts", stack.experts) for stack in routed],
        }
        for axis, dimensions in split.items():
            for what, size in dimensions:
                if size % sizes[axis]:
                    raise UserError(
                        f"mesh axis {axis} = {sizes[axis]} does not divide the {what} {size}; "
                        f"use one of {', '.join(map(str, mesh_lib.divisors(size)))}"
                    )


class LayerFlops(NamedTuple):
    """Floating-point operations of one layer's forward, by what they are counted per."""

    trunk: int
    """Per token: projections, router, and the feed-forward up to its last matrix."""
    down: int
    """Per token: the feed-forward's last matrix, whose output the backward pass does not need."""
    attention: int
    """Per query and visible key, all heads together: scores and weighted values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """Consecutive layers of equal shapes, which one scan runs."""

    layers: int
    """Layers in the stack."""
    attention: Callable[..., nnx.Module]
    """Makes the stack's attention: `attention(config, stack, rngs=…)`."""
    feed_forward: Callable[..., nnx.Module]
    """Makes the stack's feed-forward: `feed_forward(config, stack, dispatch, rngs=…)`."""
    width: int
    """Inner width F of the feed-forward, or of one expert."""
    experts: int = 0
    """Experts per layer; 0 for dense layers."""
    experts_per_token: int = 0
    """Experts per token; 0 for dense layers."""
    flops: LayerFlops
    """Operations of one of the layers."""

    @property
    def is_routed(self) -> bool:
        """True if the layers have a router."""
        return self.experts > 0

    @property
    def active_width(self) -> int:
        """Inner width that one token passes through: K · F in a routed layer, F in a dense one."""
        return self.width * self.experts_per_token if self.is_routed else self.width


def normal(stddev: float = 0.02) -> Callable[..., jax.Array]:
    """The initialiser of matrices: a plain normal."""
    return jax.nn.initializers.normal(stddev)


ones = jax.nn.initializers.ones


def parameter(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    init: Callable[..., Any] | None = None,
    *,
    float32: bool = False,
    kind: type[nnx.Param] = nnx.Param,
) -> nnx.Param[jax.Array]:
    """Declare a parameter once: its shape, its logical axes (see parallel/mesh.py) and its initialiser.

    The trainer stores parameters in float32. `float32` marks those that the forward also reads in float32, whatever
    the compute dtype; the sampler's copy therefore keeps them as they are. `kind` tells parameters apart that are
    trained from those that are not.
    """
    return kind((init or normal())(rngs.params(), shape, jnp.float32), axes=axes, float32=float32)


def dotted(key: jax.tree_util.KeyPath) -> str:
    """The path of a parameter, such as "layers.0.mlp.gate"; a leaf's last key is the value inside its nnx.Param."""
    return jax.tree_util.keystr(key[:-1], simple=True, separator=".")


def by_path(params: nnx.State) -> dict[str, Any]:
    """The leaves of parameters, or of their shapes, by path."""
    return {dotted(key): leaf for key, leaf in jax.tree_util.tree_leaves_with_path(params)}
