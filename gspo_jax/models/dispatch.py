"""Dispatch and combine: send tokens to experts sharded over the mesh axis `expert`, and bring results back.

Two ways compute the same Σ_k w_k · down_e(silu(gate_e x) · up_e x), with e the token's k-th expert. Neither drops any:

* `gather` all-gathers the tokens of an expert group, and each shard adds up its own experts' outputs.
* `ragged_all_to_all` sends each (token, expert) pair to its expert's shard. Not on CPU. Without a gradient pairs travel
  in blocks of 8 rows, which each sender fills up for each expert.

A decode step on TPU gathers its few tokens, whatever the dispatch, and a kernel picks each expert's from them
(kernels/decode_experts_tpu.py).

With ep shards of n tokens of width D and balanced experts, each shard sends and receives (ep-1)·n·D by gather,
(ep-1)/ep·K·n·D by ragged_all_to_all. Gather is lighter while ep <= K. Up to ep·n·min(K, E/ep) pairs may arrive at a
shard. Buffers (`experts`), sized at compile time, hold a multiple of a balanced load and are refilled if more arrive.
"""

from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from gspo_jax.errors import UserError
from gspo_jax.kernels import decode_experts_tpu, pairs
from gspo_jax.kernels.backend import platform, unchecked, varying_like
from gspo_jax.kernels.decode_tpu import LANES, RANKS, Adapter, Stacked
from gspo_jax.kernels.row_sums_tpu import in_order
from gspo_jax.kernels.scopes import RARELY
from gspo_jax.models.experts import (
    ExpertKernels,
    ExpertSlots,
    combine_experts,
    gather_up,
    sort_pairs,
    swiglu,
    to_slots,
    weighted_sum,
    weights_to_slots,
)
from gspo_jax.models.matrices import Matrix
from gspo_jax.parallel.mesh import AXES, BATCH_AXES, expert_axes, has_mesh, manual_axes, varying, without_axes

Dispatch = Literal["gather", "ragged_all_to_all"]
DISPATCHES: tuple[Dispatch, ...] = get_args(Dispatch)

BLOCK = 8
"""Rows that are contiguous in a TPU's memory."""
_FEW = 2**17
"""Most rows of a buffer that fits all pairs, whoever they are for, where it has no gradient."""
_ROOM = 4
"""Size of larger ones, as a multiple of a balanced load. They are used again if more arrive."""
_MOST_PICKED = 2**13
"""Most tokens of a group that go to all of its shards, each of which computes what its own experts give."""
_WIDEST_STEP = 16
"""Most tokens of a text in a decode step. A prefill has more."""


def check_dispatch(dispatch: Dispatch, platform: str) -> None:
    """Raise a UserError if the platform's compiler lacks the dispatch's collective."""
    if dispatch == "ragged_all_to_all" and platform == "cpu":
        raise UserError("dispatch 'ragged_all_to_all' does not compile on cpu, only on tpu; use 'gather'")


def _gather(x: Array, experts: Array, weights: Array, kernels: ExpertKernels, *, layer: Array | None) -> Array:
    everyone = partial(jax.lax.all_gather, axis_name="expert", axis=0, tiled=True)
    ids = everyone(experts) - jax.lax.axis_index("expert") * kernels.held
    y = combine_experts(everyone(_by_row(x)), ids, everyone(weights), kernels, layer=layer, likely=experts.size)
    return _by_row(jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True))


def _by_row(x: Float[Array, "N D"]) -> Float[Array, "N D"]:
    """Keep rows contiguous in memory, as experts read them, before all of a group's are gathered and after.

    Attention's matmuls may have left tokens on lanes, and a TPU would change the layout of the gathered rows.
    """
    gathers = platform() == "tpu" and jax.lax.axis_size("expert") > 1
    return with_layout_constraint(x, Layout((0, 1))) if gathers else x


