"""Dispatch and combine: sends tokens to the experts sharded over the mesh axis `expert`, and brings results back.

Three ways compute the same Σ_k w_k · down_e(silu(gate_e x) · up_e x), with e the token's k-th expert:

* `gather` all-gathers the tokens of an expert group; each shard adds up the outputs of its own experts.
* `ragged_all_to_all` sends each (token, expert) pair to the one shard that holds the expert, without padding. The
  TPU's compiler supports it, the CPU's does not.
* `capacity` sends pairs in buffers of fixed size, and may drop pairs that do not fit. It runs on any backend.

With ep shards on the axis, n tokens of width D on each, and balanced experts, a shard sends and receives, each way:
gather (ep-1)·n·D, ragged_all_to_all (ep-1)/ep·K·n·D, capacity `factor` times that. Gather is therefore the lightest
while ep <= K. Every buffer is sized at compile time, and ep·n·min(K, E/ep) pairs may arrive at a shard, though ep times
fewer do when experts are balanced. Buffers (`experts`) therefore have room for a multiple of a balanced
load, and are filled again if more arrive; the grouped matmul's work follows the rows that arrived.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from gspo_jax.kernels.backend import platform
from gspo_jax.models.experts import (
    ExpertKernels,
    Slots,
    combine_experts,
    gather_up,
    sort_pairs,
    to_slots,
    weights_to_slots,
)
from gspo_jax.models.matrices import Matrix
from gspo_jax.parallel.mesh import AXES, BATCH_AXES, expert_axes, has_mesh, manual_axes, varying, without_axes
from gspo_jax.types import UserError, choices

NAMES = ("gather", "ragged_all_to_all", "capacity")


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """The way tokens reach their experts; hashable, a static part of the model."""

    name: str = "gather"
    """One of `NAMES`."""
    capacity_factor: float | None = None
    """For `capacity`: buffer size between two shards, as a multiple of a balanced load; None: room for all pairs."""

    def __post_init__(self) -> None:
        """Raise a UserError for an unknown name, a factor that is not positive, or one that would not be used."""
        if self.name not in NAMES:
            raise UserError(f"unknown dispatch {self.name!r}; {choices(self.name, NAMES)}")
        if self.capacity_factor is None:
            return
        if self.name != "capacity":
            raise UserError(
                f"capacity_factor {self.capacity_factor} has no meaning for dispatch {self.name!r}, which drops "
                "nothing; leave it None or use dispatch 'capacity'"
            )
        if not 0 < self.capacity_factor < math.inf:
            raise UserError(
                f"capacity_factor {self.capacity_factor} is not a positive number; "
                "use 1 for a balanced load, more for headroom, or None to drop nothing"
            )


GATHER = Dispatch()
"""The default dispatch."""


def check_dispatch(dispatch: Dispatch, platform: str) -> None:
    """Raise a UserError if the platform's compiler lacks the dispatch's collective."""
    if dispatch.name == "ragged_all_to_all" and platform == "cpu":
        raise UserError("dispatch 'ragged_all_to_all' does not compile on cpu, only on tpu; use 'gather' or 'capacity'")


def _gather(
    x: Array, experts: Array, weights: Array, kernels: ExpertKernels, *, layer: Array | None
) -> tuple[Array, Array]:
    """All-gather tokens, compute the own experts' share of each, and reduce-scatter the sums."""
    everyone = partial(jax.lax.all_gather, axis_name="expert", axis=0, tiled=True)
    ids = everyone(experts) - jax.lax.axis_index("expert") * kernels.held
    y = combine_experts(everyone(x), ids, everyone(weights), kernels, layer=layer, likely=experts.size)
    return jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True), jnp.zeros_like(experts[:, 0])


class _Transport(NamedTuple):
    """Layout of a shard's send buffer, and the collectives that move it. Rows without a pair are undefined."""

    source: Int[Array, " S"]
    """The pair in each slot."""
    slot: Int[Array, "N K"]
    """The slot of each pair; S for a pair that is not sent."""
    arrived: Int[Array, " R"]
    """The expert of each received row, among those held here; their number for a row without a pair."""
    there: Callable[[Array], Array]
    """Sends a buffer [S, D] and returns the rows that arrived, [R, D]."""
    back: Callable[[Array], Array]
    """The way back: [R, D] to [S, D], each row to the slot it came from."""


