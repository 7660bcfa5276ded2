"""The decode of one batch shard, from its first step to its responses: a few transitions, which a caller composes."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int, Key

from gspo_jax.models.transformer import Transformer
from gspo_jax.rollout.loop import DecodeLoop, LoopState, Prefilled, is_eos
from gspo_jax.rollout.responses import ResponseBuffer
from gspo_jax.rollout.sampling import SamplingParams, StopRule
from gspo_jax.types import Rollout, Weights

_MAX_SHRINKS = 3
"""Maximum number of times the slots are halved; each number of slots is compiled separately."""
_MIN_SLOTS = 4
"""The slots are not halved below this number."""


class DecodeStats(NamedTuple):
    """Work of a decode loop, per shard."""

    steps: Int[Array, " shards"]
    """Decode steps; each feeds one token per slot."""
    slot_steps: Int[Array, " shards"]
    """Sum over steps of the number of slots, busy or idle, which the cost of a step grows with."""
    decode_tokens: Int[Array, " shards"]
    """Tokens sampled by the loop."""
    sampled_tokens: Int[Array, " shards"]
    """These, and the first token of each response, which prefill samples."""


class Decoded(NamedTuple):
    """Result of a decode call."""

    rollout: Rollout
    """The responses. Prefixes are in the tokens and routes, but are no actions of this call: their log-probs are 0."""
    unfinished: Bool[Array, " B"]
    """True for responses cut off by an early exit; False for those that reached their token limit."""
    stats: DecodeStats
    """Work of the decode loop."""


class Progress(NamedTuple):
    """How far one batch shard's loop has come."""

    state: LoopState
    """State of the running phase."""
    buffer: ResponseBuffer
    """Responses at the end of the phase before."""
    steps: Int[Array, ""]
    """Steps of the phases before."""
    slot_steps: Int[Array, ""]
    """Slot-steps of the phases before."""


def make_loop(
    graph: nnx.GraphDef[Transformer],
    weights: Weights,
    prefilled: Prefilled,
    keys: Key[Array, " n"],
    limits: Int[Array, " n"] | None,
    *,
    sampling: SamplingParams,
    stop: StopRule,
    slots: int,
    min_ended: float,
) -> tuple[DecodeLoop, list[int]]:
    """The loop of one batch shard, whose n responses queue for `slots` slots of its own; the slots of each phase."""
    n, eos_ids = keys.shape[0], jnp.asarray(stop.eos_ids, jnp.int32)
    prefix_lengths = jnp.zeros(n, jnp.int32) if prefilled.prefix is None else prefilled.prefix.lengths
    slot_counts = phases(slots, prefilled, limits, stop)
    limits = jnp.full(n, stop.max_length, jnp.int32) if limits is None else jnp.minimum(limits, stop.max_length)
    model = weights.model(graph)
    ended = is_eos(prefilled.first.tokens, eos_ids) | (prefix_lengths + 1 >= limits)
    queue, queue_length = jnp.arange(n, dtype=jnp.int32), jnp.full((), n, jnp.int32)
    if slots < n:  # responses that have ended go to the end of the queue and get no slot
        queue = jnp.lexsort((queue, ended)).astype(jnp.int32)
        queue_length = n - ended.sum(dtype=jnp.int32)
    enough = None
    if min_ended < 1:
        enough = n - jnp.floor((1 - min_ended) * (limits > 0).sum()).astype(jnp.int32)
    loop = DecodeLoop(
        model=model,
        prefilled=prefilled,
        keys=keys,
        sampling=sampling,
        stop=stop,
        eos_ids=eos_ids,
        prefix_lengths=prefix_lengths,
        limits=limits,
        ended=ended,
        queue=queue,
        queue_length=queue_length,
        slots=slots,
        enough=enough,
    )
    return loop, slot_counts


def phases(slots: int, prefilled: Prefilled, limits: Array | None, stop: StopRule) -> list[int]:
    """Number of slots of a shard in each phase: `slots`, then halved as often as allowed if lengths can differ."""
    counts = [slots]
    if not stop.eos_ids and limits is None and prefilled.prefix is None:
        return counts
    while len(counts) <= _MAX_SHRINKS and counts[-1] // 2 >= _MIN_SLOTS:
        counts.append(counts[-1] // 2)
    return counts


def begin(loop: DecodeLoop) -> Progress:
    """Before the first step."""
    zero = jnp.zeros((), jnp.int32)
    buffer = ResponseBuffer.start(loop.prefilled, loop.prefix_lengths, loop.stop.max_length)
    return Progress(loop.start(), buffer, zero, zero)


def advance(
    loop: DecodeLoop, slot_counts: list[int], progress: Progress, phase: int, *, steps: int | None = None
) -> Progress:
    """Step until the phase ends, at most `steps` times."""
    fewer, last = [*slot_counts[1:], 0][phase], None if steps is None else progress.state.row + steps

    def more(state: LoopState) -> Array:
        return state.running if last is None else state.running & (state.row < last)

    state = jax.lax.while_loop(more, partial(loop.step, fewer_slots=fewer), progress.state)
    return progress._replace(state=state)


def _collect(loop: DecodeLoop, progress: Progress) -> Progress:
    """With what the phase that has ended sampled in the buffer."""
    state, buffer, steps, slot_steps = progress
    buffer = buffer.add_phase(state, jnp.argsort(loop.queue), loop.prefix_lengths)
    return Progress(state, buffer, steps + state.row, slot_steps + state.row * state.positions.shape[0])


def shrink(loop: DecodeLoop, slot_counts: list[int], progress: Progress, phase: int) -> Progress:
    """At the start of `phase`, which is not the first."""
    collected = _collect(loop, progress)
    return collected._replace(state=loop.shrink(collected.state, slot_counts[phase]))


def finish(loop: DecodeLoop, progress: Progress, prompt_length: int) -> Decoded:
    """The responses, and the work they took, at the end of the last phase."""
    _, buffer, steps, slot_steps = _collect(loop, progress)
    rollout, unfinished = buffer.rollout(loop, prompt_length=prompt_length)
    sampled = rollout.action_mask.sum(axis=1, dtype=jnp.int32)
    decoded = jnp.maximum(sampled - 1, 0).sum()
    return Decoded(rollout, unfinished, DecodeStats(*(x[None] for x in (steps, slot_steps, decoded, sampled.sum()))))
