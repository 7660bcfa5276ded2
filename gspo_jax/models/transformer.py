"""The transformer: stacks of equal layers, each run by one scan, the same for training, prefill and decode."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels.attention import SlotRows
from gspo_jax.kernels.backend import platform
from gspo_jax.kernels.decode_attention_tpu import Visits, attend_paged
from gspo_jax.kernels.kv import KV, Values
from gspo_jax.kernels.packed_attention import Spans
from gspo_jax.kernels.rotary import Rotation, rms_norm
from gspo_jax.models import fused, int8, lora
from gspo_jax.models.attention import (
    Context,
    Recurrence,
    attend_cached,
    attend_causal,
    attend_packed,
)
from gspo_jax.models.cache import Cache, CacheDtype, DecodeSlots, stored, write_tokens
from gspo_jax.models.config import ModelConfig, Stack, parameter
from gspo_jax.models.dispatch import Dispatch
from gspo_jax.models.matrices import SCALE
from gspo_jax.models.moe import (
    Routes,
    Routing,
    interleave,
    join_layers,
    join_routes,
    split_experts,
    split_routing,
)
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel import spread
from gspo_jax.parallel.mesh import constrain, manual_axes, on_shards

Remat = Literal["none", "dots", "full", "offload"]

REMATS: dict[Remat, Callable[..., Any] | None] = {
    "none": None,
    "dots": jax.checkpoint_policies.save_only_these_names("dot"),
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["input"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""Remat policies: what each layer saves for its backward pass.

"none" saves all intermediates. "dots" saves the layer's input, the residual stream after attention, and the matmuls'
outputs, for experts whole buffers: it recomputes only what is cheap, and is fastest where memory is slow. "full" saves
the input alone and needs little HBM, "offload" saves it in host memory and needs least, at the price of traffic.
"""

LEAN: tuple[Remat, ...] = ("full", "offload")
"""Policies that recompute whole layers."""


@struct.dataclass
class Output:
    """A forward's output. Logits are computed on demand."""

    hidden: Float[Array, "B T D"]
    """Hidden states after the final norm, in the compute dtype."""
    routes: Routes
    """Arrays lead with the number of routed layers."""
    head: Float[Array, "D V"]
    """In the compute dtype."""
    head_is_spread: bool = struct.field(pytree_node=False, default=False)
    """True if `head` is this shard's part of the vocabulary (`parallel/spread.py`)."""

    @property
    def logits(self) -> Float[Array, "B T V"]:
        """Float32 logits, for a few positions. Training uses `kernels.logprobs.token_logprobs`."""

        def unembed(hidden: Array) -> Array:
            return jnp.einsum("btd,dv->btv", hidden, self.head, preferred_element_type=jnp.float32)

        return spread.logits(unembed, self.hidden) if self.head_is_spread else unembed(self.hidden)


