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
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from gspo_jax.models import moe
from gspo_jax.models.cache import Cache, Slots, empty_ring, heads_first, keep_slots, write_row
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


_ROWS = PartitionSpec(mesh_lib.BATCH_AXES)
_READ: Any = Read(*cast(Any, (*(PartitionSpec(None, mesh_lib.BATCH_AXES),) * 2, _ROWS)))


def _layout(prefix: Prefix | None) -> Any:
    """How a Prefilled lies on a mesh."""
    specs: Any = (_ROWS, None, _READ, None, _ROWS) if prefix is None else (_ROWS, _ROWS, _READ, _READ, _ROWS)
    return Prefilled(*specs)


class Work(NamedTuple):
    """What a decode loop did, by shard."""

    steps: Int[Array, " shards"]
    """Steps of the loop: each feeds one token per slot."""
    slot_steps: Int[Array, " shards"]
    """Steps times the slots there were: what a step costs follows its slots."""
    tokens: Int[Array, " shards"]
    """Tokens drawn in those."""
    drawn: Int[Array, " shards"]
    """These, and the first of each response, which the prefill draws."""


class Decoded(NamedTuple):
    """What comes of a call."""

    rollout: Rollout
    """Of prefixes there are the tokens and the routes; they are no actions of this call, and their log-probs are 0."""
    unfinished: Bool[Array, " B"]
    """Responses that an early end has cut off; not those that met their limit."""
    work: Work


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
    prefix: Prefix | None = None,
    enough: float = 1.0,
    budget: int | None = None,
    router_logprobs: bool = False,
) -> Decoded:
    """Samples `group_size` responses of at most `length` tokens to every prompt.

    Args:
      graph, params: the model, in the sampler's layout and dtype.
      prompts: [P, S], right padded.
      keys: one per response, B = P · group_size; token t of a response is drawn with `fold_in(key, t)`.
      group_size: responses per prompt; their rows are adjacent.
      length: the token limit T, EOS included.
      sampling: temperature, top-k, top-p and min-p.
      eos_ids: a response ends with the first of these; the empty tuple never ends one early.
      pad_id: what stands in `tokens` after the end.
      slots: how many responses decode at a time, over all devices; None is all of them.
      limits: a limit for each response, at most `length`; 0 draws nothing. None is `length` for all.
      priorities: responses with the smaller number get a slot first; None is in order.
      prefix: what responses begin with; the token limits include it. None is nothing.
      enough: the share of each shard's responses (of those with a limit above 0) whose end is the end of the call;
        those under way are unfinished.
      budget: so are they once this many tokens are drawn, over all devices; None is no budget.
      router_logprobs: also return the router's log-probs of the experts it chose.

    Returns:
      A Rollout, whose `truncated` marks the responses that met the limit without an EOS; and what it took.

    Raises:
      UserError: the slots do not divide into shards, or are more than there are responses.
    """
    slots = check_slots(slots, keys.shape[0])
    reading = {"group_size": group_size, "sampling": sampling, "router_logprobs": router_logprobs}
    begun = prefill(graph, params, prompts, keys, prefix, **reading)
    ends = {"length": length, "eos_ids": eos_ids, "pad_id": pad_id, "enough": enough, "budget": budget}
    return decode(graph, params, begun, keys, limits, priorities, sampling=sampling, slots=slots, **ends)


def check_slots(slots: int | None, responses: int) -> int:
    """How many slots there are, when so many are asked for.

    Raises:
      UserError: the number does not fit the mesh in scope or the responses.
    """
    if slots is None:
        return responses
    if not 0 < slots <= responses:
        raise UserError(f"{slots} slots for {responses} responses; use 1 to {responses}, or None for all of them")
    mesh_lib.check_divides("the number of slots", slots, "the shards of a batch", _shards())
    return slots


