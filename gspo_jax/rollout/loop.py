"""The decode loop of one batch shard: responses queue for slots, and every step decodes one token per slot.

Slots go to queue positions in order. Between phases the number of slots halves, and the unfinished responses move
together. For example, 5 responses A to E on 2 slots, with an EOS from prefill as the first token of B:

    queue position     0    1    2    3    4
    response           A    C    D    E    B          queue_length = 4: B needs no slot and comes last

    phase 1            slot 0     slot 1
      (prefill)        A0         C0
      step 0           A1         C1 EOS              slot 1 is refilled with D, queue position 2
      step 1           A2 EOS     D1                  slot 0 is refilled with E, queue position 3
      step 2           E1         D2
      step 3           E2         D3
      step 4           E3 EOS     D4                  queue empty, one response left: one slot is enough
    phase 2            slot 0
      step 5           D5 EOS

Each step writes a row of a log, with a column per slot: the tokens sampled in it, and the routes of the tokens fed in
it, sampled one step earlier. When a response ends or the log is full, its column is copied to the response's place.

Where the pool has too few pages for all slots (`pages`), a response gets a slot only if the pages that it and all
others may yet need are free. A call that may return early (`min_ended`) needs no such reserve: if the pages run dry,
the response with the fewest tokens gives up its slot, unfinished, and goes on in a later call.

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
from gspo_jax.models.cache import Cache, DecodeSlots, empty_pool, write_prefix
from gspo_jax.models.transformer import Transformer
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.mesh import constrain
from gspo_jax.rollout.pages import PageTable, Pool
from gspo_jax.rollout.prefilled import Prefilled, SampledTokens, flatten_routes
from gspo_jax.rollout.responses import ResponseBuffer, StepLog, log_rows
from gspo_jax.rollout.sampling import SamplingParams, StopRule, draw, is_eos, token_keys
from gspo_jax.types import Rollout, Weights

_MAX_SHRINKS = 3
"""Maximum halvings of the slots; each count is compiled separately."""
_MIN_SLOTS = 4
"""Minimum slots after halving."""
_LOG_ROWS = 128


class DecodeStats(NamedTuple):
    """Work of a decode loop, per shard."""

    steps: Int[Array, " shards"]
    slot_steps: Int[Array, " shards"]
    """Slots, busy or idle, summed over steps; drives the cost."""
    filled: Float[Array, " shards"]
    """Share of the pool with live keys, summed over slot-steps."""
    decode_tokens: Int[Array, " shards"]
    """Sampled by the loop."""
    sampled_tokens: Int[Array, " shards"]
    """Including each response's first token, sampled by prefill."""


class Decoded(NamedTuple):
    rollout: Rollout
    """Prefixes are in tokens and routes, but are no actions of this call: their log-probs are 0."""
    unfinished: Bool[Array, " B"]
    """True for responses that reached neither an EOS nor their token limit."""
    stats: DecodeStats


@struct.dataclass
class Slots:
    """State of B slots."""

    positions: Int[Array, " B"]
    """Queue position of the response in each slot; n if idle."""
    lengths: Int[Array, " B"]
    """Tokens of each slot's response so far, prefix included."""
    last_tokens: Int[Array, " B"]
    """Fed by the next step."""


