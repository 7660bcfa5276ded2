"""Dispatch and combine: sends tokens to the experts sharded over the mesh axis `expert`, and brings results back.

Three ways compute the same Σ_k w_k · down_e(silu(gate_e x) · up_e x), with e the token's k-th expert:

* `gather` all-gathers the tokens of an expert group; each shard adds up the outputs of its own experts.
* `ragged_all_to_all` sends each (token, expert) pair to the one shard that holds the expert, without padding. The
  TPU's compiler supports it, the CPU's does not.
* `capacity` sends pairs in buffers of fixed size, and may drop pairs that do not fit. It runs on any backend.

With ep shards on the axis, n tokens of width D on each, and balanced experts, a shard sends and receives, each way:
gather (ep-1)·n·D, ragged_all_to_all (ep-1)/ep·K·n·D, capacity `factor` times that. Gather is therefore the lightest
while ep <= K. Every buffer is sized at compile time, and ep·n·min(K, E/ep) pairs may arrive at a shard, though ep times
fewer do when experts are balanced. Buffers therefore have room for a multiple of a balanced load, `HEADROOM`, and are
filled again if more arrive; the grouped matmul's work follows the rows that arrived.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from gspo_jax.kernels.backend import platform
from gspo_jax.kernels.grouped_matmul import Scaled, grouped_matmuls, stacked_matmuls
from gspo_jax.kernels.grouped_matmul_tpu import ByTarget, by_target, row_sums
from gspo_jax.models.matrices import Matrix
from gspo_jax.parallel import hlo
from gspo_jax.parallel.mesh import AXES, BATCH_AXES, expert_axes, has_mesh, manual_axes, varying, without_axes
from gspo_jax.types import UserError, choices

Tree = TypeVar("Tree")

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


class ExpertKernels(NamedTuple):
    """The SwiGLU kernels of experts; weights may be those of all layers of a stack, [L, …], all else is one layer's."""

    gate: Matrix
    """[E, D, F]."""
    up: Matrix
    """[E, D, F]."""
    down: Matrix
    """[E, F, D]."""

    @property
    def held(self) -> int:
        """Number of experts."""
        return self.gate.weights.shape[-3]


def check_dispatch(dispatch: Dispatch, platform: str) -> None:
    """Raise a UserError if the platform's compiler lacks the dispatch's collective."""
    if dispatch.name == "ragged_all_to_all" and platform == "cpu":
        raise UserError("dispatch 'ragged_all_to_all' does not compile on cpu, only on tpu; use 'gather' or 'capacity'")


HEADROOM = 1.25
"""Size of the experts' buffers, as a multiple of a balanced load."""
_MANY = 1024
"""Minimum rows of a buffer for sums by one-hot products on TPU; with fewer, [J, N, D] is gathered, mostly zeros."""


def room_for(most: int, likely: int | None) -> int:
    """Rows of the experts' buffers at a shard, to which `most` pairs may come and `likely` would if balanced.

    That for all of them if it is at most twice the likely number, or that is unknown; else some headroom above it.
    """
    if likely is None or 2 * likely >= most:
        return most
    return 16 * math.ceil(HEADROOM * likely / 16)  # whole tiles of bfloat16


class _Slots(NamedTuple):
    """Which rows of [N, D] are in which slots of [M, D]: both directions, so that gradients are gathers too.

    A scatter is slow on every backend.
    """

    source: Int[Array, " M"]
    """The row in each slot; undefined in slots without one."""
    slots: Int[Array, "N J"]
    """The slots of each row, outside [0, M) where it has fewer than J."""
    by_row: ByTarget | None = None
    """The slots in the order of their rows, for sums on TPU; None: sums gather [J, N, D]."""


@jax.custom_vjp
def spread(x: Float[Array, "N D"], where: _Slots) -> Float[Array, "M D"]:
    """out[m] = x[source[m]]; undefined in slots without a row. The gradient is `gather_up`."""
    return x.at[where.source].get(mode="clip")


