"""The feed-forward layers: Qwen3's dense SwiGLU, and its mixture of experts as route -> dispatch -> combine."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.models.config import ModelConfig, parameter
from gspo_jax.models.dispatch import Dispatch, exchange
from gspo_jax.types import RouterRecord


@struct.dataclass
class Routing:
    """What a caller asks of the routers; all of it optional. Arrays lead with L, and a layer sees its own slice."""

    replay: Int[Array, "*L B T K"] | None = None
    """Experts to use in place of the router's choice. A token with a -1 among them is routed natively."""
    watch: Int[Array, "*L B T K"] | None = None
    """Experts whose router log-probs are wanted as well, whoever is chosen; 0 comes back for a -1."""
    load: Float[Array, "*L E"] | None = None
    """The share of all (token, expert) pairs that each expert had: asks for the balance penalty."""


class Routes(NamedTuple):
    """Where tokens went, and why. A forward stacks every array over its layers: [L, ...]."""

    experts: Int[Array, "*L B T K"]
    """The K experts of each token, most probable first as its router, or whoever is replayed, saw it."""
    logprobs: Float[Array, "*L B T K"]
    """log softmax of the router at those experts, float32, before renormalisation."""
    native: Int[Array, "*L B T K"] | None = None
    """The router's own choice where another is replayed; None where nothing is, as `experts` says it then."""
    watched: Float[Array, "*L B T K"] | None = None
    """log softmax of the router at the experts that are watched, a constant; None if none are."""
    balance: Float[Array, "*L B T"] | None = None
    """E Σ_e load_e p_e, 1 where load or router is uniform; None if no load was given."""
    dropped: Int[Array, "*L B T"] | None = None
    """How many of its K experts a token did not reach, for want of capacity."""
    z: Float[Array, "*L B T"] | None = None
    """(log Σ_e exp logit_e)², the router z-loss of arXiv 2202.08906."""

    @property
    def chosen(self) -> Int[Array, "*L B T K"]:
        """The router's own choice, whether it was followed or not."""
        return self.experts if self.native is None else self.native


def record(routes: Routes, fed: Bool[Array, "B N"], config: ModelConfig, *, logprobs: bool = True) -> RouterRecord:
    """What is kept of the routes of all layers, where a token was fed; with the router's log-probs or without."""
    experts, kept = (jnp.moveaxis(x, 0, 2) for x in (routes.experts, routes.logprobs))
    fed = fed[..., None, None]
    experts = jnp.where(fed, experts, -1).astype(config.expert_dtype)
    return RouterRecord(experts, jnp.where(fed, kept, 0) if logprobs else None)


@partial(jax.checkpoint, prevent_cse=False)
def _at(every: Float[Array, "B T E"], experts: Int[Array, "B T K"]) -> Float[Array, "B T K"]:
    """every[experts]; 0 at -1. By comparison, whose transpose is a sum, and not a scatter as that of a gather.

    The backward pass compares again: what it would keep is [B, T, K, E].
    """
    columns = jax.lax.broadcasted_iota(experts.dtype, (1, 1, 1, every.shape[-1]), 3)
    return jnp.where(experts[..., None] == columns, every[..., None, :], 0).sum(axis=-1)


def route(
    logits: Float[Array, "B T E"], *, k: int, renormalise: bool, asked: Routing | None = None
) -> tuple[Routes, Float[Array, "B T K"]]:
    """Softmax, then top-K, then (by `renormalise`) weights that sum to one; float32 throughout.

    Where experts are replayed only the choice is: weights come from the logits of now, and so does the gradient.
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


_EXPERTS = ("gate", "up", "down")


def split_experts(block: nnx.State) -> tuple[nnx.State, nnx.State]:
    """The experts' kernels of a stack of blocks, empty if they are dense, and all other parameters."""
    is_expert = nnx.All(lambda path, leaf: path[-1] in _EXPERTS and leaf.get_metadata("axes")[1] == "expert")
    experts, others = nnx.split_state(block, is_expert, ...)
    return experts, others


class MoE(nnx.Module):
    """Qwen3-MoE's sparse layer. Parameters carry a leading layer axis; `__call__` sees one layer's slice."""

    def __init__(self, config: ModelConfig, dispatch: Dispatch, *, rngs: nnx.Rngs):
        L, D, E, F = config.num_layers, config.hidden_size, config.num_experts, config.moe_intermediate_size
        self.config, self.dispatch = config, dispatch
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
        """Padding (`valid` False) reaches no expert: it comes out zero and costs no rows.

        With `layer` the kernels are those of all layers: a loop over layers need not copy the experts of each.
        """
        logits = checkpoint_name(jnp.einsum("btd,de->bte", x.astype(jnp.float32), self.router[...]), "dot")
        routes, weights = route(
            logits, k=self.config.experts_per_token, renormalise=self.config.norm_topk_prob, asked=asked
        )
        ids = jnp.where(valid[..., None], routes.experts, self.config.num_experts)
        kernels = (w.astype(x.dtype) for w in (self.gate, self.up, self.down))
        y, dropped = exchange(x, ids, weights, *kernels, dispatch=self.dispatch, layer=layer)
        return y, routes._replace(dropped=dropped)


class MLP(nnx.Module):
    """Qwen3's dense layer: down(silu(gate x) · up x), with a leading layer axis on the parameters."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        L, D, F = config.num_layers, config.hidden_size, config.intermediate_size
        self.gate = parameter(rngs, (L, D, F), ("layers", "embed", "mlp"))
        self.up = parameter(rngs, (L, D, F), ("layers", "embed", "mlp"))
        self.down = parameter(rngs, (L, F, D), ("layers", "mlp", "embed"))

    def __call__(
        self, x: Float[Array, "B T D"], valid: Bool[Array, "B T"], asked: Routing | None = None, layer: Any = None
    ) -> tuple[Float[Array, "B T D"], Routes]:
        """Returns no routes (K = 0), so that dense and sparse blocks are called alike."""
        del asked, layer  # there is no router to ask, and there are no experts
        gate, up, down = (w.astype(x.dtype) for w in (self.gate, self.up, self.down))
        none = jnp.zeros((*valid.shape, 0))
        gated, raised = (checkpoint_name(x @ w, "dot") for w in (gate, up))
        return (jax.nn.silu(gated) * raised) @ down, Routes(none.astype(jnp.int32), none)
