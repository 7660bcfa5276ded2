"""Feed-forward layers: a dense SwiGLU, and a mixture of SwiGLU experts as route -> dispatch -> combine.

A router scores all experts, chooses K of them for each token, and weighs these. Families name one of

    softmax_router  p = softmax(logits); the K most probable; weights p, or p made to sum to one
    sigmoid_router  σ(logits); the K largest σ + bias, in the best groups; weights σ, or σ / Σσ, times a factor

The softmax of the K largest logits is the first with weights that sum to one. A sigmoid router's p_e is σ_e / Σσ over
all experts. `Routes.logprobs`, and with them router KL, router shift γ and the balance loss, speak of p. The choice
that drift compares is the router's own, by bias and groups too.

L counts routed layers alone.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels import router_tpu
from gspo_jax.models.config import ModelConfig, Stack, dotted, parameter, zeros
from gspo_jax.models.dispatch import Dispatch, exchange
from gspo_jax.models.experts import ExpertKernels
from gspo_jax.models.matrices import matrix, project
from gspo_jax.parallel.mesh import on_shards
from gspo_jax.types import RouterRecord


@struct.dataclass
class Routing:
    """Requests to the routers. Arrays lead with L. A layer gets its slice."""

    replay: Int[Array, "*L B T K"] | None = None
    """Experts to use instead of the router's choice. A token with a -1 is routed natively."""
    watch: Int[Array, "*L B T K"] | None = None
    """Experts to return router log-probs for; 0 for a -1."""
    load: Float[Array, "*L E"] | None = None
    """Each expert's share of all (token, expert) pairs. Requests the balance penalty."""
    weigh_by: Float[Array, "*L B T K"] | None = None
    """Router log-probs that weigh the replayed experts, as constants. None: the router's own."""


class Routes(NamedTuple):
    """Each token's experts and router scores. A forward stacks arrays over routed layers."""

    experts: Int[Array, "*L B T K"]
    """Most probable first by the router that chose them (maybe a replayed one)."""
    logprobs: Float[Array, "*L B T K"]
    """log p at these experts, float32: the router's log softmax, or log σ_e − log Σ σ, before renormalisation over the
    chosen, bias and scaling."""
    native: Int[Array, "*L B T K"] | None = None
    """The router's own choice under replay; None: it is `experts`."""
    watched: Float[Array, "*L B T K"] | None = None
    """log p at the watched experts, without a gradient."""
    margin: Float[Array, "*L B T"] | None = None
    """Least p of an expert that the router chose, less the largest of the others; made with `watched`. Below 0 where a
    sigmoid router's bias or groups decided."""
    balance: Float[Array, "*L B T"] | None = None
    """E Σ_e load_e p_e, 1 if load or p is uniform."""
    z: Float[Array, "*L B T"] | None = None
    """(log Σ_e exp logit_e)², the router z-loss of arXiv 2202.08906; of the logits, whatever the scores."""

    @property
    def chosen(self) -> Int[Array, "*L B T K"]:
        """The router's own choice."""
        return self.experts if self.native is None else self.native


def split_routing(asked: Routing | None, config: ModelConfig) -> list[list[Routing | None]]:
    """Return the part of a request of each stack, by runs; None for dense stacks."""
    first, parts = 0, []
    for run in config.runs:
        routed = sum(stack.is_routed for stack in run)
        own = slice_layers(asked, first, routed * run[0].layers)
        first += routed * run[0].layers
        turn = iter(range(routed))
        parts.append([alternate(own, next(turn), routed) if stack.is_routed else None for stack in run])
    return parts


def join_routes(parts: Sequence[Sequence[Routes | None]], shape: tuple[int, ...]) -> Routes:
    """Concatenate the stacks' routes, layer by layer.

    Args:
      parts: of each stack, by runs; None for dense stacks.
      shape: [B, T]. A dense model's routes are [0, B, T, 0].
    """
    runs = [own for run in parts if (own := [part for part in run if part is not None])]
    if not runs:
        return Routes(jnp.zeros((0, *shape, 0), jnp.int32), jnp.zeros((0, *shape, 0), jnp.float32))
    return join_layers([interleave(run) for run in runs])


def alternate(tree: Any, turn: int, turns: int) -> Any:
    """Return layers turn, turn + turns, … of every array."""
    return tree if turns == 1 else jax.tree.map(lambda x: x.reshape(-1, turns, *x.shape[1:])[:, turn], tree)


def interleave(parts: Sequence[Any]) -> Any:
    """Invert `alternate`."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *xs: jnp.stack(xs, axis=1).reshape(-1, *xs[0].shape[1:]), *parts)


def slice_layers(tree: Any, first: int, count: int) -> Any:
    """Return layers [first, first + count) of every array."""
    return jax.tree.map(lambda x: x if x.shape[0] == count else x[first : first + count], tree)


def join_layers(parts: Sequence[Any]) -> Any:
    """Invert `slice_layers`."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)


