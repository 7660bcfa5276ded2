"""The trainer's forward passes over responses: log-probs, entropy, routes and values, current and old."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Bool, Float

from gspo_jax.kernels.backend import compiler_options
from gspo_jax.kernels.logprobs import token_logprobs
from gspo_jax.models.critic import Critic
from gspo_jax.models.moe import Routes, Routing, record
from gspo_jax.models.transformer import Remat, Transformer
from gspo_jax.parallel.rows import take_rows
from gspo_jax.routing.replay import Replay, experts_to_replay
from gspo_jax.training.batches import join_minibatches, take_minibatch
from gspo_jax.training.layout import Layout, deal, fold_rows
from gspo_jax.training.packing import Packing
from gspo_jax.types import OldPolicy, Rollout, RouterRecord, Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """Settings of the trainer's forward passes over responses."""

    temperature: float = 1.0
    """Sampling temperature, at which log-probs are taken."""
    logprob_chunk: int
    """Tokens whose logits are in memory at a time."""
    group_size: int = 1
    """Adjacent responses to one prompt; the prompt is fed once for all that live on the same batch shard."""
    remat: Remat = "none"
    """Activations kept for the backward pass; a key of `models.transformer.REMATS`."""


@struct.dataclass
class ModelScores:
    """A policy's forward pass over responses."""

    logprobs: Float[Array, "B T"]
    """log π_θ of each token at the sampling temperature, float32; undefined outside the mask."""
    entropy: Float[Array, "B T"]
    """Entropy of the policy's distribution for each token at the sampling temperature, in nats."""
    routes: Routes
    """Routes of the layout's rows, prompts included: [L, R, M, …], L routed layers."""
    hidden: Float[Array, "r t D"]
    """Final hidden state that predicts the token of each of the layout's scored positions."""


Fields = dict[str, Any]
"""Some fields of a record, by name."""
OldPolicyFn = Callable[[Weights, nnx.State | None, nnx.State | None, Rollout, Packing], OldPolicy]
"""(policy, critic's parameters, reference's parameters, rollout, packing) -> log-probs, values and routes that the
updates keep. The reference has the policy's frozen weights, and its own parameters beside them."""


def score(
    graph: nnx.GraphDef[Transformer],
    weights: Weights,
    layout: Layout,
    scoring: Scoring,
    *,
    routing: Routing | None = None,
) -> ModelScores:
    """The policy's scores of the response tokens, from one forward pass; logits are computed a chunk at a time.

    `routing` is in terms of the layout's rows.
    """
    out = layout.forward(weights.model(graph), routing, scoring.remat)
    hidden = layout.predicting(out.hidden)
    logprobs, entropy = token_logprobs(
        hidden, out.head, layout.targets, temperature=scoring.temperature, chunk=scoring.logprob_chunk
    )
    return ModelScores(layout.scored(logprobs), layout.scored(entropy), out.routes, hidden)


def values(
    graph: nnx.GraphDef[Critic],
    params: nnx.State,
    layout: Layout,
    scoring: Scoring,
    *,
    policy_hidden: Float[Array, "r t D"],
) -> Float[Array, "B T"]:
    """The critic's value before each response token, from its own trunk or from the policy's hidden states."""
    critic, hidden = nnx.merge(graph, params), policy_hidden
    if critic.trunk is not None:
        hidden = layout.predicting(layout.forward(critic.trunk, None, scoring.remat).hidden)
    return layout.scored(critic(hidden))


def make_old_policy(
    graph: nnx.GraphDef[Transformer],
    scoring: Scoring,
    *,
    recompute: bool,
    replay: Replay = "none",
    reference_graph: nnx.GraphDef[Transformer] | None = None,
    critic: nnx.GraphDef[Critic] | None = None,
) -> OldPolicyFn:
    """A jitted `old_policy(weights, critic_params, reference, rollout, packing)`, called before an iteration's updates.

    log π_old is the sampler's or, with `recompute`, the trainer's; then its routes are recorded too, which follow
    the sampler's under `replay` "r3". The reference policy, whose graph may be another one, without adapters, always
    uses its own routes. The compiler removes forward passes whose results are unused.
    """

    def read(
        weights: Weights, critic_params: nnx.State | None, reference: nnx.State | None, rollout: Rollout, layout: Layout
    ) -> Fields:
        asked = None
        if replay == "r3":
            asked = Routing(experts_to_replay(replay, jax.tree.map(layout.rows, rollout.routes), None))
        scores, found = score(graph, weights, layout, scoring, routing=asked), Fields()
        if reference is not None:
            initial = Weights(reference, weights.frozen)
            found["reference_logprobs"] = score(reference_graph or graph, initial, layout, scoring).logprobs
        if critic is not None:
            assert critic_params is not None
            found["values"] = values(critic, critic_params, layout, scoring, policy_hidden=scores.hidden)
        if recompute:
            found["logprobs"] = scores.logprobs
            config = weights.model(graph).config
            if config.is_routed:
                experts, kept = jax.tree.leaves(record(scores.routes, layout.valid, config))
                found["routes"] = RouterRecord(layout.whole(experts, -1), layout.whole(kept, 0))
        return found

    def in_rows(read: Callable[[Rollout, Layout], Fields], rollout: Rollout, packing: Packing) -> Fields:
        G, count = scoring.group_size, packing.turns.shape[0]

        def minibatch(index: Array) -> Fields:
            own = deal(take_minibatch(rollout, index, count=count, group_size=G), packing, index)

            def add(found: Fields, layout: Layout) -> Fields:
                new = read(own, layout)
                return jax.tree.map(lambda x, old: jnp.where(_aligned(layout.live, x), x, old), new, found)

            shapes = jax.eval_shape(lambda: read(own, Layout.of(own, packing, index, 0, 0)))
            found = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            found = fold_rows(add, found, own, packing, index, group_size=G)
            return take_rows(found, packing.places[index])

        return join_minibatches(jax.lax.map(minibatch, jnp.arange(count)), group_size=G)

    @partial(jax.jit, compiler_options=compiler_options())
    def old_policy(
        weights: Weights,
        critic_params: nnx.State | None,
        reference: nnx.State | None,
        rollout: Rollout,
        packing: Packing,
    ) -> OldPolicy:
        if not (recompute or reference is not None or critic is not None):
            return OldPolicy(rollout.logprobs)
        with_models = partial(read, weights, critic_params, reference)
        fields: Fields = {"logprobs": rollout.logprobs} | in_rows(with_models, rollout, packing)
        return OldPolicy(**fields)

    return old_policy


def _aligned(rows: Bool[Array, " B"], x: Array) -> Array:
    """The mask of rows, broadcastable to x."""
    return rows.reshape(-1, *(1,) * (x.ndim - 1))