@struct.dataclass
class LoopState:
    """State of the decode loop: B slots, n queue positions. A phase uses the first of the slots."""

    slots: Slots
    pages: PageTable
    next_position: Int[Array, ""]
    """First queue position not yet given a slot."""
    num_ended: Int[Array, ""]
    phase: Int[Array, ""]
    running: Bool[Array, ""]
    """True while the phase continues on any shard of the expert group."""
    steps: Int[Array, ""]
    slot_steps: Int[Array, ""]
    filled: Float[Array, ""]
    """As in `DecodeStats`."""
    log: StepLog
    row: Int[Array, ""]
    """Rows of the log in use."""
    buffer: ResponseBuffer
    k: KV
    """The pool's keys, [L, M, Kv, C, h]."""
    v: KV

    def first(self, size: int) -> "LoopState":
        """Return the state of the first slots alone."""
        slots, table = jax.tree.map(lambda x: x[:size], (self.slots, self.pages.table))
        log = jax.tree.map(lambda x: x[:, :size], self.log)
        return dataclasses.replace(self, slots=slots, pages=dataclasses.replace(self.pages, table=table), log=log)

    def with_first(self, state: "LoopState") -> "LoopState":
        """Return the state with these first slots."""
        own, new = ((x.slots, x.pages.table) for x in (self, state))
        slots, table = jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, 0, 0), own, new)
        log = jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, 0, 1), self.log, state.log)
        return dataclasses.replace(state, slots=slots, pages=dataclasses.replace(state.pages, table=table), log=log)


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
        pool: Pool,
        min_ended: float,
    ):
        n = keys.shape[0]
        self.prefilled, self.keys, self.prefix_lengths = prefilled, keys, prefilled.prefix_lengths
        self.sampling, self.stop, self.slots, self.pool = sampling, stop, slots, pool
        self.slot_counts = phases(slots, prefilled, limits, stop)
        """Slots of each phase."""
        self.limits = (
            jnp.full(n, stop.max_length, jnp.int32) if limits is None else jnp.minimum(limits, stop.max_length)
        )
        """Token limit of each response, prefix included."""
        self.model = weights.model(graph)
        ended = is_eos(prefilled.first.tokens, stop.eos_ids) | (self.prefix_lengths + 1 >= self.limits)
        self.ended: Bool[Array, " n"] = ended
        """True for responses that need no slot: prefill's token is an EOS or reaches the limit."""
        self.is_whole = pool.is_whole(slots, stop.max_length)
        """True if the pool never runs dry."""
        self.aligned = slots == n and self.is_whole
        """True if every response has a slot of its own."""
        self.queue, self.queue_length = jnp.arange(n, dtype=jnp.int32), jnp.full((), n, jnp.int32)
        """The responses in their order; queue positions given a slot, n if aligned."""
        if not self.aligned:  # ended responses go last and get no slot
            self.queue = jnp.lexsort((self.queue, ended)).astype(jnp.int32)
            self.queue_length = n - ended.sum(dtype=jnp.int32)
        self.enough = None
        """Stop once this many responses have ended, including any with limit 0; summed over the expert group."""
        if min_ended < 1:
            self.enough = n - jnp.floor((1 - min_ended) * (self.limits > 0).sum()).astype(jnp.int32)

    def start(self) -> LoopState:
        """Return the first state: the queue's head in the slots, prefixes in the pool."""
        n, B, T = self.queue.shape[0], self.slots, self.stop.max_length
        at, zero = jnp.arange(B, dtype=jnp.int32), jnp.zeros((), jnp.int32)
        kv, rows = self.prefilled.prompt_kv, log_rows(T, _LOG_ROWS)
        like = self.prefilled.first, jax.tree.map(flatten_routes, kv.routes)
        log = StepLog(*jax.tree.map(lambda x: jnp.zeros((rows, B, *x.shape[2:]), x.dtype), like))
        state = LoopState(
            slots=Slots(jnp.full(B, n, jnp.int32), jnp.zeros(B, jnp.int32), jnp.zeros(B, jnp.int32)),
            pages=PageTable.start(self.pool, B, T),
            next_position=zero,
            num_ended=self.ended.sum(dtype=jnp.int32),
            phase=zero,
            running=jnp.zeros((), bool),
            steps=zero,
            slot_steps=zero,
            filled=jnp.zeros((), jnp.float32),
            log=log,
            row=zero,
            buffer=ResponseBuffer.start(self.prefilled, T, rows),
            k=empty_pool(kv.k, self.pool.pages, self.pool.columns),
            v=empty_pool(kv.v, self.pool.pages, self.pool.columns),
        )
        if self.aligned:
            slots = Slots(jnp.where(self.ended, n, at), self.prefix_lengths + 1, self.prefilled.first.tokens)
            state = self._with_prefixes(dataclasses.replace(state, slots=slots), ~self.ended)
            state = dataclasses.replace(state, next_position=self.queue_length)
        else:
            state = self._refill(state)
        return dataclasses.replace(state, running=self._continues(state, self._fewer(0)))

    def advance(self, state: LoopState, steps: int | None = None) -> LoopState:
        """Step until all have ended, or enough, at most `steps` times."""
        last = None if steps is None else state.steps + steps
        for phase in range(len(self.slot_counts)):
            state = self._run_phase(state, phase, last)
            if phase + 1 < len(self.slot_counts):
                state = self._next_phase(state, phase)
        return state

    def finish(self, state: LoopState, *, prompt_length: int) -> Decoded:
        """Return the responses."""
        buffer = self._collect(state, state.slots.positions < self.queue.shape[0])
        rollout, unfinished = buffer.rollout(self.prefilled, self.limits, self.stop, prompt_length=prompt_length)
        sampled = rollout.action_mask.sum(axis=1, dtype=jnp.int32)
        decoded = jnp.maximum(sampled - 1, 0).sum()
        counts = state.steps, state.slot_steps, state.filled, decoded, sampled.sum()
        return Decoded(rollout, unfinished, DecodeStats(*(x[None] for x in counts)))

    def _run_phase(self, state: LoopState, phase: int, last: Array | None) -> LoopState:
        size, fewer = self.slot_counts[phase], self._fewer(phase)

        def more(state: LoopState) -> Array:
            here = state.running & (state.phase == phase)
            return here if last is None else here & (state.steps < last)

        part = jax.lax.while_loop(more, lambda s: self.step(s, fewer_slots=fewer), state.first(size))
        return state.with_first(part)

    def _next_phase(self, state: LoopState, phase: int) -> LoopState:
        """Leave a phase that is over: the busy slots become the first ones."""
        over = (state.phase == phase) & ~state.running
        order = jnp.argsort(state.slots.positions == self.queue.shape[0], stable=True)

        def compacted(state: LoopState) -> LoopState:
            state = self._collected(state)
            slots = jax.tree.map(lambda x: x[order], state.slots)
            return dataclasses.replace(state, slots=slots, pages=state.pages.reordered(order), phase=state.phase + 1)

        state = jax.lax.cond(over, compacted, lambda s: s, state)
        running = self._continues(state, self._fewer(phase + 1))
        return dataclasses.replace(state, running=jnp.where(over, running, state.running))

    def _fewer(self, phase: int) -> int:
        """Return the slots of the phase after this one, 0 after the last."""
        return [*self.slot_counts[1:], 0][phase]

    def step(self, state: LoopState, *, fewer_slots: int) -> LoopState:
        """Feed the last token of every slot, sample the next, and refill slots with an ended response.

        The phase ends once the next one's `fewer_slots` can hold all remaining responses.
        """
        state = self._with_pages(state)
        n, slots = self.queue.shape[0], state.slots
        active, responses = slots.positions < n, self._responses(slots.positions)
        aligned = self.aligned and len(active) == self.slots  # until slots move together
        fed = DecodeSlots(responses, jnp.where(active, slots.lengths, 0), aligned=aligned)
        prompts, kv = self.prefilled.prompts, self.prefilled.prompt_kv
        cache = Cache(kv.k, kv.v, prompts.lengths, state.k, state.v, state.pages.table, n // kv.k.shape[1])
        output, cache = self.model.decode(slots.last_tokens, fed, cache)
        logits = constrain(output.logits[:, 0], "batch", "vocab")
        keys = token_keys(self.keys if aligned else self.keys[responses], slots.lengths)
        sampled = SampledTokens(*draw(keys, logits, self.sampling))
        routes = moe.record(output.routes, active[:, None], self.model.config, logprobs=kv.routes.logprobs is not None)
        new = StepLog(sampled, jax.tree.map(lambda r: flatten_routes(r[:, 0]), routes))
        log = jax.tree.map(lambda rows, new: _written(rows, new, state.row), state.log, new)
        lengths = jnp.where(active, slots.lengths + 1, slots.lengths)
        ends = active & (is_eos(sampled.tokens, self.stop.eos_ids) | (lengths >= self.limits[responses]))
        state = dataclasses.replace(
            state,
            slots=Slots(slots.positions, lengths, sampled.tokens),
            steps=state.steps + 1,
            slot_steps=state.slot_steps + len(lengths),
            filled=state.filled + fed.ages.sum() * (len(lengths) / (self.pool.pages * self.pool.columns)),
            log=log,
            row=state.row + 1,
            k=cache.k,
            v=cache.v,
        )
        state = jax.lax.cond(state.row == len(log.sampled.tokens), self._collected, lambda s: s, state)
        state = jax.lax.cond(ends.any(), self._end, lambda s, _: s, state, ends)
        return dataclasses.replace(state, running=self._continues(state, fewer_slots))

    def _responses(self, positions: Int[Array, " B"]) -> Int[Array, " B"]:
        """Return the responses at queue positions, any for n."""
        return self.queue[jnp.minimum(positions, self.queue.shape[0] - 1)]

    def _continues(self, state: LoopState, fewer_slots: int) -> Bool[Array, ""]:
        active = (state.slots.positions < self.queue.shape[0]).sum()
        here = active + jnp.maximum(self.queue_length - state.next_position, 0) > fewer_slots
        if self.enough is None:
            return mesh_lib.any_shard(here, ("expert",))  # all take equally many steps
        counts = jnp.stack([here.astype(jnp.int32), self.enough - state.num_ended])
        waiting, missing = mesh_lib.sum_shards(counts, ("expert",))
        return (waiting > 0) & (missing > 0)

    def _end(self, state: LoopState, ends: Bool[Array, " B"]) -> LoopState:
        """Collect the responses that ended, and refill their slots."""
        state = dataclasses.replace(
            self._left(state, ends),
            num_ended=state.num_ended + ends.sum(dtype=jnp.int32),
            buffer=self._collect(state, ends),
        )
        return state if self.aligned else self._refill(state)

    def _left(self, state: LoopState, slots: Bool[Array, " B"]) -> LoopState:
        """Make slots idle."""
        positions = jnp.where(slots, self.queue.shape[0], state.slots.positions)
        slots_left = dataclasses.replace(state.slots, positions=positions)
        return dataclasses.replace(state, slots=slots_left, pages=state.pages.take_back(slots))

    def _collect(self, state: LoopState, chosen: Bool[Array, " B"]) -> ResponseBuffer:
        """Return the buffer with these slots' rows of the log."""
        slots, order = state.slots, jnp.argsort(~chosen, stable=True)
        responses = self._responses(slots.positions)

        def add(i: Array | int, buffer: ResponseBuffer) -> ResponseBuffer:
            slot = order[i]
            response = responses[slot]
            length, prefix = slots.lengths[slot], self.prefix_lengths[response]
            return buffer.add(state.log, state.row, slot, response, length, prefix)

        with jax.named_scope(RARELY):
            return jax.lax.fori_loop(0, chosen.sum(), add, state.buffer)

    def _collected(self, state: LoopState) -> LoopState:
        """Empty the log."""
        buffer = self._collect(state, state.slots.positions < self.queue.shape[0])
        return dataclasses.replace(state, buffer=buffer, row=jnp.zeros((), jnp.int32))

    def _with_pages(self, state: LoopState) -> LoopState:
        """Give a page to every slot whose next token needs one."""
        if self.is_whole:
            return state
        C, n = self.pool.columns, self.queue.shape[0]

        def needs(state: LoopState) -> Bool[Array, " B"]:
            return (state.slots.positions < n) & ((state.slots.lengths - 1) % C == 0)

        def give(state: LoopState) -> LoopState:
            if self.enough is not None:
                with jax.named_scope(RARELY):
                    state = jax.lax.while_loop(lambda s: needs(s).sum() > s.pages.free(), self._set_aside, state)
            pages = state.pages.give((state.slots.lengths - 1) // C, needs(state).astype(jnp.int32))
            return dataclasses.replace(state, pages=pages)

        return jax.lax.cond(needs(state).any(), give, lambda s: s, state)

    def _set_aside(self, state: LoopState) -> LoopState:
        """Take the slot from the response with the fewest tokens. It stays unfinished."""
        active = state.slots.positions < self.queue.shape[0]
        youngest = jnp.argmin(jnp.where(active, state.slots.lengths, self.stop.max_length + 1))
        chosen = jnp.arange(len(active)) == youngest
        return dataclasses.replace(self._left(state, chosen), buffer=self._collect(state, chosen))

    def _refill(self, state: LoopState) -> LoopState:
        """Give idle slots the next responses, as many as the pool has room for."""
        n, slots = self.queue.shape[0], state.slots
        idle = slots.positions == n
        rank = jnp.arange(len(idle), dtype=jnp.int32)
        given = (rank < idle.sum()) & (state.next_position + rank < self.queue_length)
        if not self.is_whole:
            given &= self._room(state, given)
        count = given.sum(dtype=jnp.int32)
        rank = jnp.cumsum(idle, dtype=jnp.int32) - 1
        taken = idle & (rank < count)
        positions = jnp.where(taken, state.next_position + rank, slots.positions)
        response = self._responses(positions)
        slots = Slots(
            positions,
            jnp.where(taken, self.prefix_lengths[response] + 1, slots.lengths),
            jnp.where(taken, self.prefilled.first.tokens[response], slots.last_tokens),
        )
        state = dataclasses.replace(state, slots=slots, next_position=state.next_position + count)
        return self._with_prefixes(state, taken)

    def _room(self, state: LoopState, given: Bool[Array, " B"]) -> Bool[Array, " B"]:
        """Return True for the next responses, in order, that the pool has room for."""
        C, n, B = self.pool.columns, self.queue.shape[0], len(given)
        following = self.queue[jnp.minimum(state.next_position + jnp.arange(B), n - 1)]
        active, held = state.slots.positions < n, -(-(state.slots.lengths - 1) // C)
        if self.enough is None:  # each to its limit
            most = -(-(self.limits - 1) // C)
            reserved = jnp.where(active, most[self._responses(state.slots.positions)] - held, 0).sum()
            needed = most[following]
        else:  # one more page for each
            reserved, needed = active.sum(), -(-self.prefix_lengths[following] // C) + 1
        return jnp.cumsum(jnp.where(given, needed, 0)) <= state.pages.free() - reserved

    def _with_prefixes(self, state: LoopState, taken: Bool[Array, " B"]) -> LoopState:
        """Load the prefixes of responses that took a slot."""
        prefix, prefix_kv = self.prefilled.prefix, self.prefilled.prefix_kv
        if prefix is None or prefix_kv is None:
            return state
        responses, order = self._responses(state.slots.positions), jnp.argsort(~taken, stable=True)
        count = jnp.where(taken, -(-prefix.lengths[responses] // self.pool.columns), 0)
        pages = state.pages.give(jnp.zeros_like(count), count)

        def load(i: Array | int, kv: tuple[KV, KV]) -> tuple[KV, KV]:
            slot = order[i]
            response = responses[slot]
            own = prefix.row[response], prefix.start[response], prefix.lengths[response]
            k, v = (
                write_prefix(pool, pages.table[slot], rows, *own)
                for pool, rows in zip(kv, (prefix_kv.k, prefix_kv.v), strict=True)
            )
            return k, v

        with jax.named_scope(RARELY):
            k, v = jax.lax.fori_loop(0, taken.sum(), load, (state.k, state.v))
        return dataclasses.replace(state, pages=pages, k=k, v=v)
