"""The decoder, compiled as two programs per shape: prefill each prompt once for its group, then decode in slots.

`prefill` runs the model on the prompts and samples the first token of every response. `decode` lets the responses queue
for slots: a slot whose response has ended takes the next one in the same step, so that no slot waits for the longest
response. Once the queue is empty and half of the slots are idle, the others move together and decoding continues with
half as many. Under a mesh both programs are sharded over the batch axes, and shards that share no experts stop
independently.

Every response has its own key, so its tokens depend neither on the batch around it nor on its slot.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from gspo_jax.errors import UserError
from gspo_jax.kernels.kv import each
from gspo_jax.kernels.packed_attention import Spans
from gspo_jax.models import moe
from gspo_jax.models.cache import CacheDtype, heads_first
from gspo_jax.models.transformer import Transformer
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.mesh import constrain
from gspo_jax.rollout.loop import Prefilled, PrefilledKV, SampledTokens, length_mask, token_keys
from gspo_jax.rollout.precision import Precision, rounded
from gspo_jax.rollout.prefixes import PackedPrefix
from gspo_jax.rollout.sampling import SamplingParams, StopRule, draw
from gspo_jax.rollout.shard import Decoded, advance, begin, finish, make_loop, shrink
from gspo_jax.types import Prompts, RouterRecord, Weights

ROWS = PartitionSpec(mesh_lib.BATCH_AXES)


def prefilled_specs(prefix: PackedPrefix | None, heads: str | None = None) -> Any:
    """Partition specs of a `Prefilled` on a mesh, one per field; `prefix` says whether it has prefixes.

    `heads` is the mesh axis of the heads of keys and values; without it, the specs have the axes of the batch alone.
    """
    batch = mesh_lib.BATCH_AXES

    def kv(*rows: Any) -> Any:
        specs: Any = *(PartitionSpec(*rows, heads),) * 2, ROWS
        return PrefilledKV(*specs)

    prefixes = (None, None) if prefix is None else (ROWS, kv(batch, None))
    specs: Any = ROWS, prefixes[0], kv(None, batch), prefixes[1], ROWS
    return Prefilled(*specs)


def response_keys(key: Key[Array, ""], responses: Int[Array, " B"]) -> Key[Array, " B"]:
    """One key per response, a function of `key` and the response's number alone. Consumes `key`."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, responses)


def generate(
    graph: nnx.GraphDef[Transformer],
    weights: Weights,
    prompts: Prompts,
    keys: Key[Array, " B"],
    *,
    sampling: SamplingParams,
    stop: StopRule,
    slots: int | None = None,
    limits: Int[Array, " B"] | None = None,
    prefix: PackedPrefix | None = None,
    min_ended: float = 1.0,
    router_logprobs: bool = False,
    cache_dtype: CacheDtype | None = None,
) -> Decoded:
    """Sample a group of G = B / P responses to each of P prompts.

    Args:
      graph: the model's graph definition.
      weights: the model's parameters, in the sampler's layout and dtype.
      prompts: [P, S], right-padded.
      keys: one per response, those of a group adjacent; token t of a response is sampled with `fold_in(key, t)`.
      sampling: temperature, top-k, top-p and min-p.
      stop: when a response ends.
      slots: responses decoded at a time, over all devices; None: all.
      limits: token limit of each response, at most `stop.max_length` and including its prefix; a response with limit 0
        is left empty. None: `stop.max_length` for all.
      prefix: tokens that the responses start with, see `prefixes.pack`; None: none.
      min_ended: share of a shard's responses after whose end to return, of those with a limit above 0; 1: all of them.
      router_logprobs: also return the router's log-probs of the experts it chose.
      cache_dtype: what keys and values are stored in; None: the dtype that the model computes in.

    Raises:
      UserError: `slots` is not in 1..B, or is not divisible by the number of batch shards.
    """
    slots = resolve_slots(slots, keys.shape[0])
    options: Any = {"sampling": sampling, "router_logprobs": router_logprobs, "cache_dtype": cache_dtype}
    prefilled = prefill(graph, weights, prompts, keys, prefix, **options)
    return decode(
        graph, weights, prefilled, keys, limits, sampling=sampling, stop=stop, slots=slots, min_ended=min_ended
    )


def resolve_slots(slots: int | None, responses: int) -> int:
    """The number of slots: `slots` after checks, or one per response for None.

    Raises:
      UserError: `slots` is not in 1..`responses`, or is not divisible by the number of batch shards of the mesh in
        scope.
    """
    if slots is None:
        return responses
    if not 0 < slots <= responses:
        raise UserError(f"{slots} slots for {responses} responses; use 1 to {responses}, or None for all of them")
    mesh_lib.check_divides("the number of slots", slots, "the shards of a batch", batch_shards())
    return slots


