"""Brings tokens to the experts that a mesh axis `expert` spreads over its shards, and their results back home.

Three ways, one result, Σ_k w_k · down_e(silu(gate_e x) · up_e x) with e the token's k-th expert:

* `gather` brings every token of an expert group to every shard, which adds up what its own experts make of them.
* `ragged_all_to_all` sends every (token, expert) pair to the one shard that holds the expert, exactly as many as there
  are. The TPU's compiler has it, the CPU's has not.
* `capacity` sends pairs too, in buffers of a fixed size, and may drop what does not fit. Any backend runs it.

With ep shards on the axis, n tokens of width D on each, and balanced experts, a shard sends and receives, each way:
gather (ep-1)·n·D, ragged_all_to_all (ep-1)/ep·K·n·D, capacity `factor` times that. Gather is therefore the lightest
while ep <= K. Every buffer is sized at compile time: gather and ragged_all_to_all hold ep·n·min(K, E/ep) rows on each
shard, though ep times fewer come when experts are balanced; the grouped matmul's work follows the rows that came. Of
gather a decode step has a second set, for the usual load.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from gspo_jax.kernels.backend import platform
from gspo_jax.kernels.grouped_matmul import grouped_matmuls, stacked_matmuls
from gspo_jax.parallel import hlo
from gspo_jax.parallel.mesh import AXES, BATCH_AXES, expert_axes, has_mesh, manual_axes, varying, without_axes
from gspo_jax.types import UserError, choices

NAMES = ("gather", "ragged_all_to_all", "capacity")


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """How tokens reach their experts; hashable, a static part of the model."""

    name: str = "gather"
    """One of `NAMES`."""
    capacity_factor: float | None = None
    """Of `capacity`: room for this multiple of a balanced load between any two shards; None is room for all."""

    def __post_init__(self) -> None:
        """Raises a UserError for an unknown name, a factor that is not positive, or one that nothing would read."""
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
"""The default."""


def check_dispatch(dispatch: Dispatch, platform: str) -> None:
    """Raises a UserError where the platform's compiler lacks the collective that the dispatch is made of."""
    if dispatch.name == "ragged_all_to_all" and platform == "cpu":
        raise UserError("dispatch 'ragged_all_to_all' does not compile on cpu, only on tpu; use 'gather' or 'capacity'")


HEADROOM = 2
"""Of a balanced load: what the usual buffers of a decode step have room for."""


