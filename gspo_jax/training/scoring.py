"""What the trainer's models say of responses: log-probs, entropy, routes, values; now, and of the old policy."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels.logprobs import token_logprobs
from gspo_jax.models.critic import Critic
from gspo_jax.models.moe import Routes
from gspo_jax.models.transformer import Transformer
from gspo_jax.types import OldPolicy, Responses, Rollout, RouterRecord


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """How the trainer's models read responses."""

    temperature: float = 1.0
    """Of the log-probs: that of sampling."""
    logprob_chunk: int
    """Tokens whose logits exist at once."""
    remat: bool = False
    """Keep only each layer's input for the backward pass."""


@struct.dataclass
class ModelScores:
    """What a policy says of responses."""

    logprobs: Float[Array, "B T"]
    """log π_θ of each token at the sampling temperature, float32; anything outside the mask."""
    entropy: Float[Array, "B T"]
    """Entropy of the distribution the token was drawn from, in nats."""
    routes: Routes
    """Of all N = S + T positions, prompts included: [L, B, N, K]."""
    hidden: Float[Array, "B T D"]
    """The hidden state that each token is predicted from."""

    @property
    def experts(self) -> Int[Array, "L B T K"]:
        """Routes of the response tokens as inputs."""
        return self.routes.experts[:, :, -self.logprobs.shape[1] :]


OldPolicyFn = Callable[[nnx.State, nnx.State | None, nnx.State | None, Rollout], OldPolicy]


def at_predictions(x: Array, responses: Responses) -> Array:
    """[B, N, ...] -> [B, T, ...]: what stands where each token is predicted.

    Token t is predicted one position earlier; the first one by its prompt's last real token, before the padding.
    """
    S, T = responses.prompts.shape[1], responses.tokens.shape[1]
    at = responses.prompt_lengths.reshape(-1, *(1,) * (x.ndim - 1)) - 1
    return jnp.concatenate([jnp.take_along_axis(x, at, axis=1), x[:, S : S + T - 1]], axis=1)


def score(
    graph: nnx.GraphDef[Transformer],
    params: nnx.State,
    responses: Responses,
    scoring: Scoring,
    *,
    watch: Int[Array, "L B N K"] | None = None,
) -> ModelScores:
    """One forward over prompt and response; logits only for response tokens, and only a chunk at a time."""
    out = nnx.merge(graph, params)(*_inputs(responses), watch=watch, remat=scoring.remat)
    hidden = at_predictions(out.hidden, responses)
    logprobs, entropy = token_logprobs(
        hidden, out.head, responses.tokens, temperature=scoring.temperature, chunk=scoring.logprob_chunk
    )
    return ModelScores(logprobs, entropy, out.routes, hidden)


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
    return critic(at_predictions(critic.trunk(*_inputs(responses), remat=scoring.remat).hidden, responses))


def make_old_policy(
    graph: nnx.GraphDef[Transformer],
    scoring: Scoring,
    *,
    recompute: bool,
    routes: bool,
    critic: nnx.GraphDef[Critic] | None,
) -> OldPolicyFn:
    """A jitted `old_policy(params, critic_params, reference_params, rollout)`, called before an iteration's updates.

    log π_old is the sampler's own, or with `recompute` the trainer's. `routes` asks for the router's record. Forwards
    that nothing is taken from are left out of the program.
    """

    @jax.jit
    def old_policy(
        params: nnx.State, critic_params: nnx.State | None, reference_params: nnx.State | None, rollout: Rollout
    ) -> OldPolicy:
        scores = score(graph, params, rollout, scoring)
        record = reference = value = None
        if routes:
            record = RouterRecord(*(jnp.moveaxis(x, 0, 2) for x in (scores.routes.experts, scores.routes.logprobs)))
        if reference_params is not None:
            reference = score(graph, reference_params, rollout, scoring).logprobs
        if critic is not None:
            assert critic_params is not None
            value = values(critic, critic_params, rollout, scoring, policy_hidden=scores.hidden)
        return OldPolicy(scores.logprobs if recompute else rollout.logprobs, reference, value, record)

    return old_policy


def _inputs(responses: Responses) -> tuple[Int[Array, "B N"], Bool[Array, "B N"]]:
    """Prompts and responses side by side, and which of their positions are real."""
    in_prompt = jnp.arange(responses.prompts.shape[1])[None] < responses.prompt_lengths[:, None]
    return (
        jnp.concatenate([responses.prompts, responses.tokens], axis=1),
        jnp.concatenate([in_prompt, responses.mask], axis=1),
    )
