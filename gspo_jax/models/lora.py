"""Low-rank adapters (LoRA, arXiv 2106.09685): y = x W + s · (x A) B beside a matrix W that stays as it is.

The scale s is α / √rank (rank-stabilised, arXiv 2312.03732), so that the size of an update does not shrink as the rank
grows. B starts at zero: a new adapter changes nothing. Base and adapter are never added up; sampler and trainer compute
both products by the same code, that of experts in kernels/adapted_matmul.py.
"""

import dataclasses
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
    "q_proj": "attention.q",
    "k_proj": "attention.k",
    "v_proj": "attention.v",
    "o_proj": "attention.o",
    "gate_proj": "mlp.gate",
    "up_proj": "mlp.up",
    "down_proj": "mlp.down",
    "router": "mlp.router",
}
"""Matrices of a layer that may have an adapter: the name of the field, and the parameter's path in a block."""
EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""Matrices that every expert of a routed layer has one of."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapters:
    """Which matrices have an adapter, and of which rank; hashable, a static part of the model."""

    rank: int = 0
    """Rank beside the matrices that all tokens pass, `targets`; 0: these have none."""
    expert_rank: int = 0
    """Rank beside each expert's matrices, `expert_targets`; 0: experts have none."""
    alpha: float = 8.0
    """α of the scale α / √rank."""
    targets: tuple[str, ...] = tuple(name for name in TARGETS if name != "router")
    """Names among `TARGETS`; those of a feed-forward mean dense layers."""
    expert_targets: tuple[str, ...] = EXPERTS
    """Names among `EXPERTS`."""

    def __post_init__(self) -> None:
        """Raise a UserError for an unknown target, or if no matrix would have an adapter."""
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
        """Factor of the product of an adapter of this rank."""
        return self.alpha / math.sqrt(rank)

    def rank_of(self, name: str, axes: tuple[str, ...]) -> int:
        """Rank of the adapter beside a matrix, of this name and these logical axes; 0 if it has none."""
        if "expert" in axes:
            return self.expert_rank if name in self.expert_targets else 0
        return self.rank if name in self.targets else 0


class Adapter(nnx.Module):
    """The trainable matrices beside a block's parameter; they lead with its layers, and a layer gets its slice."""

    def __init__(self, matrix: nnx.Variable, rank: int, scale: float, *, rngs: nnx.Rngs):
        *outer, inner, across = matrix.shape
        *where, row, column = matrix.get_metadata("axes")
        batch = tuple(range(len(outer)))
        # Uniform within ±1/√n, as `peft` has it.
        uniform = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", batch_axis=batch)
        zeros = jax.nn.initializers.zeros
        options: dict[str, Any] = {"float32": matrix.get_metadata("float32"), "kind": nnx.LoRAParam}
        self.a = parameter(rngs, (*outer, inner, rank), (*where, row, "rank"), uniform, **options)
        self.b = parameter(rngs, (*outer, rank, across), (*where, "rank", column), zeros, **options)
        self.scale = scale

    def low_rank(self, dtype: Any) -> LowRank:
        """The matrices in the dtype that they are computed with, which in the sampler they are stored in."""
        return LowRank(self.a.astype(dtype), self.b.astype(dtype), self.scale)


def check(config: ModelConfig, adapters: Adapters) -> None:
    """Raise a UserError if a rank is given and none of its targets is a matrix of the model."""
    dense = not all(stack.is_routed for stack in config.stacks)
    has = [name for name in TARGETS if name not in EXPERTS or dense]
    has = [name for name in has if name != "router" or config.is_routed]
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
        for name, (module, own) in places(block).items():
            matrix = getattr(module, own)
            if rank := adapters.rank_of(name, matrix.get_metadata("axes")):
                setattr(module, own + ADAPTER, Adapter(matrix, rank, adapters.scale(rank), rngs=rngs))


def places(block: Any) -> dict[str, tuple[nnx.Module, str]]:
    """The module and the name there of each of `TARGETS` that a block has."""
    found = {}
    for name, path in TARGETS.items():
        part, _, own = path.partition(".")
        module = getattr(block, part)
        if hasattr(module, own):
            found[name] = module, own
    return found


def matrices(block: Any) -> list[tuple[nnx.Module, str]]:
    """The same of all but the router."""
    return [place for name, place in places(block).items() if name != "router"]


def matrix_of(path: str) -> tuple[str, str]:
    """The path of the matrix that an adapter's parameter is beside, and which it is: "a" or "b"."""
    beside, _, which = path.rpartition(".")
    return beside.removesuffix(ADAPTER), which


def split(params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """The adapters' parameters, and all others."""
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
    """The base with s A B added to every matrix that has an adapter: a model without adapters.

    Args:
      adapters: the adapters' parameters.
      base: the weights beside them, without scales.
      rule: the rule of the adapters.
      scales: scales of the columns of matrices in int8, by path.
      dtype: the dtype of what changes.
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
