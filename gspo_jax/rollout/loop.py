"""The decode loop of one batch shard: what it carries from step to step, and how responses are put together from it.

There are no scatters here: TPUs are slow at them, and their compiler has died of some.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from gspo_jax.models import moe
from gspo_jax.models.cache import Cache, Slots, empty_ring, keep_slots, write_row
from gspo_jax.models.transformer import Transformer
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.mesh import constrain
from gspo_jax.rollout.sampling import Sampling, draw
from gspo_jax.types import Prompts, Rollout, RouterRecord


class Draws(NamedTuple):
    """Tokens with their log-probs; where they stand is said by whoever holds them."""

    tokens: Int[Array, "*b"]
    behaviour_logprobs: Float[Array, "*b"]
    logprobs: Float[Array, "*b"]


class Prefix(NamedTuple):
    """Tokens that responses begin with: what they had in an earlier call, what an environment said, or a given text."""

    tokens: Int[Array, "B Q"]
    """Right padded."""
    lengths: Int[Array, " B"]
    """0 for none; below the limit of the response."""


class Read(NamedTuple):
    """Keys, values and routes of tokens that a forward has read: of R prompts, or of the prefixes of R responses."""

    k: Float[Array, "L R Kv M h"]
    v: Float[Array, "L R Kv M h"]
    routes: RouterRecord
    """[R M L K]."""


class Prefilled(NamedTuple):
    """Prompts and prefixes that have been read, and the next token of each response."""

    prompts: Prompts
    prefix: Prefix | None
    of_prompts: Read
    of_prefix: Read | None
    first: Draws
    """Of the B responses, at the end of their prefixes."""


@struct.dataclass
class Log:
    """What each step drew in each slot, and the routes of the token that it fed."""

    draws: Draws
    """[rows, B]."""
    routes: RouterRecord
    """[rows, B, L·K]: one dimension, since a TPU pads the last to 128."""


@struct.dataclass
class State:
    """The loop's state."""

    row: Int[Array, ""]
    """Rows of the log written in this phase."""
    places: Int[Array, " B"]
    """The place in the queue of each slot's response; n, their number, where it is idle."""
    drawn: Int[Array, " B"]
    """Tokens of its response that a slot has drawn."""
    newest: Int[Array, " B"]
    """The last of these, to be fed next."""
    queued: Int[Array, ""]
    """Places handed out."""
    ended: Int[Array, ""]
    """Responses that have ended."""
    tokens: Int[Array, ""]
    """Tokens drawn."""
    more: Bool[Array, ""]
    """Whether any shard that this one shares experts with goes on in this phase."""
    slot: Int[Array, " n"]
    """The slot that each place's response is or was in during this phase; B for none."""
    row_of_first: Int[Array, " n"]
    """The row of the log that its token 0 would be in; negative where it began in an earlier phase."""
    log: Log
    cache: Cache


def is_stop(tokens: Int[Array, "*b"], stops: Int[Array, " s"]) -> Bool[Array, "*b"]:
    """Whether each token is one of the stops."""
    return (tokens[..., None] == stops.reshape((1,) * tokens.ndim + (-1,))).any(axis=-1)


def leading(lengths: Int[Array, " R"], size: int) -> Bool[Array, "R size"]:
    """True on the first tokens of each row."""
    return jnp.arange(size)[None] < lengths[:, None]


def at_token(keys: Key[Array, " B"], t: Int[Array, " B"]) -> Key[Array, " B"]:
    """The keys that token t of each response is drawn with; consumes nothing."""
    return jax.vmap(jax.random.fold_in)(keys, t)