@jax.custom_vjp
def spread(x: Float[Array, "N D"], source: Int[Array, " M"], slot: Int[Array, "N K"]) -> Float[Array, "M D"]:
    """out[m] = x[source[m] // K]: the token of the pair that lies in slot m. Slots without a pair hold any token.

    `slot` is the inverse, the slot of each pair; it lies outside [0, M) where the pair has none. With it the gradient
    is `gather_up`, which gathers as well; without, it would be a scatter, which is slow everywhere.
    """
    return x.at[source // slot.shape[1]].get(mode="clip")


@jax.custom_vjp
def gather_up(y: Float[Array, "M D"], source: Int[Array, " M"], slot: Int[Array, "N K"]) -> Float[Array, "N D"]:
    """out[n] = Σ_k y[slot[n, k]] over the pairs that have a slot; its gradient is `spread`."""
    each = y.at[slot].get(mode="clip")
    return jnp.where(((slot >= 0) & (slot < source.size))[..., None], each, 0).sum(axis=1)


spread.defvjp(
    lambda x, source, slot: (spread(x, source, slot), (source, slot)),
    lambda pairs, grads: (gather_up(grads, *pairs), None, None),
)
gather_up.defvjp(
    lambda y, source, slot: (gather_up(y, source, slot), (source, slot)),
    lambda pairs, grads: (spread(grads, *pairs), None, None),
)


def _sorted(group: Int[Array, " P"], groups: int) -> tuple[Int[Array, " P"], Int[Array, " P"], Int[Array, " G"]]:
    """The pairs by group, in token order within one; each pair's place in that order; the sizes of the groups.

    Pairs of group `groups` belong to none and come last.
    """
    pairs = jnp.arange(group.size, dtype=jnp.int32)
    if (groups + 1) * group.size < 2**31:  # one number holds both: a lighter sort than that of two arrays
        ordered, order = jnp.divmod(jnp.sort(group * group.size + pairs), group.size)
    else:
        ordered, order = jax.lax.sort((group, pairs), num_keys=1)
    # A search of one by one is a loop, which on TPU takes longer than to count all.
    method = "compare_all" if platform() == "tpu" else "scan"
    ends = jnp.searchsorted(ordered, jnp.arange(groups, dtype=jnp.int32), side="right", method=method).astype(jnp.int32)
    return order, jnp.argsort(order, stable=False).astype(jnp.int32), jnp.diff(ends, prepend=0)


def combine_experts(
    x: Float[Array, "N D"],
    experts: Int[Array, "N K"],
    weights: Float[Array, "N K"],
    gate: Float[Array, "*L E D F"],
    up: Float[Array, "*L E D F"],
    down: Float[Array, "*L E F D"],
    *,
    layer: Int[Array, ""] | None = None,
    likely: int | None = None,
) -> Float[Array, "N D"]:
    """Σ_k w_k · down_e(silu(gate_e x) · up_e x) over a token's experts that are held here, as ids in [0, E).

    They must differ, as a router's do: only min(K, E) of them can be held. The weight is put on what `down` reads: that
    is narrower than what it writes, and no output has to be kept for the weight's gradient. Of N · min(K, E) pairs that
    there is room for, `likely` are held when all experts of the model have the same load; None is all.

    With a `layer`, so without a gradient, buffers have room for `HEADROOM` times as many as are likely, and for the
    worst load only when it comes: a decode step would spend more time on empty rows than on the others.
    """
    E, (N, K) = gate.shape[-3], experts.shape
    # What comes of rows without a pair stays in them, and `gather_up` does not look there.
    matmuls = partial(grouped_matmuls, tail=False) if layer is None else partial(stacked_matmuls, layer=layer)
    matmuls = partial(matmuls, likely=likely)
    held = (experts >= 0) & (experts < E)
    order, place, sizes = _sorted(jnp.where(held, experts, E).reshape(-1), E)

    def within(room: int) -> Array:
        source = order[:room]
        slot = jnp.where(held, place.reshape(N, K), room)
        rows, shares = spread(x, source, slot), _spread_pairs(weights.astype(x.dtype), source, slot)
        gated, raised = (checkpoint_name(y, "dot") for y in matmuls(rows, (gate, up), sizes))
        (out,) = matmuls(jax.nn.silu(gated) * raised * shares, (down,), sizes)
        return gather_up(out, source, slot)

    worst = N * min(K, E)
    usual = worst if likely is None else HEADROOM * likely
    if layer is None or usual >= worst:
        return within(worst)

    def rarely() -> Array:
        with jax.named_scope(hlo.RARELY):
            return within(worst)

    return jax.lax.cond(sizes.sum() <= usual, lambda: within(usual), rarely)


def _spread_pairs(weights: Float[Array, "N K"], source: Int[Array, " M"], slot: Int[Array, "N K"]) -> Array:
    """What belongs to pairs and not to tokens: out[m] = weights of the pair in slot m, [M, 1]."""
    return spread(weights.reshape(-1, 1), source, slot.reshape(-1, 1))


def _gather(x: Array, experts: Array, weights: Array, *kernels: Array, layer: Array | None) -> tuple[Array, Array]:
    """All-gather of tokens, own experts' share of every token, reduce-scatter of the sums."""
    everyone = partial(jax.lax.all_gather, axis_name="expert", axis=0, tiled=True)
    ids = everyone(experts) - jax.lax.axis_index("expert") * kernels[0].shape[-3]
    y = combine_experts(everyone(x), ids, everyone(weights), *kernels, layer=layer, likely=experts.size)
    return jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True), jnp.zeros_like(experts[:, 0])


class _Transport(NamedTuple):
    """Where pairs lie in a shard's send buffer, and how buffers travel. Rows without a pair hold anything."""

    source: Int[Array, " S"]
    """The pair in each slot."""
    slot: Int[Array, "N K"]
    """The slot of each pair; S for those that stay at home."""
    arrived: Int[Array, " R"]
    """Which of this shard's experts the rows that it receives are for; their number where there is no pair."""
    there: Callable[[Array], Array]
    """Sends a buffer [S, D] and returns what arrived, [R, D]."""
    back: Callable[[Array], Array]
    """The way home: [R, D] to [S, D], each row to the slot that it came from."""


