"""What the trainer's models say of responses: log-probs, entropy, routes, values; now, and of the old policy."""

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
from gspo_jax.routing.replay import Replay, replayed
from gspo_jax.types import OldPolicy, Responses, Rollout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """How the trainer's models read responses."""

    temperature: float = 1.0
    """Of the log-probs: that of sampling."""
    logprob_chunk: int
    """Tokens whose logits exist at once."""
    group_size: int = 1
    """Adjacent responses to one prompt, which is fed once for as many of them as live on one shard of the batch."""
    remat: Remat = "none"
    """What is kept for the backward pass: a name of `models.transformer.REMATS`."""


@struct.dataclass
class ModelScores:
    """What a policy says of responses."""

    logprobs: Float[Array, "B T"]
    """log π_θ of each token at the sampling temperature, float32; anything outside the mask."""
    entropy: Float[Array, "B T"]
    """Entropy of the distribution the token was drawn from, in nats."""
    routes: Routes
    """Of all N = S + T positions, prompts included: [L, B, N, …]."""
    hidden: Float[Array, "B T D"]
    """The hidden state that each token is predicted from."""


OldPolicyFn = Callable[[nnx.State, nnx.State | None, nnx.State | None, Rollout], OldPolicy]


def pack(x: Array, prompt: int, share: int) -> Array:
    """[B, N, …] -> [B / share, S + share T, …]: a prompt once, and then the `share` adjacent responses to it."""
    B, N, *rest = x.shape
    x = x.reshape(B // share, share, N, *rest)
    own = x[:, :, prompt:].reshape(B // share, share * (N - prompt), *rest)
    return jnp.concatenate([x[:, 0, :prompt], own], axis=1)


def unpack(x: Array, prompt: int, share: int) -> Array:
    """The inverse of `pack`: the prompt of each response, and the response."""
    P, M, *rest = x.shape
    own = x[:, prompt:].reshape(P * share, (M - prompt) // share, *rest)
    return jnp.concatenate([jnp.repeat(x[:, :prompt], share, axis=0), own], axis=1)


def at_predictions(x: Array, responses: Responses, share: int = 1) -> Array:
    """[B / share, S + share T, ...] -> [B, T, ...]: what stands where each token is predicted.

    Token t is predicted one position earlier; the first one by its prompt's last real token, before the padding.
    """
    B, T = responses.tokens.shape
    lengths = responses.prompt_lengths.reshape(B // share, share)[:, 0]
    last = jnp.take_along_axis(x, lengths.reshape(-1, *(1,) * (x.ndim - 1)) - 1, axis=1)
    own = x[:, responses.prompts.shape[1] :].reshape(B, T, *x.shape[2:])
    return jnp.concatenate([jnp.repeat(last, share, axis=0), own[:, :-1]], axis=1)


def of_responses(x: Float[Array, "L B N *rest"], responses: Responses) -> Float[Array, "L B T *rest"]:
    """What stands at the response tokens themselves."""
    return x[:, :, responses.prompts.shape[1] :]


def cut_rows(batch: Any, count: int, *, group_size: int) -> Any:
    """[B, ...] -> [count, B / count, ...] of every array: micro-batches whose rows are spread over the shards again.

    Strided and not contiguous, so that every device cuts its own rows, and in units of as many adjacent rows of a group
    as can stay on one shard, so that they still share their prompt.
    """

    def cut(x: Array) -> Array:
        rows, *rest = x.shape
        unit = shared_rows(rows // count, group_size)
        x = jnp.moveaxis(x.reshape(rows // (count * unit), count, unit, *rest), 1, 0)
        return constrain(x.reshape(count, rows // count, *rest), None, "batch", *(None,) * len(rest))

    return jax.tree.map(cut, batch)


def join_rows(batch: Any, *, group_size: int) -> Any:
    """The inverse of `cut_rows`."""

    def join(x: Array) -> Array:
        count, rows, *rest = x.shape
        unit = shared_rows(rows, group_size)
        x = jnp.moveaxis(x.reshape(count, rows // unit, unit, *rest), 0, 1)
        return constrain(x.reshape(count * rows, *rest), "batch", *(None,) * len(rest))

    return jax.tree.map(join, batch)


def score(
    graph: nnx.GraphDef[Transformer],
    params: nnx.State,
    responses: Responses,
    scoring: Scoring,
    *,
    routing: Routing | None = None,
) -> ModelScores:
    """One forward over prompts and responses; logits only for response tokens, and only a chunk at a time."""
    out, hidden, routes = _forward(nnx.merge(graph, params), responses, scoring, routing)
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
    """The critic's value before each response token: from its own trunk's forward, or else from the policy's."""
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
    """A jitted `old_policy(params, critic_params, reference_params, rollout)`, called before an iteration's updates.

    log π_old is the sampler's own, or with `recompute` the trainer's, along with its routes, which are the sampler's
    under `replay` "r3". The reference policy routes natively. Forwards that nothing is taken from are left out of the
    program. The rows are read in `microbatches` parts.
    """

    def read(
        params: nnx.State, critic_params: nnx.State | None, reference_params: nnx.State | None, rollout: Rollout
    ) -> OldPolicy:
        asked = Routing(replayed(replay, rollout.routes, None) if replay == "r3" else None)
        scores = score(graph, params, rollout, scoring, routing=asked)
        reference = value = None
        if reference_params is not None:
            reference = score(graph, reference_params, rollout, scoring).logprobs
        if critic is not None:
            assert critic_params is not None
            value = values(critic, critic_params, rollout, scoring, policy_hidden=scores.hidden)
        if not recompute:
            return OldPolicy(rollout.logprobs, reference, value)
        config = nnx.merge(graph, params).config
        routes = record(scores.routes, _inputs(rollout)[1], config) if config.is_routed else None
        return OldPolicy(scores.logprobs, reference, value, routes)

    @partial(jax.jit, compiler_options=compiler_options())
    def old_policy(
        params: nnx.State, critic_params: nnx.State | None, reference_params: nnx.State | None, rollout: Rollout
    ) -> OldPolicy:
        parts = cut_rows(rollout, microbatches, group_size=scoring.group_size)
        found = jax.lax.map(partial(read, params, critic_params, reference_params), parts)
        return join_rows(found, group_size=scoring.group_size)

    return old_policy


def _forward(
    model: Transformer, responses: Responses, scoring: Scoring, routing: Routing | None = None
) -> tuple[Output, Float[Array, "B T D"], Routes]:
    """The model's output for packed rows; the hidden states at predictions and the routes, response by response."""
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
    """Prompts and responses side by side, and which of their positions are real."""
    in_prompt = jnp.arange(responses.prompts.shape[1])[None] < responses.prompt_lengths[:, None]
    return (
        jnp.concatenate([responses.prompts, responses.tokens], axis=1),
        jnp.concatenate([in_prompt, responses.mask], axis=1),
    )