class Block(nnx.Module):
    """Pre-norm attention and feed-forward, called on one layer's slice of the parameters."""

    def __init__(self, config: ModelConfig, stack: Stack, dispatch: Dispatch, *, rngs: nnx.Rngs):
        L, D = stack.layers, config.hidden_size
        self.config = config
        self.attention_norm = parameter(rngs, (L, D), ("layers", "embed"), config.norm_init, float32=True)
        self.attention: Any = stack.attention(config, stack, rngs=rngs)
        self.mlp_norm = parameter(rngs, (L, D), ("layers", "embed"), config.norm_init, float32=True)
        self.mlp: Any = stack.feed_forward(config, stack, dispatch, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rotation: Rotation,
        valid: Bool[Array, "B T"],
        context: Context,
        asked: Routing | None = None,
        layer: Int[Array, ""] | None = None,
        keeps: bool = False,
    ) -> tuple[Float[Array, "B T D"], Routes | None, Any]:
        """Return the residual stream, this layer's routes (None if dense), and what `context` kept.

        `layer` and `keeps` are as in `MoE`.
        """
        eps = self.config.rms_norm_eps
        attention_norm, mlp_norm = (self.config.norm_scale(w[...]) for w in (self.attention_norm, self.mlp_norm))
        with jax.named_scope("attention"):
            y, kept = self.attention(rms_norm(x, attention_norm, eps), rotation, context)
        x = checkpoint_name(constrain(x + self._scaled(y), "batch", None, None), "dot")
        with jax.named_scope("feed_forward"):
            y, routes = self.mlp(rms_norm(x, mlp_norm, eps), valid, asked, layer, keeps)
        return constrain(x + self._scaled(y), "batch", None, None), routes, kept

    def _scaled(self, y: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        factor = self.config.residual_multiplier
        return y if factor == 1 else y * factor


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The context of whole rows: a token sees itself and those before it."""

    valid: Bool[Array, "B T"]
    """False on padding."""
    positions: Int[Array, "B T"]
    spans: Spans | None
    """The keys that each token sees; None: the valid ones before it."""
    order: Int[Array, "B T"] | None = None
    """The tokens of rows without spans, those that are not padding first; None: they lie so."""
    stores: Callable[[Array | None], Values] | None = None
    """Makes what a cache stores of keys or values. None: nothing is kept."""
    ends: Int[Array, " E"] | None = None
    """Tokens of the only row whose states are kept; None: the last of each row."""

    is_step = False

    @classmethod
    def of(cls, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"] | None, spans: Spans | None) -> "_Rows":
        if spans is not None:
            return cls(spans.valid, spans.positions, spans)
        order = None if valid is None else jnp.argsort(~valid, axis=1, stable=True)
        valid = jnp.ones(tokens.shape, bool) if valid is None else valid
        return cls(valid, jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0), None, order)

    def attend(
        self, q: Array, k: Array, v: Array | None, keep: tuple[Array, Array | None] | None = None
    ) -> tuple[Array, Any]:
        assert v is not None, "only the keys in a cache are values too"
        spans = self.spans
        out = attend_causal(q, k, v, self.valid) if spans is None else attend_packed(q, k, v, spans)
        if self.stores is None:
            return out, None
        return out, tuple(map(self.stores, keep or (k, v)))

    def recur(self, rule: Recurrence, inputs: Any) -> tuple[Any, Any]:
        order, valid = self.order, self.valid
        if order is not None:
            inputs, valid = _taken((inputs, valid), order)
        out, state = rule.rows(inputs, Spans.of_texts(valid) if self.spans is None else self.spans, self.ends)
        out = out if order is None else _taken(out, jnp.argsort(order, axis=1))
        return out, None if self.stores is None else state


def _taken(tree: Any, tokens: Int[Array, "B T"]) -> Any:
    """Return these tokens of arrays [B, T, …]."""
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, tokens.reshape(*tokens.shape, *(1,) * (x.ndim - 2)), axis=1), tree
    )


@dataclasses.dataclass(frozen=True)
class _Step:
    """The context of a decode step in one layer: prompts and pages of a cache, or states."""

    cache: Cache
    """`k`, `v` and `states` as the layers before left them."""
    layer: Int[Array, ""]
    """Number among the layers with keys and values, or among those with states."""
    slots: DecodeSlots
    rows: SlotRows | None
    newest: tuple[Int[Array, "B Q"], Int[Array, "B Q"]]
    """Page and column of each token fed."""
    visits: Visits | None
    """Blocks that the attention kernel reads on TPU; None: attention is in plain operations."""

    is_step = True

    def attend(
        self, q: Array, k: Array, v: Array | None, keep: tuple[Array, Array | None] | None = None
    ) -> tuple[Array, Any]:
        del keep
        cache, where = self.cache, {"layer": self.layer, "ages": self.slots.ages, "rows": self.rows}
        if self.visits is not None:
            kinds = (k, v), (cache.prompt_k, cache.prompt_v), (cache.k, cache.v)
            both, prompt, pools = (tuple(x for x in kind if x is not None) for kind in kinds)

            def run(layer: Array, *given: Any) -> Any:
                return attend_paged(*given, layer=layer)

            given = self.layer, q, both, prompt, pools, self.visits
            out, (own_k, *own_v) = on_shards(run, given, ((),) * len(given), [(), ()])
            return out, (own_k, own_v[0] if own_v else None)
        own = write_tokens(cache.k, self.layer, k, *self.newest), write_tokens(cache.v, self.layer, v, *self.newest)
        prompt = cache.prompt_k, cache.prompt_v, cache.prompt_lengths
        return attend_cached(q, *prompt, *own, table=cache.table, **where), own

    def recur(self, rule: Recurrence, inputs: Any) -> tuple[Any, Any]:
        states = self.cache.states
        before = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False), states)
        out, state = rule.step(before, jax.tree.map(lambda x: x[:, 0], inputs))
        put = partial(jax.lax.dynamic_update_index_in_dim, index=self.layer, axis=0)
        return jax.tree.map(lambda x: x[:, None], out), jax.tree.map(put, states, state)


class Kept(NamedTuple):
    """Keys, values and states that a prefill leaves for a cache."""

    k: KV
    """Keys and values of the layers that have them, [L, P, M, Kv, h]."""
    v: KV
    states: Any
    """States of the other layers, [L, P or E, …]; None if there are none."""

    @classmethod
    def of(cls, runs: list[list[tuple[Stack, Any]]]) -> "Kept":
        """Join what all layers kept, by runs."""

        def of(kind: int) -> Any:
            own = [[kept for stack, kept in run if _kind(stack) == kind] for run in runs]
            return join_layers([interleave(run) for run in own if run]) if any(own) else None

        k, v = of(0)
        return cls(k, v, of(1))


class Transformer(nnx.Module):
    """A causal language model with float32 parameters, which computes in `dtype`.

    Router logits, softmaxes, norms and log-probs are float32 whatever the dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        dispatch: Dispatch = "gather",
    ):
        V, D = config.vocab_size, config.hidden_size
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.embed = parameter(rngs, (V, D), ("vocab", "embed"))
        # Names order the tree, and so the sums of norms: keep this one between the others.
        self.layers = nnx.List([Block(config, stack, dispatch, rngs=rngs) for stack in config.stacks])
        self.norm = parameter(rngs, (D,), ("embed",), config.norm_init, float32=True)
        self.head = None if config.tie_word_embeddings else parameter(rngs, (D, V), ("embed", "vocab"))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        valid: Bool[Array, "B T"] | None = None,
        *,
        spans: Spans | None = None,
        routing: Routing | None = None,
        remat: Remat = "none",
    ) -> Output:
        """Run the training forward: a token sees itself and the valid tokens before it.

        Args:
          valid: False on padding, which may be anywhere and takes no position; None: no padding.
          spans: for packed rows, the keys that each token sees.
        """
        out, _ = self._forward(tokens, _Rows.of(tokens, valid, spans), routing, remat)
        return out

    def prefill(
        self,
        tokens: Int[Array, "P M"],
        valid: Bool[Array, "P M"] | None = None,
        *,
        spans: Spans | None = None,
        ends: Int[Array, " E"] | None = None,
        cache_dtype: CacheDtype | None = None,
    ) -> tuple[Output, Kept]:
        """Run the forward, and also return what every layer keeps for the cache.

        Tokens attend to keys and values as computed, whatever the cache stores.

        Args:
          valid: True for the first tokens of each row, which are read; None: all.
          ends: tokens of the only row, ascending, after which states are kept; None: each row's last token.
        """
        if spans is None and valid is not None and platform() == "tpu":
            spans = Spans.of_texts(valid)
        rows = _Rows.of(tokens, valid, spans)
        rows = dataclasses.replace(rows, order=None, ends=ends, stores=partial(stored, dtype=cache_dtype))
        output, kept = self._forward(tokens, rows, None, "none", in_place=True)
        return output, Kept.of(kept)

    def decode(self, tokens: Int[Array, "B Q"], slots: DecodeSlots, cache: Cache) -> tuple[Output, Cache]:
        """Feed up to Q tokens to every slot. Where none is fed, none reaches an expert and outputs are undefined."""
        P = cache.prompt_lengths.shape[0]
        prompts = jnp.clip(slots.responses // cache.group_size, 0, P - 1)
        positions = cache.prompt_lengths[prompts][:, None] + slots.ages - 1
        if fused.applies(self.config, self.layers, cache):
            x = self._embed(tokens)
            rows, at = x.reshape(-1, x.shape[-1]), positions.reshape(-1)
            rows, cache, found = fused.decode(rows, self.layers, self.config, slots, prompts, at, cache)
            return self._output(rows.reshape(x.shape), join_routes([[own] for own in found], positions.shape)), cache
        visits = None
        if fused.attends(self.config, cache, slots.ages.size):
            options = {"arrays": 1 if cache.v is None else 2}
            given = cache.prompt_k, cache.prompt_lengths, cache.k, cache.table, prompts, slots.ages
            # Behind a barrier, or the compiler computes what is cheap in every layer.
            visits = jax.lax.optimization_barrier(Visits.of(*given, **options))
        rows = None if slots.aligned else SlotRows.of(slots.responses, slots.active, P, cache.group_size)
        rotation = Rotation.of(positions, self.config.rope_frequencies(), self.config.rope_amplitude)
        x, first, found = self._embed(tokens), (0, 0), []
        for run in self._runs():
            x, cache, routes = _decode_run(run, x, rotation, slots, rows, visits, cache, first)
            first = tuple(n + sum(s.layers for _, s in run if _kind(s) == kind) for kind, n in enumerate(first))
            found.append(routes)
        return self._output(x, join_routes(found, positions.shape)), cache

    def _runs(self) -> list[list[tuple[Block, Stack]]]:
        """Return blocks and stacks, by runs."""
        blocks = iter(self.layers)
        return [[(next(blocks), stack) for stack in run] for run in self.config.runs]

    def _forward(
        self, tokens: Array, rows: "_Rows", routing: Routing | None, remat: Remat, *, in_place: bool = False
    ) -> tuple[Output, Any]:
        """`in_place`: experts are read where all layers lie, without a gradient, and not copied layer by layer."""
        # Behind a barrier, or the TPU compiler moves cosines into the loop.
        rotation = Rotation.of(rows.positions, self.config.rope_frequencies(), self.config.rope_amplitude)
        rotation = jax.lax.optimization_barrier(rotation)

        def scanned(blocks: list[Block], x: Array, asked: list[Routing | None]) -> tuple[Array, Any]:
            graphs, stacked = zip(*map(nnx.split, blocks), strict=True)
            whole, sliced = zip(*map(split_experts if in_place else _all_sliced, stacked), strict=True)
            number = jnp.arange(len(blocks[0].attention_norm[...])) if in_place else None

            def layer(x: Array, xs: tuple[Any, list[Routing | None], Array | None]) -> Any:
                params, asked, number = xs
                found = []
                for i, graph in enumerate(graphs):
                    x = checkpoint_name(x, "input")
                    one = nnx.merge(graph, params[i], whole[i])
                    options = {"layer": number, "keeps": remat not in LEAN}
                    x, routes, kept = one(x, rotation, rows.valid, rows, asked[i], **options)
                    found.append((routes, kept))
                return x, found

            # Loops do not share subexpressions: the barriers that prevent it would keep slices from being fused.
            body = layer if remat == "none" else jax.checkpoint(layer, policy=REMATS[remat], prevent_cse=False)
            return jax.lax.scan(body, x, (sliced, asked, number))

        x, found = self._embed(tokens), []
        for run, asked in zip(self._runs(), split_routing(routing, self.config), strict=True):
            x, of_run = scanned([block for block, _ in run], x, asked)
            found.append(of_run)
        routes = join_routes([[routes for routes, _ in run] for run in found], tokens.shape)
        runs = zip(self.config.runs, found, strict=True)
        kept = [list(zip(run, (kept for _, kept in own), strict=True)) for run, own in runs]
        return self._output(x, routes), kept

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        if spread.is_spread(self.embed):
            x = spread.lookup(self.embed.astype(self.dtype), tokens)
        else:
            # The batch is sharded over fsdp too, and a lookup cannot keep both sharded.
            x = constrain(self.embed.astype(self.dtype), "vocab", None)[tokens]
        factor = self.config.embedding_multiplier
        return constrain(x if factor == 1 else x * factor, "batch", None, None)

    def _output(self, x: Array, routes: Routes) -> Output:
        head = self.embed[...].T if self.head is None else self.head[...]
        head = constrain(head.astype(self.dtype), None, "vocab")  # gathered once, not for each chunk
        is_local = "expert" in manual_axes() and spread.is_spread(self.embed if self.head is None else self.head)
        # Hidden states are divided where they are float32.
        norm = self.config.norm_scale(self.norm[...]) / self.config.logits_scaling
        return Output(rms_norm(x, norm, self.config.rms_norm_eps), routes, head, is_local)


def _kind(stack: Stack) -> int:
    """Return 0 for layers with keys and values in a cache, 1 for those with states."""
    return int(stack.state is not None)


def _all_sliced(stacked: nnx.State) -> tuple[nnx.State, nnx.State]:
    """As `split_experts`, with every parameter among the others."""
    return nnx.State({}), stacked


def _decode_run(
    run: list[tuple[Block, Stack]],
    x: Float[Array, "B Q D"],
    rotation: Rotation,
    slots: DecodeSlots,
    rows: SlotRows | None,
    visits: Visits | None,
    cache: Cache,
    first: tuple[int, ...],
) -> tuple[Float[Array, "B Q D"], Cache, list[Routes | None]]:
    """Feed x through one run, whose layers of each `_kind` in the cache begin at `first`."""
    graphs, stacked = zip(*(nnx.split(block) for block, _ in run), strict=True)
    whole, sliced = zip(*map(split_experts, stacked), strict=True)
    newest, kinds = cache.newest(slots.ages), [_kind(stack) for _, stack in run]

    def layer(carry: tuple[Array, list[Any]], xs: tuple[Any, Array]) -> tuple[Any, list[Routes | None]]:
        (x, kept), (params, number), found = carry, xs, []
        for i, (graph, kind) in enumerate(zip(graphs, kinds, strict=True)):
            (k, v), states = kept
            at = first[kind] + number * kinds.count(kind) + kinds[:i].count(kind)
            context = _Step(dataclasses.replace(cache, k=k, v=v, states=states), at, slots, rows, newest, visits)
            one = nnx.merge(graph, params[i], whole[i])
            x, routes, own = one(x, rotation, slots.ages > 0, context, layer=number)
            kept = [own if n == kind else other for n, other in enumerate(kept)]
            found.append(routes)
        return (x, kept), found

    numbers = jnp.arange(run[0][1].layers)
    (x, ((k, v), states)), routes = jax.lax.scan(layer, (x, [(cache.k, cache.v), cache.states]), (sliced, numbers))
    return x, dataclasses.replace(cache, k=k, v=v, states=states), routes


_LARGE_HEAD = 1 << 30
"""Bytes in bfloat16 from which the sampler spreads the head over `expert`. Reading fewer takes a decode step no longer
than logits of many slots take over the links."""

Base = Literal["trained", "frozen", "int8"]
"""The base weights: trained, or frozen and spread over `expert` (`parallel/spread.py`), or these in int8."""


def abstract(
    config: ModelConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    dispatch: Dispatch = "gather",
    adapters: lora.Adapters | None = None,
    base: Base = "trained",
) -> tuple[nnx.GraphDef[Transformer], nnx.State]:
    """Return the model's graph and parameter shapes, without allocating any."""
    of = {"dtype": dtype, "dispatch": dispatch, "adapters": adapters, "base": base}
    return nnx.split(nnx.eval_shape(lambda: _make(config, nnx.Rngs(0), **of)))


def _make(
    config: ModelConfig,
    rngs: nnx.Rngs,
    adapters: lora.Adapters | None = None,
    base: Base = "trained",
    **options: Any,
) -> Transformer:
    model = Transformer(config, rngs=rngs, **options)
    if base == "int8":
        int8.add(model)
    if base != "trained":
        _spread(model)
    elif model.head is not None and 2 * math.prod(model.head.shape) >= _LARGE_HEAD:
        model.head.set_metadata(spread=(1, model.head.shape[1]), spread_in="sampler")
    if adapters is not None:
        lora.add(model, adapters, rngs=rngs)
    return model


def _spread(model: Transformer) -> None:
    """Shard the vocabulary, and the columns of dense matrices not declared `whole`, over `expert` too."""
    found = [(model.embed, 0)] if model.head is None else [(model.embed, 0), (model.head, 1)]
    for module, own in (place for block in model.layers for place in lora.matrices(block)):
        if getattr(module, own).get_metadata("whole", None):
            continue
        columns = [v for v in (getattr(module, own), getattr(module, own + SCALE, None)) if v is not None]
        found += [(v, v.ndim - 1) for v in columns if "expert" not in v.get_metadata("axes")]
    for variable, dimension in found:
        variable.set_metadata(spread=(dimension, variable.shape[dimension]))


def init_params(
    config: ModelConfig,
    key: jax.Array,
    *,
    mesh: jax.sharding.Mesh | None = None,
    adapters: lora.Adapters | None = None,
) -> nnx.State:
    """Return random float32 parameters, each created in its own sharding (None: the default device).

    With `adapters`, only the adapters' parameters.
    """

    def make(key: jax.Array) -> nnx.State:
        params = nnx.state(_make(config, nnx.Rngs(key), adapters))
        return params if adapters is None else lora.split(params)[0]

    shardings = None if mesh is None else mesh_lib.param_shardings(jax.eval_shape(make, key), mesh)
    return jax.jit(make, out_shardings=shardings)(key)
