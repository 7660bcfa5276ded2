"""Sketches of score functions, Σ_t ∇ log π(y_t) over blocks of responses, for the bias meter (measuring/bias.py).

A gradient per block would take several models' memory. A sketch keeps the gradients' inner products instead: an element
is added with a random sign to one of SIDE² buckets of its tensor (signed feature hashing, arXiv 0902.2206). Then
E ⟨sketch x, sketch y⟩ = ⟨x, y⟩, with a standard deviation of about |x| |y| / SIDE, and none for a matrix of no more
rows and columns than its buckets have. Sketches are linear, so those of micro-batches add up. Directional derivatives
per token, by forward mode, do not pass the kernels' own derivatives.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Float, Int

from gspo_jax.kernels.backend import compiler_options
from gspo_jax.kernels.logprobs import forward_divergences, token_logprobs
from gspo_jax.models.moe import Routing, layers_first
from gspo_jax.models.transformer import Transformer
from gspo_jax.routing.replay import Replay, to_replay
from gspo_jax.training.digest import indices, mix
from gspo_jax.training.layout import Layout, fold_rows
from gspo_jax.training.scoring import Scoring, kept_ids
from gspo_jax.types import Batch, RouterRecord, Weights

SIDE = 64
"""Rows and columns of a tensor's buckets."""
HEAD_SIDE = 2048
"""Most rows and columns of the head's buckets: inner products of heads that are no larger are exact."""


@struct.dataclass
class Sketched:
    """Sums over a block's sampled tokens."""

    gradients: Float[Array, "tensors side side"]
    """Sketch of the gradient by trainable tensor, in the order of the tree's leaves."""
    head: Float[Array, "rows columns"]
    """That of the head's matrix as the head alone uses it, tied to the embedding or not, in buckets of its own."""
    value: Float[Array, ""]
    """Sum whose gradient is sketched."""
    tokens: Int[Array, ""]


Values = Callable[[Float[Array, "r t D"], Float[Array, "D V"]], Float[Array, "B T"]]
"""Final hidden states of a layout's rows, and the head -> a number per token."""
SketchFn = Callable[..., Sketched]
"""Sketches a block, the groups numbered `part` modulo `parts` of mini-batch `index`. Called as
`(weights, batch, index, part, parts)`, with further arguments of expectations."""


def sketch(tree: Any) -> Float[Array, "tensors side side"]:
    """Return the sketch of every array of a tree."""
    return jnp.stack([buckets(x, SIDE, SIDE) for x in jax.tree.leaves(tree)])


@partial(jax.jit, static_argnames=("rows", "columns"))
def buckets(x: Array, rows: int, columns: int) -> Float[Array, "rows columns"]:
    """Add up signed elements by their last two indices modulo `rows` and `columns`. The signs never change."""
    x = x.astype(jnp.float32).reshape(*(1,) * (2 - x.ndim), *x.shape)
    *layers, n, m = x.shape
    which = indices((*layers, 1, 1), [0] * x.ndim, (*layers, 1, 1))
    where = indices((*(1,) * len(layers), n, m), [0] * x.ndim, (*(1,) * len(layers), n, m))
    odd = mix(mix(which + 1) ^ where) >> 31
    x = jnp.where(odd > 0, -x, x).sum(axis=tuple(range(len(layers))))
    x = jnp.pad(x, [(0, -n % rows), (0, -m % columns)])
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns).sum(axis=(0, 2))


def make_sketch(graph: nnx.GraphDef[Transformer], scoring: Scoring, *, replay: Replay = "none") -> SketchFn:
    """Build a jitted sketch of Σ_t ∇ log π(y_t) of the sampled tokens, on the routes and kept ids of an update."""

    @partial(jax.jit, compiler_options=compiler_options())
    def sampled(weights: Weights, batch: Batch, index: Array | int, part: Array | int, parts: Array | int) -> Sketched:
        ids = kept_ids(jax.tree.map(lambda x: x[index], batch.rollout))

        def values_of(layout: Layout) -> Values:
            kept = jax.tree.map(layout.rows_of_tokens, ids)

            def logprobs(hidden: Array, head: Array) -> Array:
                found, *_ = token_logprobs(hidden, head, layout.targets, kept=kept, **_options(scoring))
                return layout.scored(found)

            return logprobs

        return _sketched(graph, scoring, replay, weights, batch, index, part, parts, values_of)

    return sampled


