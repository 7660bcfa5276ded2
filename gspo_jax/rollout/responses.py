"""Responses of a shard as the decode loop samples them, and cut into a `Rollout`."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from gspo_jax.rollout.prefilled import Prefilled, SampledTokens, flatten_routes, length_mask
from gspo_jax.rollout.sampling import StopRule, is_eos
from gspo_jax.types import Rollout, RouterRecord


@struct.dataclass
class StepLog:
    """Sampled tokens and routes of the newest steps, by row (step) and column (slot)."""

    sampled: SampledTokens
    """[rows, B]."""
    routes: RouterRecord
    """Routes of the tokens fed in the step, [rows, B, L·K]; see `flatten_routes`."""


@struct.dataclass
class ResponseBuffer:
    """The n responses of a shard, in their own order, with room for `rows` tokens past the longest.

    Undefined past their lengths.
    """

    sampled: SampledTokens
    """[n, T + rows]; prefixes have log-probs 0."""
    routes: RouterRecord
    """Routes of tokens fed to the model, [n, T + rows, L·K]."""
    lengths: Int[Array, " n"]

    @classmethod
    def start(cls, prefilled: Prefilled, max_length: int, rows: int) -> "ResponseBuffer":
        """Start with each response's prefix and first sampled token."""
        prefix_lengths, size = prefilled.prefix_lengths, max_length + rows
        is_first = jnp.arange(size)[None] == prefix_lengths[:, None]
        sampled = jax.tree.map(lambda d: jnp.where(is_first, d[:, None], jnp.zeros((), d.dtype)), prefilled.first)
        prefix, prefix_kv = prefilled.prefix, prefilled.prefix_kv
        if prefix is None or prefix_kv is None:
            routes = jax.tree.map(
                lambda r: jnp.zeros((*is_first.shape, r.shape[-2] * r.shape[-1]), r.dtype), prefilled.prompt_kv.routes
            )
            return cls(sampled, routes, prefix_lengths + 1)

        def of_prefixes(x: Array) -> Array:
            """[R, M, …] -> [n, T + rows, …], one response at a time."""
            padded = jnp.pad(x, ((0, 0), (0, size), *((0, 0),) * (x.ndim - 2)))
            nowhere, shape = (0,) * (x.ndim - 2), (1, size, *x.shape[2:])
            places = prefix.row, prefix.start
            return jax.lax.map(lambda at: jax.lax.dynamic_slice(padded, (*at, *nowhere), shape)[0], places)

        tokens = of_prefixes(prefix.tokens)
        tokens = jnp.where(length_mask(prefix_lengths, size), tokens, sampled.tokens)
        routes = jax.tree.map(lambda r: of_prefixes(flatten_routes(r)), prefix_kv.routes)
        return cls(sampled._replace(tokens=tokens), routes, prefix_lengths + 1)

    def add(
        self, log: StepLog, rows: Array, slot: Array, response: Array, length: Array, prefix_length: Array
    ) -> "ResponseBuffer":
        """Copy in what the first `rows` rows of the log have of a slot's response, which is `length` tokens long."""

        def put(old: Array, new: Array, origin: Array, least: Array) -> Array:
            """Copy row r to token origin + r, unless it is below `least`; what follows is undefined."""
            own = new[:, slot]
            first = jnp.maximum(origin, least)
            padded = jnp.pad(own, ((0, len(own)), *((0, 0),) * (own.ndim - 1)))
            own = jax.lax.dynamic_slice_in_dim(padded, first - origin, len(own))
            return jax.lax.dynamic_update_slice(old, own[None], (response, first, *(0,) * (own.ndim - 1)))

        # A token's routes are one row below it, in the step that feeds it.
        sampled = partial(put, origin=length - rows, least=prefix_length + 1)
        routed = partial(put, origin=length - rows - 1, least=prefix_length)
        return ResponseBuffer(
            jax.tree.map(sampled, self.sampled, log.sampled),
            jax.tree.map(routed, self.routes, log.routes),
            jax.lax.dynamic_update_index_in_dim(self.lengths, length, response, 0),
        )

    def rollout(
        self, prefilled: Prefilled, limits: Int[Array, " n"], stop: StopRule, *, prompt_length: int
    ) -> tuple[Rollout, Bool[Array, " n"]]:
        """Cut each response at its token limit or at the first EOS after its prefix.

        Also returns True for each response that reached neither.
        """
        T, prefix_lengths = stop.max_length, prefilled.prefix_lengths
        sampled, fed = (jax.tree.map(lambda x: x[:, :T], kept) for kept in (self.sampled, self.routes))
        tokens, at = sampled.tokens, jnp.arange(T)[None]
        available = at < jnp.minimum(limits, self.lengths)[:, None]
        eos = is_eos(tokens, stop.eos_ids) & available & (at >= prefix_lengths[:, None])
        mask = available & (jnp.cumsum(eos, axis=1) - eos == 0)
        stopped = eos.any(axis=1)
        action_mask = mask & (at >= prefix_lengths[:, None])
        has_successor = jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))  # this token was fed to sample the next
        P, S = prefilled.prompts.tokens.shape
        padding, group_size = ((0, 0), (0, prompt_length - S)), len(tokens) // P

        def joined(prompt: Array, response: Array, fill: int) -> Array:
            """[P, S, L, K] and [n, T, L·K] -> [n, prompt_length + T, L, K], with `fill` where no token was fed."""
            prompt = jnp.pad(prompt, (*padding, (0, 0), (0, 0)), constant_values=fill)
            response = jnp.where(has_successor[..., None], response, fill)
            whole = jnp.concatenate([jnp.repeat(flatten_routes(prompt), group_size, axis=0), response], axis=1)
            return whole.reshape(*whole.shape[:2], *prompt.shape[2:])

        prompt_routes = prefilled.prompt_kv.routes
        rollout = Rollout(
            prompts=jnp.repeat(
                jnp.pad(prefilled.prompts.tokens, padding, constant_values=stop.pad_id), group_size, axis=0
            ),
            prompt_lengths=jnp.repeat(prefilled.prompts.lengths, group_size, axis=0),
            tokens=jnp.where(mask, tokens, stop.pad_id),
            mask=mask,
            action_mask=action_mask,
            truncated=~stopped & (mask.sum(axis=1) == limits),
            behaviour_logprobs=jnp.where(action_mask, sampled.behaviour_logprobs, 0),
            logprobs=jnp.where(action_mask, sampled.logprobs, 0),
            routes=RouterRecord(
                joined(prompt_routes.experts, fed.experts, -1),
                jax.tree.map(partial(joined, fill=0), prompt_routes.logprobs, fed.logprobs),
            ),
        )
        return rollout, ~stopped & ~rollout.truncated
