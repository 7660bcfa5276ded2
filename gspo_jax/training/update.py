"""Scoring responses with the trainer's model, and one optimizer update on a mini-batch of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from jaxtyping import Array, Float, Int

from gspo_jax import objectives
from gspo_jax.kernels.logprobs import token_logprobs
from gspo_jax.models.transformer import Transformer
from gspo_jax.objectives import Objective
from gspo_jax.parallel.mesh import constrain
from gspo_jax.routing import drift as drift_lib
from gspo_jax.training.state import TrainState
from gspo_jax.types import Experience, Responses

Metrics = dict[str, Any]


UpdateFn = Callable[[TrainState, Experience, Array | int], tuple[TrainState, Metrics]]


@struct.dataclass
class ModelScores:
    """What the trainer's model says of responses."""

    logprobs: Float[Array, "B T"]
    """log π_θ of each token at the sampling temperature, float32; anything outside the mask."""
    entropy: Float[Array, "B T"]
    """Entropy of the distribution the token was drawn from, in nats."""
    experts: Int[Array, "L B T K"]
    """Routes of the response tokens as inputs."""


ScoreFn = Callable[[nnx.State, Responses], ModelScores]


def score(
    graph: nnx.GraphDef[Transformer],
    params: nnx.State,
    responses: Responses,
    *,
    temperature: float,
    logprob_chunk: int,
    remat: bool = False,
) -> ModelScores:
    """One forward over prompt and response; logits only for response tokens, and only a chunk at a time."""
    S, T = responses.prompts.shape[1], responses.tokens.shape[1]
    in_prompt = jnp.arange(S)[None] < responses.prompt_lengths[:, None]
    out = nnx.merge(graph, params)(
        jnp.concatenate([responses.prompts, responses.tokens], axis=1),
        jnp.concatenate([in_prompt, responses.mask], axis=1),
        remat=remat,
    )
    # Token t is predicted one position earlier; the first by its prompt's last real token, before the padding.
    first = jnp.take_along_axis(out.hidden, responses.prompt_lengths[:, None, None] - 1, axis=1)
    hidden = jnp.concatenate([first, out.hidden[:, S : S + T - 1]], axis=1)
    logprobs, entropy = token_logprobs(hidden, out.head, responses.tokens, temperature=temperature, chunk=logprob_chunk)
    return ModelScores(logprobs, entropy, out.routes.experts[:, :, S:])


def make_score(graph: nnx.GraphDef[Transformer], **scoring: Any) -> ScoreFn:
    """A jitted `score(params, responses)`."""
    return jax.jit(partial(score, graph, **scoring))


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


def _microbatches(batch: Any, count: int) -> Any:
    """[B, ...] -> [count, B / count, ...], strided for the same reason as `take_minibatch`."""

    def cut(x: Array) -> Array:
        x = jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)
        return constrain(x, None, "batch", *(None,) * (x.ndim - 2))

    return jax.tree.map(cut, batch)


def _loss(
    params: nnx.State,
    batch: Experience,
    weights: Float[Array, "B T"],
    *,
    graph: nnx.GraphDef[Transformer],
    objective: Objective,
    **scoring: Any,
) -> tuple[Array, tuple[Metrics, Metrics]]:
    """A micro-batch's share of the loss; sums that add up, and maxima, over the micro-batches."""
    rollout, mask = batch.rollout, batch.rollout.mask
    scores = score(graph, params, rollout, **scoring)
    loss, info = objectives.loss(
        objective,
        scores.logprobs,
        old_logprobs=batch.old_logprobs,
        mask=mask,
        advantages=batch.advantages,
        weights=weights,
    )
    d = jnp.where(mask, scores.logprobs - batch.old_logprobs, 0)
    x = jnp.where(mask, scores.logprobs - rollout.logprobs, 0)
    sums = {
        "loss": loss,
        "entropy": jnp.where(mask, scores.entropy, 0).sum(),
        "kl": (jnp.exp(d) - 1 - d).sum(),
        "mismatch_k1": -x.sum(),
        "mismatch_k3": (jnp.exp(x) - 1 - x).sum(),
        "mismatch_abs": jnp.abs(x).sum(),
        "moments": _moments(scores.logprobs, rollout.logprobs, mask),
        "clip": objectives.clip_sums(info, mask),
    }
    if rollout.experts.shape[-1]:  # a dense model routes nothing
        sums["drift"] = drift_lib.compare(rollout.experts, scores.experts, mask)
    maxima = {
        "token": jnp.abs(d).max(),
        "sequence": jnp.abs(d.sum(axis=1) / jnp.maximum(mask.sum(axis=1), 1)).max(),
        "mismatch": jnp.abs(x).max(),
    }
    return loss, (sums, maxima)


