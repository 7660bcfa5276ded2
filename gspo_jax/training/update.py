"""One optimizer update on a mini-batch."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from gspo_jax import objectives
from gspo_jax.kernels.backend import compiler_options
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.moe import Routing, balanced, layers_first
from gspo_jax.models.transformer import Transformer
from gspo_jax.objectives import Objective
from gspo_jax.objectives.mismatch import Correction, OfToken, centering_coefficients, centering_size, score_centering
from gspo_jax.objectives.surrogates import row_mean
from gspo_jax.routing import load as load_lib
from gspo_jax.routing.drift import router_shift
from gspo_jax.routing.replay import Replay, to_replay
from gspo_jax.training import metrics as metrics_lib
from gspo_jax.training import terms as terms_lib
from gspo_jax.training.layout import Layout, fold_rows
from gspo_jax.training.metrics import Metrics
from gspo_jax.training.scoring import ModelScores, Scoring, kept_ids, score
from gspo_jax.training.state import CriticRule, TrainState, step
from gspo_jax.training.terms import Penalties, Seen
from gspo_jax.types import Batch, RouterRecord, Weights

Trained = tuple[nnx.State, nnx.State | None]
"""(policy's trainable parameters, critic's parameters or None)."""
Gradients = Trained
Found = TypeVar("Found", covariant=True)


class OfMinibatch(Protocol[Found]):
    """A function of a mini-batch."""

    def __call__(
        self,
        objective: Objective,
        state: TrainState,
        frozen: nnx.State,
        batch: Batch,
        index: Array | int,
        teacher: nnx.State | None = None,
    ) -> Found:
        """`teacher`: its weights, if it is compared over the whole vocabulary."""
        ...


GradientFn = OfMinibatch[tuple[Gradients, Metrics]]
"""Returns (gradients, the loss's metrics)."""
UpdateFn = OfMinibatch[tuple[TrainState, Metrics]]
"""Returns (new state, the update's metrics)."""
Loss = tuple[Array, tuple[Metrics, Metrics]]
"""(a micro-batch's loss, (sums, maxima) for the metrics)."""
LossFn = Callable[[Trained, Batch, Array, Layout], Loss]
"""(parameters, micro-batch, its token weights, its rows) -> the loss."""
Biases = Callable[..., nnx.State]
"""Called as `biases(params, batch=…)`, of a mini-batch: returns the policy's parameters with moved biases."""
BlameFn = OfMinibatch[tuple[Array, dict[str, Any]]]
"""Returns (the loss, non-finite elements by leaf)."""


@dataclasses.dataclass(frozen=True)
class Centering:
    """Score centring over the ids that the sampler kept, as `mismatch.score_centering`."""

    correction: Correction | None
    """Correction that made the batch's factors, if it has any."""


def make_gradient(
    graph: nnx.GraphDef[Transformer],
    scoring: Scoring,
    *,
    critic: CriticRule | None = None,
    penalties: Penalties = Penalties(),
    replay: Replay = "none",
    teacher_graph: nnx.GraphDef[Transformer] | None = None,
    centering: Centering | None = None,
) -> GradientFn:
    """Build the gradient of policy and critic on a mini-batch.

    Token weights come from the whole mini-batch's mask, so the split into micro-batches does not matter.
    """

    def gradient(
        objective: Objective,
        state: TrainState,
        frozen: nnx.State,
        batch: Batch,
        index: Array | int,
        teacher: nnx.State | None = None,
    ) -> tuple[Gradients, Metrics]:
        mismatch, batch = metrics_lib.of_batch(batch), batch.minibatch(index)
        load = _load(batch, Weights(state.params, frozen).model(graph).config) if penalties.balance else None
        reference = batch.old.reference_logprobs is not None
        others = {"reference": reference, "teacher_graph": teacher_graph}
        terms = terms_lib.chosen(penalties, objective, scoring, critic, **others)
        share = 1.0 / jnp.maximum(batch.mask.sum(), 1)

        def loss(trained: Trained, batch: Batch, weights: Float[Array, "B T"], layout: Layout) -> Loss:
            params, critic_params = trained
            policy = Weights(params, frozen)
            sampled, recorded = (
                None if record is None else layers_first(jax.tree.map(layout.rows, record))
                for record in (batch.rollout.routes, batch.old.routes)
            )
            assert sampled is not None
            routes = sampled if recorded is None else recorded
            replayed, weigh_by = to_replay(replay, sampled, recorded)
            kept = jax.tree.map(layout.rows_of_tokens, kept_ids(batch.rollout))
            routing = Routing(replayed, routes.experts, load, weigh_by)
            scores = score(graph, policy, layout, scoring, routing=routing, kept=kept)
            value, info = objectives.loss(
                objective,
                scores.logprobs,
                old_logprobs=batch.old.logprobs,
                mask=batch.mask,
                advantages=batch.advantages,
                weights=weights if batch.correction is None else weights * batch.correction,
                router_shift=_router_shift(scores, layout, routes) if objective.router_shift else None,
                sampler_logprobs=None if objective.negative_mask is None else batch.rollout.logprobs,
            )
            sums, maxima = metrics_lib.of_policy(
                scores, batch, info, config=policy.model(graph).config, layout=layout, routes=routes, replayed=replayed
            )
            if centering is not None:
                share_of_loss, more = _centering(scores, batch, weights * info.advantages, objective, centering)
                value, sums = value + share_of_loss, sums | more
            value, sums = terms_lib.add(terms, Seen(batch, layout, scores, share, critic_params, teacher), value, sums)
            return value, ({"loss": value, **sums}, maxima)

        trained = (state.params, None if state.critic is None else state.critic.params)
        weights, group_size = objective.weights(batch.mask), scoring.group_size
        gradients, metrics = _of_rows(loss, trained, batch, weights, group_size=group_size)
        return gradients, metrics | mismatch

    return gradient


def make_update(
    gradient: GradientFn,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    critic: CriticRule | None = None,
    shardings: TrainState | None = None,
    biases: Biases | None = None,
) -> UpdateFn:
    """Build a jitted optimizer step on a mini-batch, followed by a step of the routers' biases, if any.

    A non-finite gradient or loss changes only the counts of updates and skipped updates. The old state is donated.
    `schedule` gives the learning rate, for the metrics.
    """
    places = None if shardings is None else (shardings, shardings.updates)

    @partial(jax.jit, static_argnums=0, donate_argnums=1, out_shardings=places, compiler_options=compiler_options())
    def update(
        objective: Objective,
        state: TrainState,
        frozen: nnx.State,
        batch: Batch,
        index: Array | int,
        teacher: nnx.State | None = None,
    ) -> tuple[TrainState, Metrics]:
        grads, metrics = gradient(objective, state, frozen, batch, index, teacher)
        move = None if biases is None else partial(biases, batch=batch.minibatch(index))
        new, seen = _apply(state, grads, metrics["actor/loss"], optimizer, critic, move)
        return new, metrics | seen | {"actor/lr": schedule(state.updates - state.skipped)}

    return update


def make_blame(gradient: GradientFn, everywhere: Any = None) -> BlameFn:
    """Build a jitted search for what is not finite in a skipped update, too slow for every update.

    It returns the loss and, under "policy" and "critic", the count of non-finite elements in each leaf's gradient.
    """

    @partial(jax.jit, static_argnums=0, out_shardings=everywhere, compiler_options=compiler_options())
    def blame(
        objective: Objective,
        state: TrainState,
        frozen: nnx.State,
        batch: Batch,
        index: Array | int,
        teacher: nnx.State | None = None,
    ) -> tuple[Array, dict[str, Any]]:
        grads, metrics = gradient(objective, state, frozen, batch, index, teacher)
        policy, critics = jax.tree.map(lambda g: (~jnp.isfinite(g)).sum(), grads)
        return metrics["actor/loss"], {"policy": policy, "critic": critics}

    return blame


def _of_rows(
    loss: LossFn, trained: Trained, batch: Batch, weights: Float[Array, "Q T"], *, group_size: int
) -> tuple[Gradients, Metrics]:
    """Add up the micro-batches' gradients and sums, from zeros. Their shapes come from tracing the loss alone."""
    rollout, packing = batch.rollout, batch.packing

    def of(layout: Layout) -> Callable[[Trained], Loss]:
        live = layout.live[:, None]
        own = dataclasses.replace(batch, mask=batch.mask & live)
        return lambda trained: loss(trained, own, jnp.where(live, weights, 0), layout)

    def add(total: tuple[Any, Metrics], layout: Layout) -> tuple[Any, Metrics]:
        (_, (sums, maxima)), gradients = jax.value_and_grad(of(layout), has_aux=True)(trained)
        return jax.tree.map(jnp.add, total[0], (gradients, sums)), jax.tree.map(jnp.maximum, total[1], maxima)

    _, (sums, maxima) = jax.eval_shape(of(Layout.of(rollout, packing, 0, 0)), trained)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), ((trained, sums), maxima))
    (gradients, sums), maxima = fold_rows(add, nothing, rollout, packing, group_size=group_size)
    return gradients, metrics_lib.from_sums(sums, maxima)