def record(routes: Routes, fed: Bool[Array, "B N"], config: ModelConfig, *, logprobs: bool = True) -> RouterRecord:
    """Return the record of all routed layers at the fed positions."""
    experts, kept = (jnp.moveaxis(x, 0, 2) for x in (routes.experts, routes.logprobs))
    fed = fed[..., None, None]
    experts = jnp.where(fed, experts, -1).astype(config.expert_dtype)
    return RouterRecord(experts, jnp.where(fed, kept, 0) if logprobs else None)


def layers_first(record: RouterRecord) -> RouterRecord:
    """Invert `record`: return [L, B, N, K]."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), record)


@partial(jax.checkpoint, prevent_cse=False)
def _at(every: Float[Array, "B T E"], experts: Int[Array, "B T K"]) -> Float[Array, "B T K"]:
    """Return every[experts], 0 at a -1, by comparison: its transpose is a sum, a gather's is a scatter.

    The backward pass compares again, to keep no [B, T, K, E] array.
    """
    columns = jax.lax.broadcasted_iota(experts.dtype, (1, 1, 1, every.shape[-1]), 3)
    return jnp.where(experts[..., None] == columns, every[..., None, :], 0).sum(axis=-1)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _top(every: Float[Array, "B T E"], k: int) -> tuple[Float[Array, "B T K"], Int[Array, "B T K"]]:
    """Return the k largest and their experts. The gradient is `_at`'s: by comparison."""
    best, experts = jax.lax.top_k(every, k)
    return best, experts


def _top_forward(every: Array, k: int) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    best, experts = _top(every, k)
    return (best, experts), (every, experts)


def _top_backward(k: int, kept: tuple[Array, Array], grads: tuple[Array, Any]) -> tuple[Array]:
    del k
    every, experts = kept
    return jax.vjp(lambda every: _at(every, experts), every)[1](grads[0])


_top.defvjp(_top_forward, _top_backward)


def route(
    logits: Float[Array, "B T E"], *, k: int, renormalise: bool, asked: Routing | None = None
) -> tuple[Routes, Float[Array, "B T K"]]:
    """Route to the top K of the softmax over all experts, with weights that sum to one if `renormalise`.

    All float32. Replay fixes the choice alone: weights, and so gradients, come from the current logits, unless the
    request says what to weigh by.
    """
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    every = logits - log_z[..., None]
    logprobs, experts = _top(every, k)
    routes = _answered(every, logprobs, experts, log_z, asked)
    scores = _weighed(routes.logprobs, asked)
    return routes, jax.nn.softmax(scores) if renormalise else jnp.exp(scores)


def _answered(
    every: Float[Array, "B T E"],
    logprobs: Float[Array, "B T K"],
    experts: Int[Array, "B T K"],
    log_z: Float[Array, "B T"],
    asked: Routing | None,
) -> Routes:
    """Return the routes of a router with log-probs `every`, its choice and its logits' log-sum-exp, as asked for."""
    asked, native, watched, balance, margin = asked or Routing(), None, None, None, None
    if asked.watch is not None:
        constant = jax.lax.stop_gradient(every)
        watched = _at(constant, asked.watch.astype(experts.dtype))
        margin = _margin(constant, jax.lax.stop_gradient(logprobs), experts)
    if asked.replay is not None:
        native, replay = experts, asked.replay.astype(experts.dtype)
        experts = jnp.where(_known(asked.replay), replay, native)
        logprobs = _at(every, experts)
    if asked.load is not None:
        balance = every.shape[-1] * (jnp.exp(every) * asked.load[None, None]).sum(axis=-1)
    return Routes(experts, logprobs, native, watched, margin, balance, log_z**2)


def _known(replay: Int[Array, "B T K"]) -> Bool[Array, "B T 1"]:
    return (replay >= 0).all(axis=-1, keepdims=True)


def _weighed(own: Float[Array, "B T K"], asked: Routing | None) -> Float[Array, "B T K"]:
    """Return the log scores that weigh each token's experts: its `own`, or those of the request."""
    if asked is None or asked.weigh_by is None:
        return own
    assert asked.replay is not None
    return jnp.where(_known(asked.replay), asked.weigh_by, own)


def _margin(
    every: Float[Array, "B T E"], chosen: Float[Array, "B T K"], experts: Int[Array, "B T K"]
) -> Float[Array, "B T"]:
    """Return the least chosen probability less the largest of the others, or less 0 if all experts are chosen."""
    columns = jax.lax.broadcasted_iota(experts.dtype, (1, 1, 1, every.shape[-1]), 3)
    others = jnp.where((experts[..., None] == columns).any(axis=2), -jnp.inf, every)
    return jnp.exp(chosen.min(axis=-1)) - jnp.exp(others.max(axis=-1))