@jax.custom_vjp
def gather_up(y: Float[Array, "M D"], where: _Slots) -> Float[Array, "N D"]:
    """out[n] = Σ_j y[slots[n, j]] over a row's slots; the gradient is `spread`."""
    slots = where.slots.T  # over rows first: a TPU would pad a second last dimension of J to a multiple of 8
    if platform() == "cpu":  # gathers of one row each end up in one loop, and no [J, N, D] array in memory
        parts = (jnp.where(_has_row(s, y)[:, None], y.at[s].get(mode="clip"), 0) for s in slots)
        return reduce(jnp.add, parts)
    if where.by_row is not None:
        return row_sums(y, where.by_row, slots.shape[1])
    return jnp.where(_has_row(slots, y)[..., None], y.at[slots].get(mode="clip"), 0).sum(axis=0)


def _has_row(slot: Int[Array, "*N"], y: Float[Array, "M D"]) -> Bool[Array, "*N"]:
    return (slot >= 0) & (slot < len(y))


spread.defvjp(
    lambda x, where: (spread(x, where), where),
    lambda where, grads: (gather_up(grads, where), None),
)
gather_up.defvjp(
    lambda y, where: (gather_up(y, where), where),
    lambda where, grads: (spread(grads, where), None),
)


def _first_slots(slot: Int[Array, "N K"], most: int, rows: int) -> Int[Array, "N J"]:
    """The slots of a token's pairs that have one, in [0, `rows`), in order and at most `most`; `rows` for want of one.

    Few of a token's pairs are held where few experts are, and a sum over all K would read mostly what it leaves out.
    """
    if most == slot.shape[1]:
        return slot
    has = slot < rows
    # By comparison, because on TPU neither a sort nor a gather of single numbers is fast.
    ranks = jnp.where(has, jnp.cumsum(has, axis=1) - 1, most)
    return jnp.where(ranks[:, None] == jnp.arange(most)[None, :, None], slot[:, None], rows).min(axis=2)


def _sorted(group: Int[Array, " P"], groups: int) -> tuple[Int[Array, " P"], Int[Array, " P"], Int[Array, " G"]]:
    """Sort pairs by group, in token order within a group.

    Returns the sorted pairs, each pair's place among them, and the group sizes. Pairs of group `groups` belong to no
    group and come last.
    """
    pairs = jnp.arange(group.size, dtype=jnp.int32)
    if (groups + 1) * group.size < 2**31:  # one number holds both: cheaper than sorting two arrays
        ordered, order = jnp.divmod(jnp.sort(group * group.size + pairs, stable=False), group.size)
    else:
        ordered, order = jax.lax.sort((group, pairs), num_keys=1)
    # A binary search is a loop, which on TPU takes longer than comparing with every element.
    method = "compare_all" if platform() == "tpu" else "scan"
    ends = jnp.searchsorted(ordered, jnp.arange(groups, dtype=jnp.int32), side="right", method=method).astype(jnp.int32)
    return order, jnp.argsort(order, stable=False).astype(jnp.int32), jnp.diff(ends, prepend=0)


def combine_experts(
    x: Float[Array, "N D"],
    experts: Int[Array, "N K"],
    weights: Float[Array, "N K"],
    kernels: ExpertKernels,
    *,
    layer: Int[Array, ""] | None = None,
    likely: int | None = None,
) -> Float[Array, "N D"]:
    """Σ_k w_k · down_e(silu(gate_e x) · up_e x) over those of a token's experts that are held here, ids in [0, E).

    A token's experts must differ, as a router's do, so at most min(K, E) of them are held. The weight multiplies the
    input of `down`: it is narrower than the output, which then need not be kept for the weight's gradient.

    Args:
      x: the tokens.
      experts: ids; those outside [0, E) are not held here and add nothing.
      weights: the factor of each expert's output.
      kernels: the kernels of the experts held here.
      layer: the layer to take from weights of all layers, without a gradient; None if they are one layer's.
      likely: pairs held here if all experts of the model have the same load; None: all N · min(K, E).
    """
    pairs, leaves = _Pairs.of(experts, kernels.held), jax.tree.leaves((x, weights, kernels))
    tree = jax.tree.structure((x, weights, kernels))
    if (room := room_for(pairs.most, likely)) == pairs.most:
        return _part(pairs, 0, room, leaves, layer, tree, likely)
    return _in_parts(leaves, pairs, layer, tree, likely)


