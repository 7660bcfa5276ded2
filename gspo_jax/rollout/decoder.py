"""The in-graph decoder: each prompt is prefilled once for its group, and slots never wait for the longest response.

Two programs per shape. `prefill` reads the prompts and draws the first token of every response; `decode` lets the
responses queue for slots, and a slot whose response has ended takes the next one in the same step. When the queue is
empty and half of the slots are idle, the others move together and the program goes on with half as many. Under a mesh
both are cut over the batch axes: shards that share no experts stop each by itself.

Every response has its own key, so what it samples depends neither on the batch around it nor on its slot.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from gspo_jax.models import moe
from gspo_jax.models.cache import Cache, Slots, empty_ring, keep_slots
from gspo_jax.models.transformer import Transformer
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.mesh import constrain
from gspo_jax.rollout.sampling import Sampling, draw
from gspo_jax.types import Prompts, Rollout, RouterRecord, UserError

_SHRINKS, _FEWEST = 3, 4
"""How often the slots are halved towards the end, each time with code of its own, and the fewest that are left."""


class Draws(NamedTuple):
    """Tokens with their log-probs; where they stand is said by whoever holds them."""

    tokens: Int[Array, "*b"]
    behaviour_logprobs: Float[Array, "*b"]
    logprobs: Float[Array, "*b"]


class Prefilled(NamedTuple):
    """Prompts that have been read, and the first token of each response to them."""

    prompts: Prompts
    k: Float[Array, "L P Kv S h"]
    v: Float[Array, "L P Kv S h"]
    routes: RouterRecord
    """Of the prompts, [P S L K]."""
    first: Draws
    """Of the B responses."""


_ROWS = PartitionSpec(mesh_lib.BATCH_AXES)
_SECOND = PartitionSpec(None, mesh_lib.BATCH_AXES)
_PREFILLED: Any = Prefilled(*cast(Any, (_ROWS, _SECOND, _SECOND, _ROWS, _ROWS)))
"""How they lie on a mesh."""


class Work(NamedTuple):
    """What a decode loop did, by shard."""

    steps: Int[Array, " shards"]
    """Steps of the loop: each feeds one token per slot."""
    slot_steps: Int[Array, " shards"]
    """Steps times the slots there were: what a step costs follows its slots."""
    tokens: Int[Array, " shards"]
    """Tokens drawn in those; the first of each response is drawn by the prefill."""


@struct.dataclass
class _Log:
    """What each step drew in each slot, and the routes of the token that it fed."""

    draws: Draws
    """[rows, B]."""
    routes: RouterRecord
    """[rows, B, L·K]: one dimension, since a TPU pads the last to 128."""


@struct.dataclass
class _State:
    """The loop's state. There are no scatters in it: TPUs are slow at them, and their compiler has died of some."""

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
    more: Bool[Array, ""]
    """Whether any shard that this one shares experts with goes on in this phase."""
    slot: Int[Array, " n"]
    """The slot that each place's response is or was in during this phase; B for none."""
    row_of_first: Int[Array, " n"]
    """The row of the log that its token 0 would be in; negative where it began in an earlier phase."""
    log: _Log
    cache: Cache