def most_steps(responses: int, slots: int, stop: StopRule) -> int:
    """An upper bound of the steps of a decode."""
    return stop.max_length if slots == responses else (responses * stop.max_length) // slots + stop.max_length


def batch_shards() -> int:
    """Number of shards that the mesh in scope splits a batch into."""
    return mesh_lib.batch_shards(dict(jax.sharding.get_abstract_mesh().shape)) if mesh_lib.has_mesh() else 1


def shard_over_batch(
    run: Callable[..., Any], weights: Weights, args: tuple[Any, ...], *, in_specs: Any, out_specs: Any
) -> Any:
    """Call `run(weights, *args)` per batch shard, on its part of `args` and its own experts.

    `in_specs` and `out_specs` describe `args` and the result. The `tensor` axis is left to the compiler.
    """
    if not mesh_lib.has_mesh():
        return run(weights, *args)
    axes = set(mesh_lib.BATCH_AXES)
    automatic = set(mesh_lib.AXES) - axes
    specs = mesh_lib.param_specs(weights, mesh_lib.SAMPLER, jax.sharding.get_abstract_mesh().shape)
    specs = jax.tree.map(lambda s: mesh_lib.without_axes(s, automatic), specs)
    # check_vma would take the loop's initial state, which is constant, for values that never vary over shards.
    options = {"in_specs": (specs, *in_specs), "out_specs": out_specs, "axis_names": axes, "check_vma": False}
    return jax.shard_map(run, **options)(weights, *args)


@partial(jax.jit, static_argnames=("graph", "sampling", "router_logprobs", "cache_dtype"))
def prefill(
    graph: nnx.GraphDef[Transformer],
    weights: Weights,
    prompts: Prompts,
    keys: Key[Array, " B"],
    prefix: PackedPrefix | None = None,
    *,
    sampling: SamplingParams,
    router_logprobs: bool = False,
    cache_dtype: CacheDtype | None = None,
) -> Prefilled:
    """Run the model on prompts and rows of prefixes, and sample the next token of each response; see `generate`."""
    run = partial(_prefill, graph, sampling=sampling, router_logprobs=router_logprobs, cache_dtype=cache_dtype)
    args = prompts, keys, prefix
    return shard_over_batch(run, weights, args, in_specs=(ROWS,) * 3, out_specs=prefilled_specs(prefix))