class _Pairs(NamedTuple):
    """Pairs of a token and one of its experts, sorted by expert."""

    held: Bool[Array, "N K"]
    """False for experts that are not held here, whose pairs come last."""
    order: Int[Array, " P"]
    """The sorted pairs."""
    place: Int[Array, "N K"]
    """Each pair's place among them."""
    sizes: Int[Array, " E"]
    """Pairs of each expert."""

    @classmethod
    def of(cls, experts: Int[Array, "N K"], held: int) -> "_Pairs":
        """The pairs of experts, of which those with ids in [0, `held`) are held here."""
        here = (experts >= 0) & (experts < held)
        order, place, sizes = _sorted(jnp.where(here, experts, held).reshape(-1), held)
        return cls(here, order, place.reshape(experts.shape), sizes)

    def part(self, first: Array | int, room: int) -> tuple[Array, Array, Array]:
        """The `room` sorted pairs from `first` on, each pair's slot among them, `room` for none, and group sizes."""
        if room >= self.most:
            return self.order[:room], jnp.where(self.held, self.place, room), self.sizes
        source = jax.lax.dynamic_slice_in_dim(jnp.pad(self.order, (0, room)), first, room)
        slot = self.place - first
        slot = jnp.where(self.held & (slot >= 0) & (slot < room), slot, room)
        return source, slot, jnp.diff(jnp.clip(jnp.cumsum(self.sizes) - first, 0, room), prepend=0)

    @property
    def most(self) -> int:
        """Pairs that are held here at most, N · min(K, E), as a token's experts differ."""
        return len(self.held) * min(self.held.shape[1], len(self.sizes))


def _part(
    pairs: _Pairs,
    first: Array | int,
    room: int,
    leaves: Sequence[Array],
    layer: Int[Array, ""] | None,
    tree: Any,
    likely: int | None,
) -> Float[Array, "N D"]:
    """What the `room` sorted pairs from `first` on add to `combine_experts`.

    `leaves` and `tree` are those of x, weights and kernels.
    """
    x, weights, kernels = tree.unflatten(leaves)
    source, slot, sizes = pairs.part(first, room)
    # Rows without a pair yield undefined rows, which `gather_up` does not read.
    thin = partial(grouped_matmuls, tail=False, likely=likely)
    wide = thin if layer is None else partial(stacked_matmuls, layer=layer, likely=likely)
    slots = _first_slots(slot, min(slot.shape[1], kernels.held), room)
    token, by_row = source // slot.shape[1], None
    if platform() == "tpu" and room >= _MANY and slots.size > 2 * room:
        by_row = by_target(token, sizes.sum(), len(x))
    where = _Slots(token, slots, by_row)
    rows, shares = spread(x, where), _spread_pairs(weights.astype(x.dtype), source, slot)
    products = partial(_products, wide, thin, sizes=sizes)
    gated, raised = (checkpoint_name(y, "dot") for y in products(rows, (kernels.gate, kernels.up)))
    (out,) = products(jax.nn.silu(gated) * raised * shares, (kernels.down,))
    return gather_up(out, where)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _in_parts(leaves: list[Array], pairs: _Pairs, layer: Array | None, tree: Any, likely: int) -> Array:
    """`combine_experts` in buffers with room for a part of the pairs, used again if more arrive.

    Most rows of buffers for the worst case are empty: they would take most of the memory, and gathers and element-wise
    operations most of their time. The first part is differentiated as it is; others are computed again for that.
    """
    room = room_for(pairs.most, likely)
    y = _part(pairs, 0, room, leaves, layer, tree, likely)
    return _others(pairs, room, lambda first, y: y + _part(pairs, first, room, leaves, layer, tree, likely), y)


