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
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, Key

from gspo_jax.models import moe
from gspo_jax.models.cache import heads_first
from gspo_jax.models.transformer import Transformer
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.mesh import constrain
from gspo_jax.rollout.loop import Draws, Found, Loop, Prefilled, Prefix, Read, at_token, is_stop, leading
from gspo_jax.rollout.sampling import Sampling, draw
from gspo_jax.types import Prompts, Rollout, UserError

_SHRINKS, _FEWEST = 3, 4
"""How often the slots are halved towards the end, each time with code of its own, and the fewest that are left."""


_ROWS = PartitionSpec(mesh_lib.BATCH_AXES)
_READ: Any = Read(*cast(Any, (*(PartitionSpec(None, mesh_lib.BATCH_AXES),) * 2, _ROWS)))


def layout(prefix: Prefix | None) -> Any:
    """The specs of a Prefilled on a mesh, by its fields."""
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
    whole = mesh_lib.param_specs(params, mesh_lib.SAMPLER, jax.sharding.get_abstract_mesh().shape)
    specs = jax.tree.map(lambda s: mesh_lib.without_axes(s, rest), whole)
    # The loop's state begins as constants, alike on all shards until the first step: nothing to be checked.
    cut = {"in_specs": (specs, *inside), "out_specs": out, "axis_names": axes, "check_vma": False}
    return jax.shard_map(run, **cut)(params, *args)


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
    return _over_batch(run, params, (prompts, keys, prefix), inside=(_ROWS,) * 3, out=layout(prefix))


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
    tokens, valid = prompts.tokens, leading(prompts.lengths, S)
    last, drawn = prompts.lengths[:, None] - 1, jnp.zeros(B, jnp.int32)
    if prefix is not None:  # a prompt and then the prefixes of its group, each of which sees the prompt and itself
        Q, drawn = prefix.tokens.shape[1], prefix.lengths
        tokens = jnp.concatenate([tokens, prefix.tokens.reshape(P, -1)], axis=1)
        valid = jnp.concatenate([valid, leading(prefix.lengths, Q).reshape(P, -1)], axis=1)
        ends = S + jnp.arange(group_size)[None] * Q + prefix.lengths.reshape(P, group_size) - 1
        last = jnp.where(prefix.lengths.reshape(P, group_size) > 0, ends, last)
    output, (k, v) = model.prefill(tokens, valid, prompt=S, responses=group_size if prefix is not None else 1)
    hidden = jnp.take_along_axis(output.hidden, last[..., None], axis=1)
    logits = dataclasses.replace(output, hidden=hidden).logits
    logits = constrain(jnp.repeat(logits, B // P // logits.shape[1], axis=1).reshape(B, -1), "batch", "vocab")
    first = Draws(*draw(at_token(keys, drawn), logits, sampling))
    routes = moe.record(output.routes, valid, model.config, logprobs=router_logprobs)

    def own(x: Array) -> Array:
        """[P, S + G Q, ...] -> [B, Q, ...]."""
        return x[:, S:].reshape(B, -1, *x.shape[2:])

    of_prompts = Read(heads_first(k[:, :, :S]), heads_first(v[:, :, :S]), jax.tree.map(lambda r: r[:, :S], routes))
    if prefix is None:
        return Prefilled(prompts, None, of_prompts, None, first)
    of_prefix = Read(heads_first(jax.vmap(own)(k)), heads_first(jax.vmap(own)(v)), jax.tree.map(own, routes))
    return Prefilled(prompts, prefix, of_prompts, of_prefix, first)


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
    inside = (layout(begun.prefix), *(_ROWS,) * 3)
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
    ended = is_stop(begun.first.tokens, stops) | (starts + 1 >= last)
    queue, waiting = jnp.arange(n, dtype=jnp.int32), jnp.full((), n, jnp.int32)
    if slots < n:  # those that have ended get no slot
        queue = jnp.lexsort((queue if priorities is None else priorities, ended)).astype(jnp.int32)
        waiting = n - ended.sum(dtype=jnp.int32)
    loop = Loop(
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
    state, found, place_of = loop.begin(ended), Found.of(begun, starts, length), jnp.argsort(queue)
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


def to_sampler(shapes: nnx.State, mesh: Mesh, dtype: DTypeLike) -> Callable[[nnx.State], nnx.State]:
    """A compiled program that casts the trainer's weights and lays them out for sampling.

    Parameters declared `float32` (norms, router) keep their dtype: the forward reads them so. Layers go one after the
    other: all together would be gathered into a second copy of the weights first.
    """
    variables = jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, nnx.Variable))
    dtypes = [jnp.float32 if v.get_metadata("float32") else dtype for v in variables]
    stacked = [i for i, v in enumerate(variables) if v.get_metadata("axes")[0] == "layers"]
    specs = {i: mesh_lib.spec(variables[i].get_metadata("axes")[1:], mesh_lib.SAMPLER) for i in stacked}
    of_layer = {i: NamedSharding(mesh, spec) for i, spec in specs.items()}

    def layer(own: list[int], slices: list[Array]) -> list[Array]:
        cast = [x.astype(dtypes[i]) for i, x in zip(own, slices, strict=True)]
        return [jax.lax.with_sharding_constraint(x, of_layer[i]) for i, x in zip(own, cast, strict=True)]

    def reshard(params: nnx.State) -> nnx.State:
        leaves, tree = jax.tree.flatten(params)
        done = {}
        for layers in {leaves[i].shape[0]: None for i in stacked}:  # stacks of as many layers go together
            own = [i for i in stacked if leaves[i].shape[0] == layers]
            done |= zip(own, jax.lax.map(partial(layer, own), [leaves[i] for i in own]), strict=True)
        return jax.tree.unflatten(tree, [done.get(i, x.astype(dtypes[i])) for i, x in enumerate(leaves)])

    return jax.jit(reshard, out_shardings=mesh_lib.param_shardings(shapes, mesh, mesh_lib.SAMPLER))