def _pairs(x: Array, experts: Array, weights: Array, kernels: ExpertKernels) -> Array:
    """Send existing pairs only, sorted by expert and so by shard. Rows of buffers without a pair are undefined.

    The receive buffer fits the worst case, min(K, held) pairs of every token of the group.
    """
    (N, K), held, shards = experts.shape, kernels.held, jax.lax.axis_size("expert")
    source, place, sizes = sort_pairs(experts.reshape(-1), held * shards)
    counts, rows = jax.lax.all_gather(sizes, "expert"), shards * N * min(K, held)
    there, back, sizes = pairs.moves(counts, jax.lax.axis_index("expert"), 0, room=rows)

    def move(a: Array, plan: tuple[Array, ...], rows: int) -> Array:
        out = varying_like(jnp.zeros((rows, a.shape[1]), a.dtype), a)
        return jax.lax.ragged_all_to_all(a, out, *plan, axis_name="expert")

    run = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right", method="compare_all")
    arrived = run.astype(jnp.int32)  # `held`: no pair
    slot = jnp.where(experts < held * shards, place.reshape(N, K), source.size)  # the last: not sent
    where = ExpertSlots(source // K, slot)
    shares = weights_to_slots(weights.astype(x.dtype), source, slot)
    sent = move(to_slots(x, where), there, rows), arrived[:, None], move(shares, there, rows)
    return gather_up(move(combine_experts(*sent, kernels, likely=experts.size), back, source.size), where)


def _blocks(x: Array, experts: Array, weights: Array, kernels: ExpertKernels, *, layer: Array) -> Array:
    """Compute `_pairs` without a gradient, in blocks of `BLOCK` rows: they arrive as the experts' matmuls read them.

    Each shard fills up its pairs of an expert to whole blocks. Weights are applied where the results return to.
    """
    (N, K), D, held, shards = experts.shape, x.shape[1], kernels.held, jax.lax.axis_size("expert")
    (room, most, likely), me = block_rooms(N, K, held, shards), jax.lax.axis_index("expert")
    own = -(-(N * K + (BLOCK - 1) * held * shards) // BLOCK)
    slots, spare, blocks = pairs.places(varying_like(experts.T, x), held * shards, block=BLOCK, none=own * BLOCK)
    _, order = in_order(jnp.concatenate([slots.reshape(-1), spare.reshape(-1)]), own * BLOCK)
    tokens = x.at[order[: own * BLOCK] % N].get(mode="clip").reshape(own, BLOCK, D)
    counts, ones = jax.lax.all_gather(blocks, "expert"), jnp.ones((room * BLOCK, 1), x.dtype)

    def empty(rows: int) -> Array:
        return varying_like(jax.lax.empty((rows, BLOCK, D), x.dtype), tokens)

    def through(first: Array | int, y: Array) -> Array:
        there, back, sizes = pairs.moves(counts, me, first, room=room)
        rows = jax.lax.ragged_all_to_all(tokens, empty(room), *there, axis_name="expert").reshape(-1, D)
        out = swiglu(rows, ones, kernels, group_sizes=sizes * BLOCK, layer=layer, likely=likely)
        return jax.lax.ragged_all_to_all(out.reshape(-1, BLOCK, D), y, *back, axis_name="expert")

    y = through(0, empty(own))
    if room < most:
        with jax.named_scope(RARELY):
            busiest = counts.reshape(shards, shards, -1).sum(axis=(0, 2)).max()
            y = jax.lax.fori_loop(1, -(-busiest // room), lambda i, y: through(i * room, y), y)
    return weighted_sum(y.reshape(-1, D), slots.T, weights.astype(x.dtype))


def _picked(
    x: Array, experts: Array, weights: Array, kernels: ExpertKernels, *, layer: Array, interpret: bool = False
) -> Array:
    """Compute few tokens on TPU without a gradient, by the experts' kernel of a decode step, which sorts nothing.

    Every shard gets all of the group's tokens with their experts and weights, and adds up what its own experts give.
    """
    (N, D), K, held, shards = x.shape, experts.shape[1], kernels.held, jax.lax.axis_size("expert")
    E, first = held * shards, jax.lax.axis_index("expert") * held
    x = jnp.where((experts < E).any(axis=1, keepdims=True), x, 0)  # a token of no expert is multiplied by zeros
    rows = decode_experts_tpu.pack(x, experts, weights, E)
    rows = jax.lax.all_gather(rows, "expert", axis=0, tiled=True) if shards > 1 else rows
    leaves, tree = jax.tree.flatten([_stacked(m) for m in kernels])

    def run(rows: Array, layer: Array, first: Array, *leaves: Array) -> Array:
        options: Any = {"layer": layer, "first": first, "k": K, "experts": E, "interpret": interpret}
        return decode_experts_tpu.experts_sum(rows, *tree.unflatten(leaves), **options)

    y = unchecked(run, rows, layer, first, *leaves)
    # By shards: of [N · shards, D] the compiler would make a longer all-reduce and permutes.
    return jax.lax.psum_scatter(y.reshape(shards, N, D), "expert")


def _takes_picked(x: Float[Array, "B T D"], kernels: ExpertKernels) -> bool:
    """Return True for a decode step's tokens on TPU, in whole tiles."""
    whole = all(size % LANES == 0 for size in kernels.gate.weights.shape[-2:])
    few = x.shape[1] <= _WIDEST_STEP and x.shape[0] * x.shape[1] * jax.lax.axis_size("expert") <= _MOST_PICKED
    return platform() == "tpu" and x.dtype == jnp.bfloat16 and whole and few


def _stacked(m: Matrix) -> Stacked:
    """Return a matrix of all layers, with one layer's scale and adapter, as the kernel takes it."""
    low = None
    if m.low is not None:
        more = [(0, 0), (0, -m.low.a.shape[-1] % RANKS), (0, 0)]
        low = Adapter(jnp.pad(m.low.a.mT, more)[None], jnp.pad(m.low.b, more)[None], m.low.scale)
    return Stacked(m.weights, None if m.scale is None else m.scale[None, :, None], low)


def block_rooms(tokens: int, k: int, held: int, shards: int) -> tuple[int, int, int]:
    """Return the blocks of a receive buffer, the most blocks that may arrive, and the rows if experts are balanced.

    Args:
      tokens: a shard's own.
    """
    most = shards * (tokens * min(k, held) // BLOCK + held)
    likely = tokens * k + (BLOCK - 1) * held * shards // 2
    return most if most <= _FEW // BLOCK else min(most, _ROOM * likely // BLOCK), most, likely


def _gathered(experts: Array, kernels: ExpertKernels, *, keeps: bool) -> tuple[Array, ExpertKernels]:
    """Return the tokens' experts, and the weights of all of `fsdp`.

    On TPU sparse cores gather both weights and tokens' rows, one after the other. Rows wait for `gate` and `up`, which
    attention hides: the experts' ids do. They are kept for the backward pass ("dot"), where nothing waits. If products
    are kept too (`keeps`), it gathers the weights one by one; if not, all of them for the products and their gradients.
    """
    whole = jax.tree.map(lambda w: jax.lax.all_gather(w, "fsdp", axis=0, tiled=True), kernels)
    if platform() == "tpu":
        first = jax.lax.stop_gradient((whole.gate.weights, whole.up.weights))
        experts = checkpoint_name(jax.lax.optimization_barrier((experts, first))[0], "dot")
    if platform() == "tpu" and keeps:
        own = (jax.lax.stop_gradient(m.weights) for m in kernels)
        whole = ExpertKernels(*(m._replace(shard=w) for m, w in zip(whole, own, strict=True)))
    return experts, whole


def _flat(x: Shaped[Array, "b t w"]) -> Shaped[Array, "n w"]:
    return x.reshape(-1, x.shape[-1])


def exchange(
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T K"],
    weights: Float[Array, "B T K"],
    kernels: ExpertKernels,
    *,
    dispatch: Dispatch,
    layer: Int[Array, ""] | None = None,
    keeps: bool = False,
) -> Float[Array, "B T D"]:
    """Return the experts' weighted sum for every token.

    On the mesh in scope, rows are sharded over the batch axes, experts over `expert` and F over `tensor`. Along axes
    that are manual already (all of the batch axes or none) the arguments are local parts.

    Args:
      experts: ids, different within a token; those outside [0, E) reach no expert and are not counted.
      layer: as in `adapted_matmuls`.
      keeps: the backward pass does not recompute products with gate and up.

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
        # Kernels are equal on every data and fsdp shard, x (and an adapter's narrow side) on every tensor shard: marked
        # varying, their gradients are summed. If fsdp holds whole experts, they are gathered and their gradients
        # reduce-scattered.
        own = tree.unflatten([varying(w, "data", "fsdp", "tensor") for w in leaves])
        tokens, ids = varying(_flat(x), "tensor"), _flat(experts)
        if "fsdp" in held_by:
            ids, own = _gathered(ids, own, keeps=keeps)
        if layer is not None and _takes_picked(x, own):
            y = _picked(tokens, ids, _flat(weights), own, layer=layer)
        elif dispatch == "gather" or shards == 1:  # one shard sends nothing
            y = _gather(tokens, ids, _flat(weights), own, layer=layer)
        elif layer is None:
            y = _pairs(tokens, ids, _flat(weights), own)
        else:
            y = _blocks(tokens, ids, _flat(weights), own, layer=layer)
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
