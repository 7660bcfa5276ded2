"""One shard's expert computation: token rows in buffers, sorted by expert, and sums of the outputs."""

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels import swiglu_tpu
from gspo_jax.kernels.adapted_matmul import adapted_matmuls
from gspo_jax.kernels.backend import platform
from gspo_jax.kernels.grouped_matmul import Scaled
from gspo_jax.kernels.row_sums_tpu import ByTarget, by_target, in_order, masked_sum, row_sums
from gspo_jax.kernels.scopes import RARELY
from gspo_jax.kernels.visits_tpu import LANES
from gspo_jax.models.matrices import Matrix

Tree = TypeVar("Tree")


class ExpertKernels(NamedTuple):
    """The experts' SwiGLU kernels. Weights may be of all layers, [L, …]."""

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


HEADROOM = 1.25
"""Size of the experts' buffers, as a multiple of a balanced load."""
_MANY = 1024
"""Minimum buffer rows for sums by one-hot products on TPU. With fewer, [J, N, D] is gathered, mostly zeros."""


def room_for(most: int, likely: int | None) -> int:
    """Return the rows of a shard's expert buffers (`most`: upper bound of pairs; `likely`: expected if balanced).

    Room for `most` if `likely` is None or at least half of it, else some headroom above `likely`.
    """
    if likely is None or 2 * likely >= most:
        return most
    return 16 * math.ceil(HEADROOM * likely / 16)  # whole tiles of bfloat16


class ExpertSlots(NamedTuple):
    """Which rows of [N, D] are in which slots of [M, D], both ways: gradients are gathers too.

    A scatter is slow on every backend.
    """

    source: Int[Array, " M"]
    """The row in each slot; undefined if empty."""
    slots: Int[Array, "N J"]
    """Each row's slots, outside [0, M) where it has fewer than J."""
    by_row: ByTarget | None = None
    """Order for sums on TPU; None: sums gather [J, N, D]."""


@jax.custom_vjp
def to_slots(x: Float[Array, "N D"], where: ExpertSlots) -> Float[Array, "M D"]:
    """Return out[m] = x[source[m]], undefined in empty slots. The gradient is `gather_up`."""
    return x.at[where.source].get(mode="clip")


@jax.custom_vjp
def gather_up(y: Float[Array, "M D"], where: ExpertSlots) -> Float[Array, "N D"]:
    """Return out[n] = Σ_j y[slots[n, j]]. The gradient is `to_slots`."""
    slots = where.slots.T  # J first: as second last dimension, a TPU would pad it to a multiple of 8
    if platform() == "cpu":  # J gathers fuse into one loop without a [J, N, D] array
        parts = (jnp.where(_has_row(s, y)[:, None], y.at[s].get(mode="clip"), 0) for s in slots)
        return reduce(jnp.add, parts)
    if where.by_row is not None:
        return row_sums(y, where.by_row, slots.shape[1])
    if platform() == "tpu" and slots.shape[1] >= LANES and y.shape[1] % LANES == 0:
        return masked_sum(y.at[slots].get(mode="clip"), _has_row(where.slots, y))
    return jnp.where(_has_row(slots, y)[..., None], y.at[slots].get(mode="clip"), 0).sum(axis=0)


def _has_row(slot: Int[Array, "*N"], y: Float[Array, "M D"]) -> Bool[Array, "*N"]:
    return (slot >= 0) & (slot < len(y))


to_slots.defvjp(
    lambda x, where: (to_slots(x, where), where),
    lambda where, grads: (gather_up(grads, where), None),
)
gather_up.defvjp(
    lambda y, where: (gather_up(y, where), where),
    lambda where, grads: (to_slots(grads, where), None),
)


def weighted_sum(y: Float[Array, "M D"], slots: Int[Array, "N J"], weights: Float[Array, "N J"]) -> Float[Array, "N D"]:
    """Return out[n] = Σ_j weights[n, j] · y[slots[n, j]], accumulated in float32, without a gradient.

    Slots outside [0, M) count 0.
    """
    factors = jnp.where(_has_row(slots, y), weights.astype(jnp.float32), 0)
    rows = y.at[slots.T].get(mode="clip")
    if platform() == "tpu" and len(slots) >= LANES and y.shape[1] % LANES == 0:
        return masked_sum(rows, factors)
    factors = factors.T[..., None]
    return jnp.where(factors != 0, rows * factors, 0).sum(axis=0).astype(y.dtype)


