"""One optimizer update on a mini-batch of experience."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

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
from gspo_jax.objectives.regularizers import kl, value_loss
from gspo_jax.routing import load as load_lib
from gspo_jax.routing.drift import router_shift
from gspo_jax.routing.replay import Replay, replayed
from gspo_jax.training import metrics as metrics_lib
from gspo_jax.training.metrics import Metrics
from gspo_jax.training.scoring import ModelScores, Scoring, at_predictions, cut_rows, of_responses, score, values
from gspo_jax.training.state import CriticRule, TrainState, step
from gspo_jax.types import Experience

UpdateFn = Callable[[TrainState, Experience, Array | int], tuple[TrainState, Metrics]]


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """What is added to the loss of any objective, each token weighed as the objective weighs it."""

    kl: float = 0.0
    """β of the KL to the reference policy."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """As in `objectives.regularizers.kl`."""
    entropy: float = 0.0
    """c_e: a positive number rewards entropy."""
    balance: float = 0.0
    """Of E Σ_e f_e p_e, mean over layers: f each expert's share of the old policy's pairs in the mini-batch (in all of
    it, as arXiv 2501.11873 asks, whatever micro-batches it is cut into), p the router's probability now."""
    router_z: float = 0.0
    """Of the router's z-loss, mean over layers."""