def _prefill(
    graph: nnx.GraphDef[Transformer],
    weights: Weights,
    prompts: Prompts,
    keys: Key[Array, " B"],
    prefix: PackedPrefix | None,
    *,
    sampling: SamplingParams,
    router_logprobs: bool,
    cache_dtype: CacheDtype | None,
) -> Prefilled:
    """The part of one batch shard."""
    model = weights.model(graph)
    (P, S), B = prompts.tokens.shape, keys.shape[0]
    record = partial(moe.record, config=model.config, logprobs=router_logprobs)
    valid = length_mask(prompts.lengths, S)
    output, (k, v) = model.prefill(prompts.tokens, valid, cache_dtype=cache_dtype)
    last = jnp.take_along_axis(output.hidden, prompts.lengths[:, None, None] - 1, axis=1)
    prompt_kv = PrefilledKV(heads_first(k), heads_first(v), record(output.routes, valid))
    lengths, prefix_kv = jnp.zeros(B, jnp.int32), None
    if prefix is not None:
        lengths = prefix.lengths
        last = jnp.repeat(last[:, 0], B // P, axis=0)
        last, prefix_kv = _prefill_rows(model, prefix, last, record, cache_dtype)
        last = last.reshape(P, B // P, -1)
    logits = dataclasses.replace(output, hidden=last).logits
    logits = constrain(jnp.repeat(logits, B // P // logits.shape[1], axis=1).reshape(B, -1), "batch", "vocab")
    first = SampledTokens(*draw(token_keys(keys, lengths), logits, sampling))
    return Prefilled(prompts, prefix, prompt_kv, prefix_kv, first)


def _prefill_rows(
    model: Transformer,
    prefix: PackedPrefix,
    last: Float[Array, "B D"],
    record: Callable[..., RouterRecord],
    cache_dtype: CacheDtype | None,
) -> tuple[Float[Array, "B D"], PrefilledKV]:
    """Run the model on one row of prefixes after the other.

    Returns:
      The hidden state at the end of each prefix, `last` for a response without one, and the rows' cache entries.
    """
    ends = prefix.start + prefix.lengths - 1

    def one(last: Array, xs: tuple[Array, Array, Spans]) -> tuple[Array, PrefilledKV]:
        number, tokens, spans = xs
        output, kv = model.prefill(tokens, spans=spans, cache_dtype=cache_dtype)
        here = (prefix.row == number) & (prefix.lengths > 0)
        last = jnp.where(here[:, None], output.hidden[0].at[ends].get(mode="clip"), last)
        routes = jax.tree.map(lambda r: r[0], record(output.routes, spans.valid))
        k, v = (each(lambda x: x[:, 0], heads_first(own)) for own in kv)
        return last, PrefilledKV(k, v, routes)

    rows = jax.tree.map(lambda x: x[:, None], (prefix.tokens, prefix.spans))
    return jax.lax.scan(one, last, (jnp.arange(len(prefix.tokens)), *rows))


@partial(jax.jit, static_argnames=("graph", "sampling", "stop", "slots", "min_ended", "prompt_length"))
def decode(
    graph: nnx.GraphDef[Transformer],
    weights: Weights,
    prefilled: Prefilled,
    keys: Key[Array, " B"],
    limits: Int[Array, " B"] | None = None,
    *,
    sampling: SamplingParams,
    stop: StopRule,
    slots: int,
    min_ended: float = 1.0,
    prompt_length: int | None = None,
) -> Decoded:
    """Decode prefilled responses until every one has ended, or enough of them; see `generate` for the arguments.

    Prompts and their routes are padded to `prompt_length` in the result; None leaves them as they are.
    """
    shards = batch_shards()
    run = partial(
        _decode,
        graph,
        sampling=sampling,
        stop=stop,
        slots=slots // shards,
        min_ended=min_ended,
        prompt_length=prompt_length or prefilled.prompts.tokens.shape[1],
    )
    in_specs = prefilled_specs(prefilled.prefix), ROWS, ROWS
    return shard_over_batch(run, weights, (prefilled, keys, limits), in_specs=in_specs, out_specs=ROWS)


def _decode(
    graph: nnx.GraphDef[Transformer],
    weights: Weights,
    prefilled: Prefilled,
    keys: Key[Array, " n"],
    limits: Int[Array, " n"] | None,
    *,
    prompt_length: int,
    **options: Any,
) -> Decoded:
    """The part of one batch shard; `options` are those of `make_loop`."""
    loop, slot_counts = make_loop(graph, weights, prefilled, keys, limits, **options)
    progress = begin(loop)
    for phase in range(len(slot_counts)):
        progress = shrink(loop, slot_counts, progress, phase) if phase else progress
        progress = advance(loop, slot_counts, progress, phase)
    return finish(loop, progress, prompt_length)


def make_reshard(
    shapes: Weights, mesh: Mesh, dtype: DTypeLike, precision: Precision | None = None
) -> Callable[[Weights], Weights]:
    """A jitted function that casts the trainer's weights to `dtype` and reshards them to the sampler's layout.

    Parameters declared `float32` (norms, router) and int8 ones keep their dtype, which the forward pass expects; the
    others are rounded to `precision` first, if it is given. Layers are converted one at a time: all at once, they would
    be gathered into a second copy of the weights first.
    """
    variables = jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, nnx.Variable))
    adapters = {i for i, v in enumerate(variables) if isinstance(v, nnx.LoRAParam)}
    dtypes = [v.dtype if v.get_metadata("float32") or v.dtype == jnp.int8 else dtype for v in variables]
    stacked = [i for i, v in enumerate(variables) if v.get_metadata("axes")[0] == "layers"]
    specs = jax.tree.leaves(mesh_lib.param_specs(shapes, mesh_lib.SAMPLER, mesh.shape))
    layer_shardings = {i: NamedSharding(mesh, PartitionSpec(*specs[i][1:])) for i in stacked}

    def convert(i: int, x: Array) -> Array:
        # Adapters are not rounded, as in rollout engines, which quantise a base alone.
        if precision is not None and not (variables[i].get_metadata("float32") or i in adapters):
            # Matrices are [input, output], but for the embedding, whose rows are its outputs.
            x = rounded(x, precision, inputs=-1 if variables[i].get_metadata("axes")[0] == "vocab" else -2)
        return x.astype(dtypes[i])

    def layer(own: list[int], slices: list[Array]) -> list[Array]:
        cast = [convert(i, x) for i, x in zip(own, slices, strict=True)]
        return [jax.lax.with_sharding_constraint(x, layer_shardings[i]) for i, x in zip(own, cast, strict=True)]

    def reshard(weights: Weights) -> Weights:
        leaves, tree = jax.tree.flatten(weights)
        converted = {}
        for layers in {leaves[i].shape[0]: None for i in stacked}:  # stacks of the same number of layers share a loop
            own = [i for i in stacked if leaves[i].shape[0] == layers]
            converted |= zip(own, jax.lax.map(partial(layer, own), [leaves[i] for i in own]), strict=True)
        converted |= {i: convert(i, x) for i, x in enumerate(leaves) if i not in converted}
        return jax.tree.unflatten(tree, [converted[i] for i in range(len(leaves))])

    return jax.jit(reshard, out_shardings=mesh_lib.param_shardings(shapes, mesh, mesh_lib.SAMPLER))
