"""The decode loop of one batch shard: responses queue for slots, and every step decodes one token per slot.

Every response has a position in the queue, positions are given slots in order, and every step writes one row of a log
with a column per slot. The loop runs in phases. In a phase the number of slots is fixed; between two phases it is
halved, the unfinished responses move together, and the log starts again at row 0. For example, 5 responses A to E on 2
slots (the real decoder does not shrink below 4), where prefill has already sampled an EOS as the first token of B:

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

D4 is token 4 of response D, counting from 0; prefill samples token 0, or the token after a response's prefix. A row
holds the tokens sampled in its step, and the routes of the tokens fed to the model in its step, which were sampled
just before. Token t of the response at queue position p is in row `first_row[p] + t` and column `slot[p]` of the log.
Phase 1 has `first_row` -1 for A and C, 0 for D and 1 for E; phase 2 has -5 for D. At the end of a phase
`responses.ResponseBuffer` collects its tokens from the log.

Nothing here is written with a scatter: scatters are slow on TPUs, and some have crashed the TPU's compiler.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from gspo_jax.kernels.kv import KV
from gspo_jax.kernels.scopes import RARELY
from gspo_jax.models import moe
from gspo_jax.models.cache import Cache, Slots, empty_ring, keep_slots, write_prefix
from gspo_jax.models.transformer import Transformer
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.mesh import constrain
from gspo_jax.rollout.prefixes import PackedPrefix
from gspo_jax.rollout.sampling import SamplingParams, StopRule, draw
from gspo_jax.types import Prompts, RouterRecord


class SampledTokens(NamedTuple):
    """Sampled token ids with their log-probs; the shape is documented where the record is used."""

    tokens: Int[Array, "*b"]
    """Token ids."""
    behaviour_logprobs: Float[Array, "*b"]
    """Log-probs under the distribution sampled from."""
    logprobs: Float[Array, "*b"]
    """Log-probs under the full softmax at the sampling temperature."""


class PrefilledKV(NamedTuple):
    """Keys, values and routes of M prefilled positions in R rows: prompts, or packed prefixes of responses."""

    k: KV
    """Keys, rotary positions applied: [L, R, Kv, M, h] of prompts, [R, L, Kv, M, h] of rows of prefixes."""
    v: KV
    """Values."""
    routes: RouterRecord
    """Router choices, [R, M, L, K]."""


class Prefilled(NamedTuple):
    """Prefilled prompts and prefixes, with the next token of every response."""

    prompts: Prompts
    """The prompts, [P, S]."""
    prefix: PackedPrefix | None
    """Prefixes of the B responses; None if there are none."""
    prompt_kv: PrefilledKV
    """Cache entries of the P prompts."""
    prefix_kv: PrefilledKV | None
    """Cache entries of the rows of prefixes; None without prefixes."""
    first: SampledTokens
    """First sampled token of each response, after its prefix, [B]."""


@struct.dataclass
class StepLog:
    """Sampled tokens and routes of every step of a phase, by row (step) and column (slot)."""

    sampled: SampledTokens
    """Tokens sampled in the step, [rows, B]."""
    routes: RouterRecord
    """Routes of the tokens fed in the step, [rows, B, L·K]; see `flatten_routes`."""


@struct.dataclass
class LoopState:
    """State of the decode loop: B slots, n queue positions."""

    row: Int[Array, ""]
    """Steps taken in this phase, i.e. the row of the log that the next step writes."""
    positions: Int[Array, " B"]
    """Queue position of the response in each slot; n if the slot is idle."""
    lengths: Int[Array, " B"]
    """Tokens that each slot's response has so far, prefix included."""
    last_tokens: Int[Array, " B"]
    """The last of these tokens, which the next step feeds."""
    next_position: Int[Array, ""]
    """First queue position that has not been given a slot."""
    num_ended: Int[Array, ""]
    """Responses that have ended."""
    running: Bool[Array, ""]
    """True while the phase continues, on this shard or on any shard of its expert group."""
    slot: Int[Array, " n"]
    """Slot held in this phase by the response at each queue position, even after it has ended; B if none."""
    first_row: Int[Array, " n"]
    """Row of the log where token 0 of the response at each queue position would be; negative if it was sampled before
    the phase."""
    log: StepLog
    """Log of this phase."""
    cache: Cache
    """KV cache of prompts and slots."""


def is_eos(tokens: Int[Array, "*b"], eos_ids: Int[Array, " s"]) -> Bool[Array, "*b"]:
    """True for tokens that are among `eos_ids`."""
    return (tokens[..., None] == eos_ids.reshape((1,) * tokens.ndim + (-1,))).any(axis=-1)


