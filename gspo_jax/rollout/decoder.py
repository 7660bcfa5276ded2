"""The decoder, two compiled programs per shape: `prefill` each prompt once for its group, then `decode` in slots.

A slot with an ended response takes the next one from the queue in the same step. Once the queue is empty and half of
the slots are idle, decoding continues with half as many. Both programs are sharded over the batch axes, and shards that
share no experts stop independently.

A response's tokens depend on its own key, not on the batch around it or its slot.
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

from gspo_jax.kernels.backend import platform
from gspo_jax.kernels.packed_attention import Spans
from gspo_jax.models import moe
from gspo_jax.models.cache import CacheDtype, heads_first
from gspo_jax.models.transformer import Transformer
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.mesh import constrain
from gspo_jax.parallel.rows import ROWS, shards
from gspo_jax.rollout.drafting import NO_DRAFTS, Drafting
from gspo_jax.rollout.loop import Decoded, DecodeLoop
from gspo_jax.rollout.pages import Pool, whole_pool
from gspo_jax.rollout.precision import Precision, rounded
from gspo_jax.rollout.prefilled import Prefilled, PrefilledKV, length_mask
from gspo_jax.rollout.prefixes import PackedPrefix
from gspo_jax.rollout.sampling import SamplingParams, StopRule, draw, token_keys
from gspo_jax.types import Prompts, RouterRecord, Weights

_ROWS = 8
"""Fewest rows of a TPU's matrix product."""


def prefilled_specs(prefix: PackedPrefix | None, heads: str | None = None) -> Any:
    """Return the partition specs of a `Prefilled`, with cached heads on the mesh axis `heads`."""
    batch = mesh_lib.BATCH_AXES

    def kv(*rows: Any, states: tuple[Any, ...]) -> Any:
        specs: Any = *(PartitionSpec(*rows, heads),) * 2, ROWS, PartitionSpec(*states, heads)
        return PrefilledKV(*specs)

    prefixes = (None, None) if prefix is None else (ROWS, kv(batch, None, states=(batch, None, None)))
    specs: Any = ROWS, prefixes[0], kv(None, batch, states=(None, batch)), prefixes[1], ROWS
    return Prefilled(*specs)


def response_keys(key: Key[Array, ""], responses: Int[Array, " B"]) -> Key[Array, " B"]:
    """Return one key per response, depending only on `key` and its number. Consumes `key`."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, responses)


def most_steps(responses: int, slots: int, stop: StopRule) -> int:
    """Return an upper bound on a decode's steps."""
    return stop.max_length if slots == responses else (responses * stop.max_length) // slots + stop.max_length