def _others(pairs: _Pairs, room: int, more: Callable[[Array, Tree], Tree], state: Tree) -> Tree:
    """state = more(first, state) for each part but the first."""
    with jax.named_scope(hlo.RARELY):
        parts = (pairs.sizes.sum() + room - 1) // room
        return jax.lax.fori_loop(1, parts, lambda i, state: more(i * room, state), state)


def _in_parts_forward(
    leaves: list[Any], pairs: Any, layer: Any, tree: Any, likely: int
) -> tuple[Array, tuple[Any, ...]]:
    """`_in_parts`, and what the gradient needs; the lists say which leaves have one: frozen kernels have none."""
    pairs, layer = jax.tree.map(lambda p: p.value, (pairs, layer))
    trained = [p.value if p.perturbed else None for p in leaves]
    frozen = [None if p.perturbed else p.value for p in leaves]
    room, part = room_for(pairs.most, likely), partial(_part_of, pairs, frozen, layer, tree, likely)
    y, pull = jax.vjp(partial(part, 0), trained)
    y = _others(pairs, room, lambda first, y: y + part(first, trained), y)
    return y, (pull, trained, frozen, pairs, layer)


def _part_of(
    pairs: _Pairs,
    frozen: Sequence[Array | None],
    layer: Array | None,
    tree: Any,
    likely: int,
    first: Array | int,
    trained: Sequence[Array | None],
) -> Array:
    leaves = [b if a is None else a for a, b in zip(trained, frozen, strict=True)]
    return _part(pairs, first, room_for(pairs.most, likely), cast(Any, leaves), layer, tree, likely)


def _in_parts_backward(tree: Any, likely: int, kept: tuple[Any, ...], grads: Any) -> tuple[Any, None, None]:
    pull, trained, frozen, pairs, layer = kept
    if isinstance(grads, jax.custom_derivatives.SymbolicZero):
        return [None] * len(trained), None, None
    part = partial(_part_of, pairs, frozen, layer, tree, likely)

    def more(first: Array, found: list[Array | None]) -> list[Array | None]:
        return jax.tree.map(jnp.add, found, jax.vjp(partial(part, first), trained)[1](grads)[0])

    return _others(pairs, room_for(pairs.most, likely), more, pull(grads)[0]), None, None


_in_parts.defvjp(_in_parts_forward, _in_parts_backward, symbolic_zeros=True)


def _products(
    wide: Callable[..., tuple[Array, ...]],
    thin: Callable[..., tuple[Array, ...]],
    rows: Float[Array, "N D"],
    matrices: Sequence[Matrix],
    *,
    sizes: Int[Array, " E"],
) -> list[Array]:
    """Each row times its expert's matrices, by the grouped matmul `wide`, and `thin` for adapters."""
    weights = tuple(m.weights if m.scale is None else Scaled(m.weights, m.scale) for m in matrices)
    lows = [m.low for m in matrices if m.low is not None]
    if wide is thin:  # rows are read once
        outs = thin(rows, (*weights, *(low.a for low in lows)), sizes)
        outs, inner = outs[: len(weights)], outs[len(weights) :]
    else:
        outs, inner = wide(rows, weights, sizes), thin(rows, tuple(low.a for low in lows), sizes) if lows else ()
    parts = (checkpoint_name(y, "dot") * low.scale for y, low in zip(inner, lows, strict=True))
    return [
        y if m.low is None else y + thin(next(parts), (m.low.b,), sizes)[0] for y, m in zip(outs, matrices, strict=True)
    ]


def _spread_pairs(weights: Float[Array, "N K"], source: Int[Array, " M"], slot: Int[Array, "N K"]) -> Array:
    """out[m] = the weight of the pair in slot m, [M, 1]."""
    return spread(weights.reshape(-1, 1), _Slots(source, slot.reshape(-1, 1)))


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
    order, place, sizes = _sorted(experts.reshape(-1), held * shards)
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
    order, place, sizes = _sorted(target, shards)
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
    where = _Slots(source // experts.shape[1], slot)
    sent = there(spread(x, where)), arrived[:, None], there(_spread_pairs(weights.astype(x.dtype), source, slot))
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