def _first_slots(slot: Int[Array, "N K"], most: int, rows: int) -> Int[Array, "N J"]:
    """Return a token's slots in [0, `rows`), in order and at most `most`, padded with `rows`."""
    if most == slot.shape[1]:
        return slot
    has = slot < rows
    # On TPU neither a sort nor a gather of single numbers is fast.
    ranks = jnp.where(has, jnp.cumsum(has, axis=1) - 1, most)
    return jnp.where(ranks[:, None] == jnp.arange(most)[None, :, None], slot[:, None], rows).min(axis=2)


def sort_pairs(group: Int[Array, " P"], groups: int) -> tuple[Int[Array, " P"], Int[Array, " P"], Int[Array, " G"]]:
    """Sort pairs by group, in token order within a group. Group `groups` is none.

    Returns the sorted pairs, each pair's place among them, and the group sizes.
    """
    ordered, order = in_order(group, groups)
    # On TPU, comparing with every element beats a binary search.
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
    """Return Σ_k w_k · down_e(silu(gate_e x) · up_e x) over each token's experts that are held here.

    A token's experts must differ, so at most min(K, E) are held. The weight multiplies the input of `down`: it is
    narrower than the output, which then need not be kept for the weight's gradient.

    Args:
      experts: ids; those outside [0, E) add nothing.
      layer: as in `adapted_matmuls`.
      likely: pairs held here if experts have equal load; None: N · min(K, E).
    """
    pairs, leaves = _Pairs.of(experts, kernels.held), jax.tree.leaves((x, weights, kernels))
    tree = jax.tree.structure((x, weights, kernels))
    if (room := room_for(pairs.most, likely)) == pairs.most:
        return _part(pairs, 0, room, leaves, layer, tree, likely)
    return _in_parts(leaves, pairs, layer, tree, room, likely)


class _Pairs(NamedTuple):
    """Pairs of a token and an expert, sorted by expert."""

    held: Bool[Array, "N K"]
    """False for other shards' pairs, which come last."""
    order: Int[Array, " P"]
    place: Int[Array, "N K"]
    """Each pair's place in `order`."""
    sizes: Int[Array, " E"]

    @classmethod
    def of(cls, experts: Int[Array, "N K"], held: int) -> "_Pairs":
        here = (experts >= 0) & (experts < held)
        order, place, sizes = sort_pairs(jnp.where(here, experts, held).reshape(-1), held)
        return cls(here, order, place.reshape(experts.shape), sizes)

    def part(self, first: Array | int, room: int) -> tuple[Array, Array, Array]:
        """Return `room` sorted pairs from `first` on, each pair's slot (`room`: none), and group sizes."""
        if room >= self.most:
            return self.order[:room], jnp.where(self.held, self.place, room), self.sizes
        source = jax.lax.dynamic_slice_in_dim(jnp.pad(self.order, (0, room)), first, room)
        slot = self.place - first
        slot = jnp.where(self.held & (slot >= 0) & (slot < room), slot, room)
        return source, slot, jnp.diff(jnp.clip(jnp.cumsum(self.sizes) - first, 0, room), prepend=0)

    @property
    def most(self) -> int:
        """N · min(K, E), as a token's experts differ."""
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
    """Compute the share of `room` sorted pairs from `first` on. `leaves` are x, weights and kernels."""
    x, weights, kernels = tree.unflatten(leaves)
    source, slot, sizes = pairs.part(first, room)
    # `gather_up` skips rows without a pair, which are undefined.
    slots = _first_slots(slot, min(slot.shape[1], kernels.held), room)
    token, by_row = source // slot.shape[1], None
    if platform() == "tpu" and room >= _MANY and slots.size > 2 * room:
        by_row = by_target(token, sizes.sum(), len(x))
    where = ExpertSlots(token, slots, by_row)
    rows, shares = to_slots(x, where), weights_to_slots(weights.astype(x.dtype), source, slot)
    return gather_up(swiglu(rows, shares, kernels, group_sizes=sizes, layer=layer, likely=likely), where)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _in_parts(leaves: list[Array], pairs: _Pairs, layer: Array | None, tree: Any, room: int, likely: int) -> Array:
    """Compute `combine_experts` in buffers of `room` rows, used again if more pairs arrive.

    Worst-case buffers would be mostly empty, and take most of the memory and time. Parts after the first are recomputed
    for their gradient.
    """
    y = _part(pairs, 0, room, leaves, layer, tree, likely)
    return _others(pairs, room, lambda first, y: y + _part(pairs, first, room, leaves, layer, tree, likely), y)


