"""A decode step's layers on TPU: four kernels and two collectives each, in place of some 145 operations.

    qkv        residual x + y, norm, heads normed and rotated (kernels/decode_qkv_tpu.py)
    attention  of prompt, pages and the newest token, which it writes (decode_attention_tpu.py)
    output     o, residual, norm, router, top K (decode_output_tpu.py)
               one all-gather over `expert`, of rows [x | weights | ids]
    experts    of the rows that the held experts got (decode_experts_tpu.py), or the dense SwiGLU (decode_mlp_tpu.py)
               one reduce-scatter, whose result y the next layer adds

Other layers, and other platforms, take `Transformer`'s own step, which computes the same. On TPU it has two of the
kernels: attention (`attends`) and experts (models/dispatch.py).
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from gspo_jax.kernels.backend import platform
from gspo_jax.kernels.decode_attention_tpu import Visits, paged_attention
from gspo_jax.kernels.decode_columns_tpu import columns, heads_of_parts
from gspo_jax.kernels.decode_experts_tpu import experts_sum
from gspo_jax.kernels.decode_mlp_tpu import mlp
from gspo_jax.kernels.decode_output_tpu import RouteLog, Router, output_and_routes, projection
from gspo_jax.kernels.decode_qkv_tpu import HeadNorms, heads, rotation
from gspo_jax.kernels.decode_tpu import LANES, RANKS, Adapter, Stacked, vmem_limit
from gspo_jax.kernels.kv import KV, parts
from gspo_jax.models.attention import Attention
from gspo_jax.models.cache import Cache, DecodeSlots
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.matrices import ADAPTER, BIAS, SCALE
from gspo_jax.models.moe import MLP, MoE, Routes, softmax_router
from gspo_jax.parallel import spread
from gspo_jax.parallel.mesh import AXES, has_mesh, manual_axes


def applies(config: ModelConfig, layers: Any, cache: Cache) -> bool:
    """Return True if the kernels compute these stacks and this cache on the platform in scope."""
    alternate = len(config.runs) < len(config.stacks)
    return platform() == "tpu" and not alternate and all(_known(block) for block in layers) and _fits(config, cache)


def _known(block: Any) -> bool:
    attention, feed_forward = block.attention, block.mlp
    routed = type(feed_forward) is MoE and feed_forward.choose is softmax_router and feed_forward.shared is None
    if type(attention) is not Attention or attention.gated or not (routed or type(feed_forward) is MLP):
        return False
    if getattr(attention, "q" + BIAS, None) is not None:
        return False
    over_chips = {spread.is_spread(getattr(attention, name)) for name in ("q", "k", "v", "o")}
    if len(over_chips) > 1 or (True in over_chips and _sharded("tensor")):
        return False
    if attention.q_norm is None:
        return True
    over = getattr(attention.q_norm, "over", None)
    return over == "head" or (over == "projection" and not _sharded("tensor"))


def _fits(config: ModelConfig, cache: Cache) -> bool:
    """Whole tiles: what the TPU's compiler takes. Heads are turned as a whole, and nothing is multiplied."""
    if config.zero_centred_norms:
        return False
    keys, _ = parts(cache.k)
    whole = config.head_dim % 64 == 0 and config.hidden_size % 128 == 0 and config.rotary_dim == config.head_dim
    plain = config.attention_multiplier is None and config.residual_multiplier == 1
    return keys.shape[3] % (32 // keys.dtype.itemsize) == 0 and whole and plain


def attends(config: ModelConfig, cache: Cache, tokens: int) -> bool:
    """Return True if the attention kernel alone takes this cache, and a step's heads of so many tokens at once."""
    if platform() != "tpu" or _sharded("tensor"):
        return False
    keys, _ = parts(cache.k)
    Kv, columns, width = keys.shape[2:]
    heads = (config.num_heads + (1 if cache.v is None else 2) * Kv) * tokens * -(-width // LANES) * LANES * 4
    return columns % (32 // keys.dtype.itemsize) == 0 and width % 64 == 0 and heads <= vmem_limit() // 4


def _sharded(axis: str) -> bool:
    return has_mesh() and jax.sharding.get_abstract_mesh().shape[axis] > 1


@struct.dataclass
class _Stack:
    """A stack's parameters as the kernels take them."""

    attention_norm: Float[Array, "L 1 D"]
    q: Stacked
    k: Stacked
    v: Stacked
    o: Stacked
    head_norms: HeadNorms = struct.field(pytree_node=False)
    is_spread: bool = struct.field(pytree_node=False)
    """True if attention's matrices are this shard's part of the columns (`parallel/spread.py`)."""
    norms: tuple[Float[Array, "L 1 _"], ...]
    mlp_norm: Float[Array, "L 1 D"]
    router: Router | None
    gate: Stacked
    up: Stacked
    down: Stacked

    @classmethod
    def of(cls, block: Any, config: ModelConfig, dtype: Any) -> "_Stack":
        attention, feed_forward = block.attention, block.mlp
        own = {name: _stacked(attention, name, dtype) for name in ("q", "k", "v", "o")}
        own |= {name: _stacked(feed_forward, name, dtype) for name in ("gate", "up", "down")}
        mlp_norm, over, norms, router = block.mlp_norm[...][:, None], "none", (), None
        if attention.q_norm is not None:
            over = attention.q_norm.over
            norms = tuple(norm.scale[...][:, None] for norm in (attention.q_norm, attention.k_norm))
        if type(feed_forward) is MoE:
            weights = _stacked(feed_forward, "router", dtype)
            router = Router(mlp_norm, weights, config.experts_per_token, config.norm_topk_prob)
        return cls(
            attention_norm=block.attention_norm[...][:, None],
            head_norms=over,
            is_spread=spread.is_spread(attention.q),
            norms=norms,
            mlp_norm=mlp_norm,
            router=router,
            **own,
        )


def _stacked(module: nnx.Module, name: str, dtype: Any) -> Stacked:
    weights: Any = getattr(module, name)
    scale, adapter = (getattr(module, name + beside, None) for beside in (SCALE, ADAPTER))
    low = None
    if adapter is not None:
        a, b = adapter.a[...].astype(dtype).mT, adapter.b[...].astype(dtype)
        if spread.is_spread(weights):
            columns = weights.shape[-1]
            b = jax.lax.dynamic_slice_in_dim(b, jax.lax.axis_index("expert") * columns, columns, axis=b.ndim - 1)
        more = -a.shape[-2] % RANKS
        ranks = [(0, more) if axis == a.ndim - 2 else (0, 0) for axis in range(a.ndim)]
        low = Adapter(jnp.pad(a, ranks), jnp.pad(b, ranks), adapter.scale)
    if scale is None:
        return Stacked(weights.astype(dtype), None, low)
    return Stacked(weights[...], scale[...][..., None, :], low)


def _spec(path: tuple[Any, ...], leaf: Array) -> PartitionSpec:
    """Return how a leaf of (stacks, cache) is sharded over `tensor`.

    Keys and values by heads; matrices before heads or F by columns, those after them by rows.
    """
    names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    whole, lead = PartitionSpec(), (None,) * (leaf.ndim - 2)
    across, is_a = PartitionSpec(*lead, None, "tensor"), names[-1] == "a"
    if names[0] in ("prompt_k", "prompt_v") or (names[0] in ("k", "v") and path[0].idx == 1):
        return PartitionSpec(None, None, "tensor")
    if names[0] in ("q", "k", "v", "gate", "up"):
        return whole if is_a else across
    if names[0] in ("o", "down"):
        return PartitionSpec(*lead, "tensor") if names[-1] == "weights" else across if is_a else whole
    return whole


def decode(
    x: Float[Array, "BQ D"],
    layers: Any,
    config: ModelConfig,
    slots: DecodeSlots,
    prompts: Int[Array, " B"],
    positions: Int[Array, " BQ"],
    cache: Cache,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "BQ D"], Cache, list[Routes | None]]:
    """Feed embedded tokens, one slot after another, through all stacks, as `Transformer.decode` does.

    Args:
      layers: the model's blocks, one per stack.
      prompts: each slot's.
      positions: of the tokens.
    """
    stacks = [_Stack.of(block, config, x.dtype) for block in layers]
    if not has_mesh() or not (automatic := set(AXES) - manual_axes()):
        x, pools, routes = _decode(x, stacks, slots, prompts, positions, cache, config, interpret)
        return x, dataclasses.replace(cache, k=pools[0], v=pools[1]), routes
    found, tree = jax.tree.flatten_with_path((stacks, cache))
    leaves = [leaf for _, leaf in found]

    def run(
        x: Array, leaves: list[Array], slots: DecodeSlots, prompts: Array, positions: Array
    ) -> tuple[Array, tuple[KV, ...], list[Routes | None]]:
        stacks, cache = tree.unflatten(leaves)
        return _decode(x, stacks, slots, prompts, positions, cache, config, interpret)

    whole, heads = PartitionSpec(), PartitionSpec(None, None, "tensor")
    specs: Any = whole, [_spec(path, leaf) for path, leaf in found], whole, whole, whole
    # The compiler cannot split kernels.
    options: Any = {"in_specs": specs, "out_specs": (whole, heads, whole), "axis_names": automatic, "check_vma": False}
    x, (k, v), routes = jax.shard_map(run, **options)(x, leaves, slots, prompts, positions)
    return x, dataclasses.replace(cache, k=k, v=v), routes


def _decode(
    x: Array,
    stacks: list[_Stack],
    slots: DecodeSlots,
    prompts: Array,
    positions: Array,
    cache: Cache,
    config: ModelConfig,
    interpret: bool,
) -> tuple[Array, tuple[KV, ...], list[Routes | None]]:
    assert cache.v is not None, "these layers have values"
    turn = rotation(positions, config.rope_frequencies(), config.rope_amplitude)
    first, found, pools = 0, [], (cache.k, cache.v)
    visits = Visits.of(cache.prompt_k, cache.prompt_lengths, cache.k, cache.table, prompts, slots.ages)
    active = (slots.ages > 0).reshape(-1, 1).astype(jnp.float32)
    # Behind a barrier, or the compiler computes what is cheap in every layer.
    visits, turn = jax.lax.optimization_barrier((visits, turn))
    for stack in stacks:
        L, log = stack.attention_norm.shape[0], None
        everyone = _all_rows if stack.is_spread else lambda rows: rows
        rows, fed, held = jax.lax.optimization_barrier((everyone(x), everyone(active), _first_held(stack)))
        if stack.router is not None:
            shape = L, len(rows), stack.router.k
            log = RouteLog(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
        one = _spread_layer if stack.is_spread else _layer
        run = partial(one, _Step(stack, config, turn, visits, fed, cache, first, held, interpret))
        rows, y, pools, log = jax.lax.fori_loop(0, L, run, (rows, jnp.zeros_like(rows), pools, log))
        x = rows + y
        if stack.is_spread:
            x, log = _own_rows(x, 0, len(active)), jax.tree.map(lambda a: _own_rows(a, 1, len(active)), log)
        found.append(None if log is None else Routes(*(a.reshape(L, *slots.ages.shape, -1) for a in log)))
        first += L
    return x, pools, found


def _all_rows(rows: Array) -> Array:
    return jax.lax.all_gather(rows, "expert", axis=0, tiled=True)


def _own_sums(rows: Array) -> Array:
    """Add up all shards' rows, and return this shard's.

    By shards, [32, 256, D]: of [8192, D] the compiler would make a longer all-reduce and permutes.
    """
    return jax.lax.psum_scatter(rows.reshape(jax.lax.axis_size("expert"), -1, rows.shape[1]), "expert")


def _own_rows(rows: Array, axis: int, count: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(rows, jax.lax.axis_index("expert") * count, count, axis=axis)


_State = tuple[Float[Array, "B D"], Float[Array, "B D"], tuple[KV, ...], RouteLog | None]
"""Residual stream, what is to be added to it, pools, and the routes of the stack."""


class _Step(NamedTuple):
    """Inputs of a stack's layers that do not change from one to the next."""

    stack: _Stack
    config: ModelConfig
    turn: tuple[Array, Array]
    """As of `decode_qkv_tpu.rotation`."""
    visits: Visits
    active: Float[Array, "B 1"]
    cache: Cache
    first: int
    """Number of the stack's first layer in the cache."""
    held: Int[Array, ""]
    """Id of the first expert held here."""
    interpret: bool

    def attend(self, own: Array, pools: tuple[KV, ...], layer: Array, dtype: Any) -> tuple[Array, tuple[KV, ...]]:
        assert self.cache.prompt_v is not None, "these layers have values"
        prompts, where = (self.cache.prompt_k, self.cache.prompt_v), layer + self.first
        return paged_attention(own, prompts, pools, self.visits, layer=where, dtype=dtype, interpret=self.interpret)

    def experts(self, rows: Array, layer: Array) -> Array:
        matrices, config = (self.stack.gate, self.stack.up, self.stack.down), self.config
        sizes = {"k": config.experts_per_token, "experts": config.num_experts}
        return experts_sum(rows, *matrices, layer=layer, first=self.held, interpret=self.interpret, **sizes)


def _layer(step: _Step, layer: Int[Array, ""], state: _State) -> _State:
    (x, y, pools, log), stack = state, step.stack
    where: Any = {"layer": layer, "interpret": step.interpret}
    options: Any = {"eps": step.config.rms_norm_eps, **where}
    with jax.named_scope("attention"):
        matrices = stack.q, stack.k, stack.v, step.turn, stack.norms
        own = heads(x, y, stack.attention_norm, *matrices, head_norms=stack.head_norms, **options)
        attended, pools = step.attend(own, pools, layer, x.dtype)
        o = stack.o
        if _sharded("tensor"):
            part = projection(attended, o, len(x), dtype=x.dtype, **where)
            attended, o = jax.lax.psum(part, "tensor"), None
        x, rows, log = output_and_routes(attended, x, y, step.active, o, stack.router, log, **options)
    with jax.named_scope("feed_forward"):
        if rows is None:
            y = mlp(x, stack.mlp_norm, stack.gate, stack.up, stack.down, **options)
        else:
            over = _over_experts()
            y = step.experts(_all_rows(rows) if over else rows, layer)
            y = _own_sums(y) if over else y
        y = jax.lax.psum(y, "tensor") if _sharded("tensor") else y
    return x, y, pools, log


def _spread_layer(step: _Step, layer: Int[Array, ""], state: _State) -> _State:
    """As `_layer`, with every shard's rows on each: attention alone needs a row's own shard.

    Collectives: an all-to-all of columns to their rows' shards, all-gathers of attention's rows and of o's columns, an
    all-reduce of the experts' sums.
    """
    (x, y, pools, log), stack, turn = state, step.stack, step.turn
    shards, B = jax.lax.axis_size("expert"), len(turn[0])
    options: Any = {"eps": step.config.rms_norm_eps, "layer": layer, "interpret": step.interpret}
    with jax.named_scope("attention"):
        matrices = stack.q, stack.k, stack.v
        own = columns(x, (y, stack.attention_norm), matrices, **options).reshape(shards, B, -1)
        parts = jax.lax.all_to_all(own, "expert", split_axis=0, concat_axis=0, tiled=True)
        widths = stack.q.weights.shape[-1], stack.k.weights.shape[-1], stack.v.weights.shape[-1]
        own = heads_of_parts(parts, widths, turn, stack.norms, head_norms=stack.head_norms, **options)
        attended, pools = step.attend(own, pools, layer, x.dtype)
        attended = _all_rows(attended[:B].astype(x.dtype).reshape(B, -1))
        parts = jax.lax.all_gather(columns(attended, None, (stack.o,), **options), "expert")
        x, rows, log = output_and_routes(parts, x, y, step.active, None, stack.router, log, **options)
    with jax.named_scope("feed_forward"):
        assert rows is not None, "only mixtures have an axis `expert`"
        y = jax.lax.psum(step.experts(rows, layer), "expert")
    return x, y, pools, log


def _over_experts() -> bool:
    return "expert" in manual_axes() and _sharded("expert")


def _first_held(stack: _Stack) -> Int[Array, ""]:
    """Return the id of the first expert held here."""
    held = stack.gate.weights.shape[1]
    return jax.lax.axis_index("expert") * held if _over_experts() else jnp.zeros((), jnp.int32)