Choose = Callable[[Array, ModelConfig, Routing | None, Any], tuple[Routes, Array]]
"""(logits [B,T,E], config, asked, bias [E] of the choice or None) -> (routes, weights [B,T,K])."""


def softmax_router(
    logits: Float[Array, "B T E"], config: ModelConfig, asked: Routing | None, bias: None = None
) -> tuple[Routes, Float[Array, "B T K"]]:
    """Call `route` as the config says. It has no bias."""
    del bias
    return route(logits, k=config.experts_per_token, renormalise=config.norm_topk_prob, asked=asked)


SUM_FLOOR = 1e-20
"""Added to the chosen scores' sum that weights are divided by, as in DeepSeek-V3."""


def sigmoid_router(
    logits: Float[Array, "B T E"], config: ModelConfig, asked: Routing | None, bias: Float[Array, " E"]
) -> tuple[Routes, Float[Array, "B T K"]]:
    """Route to the experts of the largest σ(logit) + bias, weighted by σ alone, as in DeepSeek-V3 (arXiv 2412.19437).

    Weights are σ, or σ divided by the chosen ones' sum, times `routed_scaling_factor`. All float32. The bias has no
    gradient. Replay fixes the choice alone, as in `route`: replayed experts weigh their current σ, or that of a record
    up to a factor common to a token's experts, so only with weights divided by their sum.
    """
    logits = logits.astype(jnp.float32)
    scores = jax.nn.log_sigmoid(logits)
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    every, experts = scores - total, best_of_groups(jax.lax.stop_gradient(jax.nn.sigmoid(logits)), bias, config)
    routes = _answered(every, _at(every, experts), experts, jax.nn.logsumexp(logits, axis=-1), asked)
    weights = jnp.exp(_weighed(routes.logprobs + total, asked))
    if config.norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + SUM_FLOOR)
    return routes, weights * config.routed_scaling_factor


def best_of_groups(scores: Float[Array, "B T E"], bias: Float[Array, " E"], config: ModelConfig) -> Int[Array, "B T K"]:
    """Return the experts of the K largest score + bias within each token's best groups, highest score first.

    A group's value is the sum of its two largest score + bias.
    """
    groups, biased = config.expert_groups, scores + bias[None, None]
    if groups > 1:
        apart = biased.reshape(*biased.shape[:2], groups, -1)
        _, best = jax.lax.top_k(jax.lax.top_k(apart, 2)[0].sum(axis=-1), config.groups_per_token)
        is_best = (best[..., None] == jnp.arange(groups, dtype=best.dtype)[None, None, None]).any(axis=2)
        biased = jnp.where(is_best[..., None], apart, -jnp.inf).reshape(biased.shape)
    _, experts = jax.lax.top_k(biased, config.experts_per_token)
    return jax.lax.sort((-_at(scores, experts), experts), num_keys=1)[1]


BIAS = "choice_bias"
"""Name of a parameter of `MoE`."""


def balanced(params: nnx.State, load: Float[Array, "L E"], config: ModelConfig, *, rate: float) -> nnx.State:
    """Move each router's bias against its experts' load: bias_e += rate · sign(1 / E − load_e) (arXiv 2408.15664).

    Args:
      load: each expert's share of its layer's (token, expert) pairs.
    """
    stacks = itertools.chain.from_iterable(split_routing(Routing(load=load), config))
    own = {f"layers.{i}.mlp.{BIAS}": part.load for i, part in enumerate(stacks) if part is not None}

    def one(path: jax.tree_util.KeyPath, x: Array) -> Array:
        found = own.get(dotted(path))
        return x if found is None else x + rate * jnp.sign(1 / load.shape[1] - found)

    return jax.tree_util.tree_map_with_path(one, params)


class Buffer(nnx.Param):
    """Read, kept in checkpoints and exported like a parameter, without a gradient or weight decay."""


