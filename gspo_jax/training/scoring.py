"""The trainer's forward passes over responses: log-probs, entropy, routes and values, current and old."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels.backend import compiler_options
from gspo_jax.kernels.logprobs import token_logprobs
from gspo_jax.models.critic import Critic
from gspo_jax.models.moe import Routes, Routing, record
from gspo_jax.models.transformer import Output, Remat, Transformer
from gspo_jax.parallel.mesh import constrain, shared_rows
from gspo_jax.routing.replay import Replay, experts_to_replay
from gspo_jax.types import OldPolicy, Responses, Rollout, Weights


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
    """Routes of all N = S + T positions, prompts included: [L, B, N, …], L routed layers."""
    hidden: Float[Array, "B T D"]
    """Final hidden state that predicts each token."""


OldPolicyFn = Callable[[Weights, nnx.State | None, Weights | None, Rollout], OldPolicy]
"""(policy, critic's parameters, reference, rollout) -> log-probs, values and routes fixed during the updates."""


def pack(x: Array, prompt: int, share: int) -> Array:
    """[B, N, …] -> [B / share, S + share T, …]: each prompt once, followed by the `share` adjacent responses to it."""
    B, N, *rest = x.shape
    x = x.reshape(B // share, share, N, *rest)
    own = x[:, :, prompt:].reshape(B // share, share * (N - prompt), *rest)
    return jnp.concatenate([x[:, 0, :prompt], own], axis=1)


def unpack(x: Array, prompt: int, share: int) -> Array:
    """Invert `pack`: every row has its own copy of the prompt again."""
    P, M, *rest = x.shape
    own = x[:, prompt:].reshape(P * share, (M - prompt) // share, *rest)
    return jnp.concatenate([jnp.repeat(x[:, :prompt], share, axis=0), own], axis=1)


def at_predictions(x: Array, responses: Responses, share: int = 1) -> Array:
    """[B / share, S + share T, ...] -> [B, T, ...]: values at the position that predicts each token.

    Token t is predicted one position earlier, the first one by the prompt's last real token.
    """
    B, T = responses.tokens.shape
    lengths = responses.prompt_lengths.reshape(B // share, share)[:, 0]
    last = jnp.take_along_axis(x, lengths.reshape(-1, *(1,) * (x.ndim - 1)) - 1, axis=1)
    own = x[:, responses.prompts.shape[1] :].reshape(B, T, *x.shape[2:])
    return jnp.concatenate([jnp.repeat(last, share, axis=0), own[:, :-1]], axis=1)


def of_responses(x: Float[Array, "L B N *rest"], responses: Responses) -> Float[Array, "L B T *rest"]:
    """Values at the response tokens' own positions."""
    return x[:, :, responses.prompts.shape[1] :]


def cut_rows(batch: Any, count: int, *, group_size: int) -> Any:
    """[B, ...] -> [count, B / count, ...] for every array: micro-batches, each spread over all shards.

    Strided rather than contiguous, so that every device slices its own rows, and in units of as many adjacent rows of a
    group as fit on one shard, so that they still share their prompt.
    """

    def cut(x: Array) -> Array:
        rows, *rest = x.shape
        unit = shared_rows(rows // count, group_size)
        x = jnp.moveaxis(x.reshape(rows // (count * unit), count, unit, *rest), 1, 0)
        return constrain(x.reshape(count, rows // count, *rest), None, "batch", *(None,) * len(rest))

    return jax.tree.map(cut, batch)


def join_rows(batch: Any, *, group_size: int) -> Any:
    """Invert `cut_rows`."""

    def join(x: Array) -> Array:
        count, rows, *rest = x.shape
        unit = shared_rows(rows, group_size)
        x = jnp.moveaxis(x.reshape(count, rows // unit, unit, *rest), 0, 1)
        return constrain(x.reshape(count * rows, *rest), "batch", *(None,) * len(rest))

    return jax.tree.map(join, batch)


def score(
    graph: nnx.GraphDef[Transformer],
    weights: Weights,
    responses: Responses,
    scoring: Scoring,
    *,
    routing: Routing | None = None,
) -> ModelScores:
    """The policy's scores of the response tokens, from one forward pass; logits are computed a chunk at a time."""
    out, hidden, routes = _forward(weights.model(graph), responses, scoring, routing)
    logprobs, entropy = token_logprobs(
        hidden, out.head, responses.tokens, temperature=scoring.temperature, chunk=scoring.logprob_chunk
    )
    return ModelScores(logprobs, entropy, routes, hidden)


def values(
    graph: nnx.GraphDef[Critic],
    params: nnx.State,
    responses: Responses,
    scoring: Scoring,
    *,
    policy_hidden: Float[Array, "B T D"],
) -> Float[Array, "B T"]:
    """The critic's value before each response token, from its own trunk or from the policy's hidden states."""
    critic = nnx.merge(graph, params)
    if critic.trunk is None:
        return critic(policy_hidden)
    return critic(_forward(critic.trunk, responses, scoring)[1])


def make_old_policy(
    graph: nnx.GraphDef[Transformer],
    scoring: Scoring,
    *,
    recompute: bool,
    replay: Replay = "none",
    critic: nnx.GraphDef[Critic] | None = None,
    microbatches: int = 1,
) -> OldPolicyFn:
    """A jitted `old_policy(weights, critic_params, reference, rollout)`, called before an iteration's updates.

    log π_old is the sampler's or, with `recompute`, the trainer's; then its routes are recorded too, which follow
    the sampler's under `replay` "r3". The reference policy always uses its own routes. The compiler removes forward
    passes whose results are unused. Rows are processed in `microbatches` parts.
    """

    def read(
        weights: Weights, critic_params: nnx.State | None, reference: Weights | None, rollout: Rollout
    ) -> OldPolicy:
        asked = Routing(experts_to_replay(replay, rollout.routes, None) if replay == "r3" else None)
        scores = score(graph, weights, rollout, scoring, routing=asked)
        reference_logprobs = value = None
        if reference is not None:
            reference_logprobs = score(graph, reference, rollout, scoring).logprobs
        if critic is not None:
            assert critic_params is not None
            value = values(critic, critic_params, rollout, scoring, policy_hidden=scores.hidden)
        if not recompute:
            return OldPolicy(rollout.logprobs, reference_logprobs, value)
        config = weights.model(graph).config
        routes = record(scores.routes, _inputs(rollout)[1], config) if config.is_routed else None
        return OldPolicy(scores.logprobs, reference_logprobs, value, routes)

    @partial(jax.jit, compiler_options=compiler_options())
    def old_policy(
        weights: Weights, critic_params: nnx.State | None, reference: Weights | None, rollout: Rollout
    ) -> OldPolicy:
        parts = cut_rows(rollout, microbatches, group_size=scoring.group_size)
        found = jax.lax.map(partial(read, weights, critic_params, reference), parts)
        return join_rows(found, group_size=scoring.group_size)

    return old_policy


def _forward(
    model: Transformer, responses: Responses, scoring: Scoring, routing: Routing | None = None
) -> tuple[Output, Float[Array, "B T D"], Routes]:
    """The model's output for packed rows, the hidden states that predict each token, and routes per response."""
    B, S = responses.prompts.shape
    share = shared_rows(B, scoring.group_size)
    packed, unpacked = (jax.vmap(partial(f, prompt=S, share=share)) for f in (pack, unpack))
    if routing is not None:
        replay, watch = jax.tree.map(packed, (routing.replay, routing.watch))
        routing = dataclasses.replace(routing, replay=replay, watch=watch)
    tokens, valid = (pack(x, S, share) for x in _inputs(responses))
    out = model(tokens, valid, prompt=S, responses=share, routing=routing, remat=scoring.remat)
    return out, at_predictions(out.hidden, responses, share), jax.tree.map(unpacked, out.routes)


def _inputs(responses: Responses) -> tuple[Int[Array, "B N"], Bool[Array, "B N"]]:
    """Prompts and responses concatenated, and a mask of their real positions."""
    in_prompt = jnp.arange(responses.prompts.shape[1])[None] < responses.prompt_lengths[:, None]
    return (
        jnp.concatenate([responses.prompts, responses.tokens], axis=1),
        jnp.concatenate([in_prompt, responses.mask], axis=1),
    )