def response_keys(key: Key[Array, ""], responses: Int[Array, " B"]) -> Key[Array, " B"]:
    """One key per response, from its number alone. Consumes `key`."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, responses)


def generate(
    graph: nnx.GraphDef[Transformer],
    params: nnx.State,
    prompts: Prompts,
    keys: Key[Array, " B"],
    *,
    group_size: int,
    length: int,
    sampling: Sampling,
    eos_ids: tuple[int, ...],
    pad_id: int = 0,
    slots: int | None = None,
    limits: Int[Array, " B"] | None = None,
    priorities: Int[Array, " B"] | None = None,
    router_logprobs: bool = False,
) -> tuple[Rollout, Work]:
    """Samples `group_size` responses of at most `length` tokens to every prompt.

    Args:
      graph, params: the model, in the sampler's layout and dtype.
      prompts: [P, S], right padded.
      keys: one per response, B = P · group_size; token t of a response is drawn with `fold_in(key, t)`.
      group_size: responses per prompt; their rows are adjacent.
      length: the token limit T, EOS included.
      sampling: temperature, top-k and top-p.
      eos_ids: a response ends with the first of these; the empty tuple never ends one early.
      pad_id: what stands in `tokens` after the end.
      slots: how many responses decode at a time, over all devices; None is all of them.
      limits: a limit for each response, 1 to `length`; None is `length` for all.
      priorities: responses with the smaller number get a slot first; None is in order.
      router_logprobs: also return the router's log-probs of the experts it chose.

    Returns:
      A Rollout; `truncated` marks the responses that met the limit without an EOS. And what it took.

    Raises:
      UserError: the slots do not divide into shards, or are more than there are responses.
    """
    slots = check_slots(slots, keys.shape[0])
    begun = prefill(
        graph, params, prompts, keys, group_size=group_size, sampling=sampling, router_logprobs=router_logprobs
    )
    ends = {"length": length, "eos_ids": eos_ids, "pad_id": pad_id, "slots": slots}
    return decode(graph, params, begun, keys, limits, priorities, sampling=sampling, **ends)


def check_slots(slots: int | None, responses: int) -> int:
    """How many slots there are, when so many are asked for.

    Raises:
      UserError: the number does not fit the mesh in scope or the responses.
    """
    shards = mesh_lib.batch_shards(dict(jax.sharding.get_abstract_mesh().shape)) if mesh_lib.has_mesh() else 1
    if slots is None:
        return responses
    if not 0 < slots <= responses:
        raise UserError(f"{slots} slots for {responses} responses; use 1 to {responses}, or None for all of them")
    mesh_lib.check_divides("the number of slots", slots, "the shards of a batch", shards)
    return slots


def _over_batch(run: Callable[..., Any], params: nnx.State, args: tuple[Any, ...], *, inside: Any, out: Any) -> Any:
    """run(params, *args) on each batch shard's part of args and its own experts; `tensor` is left to the compiler.

    `inside` and `out` are the specs of args and of what comes out.
    """
    if not mesh_lib.has_mesh():
        return run(params, *args)
    axes = set(mesh_lib.BATCH_AXES)
    rest = set(mesh_lib.AXES) - axes
    specs = jax.tree.map(lambda s: mesh_lib.without_axes(s, rest), mesh_lib.param_specs(params, mesh_lib.SAMPLER))
    # The loop's state begins as constants, alike on all shards until the first step: nothing to be checked.
    layout = {"in_specs": (specs, *inside), "out_specs": out, "axis_names": axes, "check_vma": False}
    return jax.shard_map(run, **layout)(params, *args)


@partial(jax.jit, static_argnames=("graph", "group_size", "sampling", "router_logprobs"))
def prefill(
    graph: nnx.GraphDef[Transformer],
    params: nnx.State,
    prompts: Prompts,
    keys: Key[Array, " B"],
    *,
    group_size: int,
    sampling: Sampling,
    router_logprobs: bool = False,
) -> Prefilled:
    """Reads each prompt once and draws the first token of its responses; the arguments are those of `generate`."""
    run = partial(_prefill, graph, group_size=group_size, sampling=sampling, router_logprobs=router_logprobs)
    return _over_batch(run, params, (prompts, keys), inside=(_ROWS, _ROWS), out=_PREFILLED)


def _prefill(
    graph: nnx.GraphDef[Transformer],
    params: nnx.State,
    prompts: Prompts,
    keys: Key[Array, " B"],
    *,
    group_size: int,
    sampling: Sampling,
    router_logprobs: bool,
) -> Prefilled:
    model = nnx.merge(graph, params)
    output, (k, v) = model.prefill(prompts.tokens, prompts.lengths)
    last = jnp.take_along_axis(output.hidden, prompts.lengths[:, None, None] - 1, axis=1)
    logits = constrain(dataclasses.replace(output, hidden=last).logits[:, 0], "batch", "vocab")
    first = draw(_at_token(keys, jnp.zeros_like(keys, jnp.int32)), jnp.repeat(logits, group_size, axis=0), sampling)
    fed = jnp.arange(prompts.tokens.shape[1])[None] < prompts.lengths[:, None]
    routes = moe.record(output.routes, fed, model.config, logprobs=router_logprobs)
    return Prefilled(prompts, k, v, routes, Draws(*first))


def _at_token(keys: Key[Array, " B"], t: Int[Array, " B"]) -> Key[Array, " B"]:
    return jax.vmap(jax.random.fold_in)(keys, t)


@partial(
    jax.jit,
    static_argnames=("graph", "length", "sampling", "eos_ids", "pad_id", "slots"),
)
def decode(
    graph: nnx.GraphDef[Transformer],
    params: nnx.State,
    begun: Prefilled,
    keys: Key[Array, " B"],
    limits: Int[Array, " B"] | None = None,
    priorities: Int[Array, " B"] | None = None,
    *,
    length: int,
    sampling: Sampling,
    eos_ids: tuple[int, ...],
    pad_id: int,
    slots: int,
) -> tuple[Rollout, Work]:
    """Goes on with what `prefill` has begun until every response has ended; the arguments are those of `generate`."""
    ends = {"length": length, "eos_ids": eos_ids, "pad_id": pad_id, "share": slots / keys.shape[0]}
    run = partial(_decode, graph, sampling=sampling, **ends)
    return _over_batch(run, params, (begun, keys, limits, priorities), inside=(_PREFILLED, *(_ROWS,) * 3), out=_ROWS)


def _decode(
    graph: nnx.GraphDef[Transformer],
    params: nnx.State,
    begun: Prefilled,
    keys: Key[Array, " n"],
    limits: Int[Array, " n"] | None,
    priorities: Int[Array, " n"] | None,
    *,
    length: int,
    sampling: Sampling,
    eos_ids: tuple[int, ...],
    pad_id: int,
    share: float,
) -> tuple[Rollout, Work]:
    """The share of one batch shard: its n responses queue for a `share` of n slots."""
    model = nnx.merge(graph, params)
    n, T = keys.shape[0], length
    B = round(n * share)
    stops = jnp.asarray(eos_ids, jnp.int32)
    last = jnp.full(n, T, jnp.int32) if limits is None else jnp.minimum(limits, T)
    alike = not eos_ids and limits is None  # all responses end together

    def is_stop(tokens: Array) -> Array:
        return (tokens[..., None] == stops.reshape((1,) * tokens.ndim + (-1,))).any(axis=-1)

    ended = is_stop(begun.first.tokens) | (last <= 1)
    waiting = n - ended.sum(dtype=jnp.int32)
    order = jnp.arange(n, dtype=jnp.int32) if priorities is None else priorities
    queue = jnp.lexsort((order, ended)).astype(jnp.int32)  # those that have ended never get a slot

    def advance(state: _State, *, aligned: bool, least: int) -> _State:
        """Feeds the newest token of every slot, draws the next, and refills the slots whose response has ended.

        The phase goes on while there are more than `least` responses.
        """
        active = state.places < n
        mine = jnp.arange(n) if aligned else queue[jnp.minimum(state.places, n - 1)]
        slots = Slots(mine, jnp.where(active, state.drawn, 0), aligned=aligned)
        output, cache = model.decode(state.newest, slots, state.cache)
        logits = constrain(output.logits[:, 0], "batch", "vocab")
        draws = Draws(*draw(_at_token(keys if aligned else keys[mine], state.drawn), logits, sampling))
        routes = moe.record(output.routes, active[:, None], model.config, logprobs=begun.routes.logprobs is not None)
        log = jax.tree.map(
            lambda kept, new: jax.lax.dynamic_update_index_in_dim(kept, new, state.row, 0),
            state.log,
            _Log(draws, jax.tree.map(lambda r: r.reshape(r.shape[0], -1), routes)),
        )
        drawn = state.drawn + 1
        ends = is_stop(draws.tokens) | (drawn >= last[mine])
        state = dataclasses.replace(
            state,
            row=state.row + 1,
            places=jnp.where(ends, n, state.places),
            drawn=drawn,
            newest=draws.tokens,
            log=log,
            cache=cache,
        )
        if n > B:
            state = jax.lax.cond(jnp.any(ends & active) & (state.queued < waiting), refill, lambda s: s, state)
        left = (state.places < n).sum() + jnp.maximum(waiting - state.queued, 0)
        return dataclasses.replace(state, more=_any_of_group(left > least))

    def refill(state: _State) -> _State:
        """Hands the next places of the queue to the idle slots, in order."""
        idle = state.places == n
        place = state.queued + jnp.cumsum(idle, dtype=jnp.int32) - 1
        taken = idle & (place < waiting)
        first = begun.first.tokens[queue[jnp.minimum(place, n - 1)]]
        behind = jnp.arange(n, dtype=jnp.int32) - state.queued
        new = (behind >= 0) & (behind < taken.sum())
        slots = jnp.argsort(~idle, stable=True).astype(jnp.int32)
        return dataclasses.replace(
            state,
            places=jnp.where(taken, place, state.places),
            drawn=jnp.where(taken, 1, state.drawn),
            newest=jnp.where(taken, first, state.newest),
            queued=state.queued + taken.sum(dtype=jnp.int32),
            slot=jnp.where(new, slots.at[behind].get(mode="clip"), state.slot),
            row_of_first=jnp.where(new, state.row - 1, state.row_of_first),
        )

    def empty_log(rows: int, slots: int) -> _Log:
        routes = jax.tree.map(lambda r: jnp.zeros((rows, slots, r.shape[2] * r.shape[3]), r.dtype), begun.routes)
        draws = jax.tree.map(lambda d: jnp.zeros((rows, slots), d.dtype), begun.first)
        return _Log(draws, routes)

    def enter(state: _State, kept: Array) -> _State:
        """The next phase: these slots of the last one, and an empty log."""
        places, drawn, size = state.places[kept], state.drawn[kept], kept.shape[0]
        held = places[None] == jnp.arange(n)[:, None]
        slot = jnp.where(held.any(axis=1), held.argmax(axis=1).astype(jnp.int32), size)
        return dataclasses.replace(
            state,
            row=jnp.zeros((), jnp.int32),
            places=places,
            drawn=drawn,
            newest=state.newest[kept],
            slot=slot,
            row_of_first=-drawn.at[slot].get(mode="clip"),
            log=empty_log(T, size),
            cache=keep_slots(state.cache, kept),
            more=_any_of_group((places < n).any()),
        )

    if n == B:  # slot b is place b is response b
        queue, places = jnp.arange(n, dtype=jnp.int32), jnp.where(ended, n, jnp.arange(n, dtype=jnp.int32))
        waiting = jnp.full((), n, jnp.int32)
    else:
        places = jnp.where(jnp.arange(B) < waiting, jnp.arange(B, dtype=jnp.int32), n)
    ring = partial(empty_ring, model.config, B, T, begun.k.dtype)
    state = _State(
        row=jnp.zeros((), jnp.int32),
        places=places,
        drawn=jnp.ones(B, jnp.int32),
        newest=begun.first.tokens[queue[:B]],
        queued=jnp.minimum(waiting, B),
        more=_any_of_group((places < n).any()),
        slot=jnp.minimum(jnp.arange(n, dtype=jnp.int32), B),
        row_of_first=jnp.full(n, -1, jnp.int32),
        log=empty_log(T if n == B else (n * T) // B + T, B),
        cache=Cache(
            begun.k,
            begun.v,
            begun.prompts.lengths,
            ring(),
            ring(),
            jnp.zeros((), jnp.int32),
            n // begun.k.shape[1],
        ),
    )
    found = _Found.of(begun.first, begun.routes, T)
    place_of = jnp.argsort(queue)
    steps = slot_steps = jnp.zeros((), jnp.int32)
    sizes = [B]
    while not alike and len(sizes) <= _SHRINKS and sizes[-1] // 2 >= _FEWEST:
        sizes.append(sizes[-1] // 2)
    if T > 1:
        for size, smaller in zip(sizes, [*sizes[1:], 0], strict=True):
            if size < B:
                state = enter(state, jnp.argsort(state.places == n, stable=True)[:size])
            run = partial(advance, aligned=size == B == n, least=smaller)
            state = jax.lax.while_loop(lambda s: s.more, run, state)
            found = found.merged(state, place_of)
            steps, slot_steps = steps + state.row, slot_steps + state.row * size
    rollout = found.rollout(begun, last, is_stop, pad_id=pad_id)
    tokens = rollout.mask.sum(dtype=jnp.int32) - n
    return rollout, Work(steps[None], slot_steps[None], tokens[None])


def _any_of_group(here: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether it is so on any shard of the expert group, which must go through the same steps."""
    if "expert" not in mesh_lib.manual_axes():
        return here
    return jax.lax.pmax(here.astype(jnp.int32), "expert") > 0