def _ragged(experts: Int[Array, "N K"], held: int, shards: int) -> _Transport:
    """Exactly the pairs there are, sorted by expert and so by shard, with `jax.lax.ragged_all_to_all`.

    The receive buffer has room for the worst case, min(K, `held`) pairs of every token of the group.
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
    """C = ceil(factor · N·K / ep) slots for every shard, filled in token order, with `jax.lax.all_to_all`.

    Factor None gives the worst case, C = N·min(K, `held`), which also is the most that C can be.
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
    *kernels: Array,
    transport: Callable[..., _Transport],
    layer: Array | None,
) -> tuple[Array, Array]:
    """Packs pairs by the shard of their expert, sends them with their weights, and adds up at home what comes back."""
    held, shards = kernels[0].shape[-3], jax.lax.axis_size("expert")
    source, slot, arrived, there, back = transport(experts, held, shards)
    sent = there(spread(x, source, slot)), arrived[:, None], there(_spread_pairs(weights.astype(x.dtype), source, slot))
    y = gather_up(back(combine_experts(*sent, *kernels, layer=layer, likely=experts.size)), source, slot)
    dropped = (slot >= source.size) & (experts < held * shards)
    return y, dropped.sum(axis=1, dtype=jnp.int32)


def _route(dispatch: Dispatch, shards: int) -> Callable[..., tuple[Array, Array]]:
    if dispatch.name == "gather" or shards == 1:  # nothing travels on an axis of one
        return _gather
    if dispatch.name == "ragged_all_to_all":
        return partial(_pairs, transport=_ragged)
    return partial(_pairs, transport=partial(_capacity, factor=dispatch.capacity_factor))


def exchange(
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T K"],
    weights: Float[Array, "B T K"],
    gate: Float[Array, "*L E D F"],
    up: Float[Array, "*L E D F"],
    down: Float[Array, "*L E F D"],
    *,
    dispatch: Dispatch,
    layer: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B T D"], Int[Array, "B T"]]:
    """The experts' weighted sum for every token, and how many of a token's pairs were dropped.

    On the mesh in scope rows lie over the batch axes, experts over `expert` and F over `tensor`; without one all is
    here. Axes that are manual already, all of the batch axes or none, have cut the arguments. Only `capacity` drops,
    and only with a factor: a pair that finds its buffer full adds nothing and has no gradient. An axis `expert` of one
    has no buffers.

    Args:
      x: the tokens.
      experts: ids, those of a token different from each other; outside [0, E) they reach no expert and are not counted.
      weights: what each expert's output counts.
      gate: first of the experts' kernels, of x's dtype, as are the others.
      up: second.
      down: third.
      dispatch: how tokens reach their experts.
      layer: which of L layers the kernels are taken from, without a gradient; None where there is no L.

    Raises:
      UserError: this platform does not have the collective.
    """

    def flat(a: Shaped[Array, "b t w"]) -> Shaped[Array, "n w"]:
        return a.reshape(-1, a.shape[-1])

    if not has_mesh():
        y = combine_experts(flat(x), flat(experts), flat(weights), gate, up, down, layer=layer)
        return y.reshape(x.shape), jnp.zeros_like(experts[..., 0])

    manual, sizes = manual_axes(), jax.sharding.get_abstract_mesh().shape
    shards = sizes["expert"]
    E = gate.shape[-3] * (shards if "expert" in manual else 1)
    held_by = ("expert",) if manual or layer is not None else expert_axes(E, sizes)
    experts = jnp.where((experts >= 0) & (experts < E), experts, E).astype(jnp.int32)
    if shards > 1:
        check_dispatch(dispatch, platform())

    def shard(
        x: Array, experts: Array, weights: Array, kernels: tuple[Array, ...], layer: Array | None
    ) -> tuple[Array, Array]:
        # Kernels are the same on every data and fsdp shard, x on every tensor shard: marked varying, their gradients
        # are summed over these. Where fsdp holds whole experts they are gathered, and their gradients reduce-scattered.
        kernels = tuple(varying(w, "data", "fsdp") for w in kernels)
        if "fsdp" in held_by:
            kernels = tuple(jax.lax.all_gather(w, "fsdp", axis=0, tiled=True) for w in kernels)
        tokens = varying(flat(x), "tensor")
        y, dropped = _route(dispatch, shards)(tokens, flat(experts), flat(weights), *kernels, layer=layer)
        return jax.lax.psum(y, "tensor").reshape(x.shape), dropped.reshape(x.shape[:2])

    stack = () if layer is None else (None,)
    rows, wide, tall = (
        without_axes(PartitionSpec(*axes), manual)
        for axes in ((BATCH_AXES,), (*stack, held_by, None, "tensor"), (*stack, held_by, "tensor", None))
    )
    return jax.shard_map(
        shard,
        in_specs=(rows, rows, rows, (wide, wide, tall), PartitionSpec()),
        out_specs=(rows, rows),
        axis_names=set(AXES) - manual,
    )(x, experts, weights, (gate, up, down), layer)