def _others(pairs: _Pairs, room: int, more: Callable[[Array, Tree], Tree], state: Tree) -> Tree:
    with jax.named_scope(RARELY):
        parts = (pairs.sizes.sum() + room - 1) // room
        return jax.lax.fori_loop(1, parts, lambda i, state: more(i * room, state), state)


def _in_parts_forward(
    leaves: list[Any], pairs: Any, layer: Any, tree: Any, room: int, likely: int
) -> tuple[Array, tuple[Any, ...]]:
    """Keep trained and frozen leaves in two lists."""
    pairs, layer = jax.tree.map(lambda p: p.value, (pairs, layer))
    trained = [p.value if p.perturbed else None for p in leaves]
    frozen = [None if p.perturbed else p.value for p in leaves]
    part = _part_of(pairs, frozen, layer, tree, room, likely)
    y, pull = jax.vjp(partial(part, 0), trained)
    y = _others(pairs, room, lambda first, y: y + part(first, trained), y)
    return y, (pull, trained, frozen, pairs, layer)


def _part_of(
    pairs: _Pairs, frozen: Sequence[Array | None], layer: Array | None, tree: Any, room: int, likely: int
) -> Callable[[Array | int, Sequence[Array | None]], Array]:
    def part(first: Array | int, trained: Sequence[Array | None]) -> Array:
        leaves = [b if a is None else a for a, b in zip(trained, frozen, strict=True)]
        return _part(pairs, first, room, cast(Any, leaves), layer, tree, likely)

    return part


def _in_parts_backward(tree: Any, room: int, likely: int, kept: tuple[Any, ...], grads: Any) -> tuple[Any, None, None]:
    pull, trained, frozen, pairs, layer = kept
    if isinstance(grads, jax.custom_derivatives.SymbolicZero):
        return [None] * len(trained), None, None
    part = _part_of(pairs, frozen, layer, tree, room, likely)

    def more(first: Array, found: list[Array | None]) -> list[Array | None]:
        return jax.tree.map(jnp.add, found, jax.vjp(partial(part, first), trained)[1](grads)[0])

    return _others(pairs, room, more, pull(grads)[0]), None, None


_in_parts.defvjp(_in_parts_forward, _in_parts_backward, symbolic_zeros=True)


def swiglu(rows: Float[Array, "M D"], shares: Float[Array, "M 1"], kernels: ExpertKernels, **options: Any) -> Array:
    """Return down(silu(gate x) · up x · share) for each row x, by its expert's matrices."""
    weights = tuple(m.weights if m.scale is None else Scaled(m.weights, m.scale) for m in kernels)
    lows = tuple(m.low for m in kernels)
    if platform() == "tpu":
        shards: Any = None if kernels.gate.shard is None else tuple(m.shard for m in kernels)
        return swiglu_tpu.swiglu(rows, shares[:, 0], cast(Any, weights), lows, shards=shards, **options)
    gated, raised = adapted_matmuls(rows, weights[:2], lows[:2], **options)
    gated, raised = checkpoint_name(gated, "dot"), checkpoint_name(raised, "dot")
    (out,) = adapted_matmuls(jax.nn.silu(gated) * raised * shares, weights[2:], lows[2:], **options)
    return out


def weights_to_slots(weights: Float[Array, "N K"], source: Int[Array, " M"], slot: Int[Array, "N K"]) -> Array:
    """Return the weight of the pair in each slot, [M, 1]."""
    return to_slots(weights.reshape(-1, 1), ExpertSlots(source, slot.reshape(-1, 1)))