def _apply(
    state: TrainState,
    grads: Gradients,
    loss: Array,
    optimizer: optax.GradientTransformation,
    critic: CriticRule | None,
    move: Callable[[nnx.State], nnx.State] | None,
) -> tuple[TrainState, Metrics]:
    """Step policy and critic, and `move` the policy's buffers, unless a gradient or the loss is not finite."""
    finite = jnp.isfinite(optax.global_norm(grads)) & jnp.isfinite(loss)
    metrics = {"actor/grad_norm": optax.global_norm(grads[0]), "update/skipped": (~finite).astype(jnp.int32)}
    policy, critics = step(state.policy, optimizer, grads[0]), None
    policy = policy if move is None else dataclasses.replace(policy, params=move(policy.params))
    if state.critic is not None:
        assert critic is not None and grads[1] is not None
        critics = step(state.critic, critic.optimizer, grads[1])
        metrics["critic/grad_norm"] = optax.global_norm(grads[1])
    policy, critics = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), (policy, critics), (state.policy, state.critic)
    )
    return TrainState(policy, state.updates + 1, state.skipped + ~finite, critics), metrics


def make_biases(config: ModelConfig, *, rate: float) -> Biases:
    """Build a step of the routers' biases (`moe.balanced`) by the load under the old policy, over a mini-batch."""

    def biases(params: nnx.State, *, batch: Batch) -> nnx.State:
        return balanced(params, _load(batch, config), config, rate=rate)

    return biases