def split_experts(block: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Split a stack's parameters into expert weights and all others."""

    def is_kernel(path: tuple[Any, ...], leaf: Any) -> bool:
        del path
        return type(leaf) is nnx.Param and leaf.get_metadata("axes")[1] == "expert"  # no scales, no adapters

    experts, others = nnx.split_state(block, is_kernel, ...)
    return experts, others


class MoE(nnx.Module):
    """A mixture of SwiGLU experts. Parameters have a leading layer axis. `__call__` gets one layer's slice.

    `choose` makes routes and weights from float32 router logits. With `biased` it gets a bias of the choice too, a
    buffer. Shared experts, if the stack has any, are one dense SwiGLU, which every token passes; with `gated`, times
    σ(x · shared_gate).
    """

    def __init__(
        self,
        config: ModelConfig,
        stack: Stack,
        dispatch: Dispatch,
        *,
        choose: Choose,
        biased: bool = False,
        gated: bool = False,
        rngs: nnx.Rngs,
    ):
        L, D, E, F = stack.layers, config.hidden_size, stack.experts, stack.width
        self.config, self.choose = config, choose
        self.dispatch: Dispatch = dispatch
        self.router = parameter(rngs, (L, D, E), ("layers", "embed", "router"), float32=True)
        self.gate = parameter(rngs, (L, E, D, F), ("layers", "expert", "embed", "mlp"))
        self.up = parameter(rngs, (L, E, D, F), ("layers", "expert", "embed", "mlp"))
        self.down = parameter(rngs, (L, E, F, D), ("layers", "expert", "mlp", "embed"))
        beside = dataclasses.replace(stack, width=stack.shared_width)
        bias: dict[str, Any] = {"float32": True, "kind": Buffer}
        self.choice_bias = parameter(rngs, (L, E), ("layers", "router"), zeros, **bias) if biased else None
        self.shared = MLP(config, beside, dispatch, rngs=rngs) if stack.shared_width else None
        self.shared_gate = parameter(rngs, (L, D, 1), ("layers", "embed", "router")) if gated else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        valid: Bool[Array, "B T"],
        asked: Routing | None = None,
        layer: Int[Array, ""] | None = None,
        keeps: bool = False,
    ) -> tuple[Float[Array, "B T D"], Routes]:
        """Return the experts' weighted sum and the routes. Padding (`valid` False) reaches no routed expert.

        With `layer` the experts' weights are of all layers, to save a loop the copies. Scales and adapters are the
        layer's. `keeps` is as in `exchange`.
        """
        routes, weights = self._routed(x, asked, layer)
        ids = jnp.where(valid[..., None], routes.experts, self.config.num_experts)
        kernels = ExpertKernels(*(matrix(self, name, x.dtype) for name in ("gate", "up", "down")))
        y = exchange(x, ids, weights, kernels, dispatch=self.dispatch, layer=layer, keeps=keeps)
        return y if self.shared is None else y + self._shared(x, self.shared), routes

    def _shared(self, x: Array, shared: "MLP") -> Float[Array, "B T D"]:
        y, _ = shared(x)
        if self.shared_gate is None:
            return y
        (gate,) = project(self, ("shared_gate",), x)
        return jax.nn.sigmoid(gate) * y

    def _routed(self, x: Array, asked: Routing | None, layer: Array | None) -> tuple[Routes, Array]:
        (B, T, D), router, config = x.shape, matrix(self, "router", x.dtype), self.config
        plain = layer is not None and asked is None and self.choose is softmax_router and router.low is None
        if not plain or not router_tpu.applies(B * T, D, config.num_experts):
            (logits,) = project(self, ("router",), x.astype(jnp.float32))
            bias = None if self.choice_bias is None else jax.lax.stop_gradient(self.choice_bias[...])
            return self.choose(checkpoint_name(logits, "dot"), config, asked, bias)

        def run(x: Array, weights: Array) -> list[Array]:
            options = {"k": config.experts_per_token, "renormalise": config.norm_topk_prob}
            found = router_tpu.choose(x.reshape(-1, D), weights, **options)
            return [jnp.moveaxis(a.reshape(len(a), -1, T), 0, 2) for a in found]

        rows = ("batch", None, None)
        experts, logprobs, weights = on_shards(run, (x, router.weights), (rows, ()), rows)
        return Routes(experts, logprobs), weights


class MLP(nnx.Module):
    """A dense SwiGLU, down(silu(gate x) · up x)."""

    def __init__(self, config: ModelConfig, stack: Stack, dispatch: Dispatch, *, rngs: nnx.Rngs):
        del dispatch
        L, D, F = stack.layers, config.hidden_size, stack.width
        self.gate = parameter(rngs, (L, D, F), ("layers", "embed", "mlp"))
        self.up = parameter(rngs, (L, D, F), ("layers", "embed", "mlp"))
        self.down = parameter(rngs, (L, F, D), ("layers", "mlp", "embed"))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        valid: Bool[Array, "B T"] | None = None,
        asked: Routing | None = None,
        layer: Any = None,
        keeps: bool = False,
    ) -> tuple[Float[Array, "B T D"], None]:
        """Return no routes, but else as a routed block."""
        del valid, asked, layer, keeps
        gated, raised = (checkpoint_name(y, "dot") for y in project(self, ("gate", "up"), x))
        return project(self, ("down",), jax.nn.silu(gated) * raised)[0], None
