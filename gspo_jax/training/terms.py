"""Loss terms added to the objective: KL to a reference or teacher, entropy bonus, router losses, the critic's loss.

A term maps a micro-batch, as `Seen`, to its share of a mean over the mini-batch's tokens and to sums for the metrics.
Coefficients thus mean the same for all objectives and lengths.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gspo_jax.kernels.logprobs import divergences
from gspo_jax.models.transformer import Transformer
from gspo_jax.objectives import Objective
from gspo_jax.objectives.regularizers import kl, value_loss
from gspo_jax.training import metrics
from gspo_jax.training.layout import Layout
from gspo_jax.training.metrics import Metrics
from gspo_jax.training.scoring import ModelScores, Scoring, values
from gspo_jax.training.state import CriticRule
from gspo_jax.types import Batch, Weights

KlEstimator = Literal["k1", "k2", "k3"]
TeacherForm = Literal["advantage", "k2", "k3", "full"]
"""How KL(π_θ ‖ teacher) is learned from: as an advantage of sampled tokens, or by a loss term, whose estimator has the
expected gradient ∇KL(π_θ ‖ π_T) for k2 and "full", ∇KL(π_T ‖ π_θ) for k3. (k1's, ∇log π_θ, knows no teacher.)"""


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """Weights of the optional loss terms; 0 leaves a term out."""

    kl: float = 0.0
    """β of the KL to the reference policy."""
    kl_estimator: KlEstimator = "k3"
    """See `objectives.regularizers.kl`."""
    teacher: float = 0.0
    """Weight of the KL to the teacher."""
    teacher_form: TeacherForm = "advantage"
    entropy: float = 0.0
    """Coefficient of the entropy bonus; positive rewards entropy."""
    balance: float = 0.0
    """Coefficient of the load-balancing loss E Σ_e f_e p_e, mean over routed layers. f is each expert's share of the
    old policy's (token, expert) pairs over the mini-batch (arXiv 2501.11873), p the current router's probability; of a
    sigmoid router σ_e / Σσ, as in DeepSeek-V3."""
    router_z: float = 0.0
    """Coefficient of the router z-loss, of the logits whatever the scores."""


class Seen(NamedTuple):
    """A scored micro-batch."""

    batch: Batch
    layout: Layout
    scores: ModelScores
    share: Float[Array, ""]
    """1 / tokens in the mini-batch's mask."""
    critic_params: nnx.State | None
    teacher: nnx.State | None = None
    """The teacher's weights, if it is compared over the whole vocabulary."""

    def mean(self, each: Float[Array, "B T"]) -> Float[Array, ""]:
        """Return the micro-batch's part of the mini-batch mean; `each` is 0 outside the mask."""
        return (self.share * each).sum()


Term = Callable[[Seen], tuple[Array | float, Metrics]]
"""Micro-batch -> (share of the loss, additive sums)."""


def chosen(
    penalties: Penalties,
    objective: Objective,
    scoring: Scoring,
    critic: CriticRule | None,
    *,
    reference: bool,
    teacher_graph: nnx.GraphDef[Transformer] | None = None,
) -> list[Term]:
    terms: list[Term] = []
    if penalties.teacher and penalties.teacher_form == "full":
        assert teacher_graph is not None
        terms.append(partial(whole_teacher_kl, weight=penalties.teacher, graph=teacher_graph, scoring=scoring))
    elif penalties.teacher:
        terms.append(partial(sampled_teacher_kl, weight=penalties.teacher, form=penalties.teacher_form))
    if reference:
        terms.append(partial(reference_kl, weight=penalties.kl, estimator=penalties.kl_estimator))
    if penalties.entropy:
        terms.append(partial(entropy_bonus, weight=penalties.entropy))
    if penalties.balance:
        terms.append(partial(router_loss, name="balance", weight=penalties.balance))
    if penalties.router_z:
        terms.append(partial(router_loss, name="z", weight=penalties.router_z))
    if critic is not None:
        terms.append(partial(critic_loss, objective=objective, scoring=scoring, critic=critic))
    return terms


def reference_kl(seen: Seen, *, weight: float, estimator: KlEstimator) -> tuple[Array | float, Metrics]:
    """β · KL(policy ‖ reference), logged even at `weight` 0, when the KL is part of the reward."""
    reference = seen.batch.old.reference_logprobs
    assert reference is not None
    divergence = kl(seen.scores.logprobs, reference, seen.batch.mask, estimator=estimator)
    return weight * seen.mean(divergence) if weight else 0.0, {"reference_kl": divergence.sum()}


def sampled_teacher_kl(seen: Seen, *, weight: float, form: TeacherForm) -> tuple[Array | float, Metrics]:
    """weight · KL(policy ‖ teacher) of the sampled tokens, by k2 or k3; logged by k1, also for `form` "advantage"."""
    teacher, own = seen.batch.old.teacher_logprobs, seen.scores.logprobs
    assert teacher is not None
    sums = {"teacher_kl": kl(own, teacher, seen.batch.mask, estimator="k1").sum()}
    if form not in ("k2", "k3"):
        return 0.0, sums
    return weight * seen.mean(kl(own, teacher, seen.batch.mask, estimator=form)), sums


def whole_teacher_kl(
    seen: Seen, *, weight: float, graph: nnx.GraphDef[Transformer], scoring: Scoring
) -> tuple[Array, Metrics]:
    """weight · KL(policy ‖ teacher) over the whole vocabulary at each sampled prefix, exact.

    The teacher reads the micro-batch here, where the policy's logits are: its log-probs over the vocabulary are never
    stored, and neither are its hidden states. An iteration still reads every response once.
    """
    assert seen.teacher is not None
    layout, scores = seen.layout, seen.scores
    out = layout.forward(Weights.full(seen.teacher).model(graph), None, "none")
    options = {"temperature": scoring.temperature, "chunk": scoring.logprob_chunk}
    each = layout.scored(divergences(scores.hidden, scores.head, layout.predicting(out.hidden), out.head, **options))
    each = jnp.where(seen.batch.mask, each, 0)
    return weight * seen.mean(each), {"teacher_kl": each.sum()}


def entropy_bonus(seen: Seen, *, weight: float) -> tuple[Array, Metrics]:
    """−c_e · entropy of the token distributions."""
    return -weight * seen.mean(jnp.where(seen.batch.mask, seen.scores.entropy, 0)), {}


def router_loss(seen: Seen, *, name: Literal["balance", "z"], weight: float) -> tuple[Array, Metrics]:
    """Load-balancing loss or router z-loss, mean over routed layers."""
    each = seen.layout.own(getattr(seen.scores.routes, name).mean(axis=0))
    each = jnp.where(seen.batch.mask, each, 0)
    return weight * seen.mean(each), {name: each.sum()}


def critic_loss(seen: Seen, *, objective: Objective, scoring: Scoring, critic: CriticRule) -> tuple[Array, Metrics]:
    """Clipped value loss of the critic, as in PPO."""
    batch, old_values, returns = seen.batch, seen.batch.old.values, seen.batch.returns
    assert objective.critic is not None and seen.critic_params is not None
    assert old_values is not None and returns is not None
    now = values(critic.graph, seen.critic_params, seen.layout, scoring, policy_hidden=seen.scores.hidden)
    losses, clipped = value_loss(now, old_values, returns, batch.mask, clip=objective.critic.value_clip)
    sums = {"critic": metrics.of_critic(now, returns, losses, clipped, batch.mask)}
    return objective.critic.value_weight * seen.mean(losses), sums


def add(terms: list[Term], seen: Seen, loss: Array, sums: Metrics) -> tuple[Array, dict[str, Any]]:
    for term in terms:
        share, more = term(seen)
        loss, sums = loss + share, sums | more
    return loss, sums
