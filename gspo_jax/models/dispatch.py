"""Dispatch and combine: sends tokens to the experts sharded over the mesh axis `expert`, and brings results back.

Two ways compute the same Σ_k w_k · down_e(silu(gate_e x) · up_e x), with e the token's k-th expert; neither drops any:

* `gather` all-gathers the tokens of an expert group; each shard adds up the outputs of its own experts.
* `ragged_all_to_all` sends each (token, expert) pair to the one shard that holds the expert, without padding. The
  TPU's compiler supports it, the CPU's does not.

With ep shards on the axis, n tokens of width D on each, and balanced experts, a shard sends and receives, each way:
gather (ep-1)·n·D, ragged_all_to_all (ep-1)/ep·K·n·D. Gather is therefore lighter while ep <= K. Every buffer is sized
at compile time, and ep·n·min(K, E/ep) pairs may arrive at a shard, though ep times fewer do when experts are balanced.
Buffers (`experts`) therefore have room for a multiple of a balanced load, and are filled again if more arrive; the
grouped matmul's work follows the rows that arrived.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from gspo_jax.errors import UserError
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

Dispatch = Literal["gather", "ragged_all_to_all"]
"""The way tokens reach their experts."""
DISPATCHES: tuple[Dispatch, ...] = get_args(Dispatch)


def check_dispatch(dispatch: Dispatch, platform: str) -> None:
    """Raise a UserError if the platform's compiler lacks the dispatch's collective."""
    if dispatch == "ragged_all_to_all" and platform == "cpu":
        raise UserError("dispatch 'ragged_all_to_all' does not compile on cpu, only on tpu; use 'gather'")


def _gather(x: Array, experts: Array, weights: Array, kernels: ExpertKernels, *, layer: Array | None) -> Array:
    """All-gather tokens, compute the own experts' share of each, and reduce-scatter the sums."""
    everyone = partial(jax.lax.all_gather, axis_name="expert", axis=0, tiled=True)
    ids = everyone(experts) - jax.lax.axis_index("expert") * kernels.held
    y = combine_experts(everyone(x), ids, everyone(weights), kernels, layer=layer, likely=experts.size)
    return jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True)


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


def _pairs(x: Array, experts: Array, weights: Array, kernels: ExpertKernels, *, layer: Array | None) -> Array:
    """Send each pair to its expert's shard, with its weight, and sum the outputs that come back."""
    source, slot, arrived, there, back = _ragged(experts, kernels.held, jax.lax.axis_size("expert"))
    where = Slots(source // experts.shape[1], slot)
    sent = there(to_slots(x, where)), arrived[:, None], there(weights_to_slots(weights.astype(x.dtype), source, slot))
    return gather_up(back(combine_experts(*sent, kernels, layer=layer, likely=experts.size)), where)


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
) -> Float[Array, "B T D"]:
    """The experts' weighted sum for every token.

    On the mesh in scope, rows are sharded over the batch axes, experts over `expert` and F over `tensor`; without a
    mesh nothing is. Along axes that are manual already (all of the batch axes or none) the arguments are local parts.
    An `expert` axis of one needs no buffers.

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
        return y.reshape(x.shape)

    manual, sizes = manual_axes(), jax.sharding.get_abstract_mesh().shape
    shards = sizes["expert"]
    E = kernels.held * (shards if "expert" in manual else 1)
    held_by = ("expert",) if manual or layer is not None else expert_axes(E, sizes)
    experts = jnp.where((experts >= 0) & (experts < E), experts, E).astype(jnp.int32)
    if shards > 1:
        check_dispatch(dispatch, platform())

    def shard(x: Array, experts: Array, weights: Array, leaves: list[Array], layer: Array | None) -> Array:
        # Kernels are the same on every data and fsdp shard, x on every tensor shard: marked varying, their gradients
        # are summed over these. If fsdp holds whole experts, they are gathered and their gradients reduce-scattered.
        # An adapter's narrow side is the same on every tensor shard.
        leaves = [varying(w, "data", "fsdp", "tensor") for w in leaves]
        if "fsdp" in held_by:
            leaves = [jax.lax.all_gather(w, "fsdp", axis=0, tiled=True) for w in leaves]
        tokens = varying(_flat(x), "tensor")
        combine = _pairs if dispatch == "ragged_all_to_all" and shards > 1 else _gather  # one shard sends nothing
        y = combine(tokens, _flat(experts), _flat(weights), tree.unflatten(leaves), layer=layer)
        return jax.lax.psum(y, "tensor").reshape(x.shape)

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
        out_specs=rows,
        axis_names=set(AXES) - manual,
    )(x, experts, weights, leaves, layer)