def _followed(mask: Bool[Array, "n T"]) -> Bool[Array, "n T"]:
    """Where the next token is in the mask: those are fed."""
    return jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))


@struct.dataclass
class _Found:
    """Responses put together from the logs of the phases; beyond the end of one stands anything."""

    draws: Draws
    """[n, T]."""
    routes: RouterRecord
    """Of the tokens that were fed, [n, T, L·K]."""

    @classmethod
    def of(cls, first: Draws, routes: RouterRecord, length: int) -> "_Found":
        """With nothing but the first tokens."""
        n, begins = first.tokens.shape[0], jnp.arange(length)[None] == 0
        draws = jax.tree.map(lambda d: jnp.where(begins, d[:, None], jnp.zeros((), d.dtype)), first)
        return cls(draws, jax.tree.map(lambda r: jnp.zeros((n, length, r.shape[2] * r.shape[3]), r.dtype), routes))

    def merged(self, state: _State, place_of: Int[Array, " n"]) -> "_Found":
        """With what a phase drew: token t of a response is in row `row_of_first` + t of its slot's log."""
        T, B = self.draws.tokens.shape[1], state.places.shape[0]
        at = jnp.arange(T)[None]
        row, own = state.row_of_first[place_of, None] + at, state.slot[place_of, None]
        # The token that row r drew follows the one that it fed, whose routes it holds.
        drawn = (row >= 0) & (row < state.row) & (own < B) & (at > 0)
        fed = _followed(drawn)
        slot = jnp.minimum(own, B - 1)

        def take(kept: Array, logged: Array, row: Array, here: Array) -> Array:
            new = logged[jnp.clip(row, 0, logged.shape[0] - 1), slot]
            return jnp.where(here.reshape(here.shape + (1,) * (kept.ndim - 2)), new, kept)

        return _Found(
            jax.tree.map(lambda kept, logged: take(kept, logged, row, drawn), self.draws, state.log.draws),
            jax.tree.map(lambda kept, logged: take(kept, logged, row + 1, fed), self.routes, state.log.routes),
        )

    def rollout(self, begun: Prefilled, last: Array, is_stop: Callable[[Array], Array], *, pad_id: int) -> Rollout:
        """Cut off at the first stop or the limit of each response."""
        tokens, at = self.draws.tokens, jnp.arange(self.draws.tokens.shape[1])[None]
        stop = is_stop(tokens) & (at < last[:, None])
        before = jnp.cumsum(stop, axis=1) - stop
        mask = (at < last[:, None]) & (before == 0)
        fed = _followed(mask)[..., None]
        own = RouterRecord(
            jnp.where(fed, self.routes.experts, -1),
            None if self.routes.logprobs is None else jnp.where(fed, self.routes.logprobs, 0),
        )
        group_size = tokens.shape[0] // begun.prompts.tokens.shape[0]

        def joined(prompt: Array, own: Array) -> Array:
            whole = jnp.concatenate(
                [jnp.repeat(prompt.reshape(*prompt.shape[:2], -1), group_size, axis=0), own], axis=1
            )
            return whole.reshape(*whole.shape[:2], *prompt.shape[2:])

        return Rollout(
            prompts=jnp.repeat(begun.prompts.tokens, group_size, axis=0),
            prompt_lengths=jnp.repeat(begun.prompts.lengths, group_size, axis=0),
            tokens=jnp.where(mask, tokens, pad_id),
            mask=mask,
            truncated=~stop.any(axis=1),
            behaviour_logprobs=jnp.where(mask, self.draws.behaviour_logprobs, 0),
            logprobs=jnp.where(mask, self.draws.logprobs, 0),
            routes=jax.tree.map(joined, begun.routes, own),
        )


def to_sampler(shapes: nnx.State, mesh: Mesh, dtype: DTypeLike) -> Callable[[nnx.State], nnx.State]:
    """A compiled program that casts the trainer's weights and lays them out for sampling.

    Parameters declared `float32` (norms, router) keep their dtype: the forward reads them so.
    """

    def cast(params: nnx.State) -> nnx.State:
        return jax.tree.map(
            lambda v: v if v.get_metadata("float32") else v.replace(v[...].astype(dtype)),
            params,
            is_leaf=lambda x: isinstance(x, nnx.Variable),
        )

    return jax.jit(cast, out_shardings=mesh_lib.param_shardings(shapes, mesh, mesh_lib.SAMPLER))
