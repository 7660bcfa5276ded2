"""The decode of one batch shard, as transitions that a caller composes."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from gspo_jax.rollout.loop import DecodeLoop, LoopState
from gspo_jax.rollout.responses import ResponseBuffer
from gspo_jax.types import Rollout


class DecodeStats(NamedTuple):
    """Work of a decode loop, per shard."""

    steps: Int[Array, " shards"]
    slot_steps: Int[Array, " shards"]
    """Slots, busy or idle, summed over steps; drives the cost."""
    decode_tokens: Int[Array, " shards"]
    """Sampled by the loop."""
    sampled_tokens: Int[Array, " shards"]
    """Including each response's first token, sampled by prefill."""


class Decoded(NamedTuple):
    rollout: Rollout
    """Prefixes are in tokens and routes, but are no actions of this call: their log-probs are 0."""
    unfinished: Bool[Array, " B"]
    """True for responses cut off by an early exit, not by their token limit."""
    stats: DecodeStats


class DecodeProgress(NamedTuple):
    """Progress of one shard's loop; buffer and counts are as of the previous phase's end."""

    state: LoopState
    buffer: ResponseBuffer
    steps: Int[Array, ""]
    slot_steps: Int[Array, ""]


def begin(loop: DecodeLoop) -> DecodeProgress:
    zero = jnp.zeros((), jnp.int32)
    buffer = ResponseBuffer.start(loop.prefilled, loop.prefix_lengths, loop.stop.max_length)
    return DecodeProgress(loop.start(), buffer, zero, zero)


def advance(loop: DecodeLoop, progress: DecodeProgress, phase: int, *, steps: int | None = None) -> DecodeProgress:
    """Step until the phase ends, at most `steps` times."""
    fewer, last = [*loop.slot_counts[1:], 0][phase], None if steps is None else progress.state.row + steps

    def more(state: LoopState) -> Array:
        return state.running if last is None else state.running & (state.row < last)

    state = jax.lax.while_loop(more, partial(loop.step, fewer_slots=fewer), progress.state)
    return progress._replace(state=state)


def _collect(loop: DecodeLoop, progress: DecodeProgress) -> DecodeProgress:
    state, buffer, steps, slot_steps = progress
    buffer = buffer.add_phase(state, jnp.argsort(loop.queue), loop.prefix_lengths)
    return DecodeProgress(state, buffer, steps + state.row, slot_steps + state.row * state.positions.shape[0])


def shrink(loop: DecodeLoop, progress: DecodeProgress, phase: int) -> DecodeProgress:
    collected = _collect(loop, progress)
    return collected._replace(state=loop.shrink(collected.state, loop.slot_counts[phase]))


def finish(loop: DecodeLoop, progress: DecodeProgress, prompt_length: int) -> Decoded:
    _, buffer, steps, slot_steps = _collect(loop, progress)
    rollout, unfinished = buffer.rollout(loop, prompt_length=prompt_length)
    sampled = rollout.action_mask.sum(axis=1, dtype=jnp.int32)
    decoded = jnp.maximum(sampled - 1, 0).sum()
    return Decoded(rollout, unfinished, DecodeStats(*(x[None] for x in (steps, slot_steps, decoded, sampled.sum()))))