def _ragged(experts: Int[Array, "N K"], held: int, shards: int) -> _Transport:
    """Transport by `jax.lax.ragged_all_to_all`: the existing pairs alone, sorted by expert and so by shard.

    The receive buffer is sized for the worst case, min(K, `held`) pairs of every token of the group.
    """
    N, K = experts.shape
    order, place, sizes = sort_pairs(experts.reshape(-1), held * shards)
    every = jax.lax.all_gather(sizes.reshape(shards, held), "expert")  # [from, to, expert]
    me = jax.lax.axis_index("expert")
    moved = every.sum(axis=2)
    start = jnp.cumsum(moved, axis=1) - moved  # in the send buffer of `from`
    landing = jnp.cumsum(moved, axis=0) - moved  # in the receive buffer of `to`
    there = (start[me], moved[me], landing[me], moved[:, me])
    back = (landing[:, me], moved[:, me], start[:, me], moved[me])

    def move(a: Array, *plan: Array, rows: int) -> Array:
        out = jax.lax.pcast(
            jnp.zeros((rows, a.shape[1]), a.dtype), tuple(jax.typeof(a).manual_axis_type.varying), to="varying"
        )
        return jax.lax.ragged_all_to_all(a, out, *plan, axis_name="expert")

    rows = shards * N * min(K, held)
    ends = jnp.cumsum(every[:, me].reshape(-1))
    run = jnp.searchsorted(ends, jnp.arange(rows, dtype=jnp.int32), side="right", method="compare_all")
    return _Transport(
        source=order,
        slot=jnp.where(experts < held * shards, place.reshape(N, K), order.size),
        arrived=jnp.where(run < ends.size, run % held, held).astype(jnp.int32),
        there=lambda a: move(a, *there, rows=rows),
        back=lambda a: move(a, *back, rows=order.size),
    )


