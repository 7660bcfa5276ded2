"""One optimizer update on a mini-batch of experience."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from gspo_jax import objectives
from gspo_jax.kernels.backend import compiler_options
from gspo_jax.models.moe import Routing
from gspo_jax.models.transformer import Transformer
from gspo_jax.objectives import Objective
from gspo_jax.routing import load as load_lib
from gspo_jax.routing.drift import router_shift
from gspo_jax.routing.replay import Replay, experts_to_replay
from gspo_jax.training import metrics as metrics_lib
from gspo_jax.training import terms as terms_lib
from gspo_jax.training.metrics import Metrics
from gspo_jax.training.scoring import ModelScores, Scoring, at_predictions, cut_rows, of_responses, score
from gspo_jax.training.state import CriticRule, TrainState, step
from gspo_jax.training.terms import Penalties, Seen
from gspo_jax.types import Experience, Weights

Gradients = tuple[nnx.State, nnx.State | None]
"""Gradients of the policy's trainable parameters and of the critic's, None without a critic."""
GradientFn = Callable[[Objective, TrainState, nnx.State, Experience, Array | int], tuple[Gradients, Metrics]]
"""(objective, state, frozen weights, experience, mini-batch) -> the gradients and the loss's metrics."""
UpdateFn = Callable[[Objective, TrainState, nnx.State, Experience, Array | int], tuple[TrainState, Metrics]]
"""(objective, state, frozen weights, experience, mini-batch) -> the new state and the update's metrics."""
BlameFn = Callable[[Objective, TrainState, nnx.State, Experience, Array | int], tuple[Array, dict[str, Any]]]
"""(objective, state, frozen weights, experience, mini-batch) -> the loss, and non-finite elements by leaf."""


def take_minibatch(batch: Any, index: Array | int, *, count: int, group_size: int) -> Any:
    """Mini-batch `index` of `count`: the groups whose number is `index` modulo `count`.

    Strided rather than contiguous, so that every device slices its own rows when it holds whole groups of every
    mini-batch. `batch` is any pytree of arrays that lead with the rows.
    """

    def cut(x: Array) -> Array:
        rows, *rest = x.shape  # no -1: a dense model's routes have no elements to infer it from
        groups = x.reshape(rows // (count * group_size), count, group_size, *rest)
        return groups[:, index].reshape(rows // count, *rest)

    return jax.tree.map(cut, batch)


def make_gradient(
    graph: nnx.GraphDef[Transformer],
    scoring: Scoring,
    *,
    critic: CriticRule | None = None,
    penalties: Penalties = Penalties(),
    replay: Replay = "none",
    minibatches: int,
    microbatches: int,
    group_size: int,
) -> GradientFn:
    """A function `gradient(objective, state, frozen, experience, index)`: of policy and critic, on mini-batch `index`.

    Token weights come from the whole mini-batch's mask, so its gradient does not depend on how it is cut into
    micro-batches.

    Args:
      graph: the policy without its parameters.
      scoring: temperature, chunking and remat of its forward pass.
      critic: trained beside the policy; None if the objective uses none.
      penalties: weights of the loss terms beside the objective.
      replay: whose routes the forward pass replays.
      minibatches: number of mini-batches, one update each, that a batch of experience is divided into.
      microbatches: gradient-accumulation steps per update.
      group_size: adjacent rows of one group.
    """

    def gradient(
        objective: Objective, state: TrainState, frozen: nnx.State, experience: Experience, index: Array | int
    ) -> tuple[Gradients, Metrics]:
        batch = take_minibatch(experience, index, count=minibatches, group_size=group_size)
        weights = objective.weights(batch.mask)
        load = None
        if penalties.balance:
            E = Weights(state.params, frozen).model(graph).config.num_experts
            experts = of_responses(_experts(batch), batch.rollout)
            load = load_lib.shares(load_lib.expert_counts(experts, batch.mask, num_experts=E))
        trained = (state.params, None if state.critic is None else state.critic.params)
        reference = batch.old.reference_logprobs is not None
        loss = partial(
            _loss,
            frozen=frozen,
            load=load,
            graph=graph,
            scoring=scoring,
            objective=objective,
            replay=replay,
            terms=terms_lib.chosen(penalties, objective, scoring, critic, reference=reference),
        )
        micro = cut_rows((batch, weights), microbatches, group_size=group_size)
        return _accumulate(jax.value_and_grad(loss, has_aux=True), trained, micro)

    return gradient


def make_update(
    gradient: GradientFn,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    critic: CriticRule | None = None,
    shardings: TrainState | None = None,
) -> UpdateFn:
    """A jitted `update(objective, state, frozen, experience, index)`: one optimizer step on mini-batch `index`.

    On a non-finite gradient or loss only the counts of updates and skipped updates change. The old state's buffers are
    donated.

    Args:
      gradient: from `make_gradient`.
      optimizer: the policy's.
      schedule: its learning rate by update, for the metrics.
      critic: trained beside the policy; None if the objective uses none.
      shardings: of the new state; None leaves them to the compiler.
    """
    places = None if shardings is None else (shardings, shardings.updates)

    @partial(jax.jit, static_argnums=0, donate_argnums=1, out_shardings=places, compiler_options=compiler_options())
    def update(
        objective: Objective, state: TrainState, frozen: nnx.State, experience: Experience, index: Array | int
    ) -> tuple[TrainState, Metrics]:
        grads, metrics = gradient(objective, state, frozen, experience, index)
        new, seen = _apply(state, grads, metrics["actor/loss"], optimizer, critic)
        return new, metrics | seen | {"actor/lr": schedule(state.updates - state.skipped)}

    return update


def make_blame(gradient: GradientFn, everywhere: Any = None) -> BlameFn:
    """A jitted `blame(objective, state, frozen, experience, index)`: what is not finite in an update that is skipped.

    Returns the loss, and under "policy" and "critic" the number of elements of each leaf's gradient that are NaN or
    infinite. A program of its own: an update that counts them would be slower. `everywhere` is the result's sharding.
    """

    @partial(jax.jit, static_argnums=0, out_shardings=everywhere, compiler_options=compiler_options())
    def blame(
        objective: Objective, state: TrainState, frozen: nnx.State, experience: Experience, index: Array | int
    ) -> tuple[Array, dict[str, Any]]:
        grads, metrics = gradient(objective, state, frozen, experience, index)
        policy, critics = jax.tree.map(lambda g: (~jnp.isfinite(g)).sum(), grads)
        return metrics["actor/loss"], {"policy": policy, "critic": critics}

    return blame


def _accumulate(gradient: Callable[..., Any], trained: Any, micro: Any) -> tuple[Any, Metrics]:
    """Sum gradients over the leading axis of `micro`, a (batch, weights) pair, and turn the sums into metrics."""

    def add(grads: Any, part: tuple[Experience, Array]) -> tuple[Any, tuple[Metrics, Metrics]]:
        (_, seen), more = gradient(trained, *part)
        return jax.tree.map(jnp.add, grads, more), seen

    grads, (sums, maxima) = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, trained), micro)
    return grads, metrics_lib.from_sums(
        jax.tree.map(lambda s: s.sum(axis=0), sums), jax.tree.map(lambda m: m.max(axis=0), maxima)
    )


