"""The decode loop of one batch shard: responses queue for slots, and every step decodes one token per slot.

Slots go to queue positions in order, and every step writes one row of a log with a column per slot. Between phases the
number of slots halves, the unfinished responses move together, and the log restarts at row 0. For example, 5 responses
A to E on 2 slots, with an EOS from prefill as the first token of B:

    queue position     0    1    2    3    4
    response           A    C    D    E    B          queue_length = 4: B needs no slot and comes last

    phase 1            slot 0     slot 1
      (prefill)        A0         C0
      row 0            A1         C1 EOS              slot 1 is refilled with D, queue position 2
      row 1            A2 EOS     D1                  slot 0 is refilled with E, queue position 3
      row 2            E1         D2
      row 3            E2         D3
      row 4            E3 EOS     D4                  queue empty, one response left: one slot is enough
    phase 2            slot 0
      row 0            D5 EOS

A row holds the tokens sampled in its step, and the routes of the tokens fed in it, sampled one step earlier. Token t of
the response at queue position p is in row `first_row[p] + t` and column `slot[p]` of the log. Here `first_row` is -1
for A and C, 0 for D, 1 for E; in phase 2, -5 for D.

Nothing here uses a scatter: scatters are slow on TPUs, and some have crashed the TPU's compiler.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from gspo_jax.kernels.kv import KV
from gspo_jax.kernels.scopes import RARELY
from gspo_jax.models import moe
from gspo_jax.models.cache import Cache, DecodeSlots, empty_ring, keep_slots, write_prefix
from gspo_jax.models.transformer import Transformer
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.mesh import constrain
from gspo_jax.rollout.prefixes import PackedPrefix
from gspo_jax.rollout.sampling import SamplingParams, StopRule, draw
from gspo_jax.types import Prompts, RouterRecord, Weights

_MAX_SHRINKS = 3
"""Maximum halvings of the slots; each count is compiled separately."""
_MIN_SLOTS = 4
"""Minimum slots after halving."""


class SampledTokens(NamedTuple):
    """Sampled token ids with their log-probs."""

    tokens: Int[Array, "*b"]
    behaviour_logprobs: Float[Array, "*b"]
    """Log-prob under the distribution sampled from."""
    logprobs: Float[Array, "*b"]
    """Log-prob under the full softmax at the sampling temperature."""


class PrefilledKV(NamedTuple):
    """Cache entries of M prefilled positions in R rows: prompts, or packed prefixes."""

    k: KV
    """Rotary positions applied: [L, R, Kv, M, h] of prompts, [R, L, Kv, M, h] of rows of prefixes."""
    v: KV
    routes: RouterRecord
    """[R, M, L, K]."""


class Prefilled(NamedTuple):
    """Prefilled prompts and prefixes, with every response's next token."""

    prompts: Prompts
    """[P, S]."""
    prefix: PackedPrefix | None
    prompt_kv: PrefilledKV
    prefix_kv: PrefilledKV | None
    first: SampledTokens
    """Token sampled after the prefix, [B]."""


@struct.dataclass
class StepLog:
    """Sampled tokens and routes of a phase, by row (step) and column (slot)."""

    sampled: SampledTokens
    """[rows, B]."""
    routes: RouterRecord
    """Routes of the tokens fed in the step, [rows, B, L·K]; see `flatten_routes`."""


@struct.dataclass
class LoopState:
    """State of the decode loop: B slots, n queue positions."""

    row: Int[Array, ""]
    """Next row to write."""
    positions: Int[Array, " B"]
    """Queue position of the response in each slot; n if idle."""
    lengths: Int[Array, " B"]
    """Tokens of each slot's response so far, prefix included."""
    last_tokens: Int[Array, " B"]
    """Fed by the next step."""
    next_position: Int[Array, ""]
    """First queue position not yet given a slot."""
    num_ended: Int[Array, ""]
    running: Bool[Array, ""]
    """True while the phase continues on any shard of the expert group."""
    slot: Int[Array, " n"]
    """Slot of each queue position in this phase, even once ended; B if none."""
    first_row: Int[Array, " n"]
    """Log row of each queue position's token 0; negative if sampled before the phase."""
    log: StepLog
    cache: Cache


def is_eos(tokens: Int[Array, "*b"], eos_ids: Int[Array, " s"]) -> Bool[Array, "*b"]:
    return (tokens[..., None] == eos_ids.reshape((1,) * tokens.ndim + (-1,))).any(axis=-1)


def length_mask(lengths: Int[Array, " R"], size: int) -> Bool[Array, "R size"]:
    """Return True on the first `lengths[r]` of `size` positions in row r."""
    return jnp.arange(size)[None] < lengths[:, None]


def token_keys(keys: Key[Array, " B"], t: Int[Array, " B"]) -> Key[Array, " B"]:
    """Return keys for sampling token t of each response. Does not consume the response's key."""
    return jax.vmap(jax.random.fold_in)(keys, t)


def flatten_routes(x: Shaped[Array, "*b L K"]) -> Shaped[Array, "*b LK"]:
    """Reshape to [..., L·K], because TPUs pad the last dimension to 128."""
    return x.reshape(*x.shape[:-2], -1)