def _shards() -> int:
    """Over how many shards of the mesh in scope a batch is spread."""
    return mesh_lib.batch_shards(dict(jax.sharding.get_abstract_mesh().shape)) if mesh_lib.has_mesh() else 1


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
    prefix: Prefix | None = None,
    *,
    group_size: int,
    sampling: Sampling,
    router_logprobs: bool = False,
) -> Prefilled:
    """Reads each prompt once, and prefixes, and draws the next token of each response; arguments as `generate`."""
    run = partial(_prefill, graph, group_size=group_size, sampling=sampling, router_logprobs=router_logprobs)
    return _over_batch(run, params, (prompts, keys, prefix), inside=(_ROWS,) * 3, out=_layout(prefix))


def _prefill(
    graph: nnx.GraphDef[Transformer],
    params: nnx.State,
    prompts: Prompts,
    keys: Key[Array, " B"],
    prefix: Prefix | None,
    *,
    group_size: int,
    sampling: Sampling,
    router_logprobs: bool,
) -> Prefilled:
    model = nnx.merge(graph, params)
    (P, S), B = prompts.tokens.shape, keys.shape[0]
    tokens, valid = prompts.tokens, _first(prompts.lengths, S)
    last, drawn = prompts.lengths[:, None] - 1, jnp.zeros(B, jnp.int32)
    if prefix is not None:  # a prompt and then the prefixes of its group, each of which sees the prompt and itself
        Q, drawn = prefix.tokens.shape[1], prefix.lengths
        tokens = jnp.concatenate([tokens, prefix.tokens.reshape(P, -1)], axis=1)
        valid = jnp.concatenate([valid, _first(prefix.lengths, Q).reshape(P, -1)], axis=1)
        ends = S + jnp.arange(group_size)[None] * Q + prefix.lengths.reshape(P, group_size) - 1
        last = jnp.where(prefix.lengths.reshape(P, group_size) > 0, ends, last)
    output, (k, v) = model.prefill(tokens, valid, prompt=S, responses=group_size if prefix is not None else 1)
    hidden = jnp.take_along_axis(output.hidden, last[..., None], axis=1)
    logits = dataclasses.replace(output, hidden=hidden).logits
    logits = constrain(jnp.repeat(logits, B // P // logits.shape[1], axis=1).reshape(B, -1), "batch", "vocab")
    first = Draws(*draw(_at_token(keys, drawn), logits, sampling))
    routes = moe.record(output.routes, valid, model.config, logprobs=router_logprobs)

    def own(x: Array) -> Array:
        """[P, S + G Q, ...] -> [B, Q, ...]."""
        return x[:, S:].reshape(B, -1, *x.shape[2:])

    of_prompts = Read(heads_first(k[:, :, :S]), heads_first(v[:, :, :S]), jax.tree.map(lambda r: r[:, :S], routes))
    if prefix is None:
        return Prefilled(prompts, None, of_prompts, None, first)
    of_prefix = Read(heads_first(jax.vmap(own)(k)), heads_first(jax.vmap(own)(v)), jax.tree.map(own, routes))
    return Prefilled(prompts, prefix, of_prompts, of_prefix, first)


def _first(lengths: Int[Array, " R"], size: int) -> Bool[Array, "R size"]:
    return jnp.arange(size)[None] < lengths[:, None]


def _at_token(keys: Key[Array, " B"], t: Int[Array, " B"]) -> Key[Array, " B"]:
    return jax.vmap(jax.random.fold_in)(keys, t)


@partial(
    jax.jit,
    static_argnames=("graph", "length", "sampling", "eos_ids", "pad_id", "slots", "enough", "budget", "prompt_length"),
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
    enough: float = 1.0,
    budget: int | None = None,
    prompt_length: int | None = None,
) -> Decoded:
    """Goes on with what `prefill` has begun until every response has ended; the arguments are those of `generate`.

    Prompts and their routes are padded to `prompt_length` in what it returns; None leaves them as they are.
    """
    run = partial(
        _decode,
        graph,
        sampling=sampling,
        length=length,
        eos_ids=eos_ids,
        pad_id=pad_id,
        share=slots / keys.shape[0],
        enough=enough,
        budget=None if budget is None else max(1, budget // _shards()),
        prompt_length=prompt_length or begun.prompts.tokens.shape[1],
    )
    inside = (_layout(begun.prefix), *(_ROWS,) * 3)
    return _over_batch(run, params, (begun, keys, limits, priorities), inside=inside, out=_ROWS)


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
    enough: float,
    budget: int | None,
    prompt_length: int,
) -> Decoded:
    """The part of one batch shard: its n responses queue for a `share` of n slots, and have a `budget` of their own."""
    n, stops = keys.shape[0], jnp.asarray(eos_ids, jnp.int32)
    starts = jnp.zeros(n, jnp.int32) if begun.prefix is None else begun.prefix.lengths
    last = jnp.full(n, length, jnp.int32) if limits is None else jnp.minimum(limits, length)
    slots, model = round(n * share), nnx.merge(graph, params)
    ended = _is_stop(begun.first.tokens, stops) | (starts + 1 >= last)
    queue, waiting = jnp.arange(n, dtype=jnp.int32), jnp.full((), n, jnp.int32)
    if slots < n:  # those that have ended get no slot
        queue = jnp.lexsort((queue if priorities is None else priorities, ended)).astype(jnp.int32)
        waiting = n - ended.sum(dtype=jnp.int32)
    loop = _Loop(
        model=model,
        begun=begun,
        keys=keys,
        sampling=sampling,
        stops=stops,
        starts=starts,
        last=last,
        queue=queue,
        waiting=waiting,
        slots=slots,
        length=length,
        enough=None if enough >= 1 else n - jnp.floor((1 - enough) * (last > 0).sum()).astype(jnp.int32),
        budget=budget,
    )
    sizes = [slots]
    alike = not eos_ids and limits is None and begun.prefix is None  # all responses end together
    while not alike and len(sizes) <= _SHRINKS and sizes[-1] // 2 >= _FEWEST:
        sizes.append(sizes[-1] // 2)
    state, found, place_of = loop.begin(ended), _Found.of(begun, starts, length), jnp.argsort(queue)
    steps = slot_steps = jnp.zeros((), jnp.int32)
    for size, fewer in zip(sizes, [*sizes[1:], 0], strict=True):
        if size < slots:
            state = loop.shrunk(state, size)
        state = jax.lax.while_loop(lambda s: s.more, partial(loop.advance, least=fewer), state)
        found = found.merged(state, place_of, starts)
        steps, slot_steps = steps + state.row, slot_steps + state.row * size
    rollout, unfinished = found.rollout(loop, pad_id=pad_id, prompt_length=prompt_length)
    drawn = rollout.action_mask.sum(axis=1, dtype=jnp.int32)
    tokens = jnp.maximum(drawn - 1, 0).sum()
    return Decoded(rollout, unfinished, Work(*(x[None] for x in (steps, slot_steps, tokens, drawn.sum()))))


def _is_stop(tokens: Int[Array, "*b"], stops: Int[Array, " s"]) -> Bool[Array, "*b"]:
    return (tokens[..., None] == stops.reshape((1,) * tokens.ndim + (-1,))).any(axis=-1)


def _any_of_group(here: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether it is so on any shard of the expert group, which must go through the same steps."""
    if "expert" not in mesh_lib.manual_axes():
        return here
    return jax.lax.pmax(here.astype(jnp.int32), "expert") > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loop:
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

    def begin(self, ended: Bool[Array, " n"]) -> _State:
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
        state = _State(
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

    def advance(self, state: _State, *, least: int) -> _State:
        """Feeds the newest token of every slot, draws the next, and refills the slots whose response has ended.

        The phase goes on while there are more than `least` responses.
        """
        n, aligned = self.queue.shape[0], state.places.shape[0] == self.queue.shape[0]
        active = state.places < n
        mine = jnp.arange(n, dtype=jnp.int32) if aligned else self.queue[jnp.minimum(state.places, n - 1)]
        slots = Slots(mine, jnp.where(active, state.drawn, 0), aligned=aligned)
        output, cache = self.model.decode(state.newest, slots, state.cache)
        logits = constrain(output.logits[:, 0], "batch", "vocab")
        keys = _at_token(self.keys if aligned else self.keys[mine], state.drawn)
        draws = Draws(*draw(keys, logits, self.sampling))
        wanted = self.begun.of_prompts.routes.logprobs is not None
        routes = moe.record(output.routes, active[:, None], self.model.config, logprobs=wanted)
        log = jax.tree.map(
            lambda kept, new: jax.lax.dynamic_update_index_in_dim(kept, new, state.row, 0),
            state.log,
            _Log(draws, jax.tree.map(lambda r: _flat(r[:, 0]), routes)),
        )
        drawn = state.drawn + 1
        ends = _is_stop(draws.tokens, self.stops) | (drawn >= self.last[mine])
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

    def shrunk(self, state: _State, size: int) -> _State:
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

    def _goes_on(self, state: _State, least: int) -> Bool[Array, ""]:
        left = (state.places < self.queue.shape[0]).sum() + jnp.maximum(self.waiting - state.queued, 0)
        here = left > least
        if self.enough is not None:
            here &= state.ended < self.enough
        if self.budget is not None:
            here &= state.tokens < self.budget
        return _any_of_group(here)

    def _refilled(self, state: _State) -> _State:
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

    def _filled(self, state: _State, first: Int[Array, ""]) -> _State:
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

    def _empty_log(self, rows: int, slots: int) -> _Log:
        of_prompts = self.begun.of_prompts.routes
        routes = jax.tree.map(lambda r: jnp.zeros((rows, slots, r.shape[-2] * r.shape[-1]), r.dtype), of_prompts)
        return _Log(jax.tree.map(lambda d: jnp.zeros((rows, slots), d.dtype), self.begun.first), routes)


def _flat(x: Shaped[Array, "*b L K"]) -> Shaped[Array, "*b LK"]:
    """[..., L, K] as [..., L·K]: a TPU pads the last dimension to 128."""
    return x.reshape(*x.shape[:-2], -1)


def _followed(mask: Bool[Array, "n T"]) -> Bool[Array, "n T"]:
    """Where the next token is in the mask: those are fed."""
    return jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))


@struct.dataclass
class _Found:
    """Responses put together from the logs of the phases; beyond the end of one stands anything."""

    draws: Draws
    """[n, T]; of prefixes the tokens."""
    routes: RouterRecord
    """Of the tokens that were fed, [n, T, L·K]."""
    counts: Int[Array, " n"]
    """Tokens there are, or more where a response has ended."""

    @classmethod
    def of(cls, begun: Prefilled, starts: Int[Array, " n"], length: int) -> "_Found":
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

        given = jnp.where(_first(starts, length), padded(begun.prefix.tokens), draws.tokens)
        return cls(
            draws._replace(tokens=given), jax.tree.map(lambda r: padded(_flat(r)), begun.of_prefix.routes), starts + 1
        )

    def merged(self, state: _State, place_of: Int[Array, " n"], starts: Int[Array, " n"]) -> "_Found":
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

        return _Found(
            jax.tree.map(lambda kept, logged: take(kept, logged, row, drawn), self.draws, state.log.draws),
            jax.tree.map(lambda kept, logged: take(kept, logged, row + 1, fed), self.routes, state.log.routes),
            jnp.maximum(self.counts, jnp.where(drawn, at + 1, 0).max(axis=1)),
        )

    def rollout(self, loop: _Loop, *, pad_id: int, prompt_length: int) -> tuple[Rollout, Bool[Array, " n"]]:
        """Cut off at the first stop after the prefix or the limit of each response; and which end at neither."""
        begun, starts, last = loop.begun, loop.starts, loop.last
        tokens, at = self.draws.tokens, jnp.arange(self.draws.tokens.shape[1])[None]
        there = at < jnp.minimum(last, self.counts)[:, None]
        stop = _is_stop(tokens, loop.stops) & there & (at >= starts[:, None])
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