def make_expected_sketch(
    graph: nnx.GraphDef[Transformer],
    scoring: Scoring,
    *,
    replay: Replay = "none",
    kept: Callable[[Array], Array] | None = None,
) -> SketchFn:
    """Build a jitted sketch of Σ_t Σ_v q(v) ∇ log π(v) on the prefixes of a batch, exact in the next token.

    q is the policy of `other` weights with the routes `experts`, [M, Q, N, L, K] (-1: its router's own choice), after
    the truncation `kept` of its logits at the sampling temperature; π is the full softmax. `value` is −Σ_t KL(q ‖ π),
    of which this is the gradient.
    """

    @partial(jax.jit, compiler_options=compiler_options())
    def expected(
        weights: Weights,
        batch: Batch,
        index: Array | int,
        part: Array | int,
        parts: Array | int,
        *,
        other: Weights,
        experts: Int[Array, "M Q N L K"],
    ) -> Sketched:
        def values_of(layout: Layout) -> Values:
            routes = layers_first(RouterRecord(layout.rows(experts[index]), None))
            out = layout.forward(other.model(graph), Routing(routes.experts), scoring.remat)
            of_other = layout.predicting(out.hidden), out.head

            def divergences(hidden: Array, head: Array) -> Array:
                found = forward_divergences(hidden, head, *of_other, kept=kept, **_options(scoring))
                return -layout.scored(found)

            return divergences

        return _sketched(graph, scoring, replay, weights, batch, index, part, parts, values_of)

    return expected


def _options(scoring: Scoring) -> dict[str, Any]:
    return {"temperature": scoring.temperature, "chunk": scoring.logprob_chunk}


def _sketched(
    graph: nnx.GraphDef[Transformer],
    scoring: Scoring,
    replay: Replay,
    weights: Weights,
    batch: Batch,
    index: Array | int,
    part: Array | int,
    parts: Array | int,
    values_of: Callable[[Layout], Values],
) -> Sketched:
    count, batch = len(batch.packing.turns), batch.minibatch(index)
    of_head = [min(size, HEAD_SIDE) for size in reversed(weights.model(graph).embed.shape)]
    packing, rollout = batch.packing, batch.rollout
    groups = packing.responses // (scoring.group_size * count)
    mask = rollout.action_mask & ((packing.responses >= 0) & (groups % parts == part))[:, None]

    def add(total: Sketched, layout: Layout) -> Sketched:
        own = mask & layout.live[:, None]
        sampled, recorded = (
            None if record is None else layers_first(jax.tree.map(layout.rows, record))
            for record in (rollout.routes, batch.old.routes)
        )
        assert sampled is not None
        experts, weigh_by = to_replay(replay, sampled, recorded)
        routing = Routing(experts, weigh_by=weigh_by)

        def forward(trainable: nnx.State) -> tuple[Array, Array]:
            out = layout.forward(Weights(trainable, weights.frozen).model(graph), routing, scoring.remat)
            return layout.predicting(out.hidden), out.head

        values = values_of(layout)
        of_model, pull = jax.vjp(forward, weights.trainable)
        value, of_hidden_and_head = jax.value_and_grad(lambda both: jnp.where(own, values(*both), 0).sum())(of_model)
        (gradient,) = pull(of_hidden_and_head)
        found = Sketched(sketch(gradient), buckets(of_hidden_and_head[1], *of_head), value, own.sum())
        return jax.tree.map(jnp.add, total, found)

    tensors = len(jax.tree.leaves(weights.trainable))
    nothing = Sketched(jnp.zeros((tensors, SIDE, SIDE)), jnp.zeros(of_head), jnp.zeros(()), jnp.zeros((), jnp.int32))
    return fold_rows(add, nothing, rollout, packing, group_size=scoring.group_size)
