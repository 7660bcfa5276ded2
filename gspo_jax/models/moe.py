"""The feed-forward layers: a dense SwiGLU, and a mixture of SwiGLU experts as route -> dispatch -> combine.

Routes and what is asked of routers cover the routed layers alone: their leading dimension L counts those.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.models.config import ModelConfig, Stack, parameter
from gspo_jax.models.dispatch import Dispatch, exchange
from gspo_jax.models.experts import ExpertKernels
from gspo_jax.models.matrices import matrix, project
from gspo_jax.types import RouterRecord


@struct.dataclass
class Routing:
    """Requests to the routers, each optional. Arrays lead with L, and a layer gets its own slice."""

    replay: Int[Array, "*L B T K"] | None = None
    """Experts to use in place of the router's choice. A token with a -1 among them is routed natively."""
    watch: Int[Array, "*L B T K"] | None = None
    """Experts whose router log-probs to return, whichever experts are used; 0 is returned for a -1."""
    load: Float[Array, "*L E"] | None = None
    """Each expert's share of all (token, expert) pairs; if given, the balance penalty is returned."""


class Routes(NamedTuple):
    """The experts of each token, with the router's scores. A forward stacks arrays over routed layers: [L, ...]."""

    experts: Int[Array, "*L B T K"]
    """The K experts used for each token, most probable first by the router that chose them (maybe a replayed one)."""
    logprobs: Float[Array, "*L B T K"]
    """log softmax of the router at those experts, float32, before renormalisation."""
    native: Int[Array, "*L B T K"] | None = None
    """The router's own choice under replay; None without replay, when it is `experts`."""
    watched: Float[Array, "*L B T K"] | None = None
    """log softmax of the router at the watched experts, without a gradient; None if none are watched."""
    balance: Float[Array, "*L B T"] | None = None
    """E Σ_e load_e p_e, 1 if load or router is uniform; None if no load was given."""
    z: Float[Array, "*L B T"] | None = None
    """(log Σ_e exp logit_e)², the router z-loss of arXiv 2202.08906."""

    @property
    def chosen(self) -> Int[Array, "*L B T K"]:
        """The router's own choice, followed or not."""
        return self.experts if self.native is None else self.native


def split_routing(asked: Routing | None, stacks: Sequence[Stack]) -> list[Routing | None]:
    """Each stack's part of what is asked of the model's routers; None for a dense stack."""
    first, parts = 0, []
    for stack in stacks:
        parts.append(slice_layers(asked, first, stack.layers) if stack.is_routed else None)
        first += stack.layers * stack.is_routed
    return parts


def join_routes(parts: Sequence[Routes | None], shape: tuple[int, ...]) -> Routes:
    """The routes of all routed layers, from those of each stack (None if dense).

    Args:
      parts: the stacks' routes, first to last.
      shape: [B, T]; the routes of a dense model are [0, B, T, 0].
    """
    routed = [part for part in parts if part is not None]
    if not routed:
        return Routes(jnp.zeros((0, *shape, 0), jnp.int32), jnp.zeros((0, *shape, 0), jnp.float32))
    return join_layers(routed)


def slice_layers(tree: Any, first: int, count: int) -> Any:
    """Layers [first, first + count) of every array; an array that has no others is returned as it is."""
    return jax.tree.map(lambda x: x if x.shape[0] == count else x[first : first + count], tree)


def join_layers(parts: Sequence[Any]) -> Any:
    """The inverse of `slice_layers`: concatenates the layers of every array."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)


def record(routes: Routes, fed: Bool[Array, "B N"], config: ModelConfig, *, logprobs: bool = True) -> RouterRecord:
    """The record of all routed layers at the positions that were fed, with or without the router's log-probs."""
    experts, kept = (jnp.moveaxis(x, 0, 2) for x in (routes.experts, routes.logprobs))
    fed = fed[..., None, None]
    experts = jnp.where(fed, experts, -1).astype(config.expert_dtype)
    return RouterRecord(experts, jnp.where(fed, kept, 0) if logprobs else None)


@partial(jax.checkpoint, prevent_cse=False)
def _at(every: Float[Array, "B T E"], experts: Int[Array, "B T K"]) -> Float[Array, "B T K"]:
    """every[experts], and 0 at a -1. By comparison, whose transpose is a sum, while that of a gather is a scatter.

    The backward pass compares again, to keep no [B, T, K, E] array.
    """
    columns = jax.lax.broadcasted_iota(experts.dtype, (1, 1, 1, every.shape[-1]), 3)
    return jnp.where(experts[..., None] == columns, every[..., None, :], 0).sum(axis=-1)