def length_mask(lengths: Int[Array, " R"], size: int) -> Bool[Array, "R size"]:
    """True on the first `lengths[r]` of `size` positions in row r."""
    return jnp.arange(size)[None] < lengths[:, None]


def token_keys(keys: Key[Array, " B"], t: Int[Array, " B"]) -> Key[Array, " B"]:
    """Keys for sampling token t of each response. Does not consume the response's key."""
    return jax.vmap(jax.random.fold_in)(keys, t)


def flatten_routes(x: Shaped[Array, "*b L K"]) -> Shaped[Array, "*b LK"]:
    """Reshape [..., L, K] to [..., L·K], because TPUs pad the last dimension to 128."""
    return x.reshape(*x.shape[:-2], -1)


def _written(log: Shaped[Array, "rows *b"], new: Shaped[Array, "*b"], row: Int[Array, ""]) -> Array:
    """The log with a row written, kept row by row in memory.

    Left to itself, the TPU's compiler may lay it out as it has the row, with few slots padded to 128.
    """
    written = jax.lax.dynamic_update_index_in_dim(log, new, row, 0)
    return with_layout_constraint(written, Layout(tuple(range(log.ndim))))


def _any_in_expert_group(here: Bool[Array, ""]) -> Bool[Array, ""]:
    """True if `here` is true on any shard of the expert group, whose shards must take the same number of steps."""
    if "expert" not in mesh_lib.manual_axes():
        return here
    return jax.lax.pmax(here.astype(jnp.int32), "expert") > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeLoop:
    """The decode loop's inputs, constant while the n responses of a shard queue for its slots, and its transitions."""

    model: Transformer
    prefilled: Prefilled
    keys: Key[Array, " n"]
    """One key per response."""
    sampling: SamplingParams
    stop: StopRule
    eos_ids: Int[Array, " s"]
    """The stop rule's EOS ids, as an array."""
    prefix_lengths: Int[Array, " n"]
    """Prefix tokens of each response."""
    limits: Int[Array, " n"]
    """Token limit of each response, prefix included."""
    ended: Bool[Array, " n"]
    """True for responses that need no slot: the token sampled by prefill is an EOS or reaches the token limit."""
    queue: Int[Array, " n"]
    """Responses in the order in which they get slots."""
    queue_length: Int[Array, ""]
    """Number of queue positions that are given a slot; n if every response has a slot of its own from the start."""
    slots: int
    """Number of slots in the first phase."""
    enough: Int[Array, ""] | None
    """Stop once this many responses have ended, counting those with a limit of 0; None: no early exit."""

    def start(self) -> LoopState:
        """The state before the first step: the head of the queue in the slots, an empty log, prefixes in the cache."""
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
        """The cache of the prompts, with these rings."""
        prompts, kv = self.prefilled.prompts, self.prefilled.prompt_kv
        return Cache(kv.k, kv.v, prompts.lengths, k, v, step, self.queue.shape[0] // kv.k.shape[1])

    def step(self, state: LoopState, *, fewer_slots: int) -> LoopState:
        """Feed the last token of every slot, sample the next, and refill the slots whose response has ended.

        The phase ends once `fewer_slots` slots, the number in the next phase, can hold all responses that are left.
        """
        n, aligned = self.queue.shape[0], state.positions.shape[0] == self.queue.shape[0]
        active = state.positions < n
        responses = jnp.arange(n, dtype=jnp.int32) if aligned else self.queue[jnp.minimum(state.positions, n - 1)]
        slots = Slots(responses, jnp.where(active, state.lengths, 0), aligned=aligned)
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
        """The state at the start of the next phase: the busy slots moved to the first `size`, and an empty log."""
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
        """True if more than `fewer_slots` responses are left and no early exit is due, on any shard of the group."""
        active = (state.positions < self.queue.shape[0]).sum()
        here = active + jnp.maximum(self.queue_length - state.next_position, 0) > fewer_slots
        if self.enough is not None:
            here &= state.num_ended < self.enough
        return _any_in_expert_group(here)

    def _refill(self, state: LoopState) -> LoopState:
        """Give the next queue positions to the idle slots, in order."""
        n = self.queue.shape[0]
        idle = state.positions == n
        position = state.next_position + jnp.cumsum(idle, dtype=jnp.int32) - 1
        taken = idle & (position < self.queue_length)
        response = self.queue[jnp.minimum(position, n - 1)]
        # By queue position, position next_position + i goes to the idle slot number i.
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
        """Write the prefixes of the queue positions from `first` on, which have just got their slots, to the cache."""
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
