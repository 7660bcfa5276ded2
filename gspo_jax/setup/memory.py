"""Memory that sampling takes on each chip, and the pool of keys and values that it leaves room for."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from gspo_jax.errors import UserError
from gspo_jax.kernels.kv import head_bytes
from gspo_jax.models.config import ModelConfig
from gspo_jax.parallel.mesh import batch_shards, head_axis
from gspo_jax.rollout import prefixes
from gspo_jax.rollout.pages import Pool, whole_pool
from gspo_jax.setup import learning

HEADROOM = 0.08
"""Share of a chip's memory that a pool of the default size leaves free."""
MOST_PREFIXES = 1.15
"""Tokens of prefixes that a shard of a shared pool continues, at most, as a multiple of the pool's."""
_RECORDS = 1.5
"""Copies of a response's tokens and routes at a decode's peak."""
_STATES = 1.5
"""Copies of a slot's states at a decode's peak."""
_MARGIN = 1.1
"""Memory of a pool over its keys and values, for log and buffers."""


def token_bytes(config: ConfigDict, model: ModelConfig, sampler: Mapping[str, int]) -> int:
    """Return a token's KV bytes on each chip that shares them. `sampler`: its mesh's axis sizes."""
    cached = config.sampling.cache_dtype
    layers, heads, *widths = model.cached
    dtype = cached or jnp.dtype(config.model.dtype)
    one = sum(head_bytes(width, dtype, scaled=bool(cached)) for width in widths if width)
    return layers * (heads // sampler["tensor"] if head_axis(heads) else heads) * one


def state_bytes(config: ConfigDict, model: ModelConfig, sampler: Mapping[str, int]) -> int:
    """Return the bytes of a text's states in all layers that keep one, on each chip that shares their heads."""
    found = 0
    for stack in model.stacks:
        if stack.state is not None:
            shapes = jax.tree.leaves(stack.state(model, jnp.dtype(config.model.dtype)))
            found += stack.layers * sum(math.prod(x.shape) * x.dtype.itemsize for x in shapes)
    return found // sampler["tensor"]


def prefix_rows(config: ConfigDict, slots: int, pool: Pool) -> tuple[int, int]:
    """Return expected prefix rows per batch shard, and tokens per row.

    Slots with pages of their own are half full on average, a shared pool is full, and some responses are set aside.
    """
    longest = config.sampling.max_response_length
    share = 0.5 if pool.is_whole(slots, longest) else MOST_PREFIXES
    width = prefixes.row_tokens(config.data.max_prompt_length, longest)
    return prefixes.few(-(-round(share * pool.pages * pool.columns) // width)), width


def sampling_bytes(config: ConfigDict, model: ModelConfig, sampler: Mapping[str, int], slots: int, pool: Pool) -> float:
    """Return the estimated bytes per chip that `slots` add to a decode: pool, states, prefixes, records of responses.

    The slots that are left when half have become idle get copies of their states.
    """
    prompts = config.sampling.partial.prompts or config.data.prompts_per_batch
    responses = prompts * config.sampling.group_size // batch_shards(dict(sampler))
    tokens = _MARGIN * pool.pages * pool.columns
    states = _STATES * slots
    if config.sampling.partial.prompts is not None:
        rows, width = prefix_rows(config, slots, pool)
        tokens += rows * width
        states += slots  # most prefixes are of responses that were in a slot
    logprobs = 4 if learning.keeps_router_logprobs(config, model) else 0
    record = math.prod(model.route_shape) * (model.expert_dtype.itemsize + logprobs) + 12 + 8 * config.sampling.keep_top
    kept = _RECORDS * responses * config.sampling.max_response_length * record
    return tokens * token_bytes(config, model, sampler) + states * state_bytes(config, model, sampler) + kept


def default_pool(
    config: ConfigDict,
    model: ModelConfig,
    sampler: Mapping[str, int],
    slots: int,
    columns: int,
    *,
    memory: int,
    beside: int,
) -> int | None:
    """Return the tokens of the largest pool, over all devices, that a chip's memory is estimated to have room for.

    At least those of one response. None if there is room for `slots` responses of full length.

    Args:
      columns: tokens per page.
      memory: bytes of a chip.
      beside: bytes that it holds while sampling, beside what slots add.

    Raises:
      UserError: not even one response's keys and values fit.
    """
    longest, shards = config.sampling.max_response_length, batch_shards(dict(sampler))
    whole = whole_pool(slots, longest, columns)

    def fits(pages: int) -> bool:
        used = sampling_bytes(config, model, sampler, slots, Pool(columns, pages))
        return used + beside <= (1 - HEADROOM) * memory

    if fits(whole.pages):
        return None
    one = whole.per_response(longest)
    needed = one * columns * token_bytes(config, model, sampler)
    if needed > memory - beside:
        taught = bool(config.teacher.folder)
        raise UserError(
            f"keys and values of one response of {longest} tokens, sampling.max_response_length, take "
            f"{needed / 1e9:.1f} GB, and weights, {'teacher, ' * taught}optimizer and prompts leave "
            f"{max(memory - beside, 0) / 1e9:.1f} of {memory / 1e9:.1f} GB; lower it, or use more chips"
            f"{', or a teacher.dtype of int8' * (taught and config.teacher.dtype != 'int8')}"
        )
    low, high = one, whole.pages
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * columns * shards