def route(
    logits: Float[Array, "B T E"], *, k: int, renormalise: bool, asked: Routing | None = None
) -> tuple[Routes, Float[Array, "B T K"]]:
    """Softmax over all experts, then top-K, then weights that sum to one if `renormalise`; float32 throughout.

    Replay fixes the choice alone: weights, and so gradients, come from the current logits.
    """
    asked = asked or Routing()
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    every = logits - log_z[..., None]
    experts = jax.lax.top_k(jax.lax.stop_gradient(every), k)[1]
    native = watched = balance = None
    if asked.replay is not None:
        native, replay = experts, asked.replay.astype(experts.dtype)
        experts = jnp.where((replay >= 0).all(axis=-1, keepdims=True), replay, native)
    if asked.watch is not None:
        watched = _at(jax.lax.stop_gradient(every), asked.watch.astype(experts.dtype))
    if asked.load is not None:
        balance = logits.shape[-1] * (jnp.exp(every) * asked.load[None, None]).sum(axis=-1)
    logprobs = _at(every, experts)
    weights = jax.nn.softmax(logprobs) if renormalise else jnp.exp(logprobs)
    return Routes(experts, logprobs, native, watched, balance, z=log_z**2), weights


Choose = Callable[[Array, ModelConfig, Routing | None], tuple[Routes, Array]]
"""A family's router: (logits [B,T,E], config, asked) -> (routes, weights [B,T,K] of the experts' outputs)."""


def softmax_router(
    logits: Float[Array, "B T E"], config: ModelConfig, asked: Routing | None
) -> tuple[Routes, Float[Array, "B T K"]]:
    """Call `route` with the config's K and renormalisation."""
    return route(logits, k=config.experts_per_token, renormalise=config.norm_topk_prob, asked=asked)


def split_experts(block: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Split a stack's parameters into the experts' weights (none in a dense stack) and all others."""

    def is_kernel(path: tuple[Any, ...], leaf: Any) -> bool:
        del path
        return type(leaf) is nnx.Param and leaf.get_metadata("axes")[1] == "expert"  # no scales, no adapters

    experts, others = nnx.split_state(block, is_kernel, ...)
    return experts, others


class MoE(nnx.Module):
    """A mixture of SwiGLU experts. Parameters have a leading layer axis; `__call__` gets one layer's slice of them.

    `choose` makes routes and weights of the router's logits, which are a projection of the token in float32.
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
    ) -> tuple[Float[Array, "B T D"], Routes]:
        """Return the experts' weighted sum and the routes. Padding (`valid` False) reaches no expert: its sum is 0.

        With `layer` the experts' weights are those of all layers of the stack, so that a loop over layers need not copy
        each layer's; scales and adapters are the layer's.
        """
        (logits,) = project(self, ("router",), x.astype(jnp.float32))
        routes, weights = self.choose(checkpoint_name(logits, "dot"), self.config, asked)
        ids = jnp.where(valid[..., None], routes.experts, self.config.num_experts)
        kernels = ExpertKernels(*(matrix(self, name, x.dtype) for name in ("gate", "up", "down")))
        return exchange(x, ids, weights, kernels, dispatch=self.dispatch, layer=layer), routes


class MLP(nnx.Module):
    """A dense SwiGLU, down(silu(gate x) · up x). Parameters have a leading layer axis."""

    def __init__(self, config: ModelConfig, stack: Stack, dispatch: Dispatch, *, rngs: nnx.Rngs):
        del dispatch  # nothing is sent anywhere
        L, D, F = stack.layers, config.hidden_size, stack.width
        self.gate = parameter(rngs, (L, D, F), ("layers", "embed", "mlp"))
        self.up = parameter(rngs, (L, D, F), ("layers", "embed", "mlp"))
        self.down = parameter(rngs, (L, F, D), ("layers", "mlp", "embed"))

    def __call__(
        self, x: Float[Array, "B T D"], valid: Bool[Array, "B T"], asked: Routing | None = None, layer: Any = None
    ) -> tuple[Float[Array, "B T D"], None]:
        """Return no routes, so that dense and routed blocks are called alike."""
        del valid, asked, layer  # a dense layer has no router to ask and no experts to select
        gated, raised = (checkpoint_name(y, "dot") for y in project(self, ("gate", "up"), x))
        return project(self, ("down",), jax.nn.silu(gated) * raised)[0], None