def take_minibatch(batch: Any, index: Array | int, *, count: int, group_size: int) -> Any:
    """Mini-batch `index` of `count`, in whole groups: those whose number is `index` modulo `count`.

    Strided and not contiguous, so that every device cuts its own rows where it holds whole mini-batches' worth of
    groups. Takes any pytree of row-leading arrays.
    """

    def cut(x: Array) -> Array:
        rows, *rest = x.shape  # no -1: a dense model's routes have no elements to infer it from
        groups = x.reshape(rows // (count * group_size), count, group_size, *rest)
        return groups[:, index].reshape(rows // count, *rest)

    return jax.tree.map(cut, batch)


def _loss(
    trained: tuple[nnx.State, nnx.State | None],
    batch: Experience,
    weights: Float[Array, "B T"],
    load: Float[Array, "L E"] | None,
    *,
    graph: nnx.GraphDef[Transformer],
    scoring: Scoring,
    objective: Objective,
    penalties: Penalties,
    replay: Replay,
    critic: CriticRule | None,
) -> tuple[Array, tuple[Metrics, Metrics]]:
    """A micro-batch's share of the loss; sums that add up, and maxima, over the micro-batches."""
    params, critic_params = trained
    rollout, mask, old = batch.rollout, batch.mask, batch.old
    routing = Routing(replayed(replay, rollout.routes, old.routes), _experts(batch), load)
    scores = score(graph, params, rollout, scoring, routing=routing)
    shift = _router_shift(scores, batch) if objective.router_shift else None
    loss, info = objectives.loss(
        objective,
        scores.logprobs,
        old_logprobs=old.logprobs,
        mask=mask,
        advantages=batch.advantages,
        weights=weights if batch.correction is None else weights * batch.correction,
        router_shift=shift,
    )
    sums, maxima = metrics_lib.of_policy(
        scores,
        batch,
        info,
        config=nnx.merge(graph, params).config,
        replayed=routing.replay,
    )
    if old.reference_logprobs is not None:
        divergence = kl(scores.logprobs, old.reference_logprobs, mask, estimator=penalties.kl_estimator)
        sums["reference_kl"] = divergence.sum()
        if penalties.kl:  # else it is in the reward
            loss += penalties.kl * (weights * divergence).sum()
    if penalties.entropy:
        loss -= penalties.entropy * (weights * jnp.where(mask, scores.entropy, 0)).sum()
    for name, weight in (("balance", penalties.balance), ("z", penalties.router_z)):
        if weight:
            each = of_responses(getattr(scores.routes, name), rollout).mean(axis=0)
            sums[name] = jnp.where(mask, each, 0).sum()
            loss += weight * (weights * jnp.where(mask, each, 0)).sum()
    if critic is not None:
        assert objective.critic is not None and critic_params is not None
        assert old.values is not None and batch.returns is not None
        now = values(critic.graph, critic_params, rollout, scoring, policy_hidden=scores.hidden)
        losses, clipped = value_loss(now, old.values, batch.returns, mask, clip=objective.critic.value_clip)
        sums["critic"] = metrics_lib.of_critic(now, batch.returns, losses, clipped, mask)
        loss += objective.critic.value_weight * (weights * losses).sum()
    return loss, ({"loss": loss, **sums}, maxima)


def _experts(batch: Experience) -> Int[Array, "L B N K"]:
    """Those of the old policy."""
    return jnp.moveaxis(batch.routes.experts, 2, 0)


def _router_shift(scores: ModelScores, batch: Experience) -> Float[Array, "B T"]:
    """γ of every response token, at the position that it is predicted from."""
    assert batch.routes.logprobs is not None and scores.routes.watched is not None
    shift = router_shift(jnp.moveaxis(batch.routes.logprobs, 2, 0), scores.routes.watched)
    return at_predictions(shift, batch.rollout)


def make_update(
    graph: nnx.GraphDef[Transformer],
    scoring: Scoring,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    critic: CriticRule | None = None,
    penalties: Penalties = Penalties(),
    replay: Replay = "none",
    shardings: TrainState | None = None,
    minibatches: int,
    microbatches: int,
    group_size: int,
) -> UpdateFn:
    """A jitted `update(state, experience, index)`: one optimizer step on mini-batch `index` of the experience.

    The weights come from the whole mini-batch's mask, so the gradients of its micro-batches add up to its gradient
    however it is cut. A gradient or loss that is not finite leaves parameters and optimizer as they were, and is
    counted. `replay` says whose routes the forward takes. `critic` learns beside the policy where the objective has
    one. `shardings` pins where the new state lives: where the old one did. The old state's buffers are given up
    (donated).
    """
    loss = partial(
        _loss, graph=graph, scoring=scoring, objective=objective, penalties=penalties, replay=replay, critic=critic
    )
    gradient = jax.value_and_grad(loss, has_aux=True)

    places = None if shardings is None else (shardings, shardings.updates)

    @partial(jax.jit, donate_argnums=0, out_shardings=places, compiler_options=compiler_options())
    def update(state: TrainState, experience: Experience, index: Array | int) -> tuple[TrainState, Metrics]:
        batch = take_minibatch(experience, index, count=minibatches, group_size=group_size)
        weights = objective.weights(batch.mask)
        load = None
        if penalties.balance:
            E = nnx.merge(graph, state.params).config.num_experts
            experts = of_responses(_experts(batch), batch.rollout)
            load = load_lib.shares(load_lib.pairs(experts, batch.mask, num_experts=E))
        trained = (state.params, None if state.critic is None else state.critic.params)

        def add(grads: Any, micro: tuple[Experience, Array]) -> tuple[Any, tuple[Metrics, Metrics]]:
            (_, seen), more = gradient(trained, *micro, load)
            return jax.tree.map(jnp.add, grads, more), seen

        zeros = jax.tree.map(jnp.zeros_like, trained)
        grads, (sums, maxima) = jax.lax.scan(
            add, zeros, cut_rows((batch, weights), microbatches, group_size=group_size)
        )
        metrics = metrics_lib.from_sums(
            jax.tree.map(lambda s: s.sum(axis=0), sums), jax.tree.map(lambda m: m.max(axis=0), maxima)
        )
        finite = jnp.isfinite(optax.global_norm(grads)) & jnp.isfinite(metrics["actor/loss"])
        metrics |= {
            "actor/grad_norm": optax.global_norm(grads[0]),
            "actor/lr": schedule(state.updates - state.skipped),
            "update/skipped": (~finite).astype(jnp.int32),
        }
        policy, critics = step(state.policy, optimizer, grads[0]), None
        if state.critic is not None:
            assert critic is not None
            critics = step(state.critic, critic.optimizer, grads[1])
            metrics["critic/grad_norm"] = optax.global_norm(grads[1])
        policy, critics = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (policy, critics), (state.policy, state.critic)
        )
        return TrainState(policy, state.updates + 1, state.skipped + ~finite, critics), metrics

    return update
