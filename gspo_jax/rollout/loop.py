"""The decode loop of one batch shard: responses queue for slots, and every step decodes a token per slot, or several.

Slots go to queue positions in order. Between phases the number of slots halves (with drafts it becomes a quarter), and
the unfinished responses move together. For example, 5 responses A to E on 2 slots, with an EOS from prefill as the
first token of B:

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

With drafts (`drafting`) a step feeds a slot's last token and up to Q - 1 drafts of what follows, in Q rows of the log,
and samples after each, with the key of that place. A sample is the response's if all drafts before it were sampled too:
the same tokens as without drafts, in fewer steps.

Where the pool has too few pages for all slots (`pages`), a response gets a slot only if the pages that it and all
others may yet need are free. A call that may return early (`min_ended`) needs no such reserve: if the pages run dry,
the response with the fewest tokens gives up its slot, unfinished, and goes on in a later call.

Nothing here uses a scatter: scatters are slow on TPUs, and some have crashed the TPU's compiler.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from gspo_jax.kernels.kv import KV, Values
from gspo_jax.kernels.scopes import RARELY
from gspo_jax.models import moe
from gspo_jax.models.cache import (
    Cache,
    DecodeSlots,
    empty_pool,
    empty_states,
    state_at,
    state_in_row,
    write_prefix,
    write_state,
)
from gspo_jax.models.transformer import Transformer
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.mesh import constrain
from gspo_jax.rollout.drafting import Drafting, DraftState, Held, drafted
from gspo_jax.rollout.drafts import accepted
from gspo_jax.rollout.pages import PageTable, Pool
from gspo_jax.rollout.prefilled import Prefilled, flatten_routes
from gspo_jax.rollout.responses import ResponseBuffer, StepLog, log_rows
from gspo_jax.rollout.sampling import SamplingParams, StopRule, draw, is_eos, token_keys
from gspo_jax.types import KeptRecord, Rollout, Weights

_SHRINKS, _DRAFTING_SHRINKS = (2, 2, 2), (4,)
"""Divisors of the slots from phase to phase, each compiled separately, as is each width of a step with drafts."""
_MIN_SLOTS = 4
"""Minimum slots after a division."""
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
    busy_steps: Int[Array, " shards"]
    """Slots with a response, summed over steps."""
    drafted: Int[Array, " shards"]
    """Drafts fed."""
    accepted: Int[Array, " shards"]
    """Drafts that the policy sampled in their place, of those fed."""
    kept: Float[Array, " shards"] | None
    """Probability of the kept ids, or with truncation 1 where they are all that it left, summed over sampled tokens;
    None without a record."""


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
    """Fed by the next step, before its drafts."""


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
    busy_steps: Int[Array, ""]
    drafted: Int[Array, ""]
    accepted: Int[Array, ""]
    """As in `DecodeStats`."""
    drafts: DraftState | None
    """None: nothing is drafted."""
    log: StepLog
    row: Int[Array, ""]
    """Rows of the log in use."""
    buffer: ResponseBuffer
    k: KV
    """The pool's keys, [L, M, Kv, C, h]."""
    v: Values
    states: Any
    """The slots' states in the layers that have one, arrays [L, B, …]; None in a model without them."""

    def first(self, size: int) -> "LoopState":
        """Return the state of the first slots alone."""
        slots, table, drafts = jax.tree.map(lambda x: x[:size], self._by_slot())
        log, states = jax.tree.map(lambda x: x[:, :size], (self.log, self.states))
        return dataclasses.replace(self._with_slots(slots, table, drafts, log), states=states)

    def with_first(self, state: "LoopState") -> "LoopState":
        """Return the state with these first slots."""
        own, new = self._by_slot(), state._by_slot()
        slots, table, drafts = jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, 0, 0), own, new)
        own, new = (self.log, self.states), (state.log, state.states)
        log, states = jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, 0, 1), own, new)
        return dataclasses.replace(state._with_slots(slots, table, drafts, log), states=states)

    def _by_slot(self) -> tuple[Slots, Array, tuple[Array, Array] | None]:
        drafts = self.drafts
        return self.slots, self.pages.table, None if drafts is None else (drafts.tokens, drafts.count)

    def _with_slots(self, slots: Slots, table: Array, drafts: tuple[Array, Array] | None, log: StepLog) -> "LoopState":
        state = dataclasses.replace(self, slots=slots, pages=dataclasses.replace(self.pages, table=table), log=log)
        if drafts is None or self.drafts is None:
            return state
        tokens, count = drafts
        return dataclasses.replace(state, drafts=dataclasses.replace(self.drafts, tokens=tokens, count=count))