def _load(batch: Batch, config: ModelConfig) -> Float[Array, "L E"]:
    """Return each expert's share of the old policy's pairs over a mini-batch's tokens."""
    experts = layers_first(batch.routes).experts[:, :, batch.rollout.prompts.shape[1] :]
    return load_lib.shares(load_lib.expert_counts(experts, batch.mask, num_experts=config.num_experts))


def _centering(
    scores: ModelScores, batch: Batch, weights: Float[Array, "B T"], objective: Objective, centering: Centering
) -> tuple[Array, Metrics]:
    """Return Σ w·Â·C, and sums for the metrics. `weights` are w·Â, without a correction's factors."""
    kept, now, weight = batch.rollout.kept, scores.kept_logprobs, batch.correction
    assert kept is not None and now is not None
    if weight is not None and objective.one_gain:
        weight = jnp.broadcast_to(row_mean(weight, batch.mask)[:, None], weight.shape)
    elif isinstance(centering.correction, OfToken):
        weight = centering.correction.weight
    present = (kept.ids >= 0) & batch.mask[..., None]
    given = now, kept.logprobs, present, kept.whole
    size = centering_size(centering_coefficients(*given, weight=weight), now, present)
    return (weights * score_centering(*given, weight=weight)).sum(), {"center": size.sum()}


def _router_shift(scores: ModelScores, layout: Layout, old: RouterRecord) -> Float[Array, "B T"]:
    """Return RSPO's γ at the position that predicts each token; `old` is in the rows, layers first."""
    assert old.logprobs is not None and scores.routes.watched is not None
    shift = router_shift(old.logprobs, scores.routes.watched)
    return layout.scored(layout.predicting(shift))