def _written(log: Shaped[Array, "rows *b"], new: Shaped[Array, "*b"], row: Int[Array, ""]) -> Array:
    """Write a row of the log, kept row by row in memory.

    Otherwise the TPU's compiler may take the new row's layout, padding few slots to 128.
    """
    written = jax.lax.dynamic_update_index_in_dim(log, new, row, 0)
    return with_layout_constraint(written, Layout(tuple(range(log.ndim))))


def phases(slots: int, prefilled: Prefilled, limits: Array | None, stop: StopRule) -> list[int]:
    """Return a shard's slots in each phase: `slots`, then halved as often as allowed if lengths can differ."""
    counts = [slots]
    if not stop.eos_ids and limits is None and prefilled.prefix is None:
        return counts
    while len(counts) <= _MAX_SHRINKS and counts[-1] // 2 >= _MIN_SLOTS:
        counts.append(counts[-1] // 2)
    return counts


class DecodeLoop:
    """Inputs and transitions of a shard's decode loop, n responses queueing for its slots."""

    def __init__(
        self,
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
    ):
        n = keys.shape[0]
        self.prefilled, self.keys = prefilled, keys
        self.sampling, self.stop, self.slots = sampling, stop, slots
        self.eos_ids = jnp.asarray(stop.eos_ids, jnp.int32)
        self.prefix_lengths = jnp.zeros(n, jnp.int32) if prefilled.prefix is None else prefilled.prefix.lengths
        self.slot_counts = phases(slots, prefilled, limits, stop)
        """Slots of each phase."""
        self.limits = (
            jnp.full(n, stop.max_length, jnp.int32) if limits is None else jnp.minimum(limits, stop.max_length)
        )
        """Token limit of each response, prefix included."""
        self.model = weights.model(graph)
        self.ended = is_eos(prefilled.first.tokens, self.eos_ids) | (self.prefix_lengths + 1 >= self.limits)
        """True for responses that need no slot: prefill's token is an EOS or reaches the limit."""
        self.queue, self.queue_length = jnp.arange(n, dtype=jnp.int32), jnp.full((), n, jnp.int32)
        """The responses in their order; queue positions given a slot, n if every response starts with its own."""
        if slots < n:  # ended responses go last and get no slot
            self.queue = jnp.lexsort((self.queue, self.ended)).astype(jnp.int32)
            self.queue_length = n - self.ended.sum(dtype=jnp.int32)
        self.enough = None
        """Stop once this many responses have ended, including any with limit 0."""
        if min_ended < 1:
            self.enough = n - jnp.floor((1 - min_ended) * (self.limits > 0).sum()).astype(jnp.int32)

    def start(self) -> LoopState:
        """Return the first state: the queue's head in the slots, prefixes in the cache."""
        n, B, T = self.queue.shape[0], self.slots, self.stop.max_length
        at = jnp.arange(B, dtype=jnp.int32)
        positions = jnp.where(~self.ended if n == B else at < self.queue_length, at, n)
        k = empty_ring(self.prefilled.prompt_kv.k, B, T)
        # Prefixes take the columns just before the first one that a step writes.
        first_column = 0 if self.prefilled.prefix_kv is None else k.shape[1] * k.shape[4]
        state = LoopState(
            row=jnp.zeros((), jnp.int32),
            positions=positions,
            lengths=self.prefix_lengths[self.queue[:B]] + 1,
            last_tokens=self.prefilled.first.tokens[self.queue[:B]],
            next_position=jnp.minimum(self.queue_length, B),
            num_ended=self.ended.sum(dtype=jnp.int32),
            running=jnp.zeros((), bool),
            slot=jnp.minimum(jnp.arange(n, dtype=jnp.int32), B),
            first_row=-1 - self.prefix_lengths[self.queue],
            log=self._empty_log(T if n == B else (n * T) // B + T, B),
            cache=self.cache(k, k, jnp.asarray(first_column, jnp.int32)),
        )
        state = self._load_prefixes(state, jnp.zeros((), jnp.int32))
        return dataclasses.replace(state, running=self._continues(state, 0))

    def cache(self, k: KV, v: KV, step: Array) -> Cache:
        prompts, kv = self.prefilled.prompts, self.prefilled.prompt_kv
        return Cache(kv.k, kv.v, prompts.lengths, k, v, step, self.queue.shape[0] // kv.k.shape[1])

    def step(self, state: LoopState, *, fewer_slots: int) -> LoopState:
        """Feed the last token of every slot, sample the next, and refill slots with an ended response.

        The phase ends once the next one's `fewer_slots` can hold all remaining responses.
        """
        n, aligned = self.queue.shape[0], state.positions.shape[0] == self.queue.shape[0]
        active = state.positions < n
        responses = jnp.arange(n, dtype=jnp.int32) if aligned else self.queue[jnp.minimum(state.positions, n - 1)]
        slots = DecodeSlots(responses, jnp.where(active, state.lengths, 0), aligned=aligned)
        output, cache = self.model.decode(state.last_tokens, slots, state.cache)
        logits = constrain(output.logits[:, 0], "batch", "vocab")
        keys = token_keys(self.keys if aligned else self.keys[responses], state.lengths)
        sampled = SampledTokens(*draw(keys, logits, self.sampling))
        with_logprobs = self.prefilled.prompt_kv.routes.logprobs is not None
        routes = moe.record(output.routes, active[:, None], self.model.config, logprobs=with_logprobs)
        new = StepLog(sampled, jax.tree.map(lambda r: flatten_routes(r[:, 0]), routes))
        log = jax.tree.map(lambda rows, new: _written(rows, new, state.row), state.log, new)
        lengths = state.lengths + 1
        ends = is_eos(sampled.tokens, self.eos_ids) | (lengths >= self.limits[responses])
        state = dataclasses.replace(
            state,
            row=state.row + 1,
            positions=jnp.where(ends, n, state.positions),
            lengths=lengths,
            last_tokens=sampled.tokens,
            num_ended=state.num_ended + (ends & active).sum(dtype=jnp.int32),
            log=log,
            cache=cache,
        )
        if self.slots < n:
            first = state.next_position
            refill = jnp.any(ends & active) & (first < self.queue_length)
            state = jax.lax.cond(refill, self._refill, lambda s: s, state)
            state = self._load_prefixes(state, first)
        return dataclasses.replace(state, running=self._continues(state, fewer_slots))

    def shrink(self, state: LoopState, size: int) -> LoopState:
        """Start the next phase: the busy slots in the first `size`, and an empty log."""
        n = self.queue.shape[0]
        kept = jnp.argsort(state.positions == n, stable=True)[:size]
        positions, lengths = state.positions[kept], state.lengths[kept]
        held = positions[None] == jnp.arange(n)[:, None]
        slot = jnp.where(held.any(axis=1), held.argmax(axis=1).astype(jnp.int32), size)
        state = dataclasses.replace(
            state,
            row=jnp.zeros((), jnp.int32),
            positions=positions,
            lengths=lengths,
            last_tokens=state.last_tokens[kept],
            slot=slot,
            first_row=-lengths.at[slot].get(mode="clip"),
            log=self._empty_log(self.stop.max_length, size),
            cache=keep_slots(state.cache, kept),
        )
        return dataclasses.replace(state, running=self._continues(state, 0))

    def _continues(self, state: LoopState, fewer_slots: int) -> Bool[Array, ""]:
        active = (state.positions < self.queue.shape[0]).sum()
        here = active + jnp.maximum(self.queue_length - state.next_position, 0) > fewer_slots
        if self.enough is not None:
            here &= state.num_ended < self.enough
        return mesh_lib.any_shard(here, ("expert",))  # all take equally many steps

    def _refill(self, state: LoopState) -> LoopState:
        n = self.queue.shape[0]
        idle = state.positions == n
        position = state.next_position + jnp.cumsum(idle, dtype=jnp.int32) - 1
        taken = idle & (position < self.queue_length)
        response = self.queue[jnp.minimum(position, n - 1)]
        # Queue position next_position + i goes to idle slot number i.
        i = jnp.arange(n, dtype=jnp.int32) - state.next_position
        new = (i >= 0) & (i < taken.sum())
        idle_slots = jnp.argsort(~idle, stable=True).astype(jnp.int32)
        return dataclasses.replace(
            state,
            positions=jnp.where(taken, position, state.positions),
            lengths=jnp.where(taken, self.prefix_lengths[response] + 1, state.lengths),
            last_tokens=jnp.where(taken, self.prefilled.first.tokens[response], state.last_tokens),
            next_position=state.next_position + taken.sum(dtype=jnp.int32),
            slot=jnp.where(new, idle_slots.at[i].get(mode="clip"), state.slot),
            first_row=jnp.where(new, state.row - 1 - self.prefix_lengths[self.queue], state.first_row),
        )

    def _load_prefixes(self, state: LoopState, first: Int[Array, ""]) -> LoopState:
        """Cache the prefixes of queue positions from `first` on."""
        prefix, prefix_kv = self.prefilled.prefix, self.prefilled.prefix_kv
        if prefix is None or prefix_kv is None:
            return state

        def load(position: Array, cache: Cache) -> Cache:
            response = self.queue[position]
            own = prefix.row[response], prefix.start[response], prefix.lengths[response]
            k, v = (
                write_prefix(ring, state.slot[position], cache.step, rows, *own)
                for ring, rows in ((cache.k, prefix_kv.k), (cache.v, prefix_kv.v))
            )
            return dataclasses.replace(cache, k=k, v=v)

        with jax.named_scope(RARELY):
            cache = jax.lax.fori_loop(first, state.next_position, load, state.cache)
        return dataclasses.replace(state, cache=cache)

    def _empty_log(self, rows: int, slots: int) -> StepLog:
        def empty(r: Array) -> Array:
            return jnp.zeros((rows, slots, r.shape[-2] * r.shape[-1]), r.dtype)

        routes = jax.tree.map(empty, self.prefilled.prompt_kv.routes)
        return StepLog(jax.tree.map(lambda d: jnp.zeros((rows, slots), d.dtype), self.prefilled.first), routes)
