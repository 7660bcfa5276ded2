"""Low-rank adapters (LoRA, arXiv 2106.09685): y = x W + s · (x A) B with a frozen matrix W.

The scale s is α / √rank (rank-stabilised, arXiv 2312.03732): updates do not shrink as the rank grows. B starts at zero,
so a new adapter changes nothing. Sampler and trainer compute both products by the same code.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gspo_jax.errors import UserError, choices
from gspo_jax.kernels.adapted_matmul import LowRank
from gspo_jax.models.config import ModelConfig, by_path, dotted, parameter
from gspo_jax.models.matrices import ADAPTER

TARGETS = {
    "q_proj": ("attention.q",),
    "k_proj": ("attention.k",),
    "v_proj": ("attention.v",),
    "o_proj": ("attention.o",),
    "q_a_proj": ("attention.q_a",),
    "q_b_proj": ("attention.q_b",),
    "kv_a_proj_with_mqa": ("attention.kv_a",),
    "kv_b_proj": ("attention.kv_b",),
    "in_proj_qkvz": ("attention.qkvz",),
    "in_proj_ba": ("attention.ba",),
    "in_proj_qkv": ("attention.qkv",),
    "in_proj_z": ("attention.z",),
    "in_proj_b": ("attention.b",),
    "in_proj_a": ("attention.a",),
    "out_proj": ("attention.out",),
    "gate_proj": ("mlp.gate", "mlp.shared.gate"),
    "up_proj": ("mlp.up", "mlp.shared.up"),
    "down_proj": ("mlp.down", "mlp.shared.down"),
    "router": ("mlp.router",),
}
"""Matrices that may have an adapter: parameter paths in a block."""
STEERING = ("router", "in_proj_ba", "in_proj_b", "in_proj_a")
"""Matrices that are never int8, nor spread over `expert`."""
EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""Matrices of every expert."""
_DELTA = {"in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}
"""Matrices of the delta rule's layers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapters:
    """Which matrices have an adapter, and its rank: a static part of the model."""

    rank: int = 0
    """Rank for `targets`, matrices that all tokens pass; 0: none."""
    expert_rank: int = 0
    """Rank for `expert_targets`, each expert's matrices; 0: none."""
    alpha: float = 8.0
    targets: tuple[str, ...] = tuple(name for name in TARGETS if name != "router")
    """Names among `TARGETS`. Feed-forward names mean dense layers and shared experts."""
    expert_targets: tuple[str, ...] = EXPERTS
    """Names among `EXPERTS`."""

    def __post_init__(self) -> None:
        """Raise a UserError for an unknown target, or if no matrix has an adapter."""
        for field, names, known in (
            ("targets", self.targets, tuple(TARGETS)),
            ("expert_targets", self.expert_targets, EXPERTS),
        ):
            for name in names:
                if name not in known:
                    raise UserError(f"adapter.{field} has no {name!r}; {choices(name, known)}")
        if not ((self.rank and self.targets) or (self.expert_rank and self.expert_targets)):
            raise UserError("no matrix has an adapter; set adapter.rank or adapter.expert_rank, with targets")

    def scale(self, rank: int) -> float:
        """Return the factor of A B."""
        return self.alpha / math.sqrt(rank)

    def rank_of(self, name: str, axes: tuple[str, ...]) -> int:
        """Return a matrix's adapter rank; 0: none."""
        if "expert" in axes:
            return self.expert_rank if name in self.expert_targets else 0
        return self.rank if name in self.targets else 0


class Adapter(nnx.Module):
    """A matrix's trainable A and B, with its leading axes."""

    def __init__(self, matrix: nnx.Variable, rank: int, scale: float, *, rngs: nnx.Rngs):
        *outer, inner, across = matrix.shape
        *where, row, column = matrix.get_metadata("axes")
        batch = tuple(range(len(outer)))
        # Uniform within ±1/√n, as in `peft`.
        uniform = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", batch_axis=batch)
        zeros = jax.nn.initializers.zeros
        options: dict[str, Any] = {"float32": matrix.get_metadata("float32"), "kind": nnx.LoRAParam}
        self.a = parameter(rngs, (*outer, inner, rank), (*where, row, "rank"), uniform, **options)
        self.b = parameter(rngs, (*outer, rank, across), (*where, "rank", column), zeros, **options)
        self.scale = scale

    def low_rank(self, dtype: Any) -> LowRank:
        """Return the matrices in the compute dtype, the sampler's storage dtype."""
        return LowRank(self.a.astype(dtype), self.b.astype(dtype), self.scale)


def check(config: ModelConfig, adapters: Adapters) -> None:
    """Raise a UserError if a rank is given and no target is in the model."""
    dense = any(not stack.is_routed or stack.shared_width for stack in config.stacks)
    latent = config.latent
    direct, lacking = latent is None or latent.query_rank is None, set() if dense else set(EXPERTS)
    lacking |= set() if config.is_routed else {"router"}
    lacking |= set() if config.is_recurrent else _DELTA
    lacking |= {"kv_a_proj_with_mqa", "kv_b_proj"} if latent is None else {"k_proj", "v_proj"}
    lacking |= {"q_a_proj", "q_b_proj"} if direct else {"q_proj"}
    has = [name for name in TARGETS if name not in lacking]
    if adapters.rank and not set(adapters.targets).intersection(has):
        raise UserError(
            f"adapter.targets is {', '.join(adapters.targets)}, none of which every token of this model passes; use "
            f"some of {', '.join(has)}, or set adapter.rank to 0"
        )
    if adapters.expert_rank and not config.is_routed:
        raise UserError(f"adapter.expert_rank is {adapters.expert_rank}, and the model has no experts; set it to 0")


def add(model: Any, adapters: Adapters, *, rngs: nnx.Rngs) -> None:
    """Give a transformer its adapters."""
    for block in model.layers:
        for name, module, own in places(block):
            matrix = getattr(module, own)
            if rank := adapters.rank_of(name, matrix.get_metadata("axes")):
                setattr(module, own + ADAPTER, Adapter(matrix, rank, adapters.scale(rank), rngs=rngs))


def places(block: Any) -> list[tuple[str, nnx.Module, str]]:
    """Return the name among `TARGETS`, module and attribute of each such matrix in a block."""
    found = []
    for name, paths in TARGETS.items():
        for *parts, own in (path.split(".") for path in paths):
            module = functools.reduce(lambda module, part: getattr(module, part, None), parts, block)
            if hasattr(module, own):
                found.append((name, module, own))
    return found


def matrices(block: Any) -> list[tuple[nnx.Module, str]]:
    """Return module and attribute of each of `places` but those of a few columns, which steer much: `STEERING`."""
    return [(module, own) for name, module, own in places(block) if name not in STEERING]


def matrix_of(path: str) -> tuple[str, str]:
    """Return the path of an adapter parameter's matrix, and "a" or "b"."""
    beside, _, which = path.rpartition(".")
    return beside.removesuffix(ADAPTER), which


def split(params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Split off the adapters' parameters."""
    adapters, others = nnx.split_state(params, nnx.LoRAParam, ...)
    return adapters, others


def merge(
    adapters: nnx.State,
    base: nnx.State,
    rule: Adapters,
    *,
    scales: Mapping[str, jax.Array] = MappingProxyType({}),
    dtype: Any = jnp.float32,
) -> nnx.State:
    """Return the base with every adapter's s A B added: a model without adapters.

    Args:
      base: weights without scales.
      scales: column scales of int8 matrices, by path.
      dtype: dtype of changed matrices.
    """
    beside = {matrix_of(path): leaf for path, leaf in by_path(adapters).items()}

    def one(path: jax.tree_util.KeyPath, w: jax.Array) -> jax.Array:
        own = dotted(path)
        a, b, columns = beside.get((own, "a")), beside.get((own, "b")), scales.get(own)
        if a is None and columns is None:
            return w

        def layer(xs: tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]) -> jax.Array:
            w, a, b, columns = xs
            w = w.astype(jnp.float32)
            w = w if columns is None else w * columns[..., None, :]
            return (w if a is None or b is None else w + rule.scale(a.shape[-1]) * (a @ b)).astype(dtype)

        return jax.jit(lambda *xs: jax.lax.map(layer, xs))(w, a, b, columns)  # by layer, for the float32 copy

    return jax.tree.map_with_path(one, base)