def _moments(x: Float[Array, "B T"], y: Float[Array, "B T"], mask: Array) -> Float[Array, " 5"]:
    """Sums of x, y, x², y², xy over the mask: what a correlation is made of."""
    x, y = jnp.where(mask, x, 0), jnp.where(mask, y, 0)
    return jnp.stack([x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum()])


def _pearson(moments: Float[Array, " 5"], n: Array) -> Array:
    """Pearson's correlation; 1 where either side is constant, as two equal constants agree."""
    x, y, xx, yy, xy = moments / n
    spread = jnp.sqrt(jnp.maximum((xx - x * x) * (yy - y * y), 0))
    return jnp.where(spread > 0, (xy - x * y) / jnp.where(spread > 0, spread, 1), 1.0)


def _metrics(sums: Metrics, maxima: Metrics) -> Metrics:
    """Means per response token, rates and maxima, by their names in metrics.jsonl."""
    tokens = jnp.maximum(sums["clip"].tokens, 1)
    return {
        "actor/loss": sums["loss"],
        "actor/entropy": sums["entropy"] / tokens,
        "actor/kl": sums["kl"] / tokens,
        "ratio/token_log_max": maxima["token"],
        "ratio/sequence_log_max": maxima["sequence"],
        "mismatch/kl": sums["mismatch_k3"] / tokens,
        "mismatch/kl_k1": sums["mismatch_k1"] / tokens,
        "mismatch/mean": sums["mismatch_abs"] / tokens,
        "mismatch/max": maxima["mismatch"],
        "mismatch/pearson": _pearson(sums["moments"], tokens),
        **objectives.clip_fractions(sums["clip"]),
        **(drift_lib.metrics(sums["drift"]) if "drift" in sums else {}),
    }


def make_update(
    graph: nnx.GraphDef[Transformer],
    objective: Objective,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    shardings: TrainState | None = None,
    minibatches: int,
    microbatches: int,
    group_size: int,
    **scoring: Any,
) -> UpdateFn:
    """A jitted `update(state, experience, index)`: one optimizer step on mini-batch `index` of the experience.

    The weights come from the whole mini-batch's mask, so the gradients of its micro-batches add up to its gradient
    however it is cut. A gradient or loss that is not finite leaves parameters and optimizer as they were, and is
    counted. `shardings` pins where the new state lives: where the old one did. `scoring` goes to `score`. The old
    state's buffers are given up (donated).
    """
    gradient = jax.value_and_grad(partial(_loss, graph=graph, objective=objective, **scoring), has_aux=True)

    @partial(jax.jit, donate_argnums=0, out_shardings=None if shardings is None else (shardings, None))
    def update(state: TrainState, experience: Experience, index: Array | int) -> tuple[TrainState, Metrics]:
        batch = take_minibatch(experience, index, count=minibatches, group_size=group_size)
        weights = objective.weights(batch.rollout.mask)

        def add(grads: nnx.State, micro: tuple[Experience, Array]) -> tuple[nnx.State, tuple[Metrics, Metrics]]:
            (_, seen), more = gradient(state.params, *micro)
            return jax.tree.map(jnp.add, grads, more), seen

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        grads, (sums, maxima) = jax.lax.scan(add, zeros, _microbatches((batch, weights), microbatches))
        metrics = _metrics(jax.tree.map(lambda s: s.sum(axis=0), sums), jax.tree.map(lambda m: m.max(axis=0), maxima))

        norm = optax.global_norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["actor/loss"])
        changes, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, changes)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        metrics |= {
            "actor/grad_norm": norm,
            "actor/lr": schedule(state.updates - state.skipped),
            "update/skipped": (~finite).astype(jnp.int32),
        }
        return TrainState(params, opt_state, state.updates + 1, state.skipped + ~finite), metrics

    return update
