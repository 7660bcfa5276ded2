"""The trainer's forward passes over responses, by current and old policies."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels.backend import compiler_options
from gspo_jax.kernels.logprobs import KeptIds, token_logprobs
from gspo_jax.models.critic import Critic
from gspo_jax.models.moe import Routes, Routing, layers_first, record
from gspo_jax.models.transformer import Remat, Transformer
from gspo_jax.objectives.advantages import score_energy
from gspo_jax.routing import drift
from gspo_jax.routing.replay import OF_SAMPLER, Replay, to_replay
from gspo_jax.training.layout import Layout, SideBySide, fold_all_rows
from gspo_jax.types import Batch, OldPolicy, Rollout, RouterRecord, Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """Settings of the trainer's forward passes."""

    temperature: float = 1.0
    logprob_chunk: int
    """Tokens with logits in memory at a time."""
    group_size: int = 1
    remat: Remat = "none"
    """A key of `models.transformer.REMATS`."""
    at_once: int = 1
    """Micro-batches that the old policy reads in one pass: weights are gathered, and read, once for all."""


@struct.dataclass
class ModelScores:
    """A policy's forward pass."""

    logprobs: Float[Array, "B T"]
    """log π_θ at the sampling temperature, float32; undefined outside the mask. Renormalised over the kept ids where
    they are whole."""
    entropy: Float[Array, "B T"]
    """Entropy of each token's distribution at the sampling temperature, over the vocabulary, in nats."""
    routes: Routes
    """Routes of the layout's rows, prompts included: [L, R, M, …]."""
    hidden: Float[Array, "r t D"]
    """Final hidden state that predicts each scored position's token."""
    head: Float[Array, "D V"]
    kept_logprobs: Float[Array, "B T K"] | None = None
    """log π_θ at the kept ids, likewise; 0 in unused entries. None without them."""


Fields = dict[str, Any]


class OldPolicyFn(Protocol):
    """Scores a packed batch for the updates: log-probs, values and routes."""

    def __call__(
        self,
        weights: Weights,
        critic_params: nnx.State | None,
        reference: nnx.State | None,
        batch: Batch,
        teacher: nnx.State | None = None,
    ) -> OldPolicy:
        """`reference` shares the policy's frozen weights, `teacher` shares nothing."""
        ...


def score(
    graph: nnx.GraphDef[Transformer],
    weights: Weights,
    layout: Layout | SideBySide,
    scoring: Scoring,
    *,
    routing: Routing | None = None,
    kept: KeptIds | None = None,
) -> ModelScores:
    """Score response tokens in one forward pass, with logits in chunks; `routing` and `kept` are in terms of rows."""
    out = layout.forward(weights.model(graph), routing, scoring.remat)
    hidden = layout.predicting(out.hidden)
    options = {"temperature": scoring.temperature, "chunk": scoring.logprob_chunk}
    logprobs, entropy, at_kept = token_logprobs(hidden, out.head, layout.targets, kept=kept, **options)
    at_kept = None if at_kept is None else layout.scored(at_kept)
    return ModelScores(layout.scored(logprobs), layout.scored(entropy), out.routes, hidden, out.head, at_kept)


def kept_ids(rollout: Rollout) -> KeptIds | None:
    """Return the ids that the sampler kept, if it recorded any."""
    return None if rollout.kept is None else KeptIds(rollout.kept.ids, rollout.kept.whole)


