"""The feed-forward layers: Qwen3's dense SwiGLU, and its mixture of experts as route -> dispatch -> experts -> combine.

Dispatch is dropless: the tokens of an expert group are all-gathered over the mesh axis `expert`, each shard computes
its own experts' rows with the grouped matmul, and a reduce-scatter brings the sums home. It moves no more bytes than an
all-to-all for K = 8 and an expert axis of at most 8, is deterministic, and runs on every backend.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels.grouped_matmul import grouped_matmul
from gspo_jax.models.config import ModelConfig, parameter
from gspo_jax.parallel.mesh import BATCH_AXES, has_mesh


class Routes(NamedTuple):
    """Where tokens went."""

    experts: Int[Array, "B T K"]
    """The K experts of each token, most probable first."""
    logprobs: Float[Array, "B T K"]
    """log softmax of the router at those experts, float32, before renormalisation."""
    watched: Float[Array, "B T K"] | None = None
    """log softmax of the router at the experts that the caller asked about, a constant; None if it did not ask."""


def route(logits: Float[Array, "B T E"], *, k: int, renormalise: bool) -> tuple[Routes, Float[Array, "B T K"]]:
    """Softmax, then top-K, then (by `renormalise`) weights that sum to one; float32 throughout."""
    logprobs, experts = jax.lax.top_k(jax.nn.log_softmax(logits.astype(jnp.float32)), k)
    weights = jax.nn.softmax(logprobs) if renormalise else jnp.exp(logprobs)
    return Routes(experts, logprobs), weights


def combine_experts(
    x: Float[Array, "N D"],
    experts: Int[Array, "N K"],
    weights: Float[Array, "N K"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
) -> Float[Array, "N D"]:
    """sum_k w_k · down_e(silu(gate_e x) · up_e x) over the experts held here; ids outside [0, E) contribute nothing."""
    E, K = gate.shape[0], experts.shape[1]
    group = jnp.where((experts >= 0) & (experts < E), experts, E).reshape(-1)
    order = jnp.argsort(group)  # stable: rows of an expert keep the tokens' order
    sizes = jnp.bincount(group, length=E + 1)[:E].astype(jnp.int32)
    rows = x[order // K]
    h = jax.nn.silu(grouped_matmul(rows, gate, sizes)) * grouped_matmul(rows, up, sizes)
    y = grouped_matmul(h, down, sizes)[jnp.argsort(order)].reshape(*experts.shape, -1)
    return jnp.einsum("nkd,nk->nd", y, weights.astype(y.dtype))


def expert_parallel(
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T K"],
    weights: Float[Array, "B T K"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
) -> Float[Array, "B T D"]:
    """`combine_experts` on the mesh in scope: rows over the batch axes, experts over `expert`, F over `tensor`."""

    def flat(a: Array) -> Array:
        return a.reshape(-1, a.shape[-1])

    if not has_mesh():
        return combine_experts(flat(x), flat(experts), flat(weights), gate, up, down).reshape(x.shape)

    def shard(x: Array, experts: Array, weights: Array, *kernels: Array) -> Array:
        gather = partial(jax.lax.all_gather, axis_name="expert", axis=0, tiled=True)
        # The kernels are the same on every data and fsdp shard; marked varying, their gradients are summed over these.
        kernels = tuple(jax.lax.pcast(w, ("data", "fsdp"), to="varying") for w in kernels)
        held = kernels[0].shape[0]
        ids = gather(flat(experts)) - jax.lax.axis_index("expert") * held
        rows = jax.lax.pcast(gather(flat(x)), "tensor", to="varying")
        y = combine_experts(rows, ids, gather(flat(weights)), *kernels)
        y = jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True)
        return jax.lax.psum(y, "tensor").reshape(x.shape)

    rows, wide, tall = (
        PartitionSpec(BATCH_AXES),
        PartitionSpec("expert", None, "tensor"),
        PartitionSpec("expert", "tensor", None),
    )
    return jax.shard_map(shard, in_specs=(rows, rows, rows, wide, wide, tall), out_specs=rows)(
        x, experts, weights, gate, up, down
    )


class MoE(nnx.Module):
    """Qwen3-MoE's sparse layer. Parameters carry a leading layer axis; `__call__` sees one layer's slice."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        L, D, E, F = config.num_layers, config.hidden_size, config.num_experts, config.moe_intermediate_size
        self.config = config
        self.router = parameter(rngs, (L, D, E), ("layers", "embed", "router"), float32=True)
        self.gate = parameter(rngs, (L, E, D, F), ("layers", "expert", "embed", "mlp"))
        self.up = parameter(rngs, (L, E, D, F), ("layers", "expert", "embed", "mlp"))
        self.down = parameter(rngs, (L, E, F, D), ("layers", "expert", "mlp", "embed"))

    def __call__(
        self, x: Float[Array, "B T D"], valid: Bool[Array, "B T"], watch: Int[Array, "B T K"] | None = None
    ) -> tuple[Float[Array, "B T D"], Routes]:
        """Padding (`valid` False) reaches no expert: it comes out zero and costs no rows.

        `watch` names experts whose router log-probs are wanted as well, whoever is chosen.
        """
        logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), self.router[...])
        routes, weights = route(logits, k=self.config.experts_per_token, renormalise=self.config.norm_topk_prob)
        if watch is not None:
            every = jax.lax.stop_gradient(jax.nn.log_softmax(logits))
            routes = routes._replace(watched=jnp.take_along_axis(every, watch.astype(jnp.int32), axis=-1))
        ids = jnp.where(valid[..., None], routes.experts, self.config.num_experts)
        kernels = (w.astype(x.dtype) for w in (self.gate, self.up, self.down))
        return expert_parallel(x, ids, weights, *kernels), routes


class MLP(nnx.Module):
    """Qwen3's dense layer: down(silu(gate x) · up x), with a leading layer axis on the parameters."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        L, D, F = config.num_layers, config.hidden_size, config.intermediate_size
        self.gate = parameter(rngs, (L, D, F), ("layers", "embed", "mlp"))
        self.up = parameter(rngs, (L, D, F), ("layers", "embed", "mlp"))
        self.down = parameter(rngs, (L, F, D), ("layers", "mlp", "embed"))

    def __call__(
        self, x: Float[Array, "B T D"], valid: Bool[Array, "B T"], watch: Int[Array, "B T K"] | None = None
    ) -> tuple[Float[Array, "B T D"], Routes]:
        """Returns no routes (K = 0), so that dense and sparse blocks are called alike."""
        del watch  # there is no router to watch
        gate, up, down = (w.astype(x.dtype) for w in (self.gate, self.up, self.down))
        none = jnp.zeros((*valid.shape, 0))
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down, Routes(none.astype(jnp.int32), none)