def _written(log: Shaped[Array, "rows *b"], new: Shaped[Array, "Q *b"], row: Int[Array, ""]) -> Array:
    """Write rows of the log, kept row by row in memory.

    Otherwise the TPU's compiler may take the new rows' layout, padding few slots to 128.
    """
    written = jax.lax.dynamic_update_slice_in_dim(log, new, row, 0)
    return with_layout_constraint(written, Layout(tuple(range(log.ndim))))


def slot_counts(slots: int, drafting: Drafting) -> list[int]:
    """Return a shard's slots in each phase where lengths can differ: `slots`, then divided as often as allowed."""
    counts = [slots]
    for divisor in _SHRINKS if drafting.widths(slots) == (1,) else _DRAFTING_SHRINKS:
        if counts[-1] // divisor >= _MIN_SLOTS:
            counts.append(counts[-1] // divisor)
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
        drafting: Drafting,
        polled: bool = False,
    ):
        """Take a shard's inputs. `polled`: the call returns between its pieces, and not within one (`goes_on`)."""
        n = keys.shape[0]
        self.prefilled, self.keys, self.prefix_lengths = prefilled, keys, prefilled.prefix_lengths
        self.sampling, self.stop, self.slots, self.pool = sampling, stop, slots, pool
        may_differ = stop.eos_ids or limits is not None or prefilled.prefix is not None
        self.slot_counts = slot_counts(slots, drafting) if may_differ else [slots]
        """Slots of each phase."""
        self.drafting, self.drafts = drafting, drafting.widest(self.slot_counts) - 1
        """Most drafts per slot and step."""
        self.limits = (
            jnp.full(n, stop.max_length, jnp.int32) if limits is None else jnp.minimum(limits, stop.max_length)
        )
        """Token limit of each response, prefix included."""
        self.model = weights.model(graph)
        if self.drafts and self.model.config.is_recurrent:
            raise ValueError("a state cannot take back a wrong draft; decode models with states without drafts")
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
        """Stop once this many responses have ended, including any with limit 0; summed over the expert group, or over
        all shards if polled."""
        self.polled = polled
        if min_ended < 1:
            self.enough = n - jnp.floor((1 - min_ended) * (self.limits > 0).sum()).astype(jnp.int32)

    def start(self) -> LoopState:
        """Return the first state: the queue's head in the slots, prefixes in the pool."""
        n, B, T = self.queue.shape[0], self.slots, self.stop.max_length
        at, zero = jnp.arange(B, dtype=jnp.int32), jnp.zeros((), jnp.int32)
        kv, rows = self.prefilled.prompt_kv, log_rows(T, _LOG_ROWS) * (1 + self.drafts)
        like = self.prefilled.first, jax.tree.map(lambda r: flatten_routes(r)[0], kv.routes)
        log = StepLog(*jax.tree.map(lambda x: jnp.zeros((rows, B, *x.shape[1:]), x.dtype), like))
        buffer, drafts = ResponseBuffer.start(self.prefilled, T, rows), None
        if self.drafts:
            log = dataclasses.replace(log, taken=jnp.zeros((rows, B), bool))
            drafts = DraftState.start(buffer.sampled.tokens[:, :T], B, self.drafts)
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
            busy_steps=zero,
            drafted=zero,
            accepted=zero,
            drafts=drafts,
            log=log,
            row=zero,
            buffer=buffer,
            k=empty_pool(kv.k, self.pool.pages, self.pool.columns),
            v=empty_pool(kv.v, self.pool.pages, self.pool.columns),
            states=empty_states(kv.states, B),
        )
        if self.aligned:
            slots = Slots(jnp.where(self.ended, n, at), self.prefix_lengths + 1, self.prefilled.first.tokens)
            state = self._with_prefixes(dataclasses.replace(state, slots=slots), ~self.ended)
            state = dataclasses.replace(state, next_position=self.queue_length)
        else:
            state = self._refill(state)
        return self._planned(state, 0)

    def advance(self, state: LoopState, steps: int | None = None) -> LoopState:
        """Step until all have ended, or enough, at most `steps` times."""
        last = None if steps is None else state.steps + steps
        for phase in range(len(self.slot_counts)):
            state = self._run_phase(state, phase, last)
            if phase + 1 < len(self.slot_counts):
                state = self._next_phase(state, phase)
        return state

    def goes_on(self, state: LoopState) -> Bool[Array, ""]:
        """Return whether any shard goes on after a piece: alike on all, so that none waits for a slower one."""
        running = mesh_lib.any_shard(state.running)
        if self.enough is None:
            return running
        return running & (mesh_lib.sum_shards(self.enough - state.num_ended, mesh_lib.BATCH_AXES) > 0)

    def finish(self, state: LoopState, *, prompt_length: int) -> Decoded:
        """Return the responses."""
        buffer = self._collect(state, state.slots.positions < self.queue.shape[0])
        rollout, unfinished = buffer.rollout(self.prefilled, self.limits, self.stop, prompt_length=prompt_length)
        sampled = rollout.action_mask.sum(axis=1, dtype=jnp.int32)
        decoded = jnp.maximum(sampled - 1, 0).sum()
        counts = state.steps, state.slot_steps, state.filled, decoded, sampled.sum()
        counts = *counts, state.busy_steps, state.drafted, state.accepted, self._kept(rollout.kept)
        return Decoded(rollout, unfinished, jax.tree.map(lambda x: x[None], DecodeStats(*counts)))

    def _kept(self, kept: KeptRecord | None) -> Float[Array, ""] | None:
        """Return `DecodeStats.kept` of this shard."""
        if kept is None:
            return None
        if self.sampling.truncates:
            return kept.whole.sum(dtype=jnp.float32)
        return jnp.where(kept.ids >= 0, jnp.exp(kept.logprobs), 0).sum()

    def ended_so_far(self, state: LoopState) -> tuple[Int[Array, "n T"], Int[Array, " n"]]:
        """Return the tokens and lengths of the responses that have ended, length 0 for all others."""
        given = {"prompt_length": self.prefilled.prompts.tokens.shape[1]}
        rollout, unfinished = state.buffer.rollout(self.prefilled, self.limits, self.stop, **given)
        return rollout.tokens, jnp.where(unfinished, 0, rollout.mask.sum(axis=1, dtype=jnp.int32))

    def _run_phase(self, state: LoopState, phase: int, last: Array | None) -> LoopState:
        size = self.slot_counts[phase]
        widths = self.drafting.widths(size)

        def more(state: LoopState, number: int | None = None) -> Array:
            here = state.running & (state.phase == phase)
            if number is not None and state.drafts is not None:
                here &= state.drafts.width == number
            return here if last is None else here & (state.steps < last)

        def stretches(state: LoopState) -> LoopState:
            for number, width in enumerate(widths):
                one = partial(self.step, phase=phase, width=width)
                state = jax.lax.while_loop(partial(more, number=number), one, state)
            return state

        part = state.first(size)
        part = stretches(part) if len(widths) == 1 else jax.lax.while_loop(more, stretches, part)
        return state.with_first(part)

    def _next_phase(self, state: LoopState, phase: int) -> LoopState:
        """Leave a phase that is over: the busy slots become the first ones."""
        over = (state.phase == phase) & ~state.running
        order = jnp.argsort(state.slots.positions == self.queue.shape[0], stable=True)

        def compacted(state: LoopState) -> LoopState:
            state = self._collected(state)
            slots = jax.tree.map(lambda x: x[order], state.slots)
            states, pages = jax.tree.map(lambda x: x[:, order], state.states), state.pages.reordered(order)
            return dataclasses.replace(state, slots=slots, pages=pages, states=states, phase=state.phase + 1)

        state = jax.lax.cond(over, compacted, lambda s: s, state)
        planned = state.with_first(self._planned(state.first(self.slot_counts[phase + 1]), phase + 1))
        decided, before = ((x.running, x.drafts) for x in (planned, state))
        running, drafts = jax.tree.map(lambda x, y: jnp.where(over, x, y), decided, before)
        return dataclasses.replace(state, running=running, drafts=drafts)

    def _fewer(self, phase: int) -> int:
        """Return the slots of the phase after this one, 0 after the last."""
        return [*self.slot_counts[1:], 0][phase]

    def step(self, state: LoopState, *, phase: int, width: int) -> LoopState:
        """Feed every slot's last token and drafts, `width` in all, and refill slots with an ended response.

        A slot takes the samples up to the first that differs from its draft, and up to an EOS.
        """
        state = self._with_pages(state)
        slots, held, Q = state.slots, self._held(state), width
        tokens, count = slots.last_tokens[:, None], jnp.zeros_like(slots.lengths)
        if state.drafts is not None:
            tokens = jnp.concatenate([tokens, state.drafts.tokens[:, : Q - 1]], axis=1)
            count = jnp.minimum(state.drafts.count, Q - 1)
        B, place = len(tokens), jnp.arange(Q)[None]
        fed, following = held.active[:, None] & (place <= count[:, None]), slots.lengths[:, None] + place
        given = DecodeSlots(held.responses, jnp.where(fed, following, 0), aligned=held.aligned)
        prompts, kv = self.prefilled.prompts, self.prefilled.prompt_kv
        group_size = self.queue.shape[0] // kv.k.shape[1]
        pools = state.k, state.v, state.pages.table
        cache = Cache(kv.k, kv.v, prompts.lengths, *pools, group_size, state.states)
        output, cache = self.model.decode(tokens, given, cache)
        logits = constrain(output.logits.reshape(B * Q, -1), "batch", "vocab")
        keys = self.keys if held.aligned else self.keys[held.responses]
        drawn = draw(token_keys(jnp.repeat(keys, Q), following.reshape(-1)), logits, self.sampling)
        sampled = jax.tree.map(lambda x: x.reshape(B, Q, *x.shape[1:]), drawn)
        routes = moe.record(output.routes, fed, self.model.config, logprobs=kv.routes.logprobs is not None)
        eos, right = is_eos(sampled.tokens, self.stop.eos_ids), accepted(tokens[:, 1:], count, sampled.tokens)
        taken = held.active[:, None] & (place <= right[:, None]) & (jnp.cumsum(eos, axis=1) - eos == 0)
        advance = taken.sum(axis=1, dtype=jnp.int32)
        new = StepLog(sampled, jax.tree.map(flatten_routes, routes), None if state.drafts is None else taken)
        new = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), new)
        log = jax.tree.map(lambda rows, new: _written(rows, new, state.row), state.log, new)
        lengths = slots.lengths + advance
        last = jnp.take_along_axis(sampled.tokens, jnp.maximum(advance - 1, 0)[:, None], axis=1)[:, 0]
        ends = held.active & ((eos & taken).any(axis=1) | (lengths >= self.limits[held.responses]))
        live = jnp.where(held.active, slots.lengths, 0).sum()
        state = dataclasses.replace(
            state,
            slots=Slots(slots.positions, lengths, last),
            steps=state.steps + 1,
            slot_steps=state.slot_steps + B,
            filled=state.filled + live * (B / (self.pool.pages * self.pool.columns)),
            busy_steps=state.busy_steps + held.active.sum(dtype=jnp.int32),
            drafted=state.drafted + jnp.where(held.active, count, 0).sum(dtype=jnp.int32),
            accepted=state.accepted + jnp.maximum(advance - 1, 0).sum(dtype=jnp.int32),
            drafts=state.drafts and state.drafts.with_new(held, sampled.tokens, taken),
            log=log,
            row=state.row + Q,
            k=cache.k,
            v=cache.v,
            states=cache.states,
        )
        trials = None
        if state.drafts is not None:
            trials = state.drafts.trials(sampled.tokens, held.active)
        full = state.row > len(log.sampled.tokens) - (1 + self.drafts)
        state = jax.lax.cond(full, self._collected, lambda s: s, state)
        state = jax.lax.cond(ends.any(), self._end, lambda s, _: s, state, ends)
        return self._planned(state, phase, trials)

    def _held(self, state: LoopState) -> Held:
        slots = state.slots
        aligned = self.aligned and len(slots.positions) == self.slots  # until slots move together
        active = slots.positions < self.queue.shape[0]
        return Held(self._responses(slots.positions), slots.lengths, active, aligned)

    def _responses(self, positions: Int[Array, " B"]) -> Int[Array, " B"]:
        """Return the responses at queue positions, any for n."""
        return self.queue[jnp.minimum(positions, self.queue.shape[0] - 1)]

    def _planned(
        self, state: LoopState, phase: int, trials: tuple[Float[Array, ""], Float[Array, ""]] | None = None
    ) -> LoopState:
        """Decide whether the phase goes on, and with which drafts.

        It ends once the next phase's slots can hold all remaining responses. Shards of an expert group agree, in one
        all-reduce: all take the same steps.
        """
        active = (state.slots.positions < self.queue.shape[0]).sum()
        here = active + jnp.maximum(self.queue_length - state.next_position, 0) > self._fewer(phase)
        missing = [] if self.enough is None or self.polled else [self.enough - state.num_ended]
        counts = [here.astype(jnp.int32), *missing]
        if state.drafts is None:
            counts = mesh_lib.sum_shards(jnp.stack(counts), ("expert",))
            return dataclasses.replace(state, running=(counts > 0).all())
        drafts, widths = state.drafts, self.drafting.widths(len(state.slots.positions))
        if widths != (1,):
            drafts = self._drafted(state, drafts)
        gained = drafts.gained(widths, state.slots.positions < self.queue.shape[0])
        tried, right = trials or (jnp.zeros(()), jnp.zeros(()))
        sums = jnp.concatenate([jnp.stack([*counts, tried, right]).astype(jnp.float32), gained])
        sums = mesh_lib.sum_shards(sums, ("expert",))
        tried, right, *_ = sums[len(counts) :]
        drafts = drafts.remembered(tried, right)
        width = self.drafting.best(widths, sums[len(counts) + 2 :], len(state.slots.positions))
        running = (sums[: len(counts)] > 0).all()
        return dataclasses.replace(state, running=running, drafts=dataclasses.replace(drafts, width=width))

    def _drafted(self, state: LoopState, drafts: DraftState) -> DraftState:
        """Draft what follows in every slot."""
        held, n = self._held(state), self.queue.shape[0]
        room = self.limits[held.responses] - 1 - held.lengths
        if not self.is_whole:  # a draft takes no page
            C = self.pool.columns
            room = jnp.minimum(room, C - 1 - (held.lengths - 1) % C)
        holds = (held.responses[None] == jnp.arange(n)[:, None]) & held.active[None]
        known = jnp.where(holds.any(axis=1), jnp.where(holds, held.lengths[None], 0).sum(axis=1), state.buffer.lengths)
        room, drafter = jnp.maximum(room, 0), self.drafting.drafter
        return drafted(drafts, held, self.prefilled.prompts, known, room, drafter=drafter)

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
        """Load the prefixes and states of responses that took a slot."""
        state = self._with_states(state, taken)
        prefix, prefix_kv = self.prefilled.prefix, self.prefilled.prefix_kv
        if prefix is None or prefix_kv is None:
            return state
        responses, order = self._responses(state.slots.positions), jnp.argsort(~taken, stable=True)
        count = jnp.where(taken, -(-prefix.lengths[responses] // self.pool.columns), 0)
        pages = state.pages.give(jnp.zeros_like(count), count)

        def load(i: Array | int, kv: tuple[KV, Values]) -> tuple[KV, Values]:
            slot = order[i]
            response = responses[slot]
            own, into = (prefix.row[response], prefix.start[response], prefix.lengths[response]), pages.table[slot]
            k, v = kv
            return write_prefix(k, into, prefix_kv.k, *own), write_prefix(v, into, prefix_kv.v, *own)

        with jax.named_scope(RARELY):
            k, v = jax.lax.fori_loop(0, taken.sum(), load, (state.k, state.v))
        return dataclasses.replace(state, pages=pages, k=k, v=v)

    def _with_states(self, state: LoopState, taken: Bool[Array, " B"]) -> LoopState:
        """Load the states of responses that took a slot: of their prefix's end, or their prompt's."""
        prefix, prefix_kv, prompts = self.prefilled.prefix, self.prefilled.prefix_kv, self.prefilled.prompt_kv.states
        if prompts is None:
            return state
        responses, order = self._responses(state.slots.positions), jnp.argsort(~taken, stable=True)
        group_size = self.queue.shape[0] // len(self.prefilled.prompts.lengths)

        def load(i: Array | int, states: Any) -> Any:
            slot = order[i]
            response = responses[slot]
            own = state_at(prompts, response // group_size)
            if prefix is not None and prefix_kv is not None and prefix.number is not None:
                ends = state_in_row(prefix_kv.states, prefix.row[response], prefix.number[response])
                own = jax.tree.map(partial(jnp.where, prefix.lengths[response] > 0), ends, own)
            return write_state(states, slot, own)

        with jax.named_scope(RARELY):
            states = jax.lax.fori_loop(0, taken.sum(), load, state.states)
        return dataclasses.replace(state, states=states)