def values(
    graph: nnx.GraphDef[Critic],
    params: nnx.State,
    layout: Layout | SideBySide,
    scoring: Scoring,
    *,
    policy_hidden: Float[Array, "r t D"],
) -> Float[Array, "B T"]:
    """Return the critic's value before each token, from its own trunk or the policy's hidden states."""
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
    teacher_graph: nnx.GraphDef[Transformer] | None = None,
    critic: nnx.GraphDef[Critic] | None = None,
    energy: bool = False,
) -> OldPolicyFn:
    """Build a jitted `old_policy(weights, critic_params, reference, batch, teacher)`, called before the updates.

    log π_old is the sampler's or, with `recompute`, the trainer's, with routes recorded (the sampler's under `replay`
    "r3" and "r3w") and where the routers' own choice differs from the rollout's record. The reference may have another
    graph, without adapters; it and the teacher always use their own routes. A token beyond the teacher's vocabulary has
    log π_old as its log π_T, so that there is nothing to learn from it. `energy` adds that of the policy, by one more
    product with the head.

    Policy and reference are renormalised over the rollout's kept ids where they are whole. The teacher is not: the KL
    from the renormalised policy to all of its distribution is one too, and differs by a constant at each prefix.
    """

    def read(
        weights: Weights,
        critic_params: nnx.State | None,
        reference: nnx.State | None,
        teacher: nnx.State | None,
        rollouts: Sequence[Rollout],
        layout: SideBySide,
    ) -> Fields:
        sampled, asked = layers_first(layout.rows([rollout.routes for rollout in rollouts])), None
        if replay in OF_SAMPLER:
            experts, weigh_by = to_replay(replay, sampled, None)
            asked = Routing(experts, weigh_by=weigh_by)
        ids = layout.rows_of_tokens([kept_ids(rollout) for rollout in rollouts])
        scores, found = score(graph, weights, layout, scoring, routing=asked, kept=ids), Fields()
        if reference is not None:
            initial = Weights(reference, weights.frozen)
            found["reference_logprobs"] = score(reference_graph or graph, initial, layout, scoring, kept=ids).logprobs
        if teacher is not None:
            assert teacher_graph is not None
            taught = score(teacher_graph, Weights.full(teacher), layout, scoring)
            tokens = jnp.stack([rollout.tokens for rollout in rollouts])
            old = scores.logprobs if recompute else jnp.stack([rollout.logprobs for rollout in rollouts])
            found["teacher_logprobs"] = jnp.where(tokens < taught.head.shape[1], taught.logprobs, old)
        if critic is not None:
            assert critic_params is not None
            found["values"] = values(critic, critic_params, layout, scoring, policy_hidden=scores.hidden)
        if energy:
            options = {"temperature": scoring.temperature / 2, "chunk": scoring.logprob_chunk}
            sharpened, *_ = token_logprobs(scores.hidden, scores.head, layout.targets, kept=ids, **options)
            found["energy"] = score_energy(scores.logprobs, layout.scored(sharpened))
        if recompute:
            found["logprobs"] = scores.logprobs
            config = weights.model(graph).config
            if config.is_routed:
                experts, kept = jax.tree.leaves(record(scores.routes, layout.valid, config))
                found["routes"] = RouterRecord(layout.whole(experts, -1), layout.whole(kept, 0))
                flips = jnp.moveaxis(drift.flipped(sampled.experts, scores.routes.chosen), 0, 2)
                whole = layout.whole(layout.predicting(flips.astype(config.expert_dtype)), -1)
                found["flips"] = whole[:, :, rollouts[0].prompts.shape[1] :]
        return found

    def in_rows(read: Callable[[Sequence[Rollout], SideBySide], Fields], batch: Batch) -> Fields:
        rollout, packing = batch.rollout, batch.packing

        def own(minibatch: Array | int) -> Rollout:
            return jax.tree.map(lambda x: x[minibatch], rollout)

        def add(found: Fields, minibatches: Int[Array, " n"], layout: SideBySide) -> Fields:
            new = read([own(minibatch) for minibatch in minibatches], layout)
            for n, part in enumerate(layout.parts):

                def put(x: Array, old: Array, n: int = n, part: Layout = part) -> Array:
                    now = jnp.where(_aligned(part.live, x[n]), x[n], old[minibatches[n]])
                    return old.at[minibatches[n]].set(now)

                found = jax.tree.map(put, new, found)
            return found

        one = jax.tree.map(lambda x: x[0], packing)
        shapes = jax.eval_shape(lambda: read([own(0)], SideBySide([Layout.of(own(0), one, 0, 0)])))
        found = jax.tree.map(lambda x: jnp.zeros((len(packing.turns), *x.shape[1:]), x.dtype), shapes)
        options = {"at_once": scoring.at_once, "group_size": scoring.group_size}
        return fold_all_rows(add, found, rollout, packing, **options)

    @partial(jax.jit, compiler_options=compiler_options())
    def old_policy(
        weights: Weights,
        critic_params: nnx.State | None,
        reference: nnx.State | None,
        batch: Batch,
        teacher: nnx.State | None = None,
    ) -> OldPolicy:
        if not (recompute or energy) and reference is teacher is critic is None:
            return OldPolicy(batch.rollout.logprobs)
        with_models = partial(read, weights, critic_params, reference, teacher)
        fields: Fields = {"logprobs": batch.rollout.logprobs} | in_rows(with_models, batch)
        return OldPolicy(**fields)

    return old_policy


def _aligned(rows: Bool[Array, " B"], x: Array) -> Array:
    return rows.reshape(-1, *(1,) * (x.ndim - 1))
