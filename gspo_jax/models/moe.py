"""Feed-forward layers: a dense SwiGLU, and a mixture of SwiGLU experts as route -> dispatch -> combine.

L counts routed layers alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels import router_tpu
from gspo_jax.models.config import ModelConfig, Stack, parameter
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


class Routes(NamedTuple):
    """Each token's experts and router scores. A forward stacks arrays over routed layers."""

    experts: Int[Array, "*L B T K"]
    """Most probable first by the router that chose them (maybe a replayed one)."""
    logprobs: Float[Array, "*L B T K"]
    """Router log softmax at these experts, float32, before renormalisation."""
    native: Int[Array, "*L B T K"] | None = None
    """The router's own choice under replay; None: it is `experts`."""
    watched: Float[Array, "*L B T K"] | None = None
    """Router log softmax at the watched experts, without a gradient."""
    balance: Float[Array, "*L B T"] | None = None
    """E Σ_e load_e p_e, 1 if load or router is uniform."""
    z: Float[Array, "*L B T"] | None = None
    """(log Σ_e exp logit_e)², the router z-loss of arXiv 2202.08906."""

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

    All float32. Replay fixes the choice alone: weights, and so gradients, come from the current logits.
    """
    asked = asked or Routing()
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    every = logits - log_z[..., None]
    logprobs, experts = _top(every, k)
    native = watched = balance = None
    if asked.replay is not None:
        native, replay = experts, asked.replay.astype(experts.dtype)
        experts = jnp.where((replay >= 0).all(axis=-1, keepdims=True), replay, native)
        logprobs = _at(every, experts)
    if asked.watch is not None:
        watched = _at(jax.lax.stop_gradient(every), asked.watch.astype(experts.dtype))
    if asked.load is not None:
        balance = logits.shape[-1] * (jnp.exp(every) * asked.load[None, None]).sum(axis=-1)
    weights = jax.nn.softmax(logprobs) if renormalise else jnp.exp(logprobs)
    return Routes(experts, logprobs, native, watched, balance, z=log_z**2), weights


Choose = Callable[[Array, ModelConfig, Routing | None], tuple[Routes, Array]]
"""(logits [B,T,E], config, asked) -> (routes, weights [B,T,K])."""


def softmax_router(
    logits: Float[Array, "B T E"], config: ModelConfig, asked: Routing | None
) -> tuple[Routes, Float[Array, "B T K"]]:
    """Call `route` as the config says."""
    return route(logits, k=config.experts_per_token, renormalise=config.norm_topk_prob, asked=asked)


def split_experts(block: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Split a stack's parameters into expert weights and all others."""

    def is_kernel(path: tuple[Any, ...], leaf: Any) -> bool:
        del path
        return type(leaf) is nnx.Param and leaf.get_metadata("axes")[1] == "expert"  # no scales, no adapters

    experts, others = nnx.split_state(block, is_kernel, ...)
    return experts, others


class MoE(nnx.Module):
    """A mixture of SwiGLU experts. Parameters have a leading layer axis. `__call__` gets one layer's slice.

    `choose` makes routes and weights from float32 router logits.
    """

    def __init__(self, config: ModelConfig, stack: Stack, dispatch: Dispatch, *, choose: Choose, rngs: nnx.Rngs):
        L, D, E, F = stack.layers, config.hidden_size, stack.experts, stack.width
        self.config, self.choose = config, choose
        self.dispatch: Dispatch = dispatch
        self.router = parameter(rngs, (L, D, E), ("layers", "embed", "router"), float32=True)
        self.gate = parameter(rngs, (L, E, D, F), ("layers", "expert", "embed", "mlp"))
        self.up = parameter(rngs, (L, E, D, F), ("layers", "expert", "embed", "mlp"))
        self.down = parameter(rngs, (L, E, F, D), ("layers", "expert", "mlp", "embed"))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        valid: Bool[Array, "B T"],
        asked: Routing | None = None,
        layer: Int[Array, ""] | None = None,
        keeps: bool = False,
    ) -> tuple[Float[Array, "B T D"], Routes]:
        """Return the experts' weighted sum and the routes. Padding (`valid` False) reaches no expert and gets 0.

        With `layer` the experts' weights are of all layers, to save a loop the copies. Scales and adapters are the
        layer's. `keeps` is as in `exchange`.
        """
        routes, weights = self._routed(x, asked, layer)
        ids = jnp.where(valid[..., None], routes.experts, self.config.num_experts)
        kernels = ExpertKernels(*(matrix(self, name, x.dtype) for name in ("gate", "up", "down")))
        return exchange(x, ids, weights, kernels, dispatch=self.dispatch, layer=layer, keeps=keeps), routes

    def _routed(self, x: Array, asked: Routing | None, layer: Array | None) -> tuple[Routes, Array]:
        (B, T, D), router, config = x.shape, matrix(self, "router", x.dtype), self.config
        plain = layer is not None and asked is None and self.choose is softmax_router and router.low is None
        if not plain or not router_tpu.applies(B * T, D, config.num_experts):
            (logits,) = project(self, ("router",), x.astype(jnp.float32))
            return self.choose(checkpoint_name(logits, "dot"), config, asked)

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
        valid: Bool[Array, "B T"],
        asked: Routing | None = None,
        layer: Any = None,
        keeps: bool = False,
    ) -> tuple[Float[Array, "B T D"], None]:
        """Return no routes, but else as a routed block."""
        del valid, asked, layer, keeps
        gated, raised = (checkpoint_name(y, "dot") for y in project(self, ("gate", "up"), x))
        return project(self, ("down",), jax.nn.silu(gated) * raised)[0], None