def _apply(
    state: TrainState,
    grads: Gradients,
    loss: Array,
    optimizer: optax.GradientTransformation,
    critic: CriticRule | None,
) -> tuple[TrainState, Metrics]:
    """The state after one optimizer step for policy and critic, skipped if a gradient or the loss is not finite."""
    finite = jnp.isfinite(optax.global_norm(grads)) & jnp.isfinite(loss)
    metrics = {"actor/grad_norm": optax.global_norm(grads[0]), "update/skipped": (~finite).astype(jnp.int32)}
    policy, critics = step(state.policy, optimizer, grads[0]), None
    if state.critic is not None:
        assert critic is not None and grads[1] is not None
        critics = step(state.critic, critic.optimizer, grads[1])
        metrics["critic/grad_norm"] = optax.global_norm(grads[1])
    policy, critics = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), (policy, critics), (state.policy, state.critic)
    )
    return TrainState(policy, state.updates + 1, state.skipped + ~finite, critics), metrics


def _loss(
    trained: tuple[nnx.State, nnx.State | None],
    batch: Experience,
    weights: Float[Array, "B T"],
    *,
    frozen: nnx.State,
    load: Float[Array, "L E"] | None,
    graph: nnx.GraphDef[Transformer],
    scoring: Scoring,
    objective: Objective,
    replay: Replay,
    terms: list[terms_lib.Term],
) -> tuple[Array, tuple[Metrics, Metrics]]:
    """A micro-batch's share of the loss, and its (sums, maxima) for the metrics."""
    params, critic_params = trained
    policy = Weights(params, frozen)
    rollout, mask, old = batch.rollout, batch.mask, batch.old
    routing = Routing(experts_to_replay(replay, rollout.routes, old.routes), _experts(batch), load)
    scores = score(graph, policy, rollout, scoring, routing=routing)
    loss, info = objectives.loss(
        objective,
        scores.logprobs,
        old_logprobs=old.logprobs,
        mask=mask,
        advantages=batch.advantages,
        weights=weights if batch.correction is None else weights * batch.correction,
        router_shift=_router_shift(scores, batch) if objective.router_shift else None,
    )
    sums, maxima = metrics_lib.of_policy(
        scores, batch, info, config=policy.model(graph).config, replayed=routing.replay
    )
    loss, sums = terms_lib.add(terms, Seen(batch, scores, weights, critic_params), loss, sums)
    return loss, ({"loss": loss, **sums}, maxima)


def _experts(batch: Experience) -> Int[Array, "L B N K"]:
    """The old policy's experts, layers first."""
    return jnp.moveaxis(batch.routes.experts, 2, 0)


def _router_shift(scores: ModelScores, batch: Experience) -> Float[Array, "B T"]:
    """RSPO's γ of each response token, at the position that predicts the token."""
    assert batch.routes.logprobs is not None and scores.routes.watched is not None
    shift = router_shift(jnp.moveaxis(batch.routes.logprobs, 2, 0), scores.routes.watched)
    return at_predictions(shift, batch.rollout)