def shard_over_batch(
    run: Callable[..., Any], weights: Weights, args: tuple[Any, ...], *, in_specs: Any, out_specs: Any
) -> Any:
    """Call `run(weights, *args)` per batch shard, on its part of `args` and its own experts.

    The `tensor` axis is left to the compiler.
    """
    if not mesh_lib.has_mesh():
        return run(weights, *args)
    axes = set(mesh_lib.BATCH_AXES)
    automatic = set(mesh_lib.AXES) - axes
    specs = mesh_lib.param_specs(weights, mesh_lib.SAMPLER, jax.sharding.get_abstract_mesh().shape)
    specs = jax.tree.map(lambda s: mesh_lib.without_axes(s, automatic), specs)
    # check_vma would assume that the constant initial state never varies over shards.
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
    """Prefill prompts and prefixes, and sample each response's next token, for a group of G = B / P per prompt.

    Args:
      weights: in the sampler's layout and dtype.
      prompts: [P, S].
      keys: one per response, a group's adjacent; token t is sampled with `fold_in(key, t)`.
      prefix: see `prefixes.pack`.
      router_logprobs: also return the router's log-probs of chosen experts.
      cache_dtype: defaults to the compute dtype.
    """

    def run(weights: Weights, prompts: Prompts, keys: Key[Array, " B"], prefix: PackedPrefix | None) -> Prefilled:
        model = weights.model(graph)
        (P, S), B = prompts.tokens.shape, keys.shape[0]
        record = partial(moe.record, config=model.config, logprobs=router_logprobs)
        valid = length_mask(prompts.lengths, S)
        output, kept = model.prefill(prompts.tokens, valid, cache_dtype=cache_dtype)
        last = jnp.take_along_axis(output.hidden, prompts.lengths[:, None, None] - 1, axis=1)
        routes = record(output.routes, valid)
        prompt_kv = PrefilledKV(heads_first(kept.k), heads_first(kept.v), routes, kept.states)
        lengths, prefix_kv = jnp.zeros(B, jnp.int32), None
        if prefix is not None:
            lengths = prefix.lengths
            last = jnp.repeat(last[:, 0], B // P, axis=0)
            last, prefix_kv = _prefill_rows(model, prefix, last, record, cache_dtype)
            last = last.reshape(P, B // P, -1)
        # A product with one row would not be the matrix units'. Those of a spread head get the rows of all shards.
        if P < _ROWS and not output.head_is_spread and platform() == "tpu":
            last = jnp.repeat(last, B // P // last.shape[1], axis=1)
        logits = dataclasses.replace(output, hidden=last).logits
        logits = constrain(jnp.repeat(logits, B // P // logits.shape[1], axis=1).reshape(B, -1), "batch", "vocab")
        first = draw(token_keys(keys, lengths), logits, sampling)
        return Prefilled(prompts, prefix, prompt_kv, prefix_kv, first)

    args = prompts, keys, prefix
    return shard_over_batch(run, weights, args, in_specs=(ROWS,) * 3, out_specs=prefilled_specs(prefix))


def _prefill_rows(
    model: Transformer,
    prefix: PackedPrefix,
    last: Float[Array, "B D"],
    record: Callable[..., RouterRecord],
    cache_dtype: CacheDtype | None,
) -> tuple[Float[Array, "B D"], PrefilledKV]:
    """Run the model on rows of prefixes, one at a time.

    Returns each prefix's last hidden state (`last` for an empty one) and the rows' cache entries.
    """
    ends = prefix.start + prefix.lengths - 1

    def one(last: Array, xs: tuple[Array, Array, Spans, Array | None]) -> tuple[Array, PrefilledKV]:
        number, tokens, spans, own = xs
        output, kept = model.prefill(tokens, spans=spans, ends=own, cache_dtype=cache_dtype)
        here = (prefix.row == number) & (prefix.lengths > 0)
        last = jnp.where(here[:, None], output.hidden[0].at[ends].get(mode="clip"), last)
        routes = jax.tree.map(lambda r: r[0], record(output.routes, spans.valid))
        k, v = (heads_first(own) for own in (kept.k, kept.v))
        k, v = jax.tree.map(lambda x: x[:, 0], (k, v))
        return last, PrefilledKV(k, v, routes, kept.states)

    rows = jax.tree.map(lambda x: x[:, None], (prefix.tokens, prefix.spans))
    return jax.lax.scan(one, last, (jnp.arange(len(prefix.tokens)), *rows, prefix.ends))


@partial(
    jax.jit,
    static_argnames=("graph", "sampling", "stop", "slots", "pool", "min_ended", "drafting", "prompt_length"),
)
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
    pool: Pool | None = None,
    min_ended: float = 1.0,
    drafting: Drafting = NO_DRAFTS,
    prompt_length: int | None = None,
) -> Decoded:
    """Decode prefilled responses until all have ended, or enough.

    Args:
      weights, keys, sampling: as in `prefill`.
      limits: token limit of each response, prefix included; 0 leaves it empty.
      slots: responses decoded at a time, over all devices, equally many per batch shard.
      pool: a shard's pages of keys and values; None: enough for all slots.
      min_ended: return once this share of an expert group's responses with a limit above 0 has ended. In pieces
        (`polled`), return after that in which this share of all shards' has.
      drafting: what is drafted. It changes no token.
      prompt_length: to which the result's prompts and routes are padded; defaults to the prompts' own.
    """
    padded = prompt_length or prefilled.prompts.tokens.shape[1]
    own = slots // shards()
    options: Any = {"sampling": sampling, "stop": stop, "slots": own, "min_ended": min_ended}
    options["drafting"] = drafting
    options["pool"] = pool or whole_pool(own, stop.max_length)

    def run(weights: Weights, prefilled: Prefilled, keys: Key[Array, " n"], limits: Int[Array, " n"] | None) -> Decoded:
        loop = DecodeLoop(graph, weights, prefilled, keys, limits, **options)
        return loop.finish(loop.advance(loop.start()), prompt_length=padded)

    in_specs = prefilled_specs(prefilled.prefix), ROWS, ROWS
    return shard_over_batch(run, weights, (prefilled, keys, limits), in_specs=in_specs, out_specs=ROWS)


def make_reshard(
    shapes: Weights, mesh: Mesh, dtype: DTypeLike, precision: Precision | None = None
) -> Callable[[Weights], Weights]:
    """Build a jitted function that casts the trainer's weights to `dtype` and reshards them for the sampler.

    Parameters declared `float32` (norms, router) and int8 ones keep their dtype. Others are first rounded to
    `precision`, if given. Layers are converted one at a time: all at once, they would be gathered into a second copy.
    """
    variables = jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, nnx.Variable))
    adapters = {i for i, v in enumerate(variables) if isinstance(v, nnx.LoRAParam)}
    dtypes = [v.dtype if v.get_metadata("float32") or v.dtype == jnp.int8 else dtype for v in variables]
    stacked = [i for i, v in enumerate(variables) if v.get_metadata("axes")[0] == "layers"]
    specs = jax.tree.leaves(mesh_lib.param_specs(shapes, mesh_lib.SAMPLER, mesh.shape))
    layer_shardings = {i: NamedSharding(mesh, PartitionSpec(*specs[i][1:])) for i in stacked}

    def convert(i: int, x: Array) -> Array:
        # Adapters are not rounded: rollout engines quantise the base alone.
        if precision is not None and not (variables[i].get_metadata("float32") or i in adapters):
            # Matrices are [input, output], except the embedding.
            x = rounded(x, precision, inputs=-1 if variables[i].get_metadata("axes")[0] == "vocab" else -2)
        return x.astype(dtypes[i])

    def layer(own: list[int], slices: list[Array]) -> list[Array]:
        cast = [convert(i, x) for i, x in zip(own, slices, strict=True)]
        return [jax.lax.with_sharding_constraint(x, layer_shardings[i]) for i, x in zip(own, cast, strict=True)]

    def reshard(weights: Weights) -> Weights:
        leaves, tree = jax.tree.flatten(weights)
        converted = {}
        for layers in {leaves[i].shape[0]: None for i in stacked}:  # stacks of equal depth share a loop
            own = [i for i in stacked if leaves[i].shape[0] == layers]
            converted |= zip(own, jax.lax.map(partial(layer, own), [leaves[i] for i in own]), strict=True)
        converted |= {i: convert(i, x) for i, x in enumerate(leaves) if i not in converted}
        return jax.tree.unflatten(tree, [converted[i] for i in range(len(leaves))])

    return jax.jit(reshard, out_shardings=mesh_lib.param_shardings(shapes, mesh, mesh_lib.SAMPLER))