def _capacity(experts: Int[Array, "N K"], held: int, shards: int, *, factor: float | None) -> _Transport:
    """Transport by `jax.lax.all_to_all`: C = ceil(factor · N·K / ep) slots per target shard, filled in token order.

    Factor None gives the worst case, C = N·min(K, `held`), which also bounds C from above.
    """
    N, K = experts.shape
    size = N * min(K, held)
    size = size if factor is None else min(math.ceil(factor * experts.size / shards), size)
    target = (experts // held).reshape(-1)
    order, place, sizes = sort_pairs(target, shards)
    first = jnp.cumsum(sizes) - sizes
    rank = place - first.at[target].get(mode="clip")
    block, offset = jnp.divmod(jnp.arange(shards * size, dtype=jnp.int32), size)
    source = order.at[first[block] + offset].get(mode="clip")
    ids = jnp.where(offset < sizes[block], (experts % held).reshape(-1)[source], held)
    move = partial(jax.lax.all_to_all, axis_name="expert", split_axis=0, concat_axis=0, tiled=True)
    slot = jnp.where((target < shards) & (rank < size), target * size + rank, shards * size)
    return _Transport(source, slot.reshape(N, K), move(ids), move, move)


def _pairs(
    x: Array,
    experts: Array,
    weights: Array,
    kernels: ExpertKernels,
    *,
    transport: Callable[..., _Transport],
    layer: Array | None,
) -> tuple[Array, Array]:
    """Pack pairs by their expert's shard, send them with their weights, and sum the outputs that come back."""
    held, shards = kernels.held, jax.lax.axis_size("expert")
    source, slot, arrived, there, back = transport(experts, held, shards)
    where = Slots(source // experts.shape[1], slot)
    sent = there(to_slots(x, where)), arrived[:, None], there(weights_to_slots(weights.astype(x.dtype), source, slot))
    y = gather_up(back(combine_experts(*sent, kernels, layer=layer, likely=experts.size)), where)
    dropped = (slot >= source.size) & (experts < held * shards)
    return y, dropped.sum(axis=1, dtype=jnp.int32)


def _route(dispatch: Dispatch, shards: int) -> Callable[..., tuple[Array, Array]]:
    if dispatch.name == "gather" or shards == 1:  # an axis of one sends nothing
        return _gather
    if dispatch.name == "ragged_all_to_all":
        return partial(_pairs, transport=_ragged)
    return partial(_pairs, transport=partial(_capacity, factor=dispatch.capacity_factor))


def _flat(x: Shaped[Array, "b t w"]) -> Shaped[Array, "n w"]:
    """Rows and tokens in one dimension."""
    return x.reshape(-1, x.shape[-1])


def exchange(
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T K"],
    weights: Float[Array, "B T K"],
    kernels: ExpertKernels,
    *,
    dispatch: Dispatch,
    layer: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B T D"], Int[Array, "B T"]]:
    """The experts' weighted sum for every token, and the number of each token's pairs that were dropped.

    On the mesh in scope, rows are sharded over the batch axes, experts over `expert` and F over `tensor`; without a
    mesh nothing is. Along axes that are manual already (all of the batch axes or none) the arguments are local parts.
    Only `capacity` with a factor drops pairs: one that finds its buffer full adds nothing and has no gradient. An
    `expert` axis of one needs no buffers.

    Args:
      x: the tokens.
      experts: ids, different within a token; those outside [0, E) reach no expert and are not counted.
      weights: the factor of each expert's output.
      kernels: the experts' kernels.
      dispatch: the way tokens reach their experts.
      layer: the layer to take from weights of all layers, without a gradient; None if they are one layer's.

    Raises:
      UserError: this platform lacks the dispatch's collective.
    """

    if not has_mesh():
        y = combine_experts(_flat(x), _flat(experts), _flat(weights), kernels, layer=layer)
        return y.reshape(x.shape), jnp.zeros_like(experts[..., 0])

    manual, sizes = manual_axes(), jax.sharding.get_abstract_mesh().shape
    shards = sizes["expert"]
    E = kernels.held * (shards if "expert" in manual else 1)
    held_by = ("expert",) if manual or layer is not None else expert_axes(E, sizes)
    experts = jnp.where((experts >= 0) & (experts < E), experts, E).astype(jnp.int32)
    if shards > 1:
        check_dispatch(dispatch, platform())

    def shard(
        x: Array, experts: Array, weights: Array, leaves: list[Array], layer: Array | None
    ) -> tuple[Array, Array]:
        # Kernels are the same on every data and fsdp shard, x on every tensor shard: marked varying, their gradients
        # are summed over these. If fsdp holds whole experts, they are gathered and their gradients reduce-scattered.
        # An adapter's narrow side is the same on every tensor shard.
        leaves = [varying(w, "data", "fsdp", "tensor") for w in leaves]
        if "fsdp" in held_by:
            leaves = [jax.lax.all_gather(w, "fsdp", axis=0, tiled=True) for w in leaves]
        tokens = varying(_flat(x), "tensor")
        y, dropped = _route(dispatch, shards)(
            tokens, _flat(experts), _flat(weights), tree.unflatten(leaves), layer=layer
        )
        return jax.lax.psum(y, "tensor").reshape(x.shape), dropped.reshape(x.shape[:2])

    stack = () if layer is None else (None,)
    rows = without_axes(PartitionSpec(BATCH_AXES), manual)

    def places(m: Matrix, inner: str | None, outer: str | None) -> list[PartitionSpec]:
        weights = PartitionSpec(*stack, held_by, inner, outer)
        scale = [] if m.scale is None else [PartitionSpec(held_by, outer)]
        low = [] if m.low is None else [PartitionSpec(held_by, inner), PartitionSpec(held_by, None, outer)]
        return [without_axes(spec, manual) for spec in (weights, *scale, *low)]

    leaves, tree = jax.tree.flatten(kernels)
    there = [*places(kernels.gate, None, "tensor"), *places(kernels.up, None, "tensor")]
    there += places(kernels.down, "tensor", None)
    return jax.shard_map(
        shard,
        in_specs=(rows, rows, rows, there, PartitionSpec()),
        out_specs=(rows, rows),
        axis_names=set(AXES) - manual,
    )(x, experts, weights, leaves, layer)