def _any_of_group(here: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether it is so on any shard of the expert group, which must go through the same steps."""
    if "expert" not in mesh_lib.manual_axes():
        return here
    return jax.lax.pmax(here.astype(jnp.int32), "expert") > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """What stays as it is while the n responses of a shard queue for slots."""

    model: Transformer
    begun: Prefilled
    keys: Key[Array, " n"]
    sampling: Sampling
    stops: Int[Array, " s"]
    starts: Int[Array, " n"]
    """Tokens of the prefix."""
    last: Int[Array, " n"]
    """The token limit."""
    queue: Int[Array, " n"]
    """The responses in the order in which they get slots."""
    waiting: Int[Array, ""]
    """How many of them get one."""
    slots: int
    length: int
    enough: Int[Array, ""] | None
    """Responses whose end is the end of the loop; those that have no token to draw count."""
    budget: int | None
    """Tokens that are."""

    def begin(self, ended: Bool[Array, " n"]) -> State:
        """The first phase; responses that have `ended` are in no slot."""
        n, B, T = self.queue.shape[0], self.slots, self.length
        at = jnp.arange(B, dtype=jnp.int32)
        places = jnp.where(~ended if n == B else at < self.waiting, at, n)
        of_prompts = self.begun.of_prompts
        k = empty_ring(self.model.config, B, T, of_prompts.k.dtype)
        # Prefixes lie in the columns before the first one that is written.
        first = 0 if self.begun.of_prefix is None else k.shape[1] * k.shape[4]
        lengths, group_size = self.begun.prompts.lengths, n // of_prompts.k.shape[1]
        cache = Cache(of_prompts.k, of_prompts.v, lengths, k, k, jnp.asarray(first, jnp.int32), group_size)
        state = State(
            row=jnp.zeros((), jnp.int32),
            places=places,
            drawn=self.starts[self.queue[:B]] + 1,
            newest=self.begun.first.tokens[self.queue[:B]],
            queued=jnp.minimum(self.waiting, B),
            ended=ended.sum(dtype=jnp.int32),
            tokens=jnp.zeros((), jnp.int32),
            more=jnp.zeros((), bool),
            slot=jnp.minimum(jnp.arange(n, dtype=jnp.int32), B),
            row_of_first=-1 - self.starts[self.queue],
            log=self._empty_log(T if n == B else (n * T) // B + T, B),
            cache=cache,
        )
        state = self._filled(state, jnp.zeros((), jnp.int32))
        return dataclasses.replace(state, more=self._goes_on(state, 0))

    def advance(self, state: State, *, least: int) -> State:
        """Feeds the newest token of every slot, draws the next, and refills the slots whose response has ended.

        The phase goes on while there are more than `least` responses.
        """
        n, aligned = self.queue.shape[0], state.places.shape[0] == self.queue.shape[0]
        active = state.places < n
        mine = jnp.arange(n, dtype=jnp.int32) if aligned else self.queue[jnp.minimum(state.places, n - 1)]
        slots = Slots(mine, jnp.where(active, state.drawn, 0), aligned=aligned)
        output, cache = self.model.decode(state.newest, slots, state.cache)
        logits = constrain(output.logits[:, 0], "batch", "vocab")
        keys = at_token(self.keys if aligned else self.keys[mine], state.drawn)
        draws = Draws(*draw(keys, logits, self.sampling))
        wanted = self.begun.of_prompts.routes.logprobs is not None
        routes = moe.record(output.routes, active[:, None], self.model.config, logprobs=wanted)
        log = jax.tree.map(
            lambda kept, new: jax.lax.dynamic_update_index_in_dim(kept, new, state.row, 0),
            state.log,
            Log(draws, jax.tree.map(lambda r: _flat(r[:, 0]), routes)),
        )
        drawn = state.drawn + 1
        ends = is_stop(draws.tokens, self.stops) | (drawn >= self.last[mine])
        state = dataclasses.replace(
            state,
            row=state.row + 1,
            places=jnp.where(ends, n, state.places),
            drawn=drawn,
            newest=draws.tokens,
            ended=state.ended + (ends & active).sum(dtype=jnp.int32),
            tokens=state.tokens + active.sum(dtype=jnp.int32),
            log=log,
            cache=cache,
        )
        if self.slots < n:
            queued = state.queued
            state = jax.lax.cond(jnp.any(ends & active) & (queued < self.waiting), self._refilled, lambda s: s, state)
            state = self._filled(state, queued)
        return dataclasses.replace(state, more=self._goes_on(state, least))

    def shrunk(self, state: State, size: int) -> State:
        """The next phase: the first `size` slots that are not idle, and an empty log."""
        n = self.queue.shape[0]
        kept = jnp.argsort(state.places == n, stable=True)[:size]
        places, drawn = state.places[kept], state.drawn[kept]
        held = places[None] == jnp.arange(n)[:, None]
        slot = jnp.where(held.any(axis=1), held.argmax(axis=1).astype(jnp.int32), size)
        state = dataclasses.replace(
            state,
            row=jnp.zeros((), jnp.int32),
            places=places,
            drawn=drawn,
            newest=state.newest[kept],
            slot=slot,
            row_of_first=-drawn.at[slot].get(mode="clip"),
            log=self._empty_log(self.length, size),
            cache=keep_slots(state.cache, kept),
        )
        return dataclasses.replace(state, more=self._goes_on(state, 0))

    def _goes_on(self, state: State, least: int) -> Bool[Array, ""]:
        left = (state.places < self.queue.shape[0]).sum() + jnp.maximum(self.waiting - state.queued, 0)
        here = left > least
        if self.enough is not None:
            here &= state.ended < self.enough
        if self.budget is not None:
            here &= state.tokens < self.budget
        return _any_of_group(here)

    def _refilled(self, state: State) -> State:
        """Hands the next places of the queue to the idle slots, in order."""
        n = self.queue.shape[0]
        idle = state.places == n
        place = state.queued + jnp.cumsum(idle, dtype=jnp.int32) - 1
        taken = idle & (place < self.waiting)
        response = self.queue[jnp.minimum(place, n - 1)]
        behind = jnp.arange(n, dtype=jnp.int32) - state.queued
        new = (behind >= 0) & (behind < taken.sum())
        slots = jnp.argsort(~idle, stable=True).astype(jnp.int32)
        return dataclasses.replace(
            state,
            places=jnp.where(taken, place, state.places),
            drawn=jnp.where(taken, self.starts[response] + 1, state.drawn),
            newest=jnp.where(taken, self.begun.first.tokens[response], state.newest),
            queued=state.queued + taken.sum(dtype=jnp.int32),
            slot=jnp.where(new, slots.at[behind].get(mode="clip"), state.slot),
            row_of_first=jnp.where(new, state.row - 1 - self.starts[self.queue], state.row_of_first),
        )

    def _filled(self, state: State, first: Int[Array, ""]) -> State:
        """With the prefixes of the places from `first` on, which have just got their slots, in the cache."""
        read = self.begun.of_prefix
        if read is None:
            return state

        def fill(place: Array, cache: Cache) -> Cache:
            response = self.queue[place]
            where = {"slot": state.slot[place], "step": cache.step, "length": self.starts[response]}
            k, v = (
                write_row(ring, own=jax.lax.dynamic_index_in_dim(own, response, 1, keepdims=False), **where)
                for ring, own in ((cache.k, read.k), (cache.v, read.v))
            )
            return dataclasses.replace(cache, k=k, v=v)

        return dataclasses.replace(state, cache=jax.lax.fori_loop(first, state.queued, fill, state.cache))

    def _empty_log(self, rows: int, slots: int) -> Log:
        of_prompts = self.begun.of_prompts.routes
        routes = jax.tree.map(lambda r: jnp.zeros((rows, slots, r.shape[-2] * r.shape[-1]), r.dtype), of_prompts)
        return Log(jax.tree.map(lambda d: jnp.zeros((rows, slots), d.dtype), self.begun.first), routes)


def _flat(x: Shaped[Array, "*b L K"]) -> Shaped[Array, "*b LK"]:
    """[..., L, K] as [..., L·K]: a TPU pads the last dimension to 128."""
    return x.reshape(*x.shape[:-2], -1)


def _followed(mask: Bool[Array, "n T"]) -> Bool[Array, "n T"]:
    """Where the next token is in the mask: those are fed."""
    return jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))


@struct.dataclass
class Found:
    """Responses put together from the logs of the phases; beyond the end of one stands anything."""

    draws: Draws
    """[n, T]; of prefixes the tokens."""
    routes: RouterRecord
    """Of the tokens that were fed, [n, T, L·K]."""
    counts: Int[Array, " n"]
    """Tokens there are, or more where a response has ended."""

    @classmethod
    def of(cls, begun: Prefilled, starts: Int[Array, " n"], length: int) -> "Found":
        """With nothing but prefixes and first tokens."""
        begins = jnp.arange(length)[None] == starts[:, None]
        draws = jax.tree.map(lambda d: jnp.where(begins, d[:, None], jnp.zeros((), d.dtype)), begun.first)
        if begun.prefix is None or begun.of_prefix is None:
            routes = jax.tree.map(
                lambda r: jnp.zeros((*begins.shape, r.shape[-2] * r.shape[-1]), r.dtype), begun.of_prompts.routes
            )
            return cls(draws, routes, starts + 1)

        def padded(x: Array) -> Array:
            return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *((0, 0),) * (x.ndim - 2)))

        given = jnp.where(leading(starts, length), padded(begun.prefix.tokens), draws.tokens)
        return cls(
            draws._replace(tokens=given), jax.tree.map(lambda r: padded(_flat(r)), begun.of_prefix.routes), starts + 1
        )

    def merged(self, state: State, place_of: Int[Array, " n"], starts: Int[Array, " n"]) -> "Found":
        """With what a phase drew: token t of a response, if it was drawn here, is in row `row_of_first` + t."""
        T, B = self.draws.tokens.shape[1], state.places.shape[0]
        at = jnp.arange(T, dtype=jnp.int32)[None]
        row, own = state.row_of_first[place_of, None] + at, state.slot[place_of, None]
        # The token that row r drew follows the one that it fed, whose routes it holds.
        drawn = (row >= 0) & (row < state.row) & (own < B) & (at > starts[:, None])
        fed = _followed(drawn)
        slot = jnp.minimum(own, B - 1)

        def take(kept: Array, logged: Array, row: Array, here: Array) -> Array:
            new = logged[jnp.clip(row, 0, logged.shape[0] - 1), slot]
            return jnp.where(here.reshape(here.shape + (1,) * (kept.ndim - 2)), new, kept)

        return Found(
            jax.tree.map(lambda kept, logged: take(kept, logged, row, drawn), self.draws, state.log.draws),
            jax.tree.map(lambda kept, logged: take(kept, logged, row + 1, fed), self.routes, state.log.routes),
            jnp.maximum(self.counts, jnp.where(drawn, at + 1, 0).max(axis=1)),
        )

    def rollout(self, loop: Loop, *, pad_id: int, prompt_length: int) -> tuple[Rollout, Bool[Array, " n"]]:
        """Cut off at the first stop after the prefix or the limit of each response; and which end at neither."""
        begun, starts, last = loop.begun, loop.starts, loop.last
        tokens, at = self.draws.tokens, jnp.arange(self.draws.tokens.shape[1])[None]
        there = at < jnp.minimum(last, self.counts)[:, None]
        stop = is_stop(tokens, loop.stops) & there & (at >= starts[:, None])
        mask = there & (jnp.cumsum(stop, axis=1) - stop == 0)
        stopped = stop.any(axis=1)
        own = mask & (at >= starts[:, None])
        P, S = begun.prompts.tokens.shape
        beyond = ((0, 0), (0, prompt_length - S))

        def joined(prompt: Array, own: Array, nothing: int) -> Array:
            prompt = jnp.pad(prompt, (*beyond, (0, 0), (0, 0)), constant_values=nothing)
            own = jnp.where(_followed(mask)[..., None], own, nothing)
            whole = jnp.concatenate([jnp.repeat(_flat(prompt), len(tokens) // P, axis=0), own], axis=1)
            return whole.reshape(*whole.shape[:2], *prompt.shape[2:])

        routes, of_prompts = self.routes, begun.of_prompts.routes
        rollout = Rollout(
            prompts=jnp.repeat(jnp.pad(begun.prompts.tokens, beyond, constant_values=pad_id), len(tokens) // P, axis=0),
            prompt_lengths=jnp.repeat(begun.prompts.lengths, len(tokens) // P, axis=0),
            tokens=jnp.where(mask, tokens, pad_id),
            mask=mask,
            action_mask=own,
            truncated=~stopped & (mask.sum(axis=1) == last),
            behaviour_logprobs=jnp.where(mask, self.draws.behaviour_logprobs, 0),
            logprobs=jnp.where(mask, self.draws.logprobs, 0),
            routes=RouterRecord(
                joined(of_prompts.experts, routes.experts, -1),
                jax.tree.map(partial(joined, nothing=0), of_prompts.logprobs, routes.logprobs),
            ),
        )
        return rollout, ~stopped & ~rollout.truncated
