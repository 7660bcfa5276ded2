"""One optimizer update on a mini-batch of experience."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from jaxtyping import Array, Float

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
from gspo_jax.training.batches import take_minibatch
from gspo_jax.training.layout import Layout, deal, fold_rows
from gspo_jax.training.metrics import Metrics
from gspo_jax.training.packing import Packing
from gspo_jax.training.scoring import ModelScores, Scoring, score
from gspo_jax.training.state import CriticRule, TrainState, step
from gspo_jax.training.terms import Penalties, Seen
from gspo_jax.types import Experience, RouterRecord, Weights

Trained = tuple[nnx.State, nnx.State | None]
"""The policy's trainable parameters and the critic's, None without a critic."""
Gradients = Trained
"""Their gradients."""
GradientFn = Callable[[Objective, TrainState, nnx.State, Experience, Array | int], tuple[Gradients, Metrics]]
"""(objective, state, frozen weights, experience, mini-batch) -> the gradients and the loss's metrics."""
UpdateFn = Callable[[Objective, TrainState, nnx.State, Experience, Array | int], tuple[TrainState, Metrics]]
"""(objective, state, frozen weights, experience, mini-batch) -> the new state and the update's metrics."""
Loss = tuple[Array, tuple[Metrics, Metrics]]
"""The loss of a micro-batch, and its (sums, maxima) for the metrics."""
LossFn = Callable[[Trained, Experience, Array, Layout], Loss]
"""(parameters, micro-batch, weights of its tokens, its rows) -> the loss."""
BlameFn = Callable[[Objective, TrainState, nnx.State, Experience, Array | int], tuple[Array, dict[str, Any]]]
"""(objective, state, frozen weights, experience, mini-batch) -> the loss, and non-finite elements by leaf."""


def make_gradient(
    graph: nnx.GraphDef[Transformer],
    scoring: Scoring,
    *,
    critic: CriticRule | None = None,
    penalties: Penalties = Penalties(),
    replay: Replay = "none",
    minibatches: int,
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
      group_size: adjacent rows of one group.
    """

    def gradient(
        objective: Objective, state: TrainState, frozen: nnx.State, experience: Experience, index: Array | int
    ) -> tuple[Gradients, Metrics]:
        packing, experience = experience.packing, dataclasses.replace(experience, packing=None)
        assert packing is not None
        batch = take_minibatch(experience, index, count=minibatches, group_size=group_size)
        load = None
        if penalties.balance:
            E = Weights(state.params, frozen).model(graph).config.num_experts
            experts = jnp.moveaxis(batch.routes.experts[:, batch.rollout.prompts.shape[1] :], 2, 0)
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
            share=1.0 / jnp.maximum(batch.mask.sum(), 1),
            terms=terms_lib.chosen(penalties, objective, scoring, critic, reference=reference),
        )
        weights = objective.weights(batch.mask)
        return _of_rows(loss, trained, batch, weights, packing=packing, minibatch=index, group_size=group_size)

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


@struct.dataclass
class _Sums:
    """Gradients and statistics, added up over micro-batches."""

    gradients: Gradients
    sums: Metrics
    maxima: Metrics

    @classmethod
    def zeros(cls, trained: Trained, part: Callable[[Trained], Loss]) -> "_Sums":
        """Nothing yet, in the shapes that a part will have. Traces its loss, but not the loss's gradient."""
        _, (sums, maxima) = jax.eval_shape(part, trained)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cls(trained, sums, maxima))

    def plus(self, trained: Trained, part: Callable[[Trained], Loss]) -> "_Sums":
        """The sums and maxima with those of one more part, of which this is the loss."""
        (_, (sums, maxima)), gradients = jax.value_and_grad(part, has_aux=True)(trained)
        gradients, sums = jax.tree.map(jnp.add, (self.gradients, self.sums), (gradients, sums))
        return _Sums(gradients, sums, jax.tree.map(jnp.maximum, self.maxima, maxima))

    def results(self) -> tuple[Gradients, Metrics]:
        """The gradients, and metrics by their names."""
        return self.gradients, metrics_lib.from_sums(self.sums, self.maxima)


def _of_rows(
    loss: LossFn,
    trained: Trained,
    batch: Experience,
    weights: Float[Array, "B T"],
    *,
    packing: Packing,
    minibatch: Array | int,
    group_size: int,
) -> tuple[Gradients, Metrics]:
    """Gradients and metrics of a mini-batch, a row of each shard at a time."""
    batch, weights = deal((batch, weights), packing, minibatch)

    def of(layout: Layout) -> Callable[[Trained], Loss]:
        live = layout.live[:, None]
        own = dataclasses.replace(batch, mask=batch.mask & live)
        return lambda trained: loss(trained, own, jnp.where(live, weights, 0), layout)

    nothing = _Sums.zeros(trained, of(Layout.of(batch.rollout, packing, minibatch, 0, 0)))
    rows = partial(fold_rows, responses=batch.rollout, packing=packing, minibatch=minibatch, group_size=group_size)
    return rows(lambda total, layout: total.plus(trained, of(layout)), nothing).results()


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
    trained: Trained,
    batch: Experience,
    weights: Float[Array, "B T"],
    layout: Layout,
    *,
    frozen: nnx.State,
    load: Float[Array, "L E"] | None,
    graph: nnx.GraphDef[Transformer],
    scoring: Scoring,
    objective: Objective,
    replay: Replay,
    share: Float[Array, ""],
    terms: list[terms_lib.Term],
) -> Loss:
    """A micro-batch's share of the loss, and its (sums, maxima) for the metrics."""
    params, critic_params = trained
    policy = Weights(params, frozen)
    mask, old = batch.mask, batch.old
    sampled, recorded = jax.tree.map(layout.rows, (batch.rollout.routes, old.routes))
    routes = sampled if recorded is None else recorded
    replayed = experts_to_replay(replay, sampled, recorded)
    routing = Routing(replayed, jnp.moveaxis(routes.experts, 2, 0), load)
    scores = score(graph, policy, layout, scoring, routing=routing)
    loss, info = objectives.loss(
        objective,
        scores.logprobs,
        old_logprobs=old.logprobs,
        mask=mask,
        advantages=batch.advantages,
        weights=weights if batch.correction is None else weights * batch.correction,
        router_shift=_router_shift(scores, layout, routes) if objective.router_shift else None,
        sampler_logprobs=None if objective.negative_mask is None else batch.rollout.logprobs,
    )
    sums, maxima = metrics_lib.of_policy(
        scores, batch, info, config=policy.model(graph).config, layout=layout, routes=routes, replayed=replayed
    )
    loss, sums = terms_lib.add(terms, Seen(batch, layout, scores, share, critic_params), loss, sums)
    return loss, ({"loss": loss, **sums}, maxima)


def _router_shift(scores: ModelScores, layout: Layout, old: RouterRecord) -> Float[Array, "B T"]:
    """RSPO's γ of each response token, at the position that predicts the token; `old` is at the rows' positions."""
    assert old.logprobs is not None and scores.routes.watched is not None
    shift = router_shift(jnp.moveaxis(old.logprobs, 2, 0), scores.routes.watched)
    return layout.scored(layout.predicting(shift))
