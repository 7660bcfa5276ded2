"""Responses assembled from the decode loop's logs, phase by phase, and cut into a `Rollout`."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from gspo_jax.rollout.loop import (
    DecodeLoop,
    LoopState,
    Prefilled,
    SampledTokens,
    flatten_routes,
    is_eos,
    length_mask,
)
from gspo_jax.types import Rollout, RouterRecord


@struct.dataclass
class ResponseBuffer:
    """The n responses of a shard, in their own order; undefined past their ends."""

    sampled: SampledTokens
    """[n, T]; prefixes have log-probs 0."""
    routes: RouterRecord
    """Routes of tokens fed to the model, [n, T, L·K]."""
    lengths: Int[Array, " n"]
    """May exceed an ended response's length until it is cut."""

    @classmethod
    def start(cls, prefilled: Prefilled, prefix_lengths: Int[Array, " n"], max_length: int) -> "ResponseBuffer":
        """Start with each response's prefix and first sampled token."""
        is_first = jnp.arange(max_length)[None] == prefix_lengths[:, None]
        sampled = jax.tree.map(lambda d: jnp.where(is_first, d[:, None], jnp.zeros((), d.dtype)), prefilled.first)
        prefix, prefix_kv = prefilled.prefix, prefilled.prefix_kv
        if prefix is None or prefix_kv is None:
            routes = jax.tree.map(
                lambda r: jnp.zeros((*is_first.shape, r.shape[-2] * r.shape[-1]), r.dtype), prefilled.prompt_kv.routes
            )
            return cls(sampled, routes, prefix_lengths + 1)

        def of_prefixes(x: Array) -> Array:
            """[R, M, …] -> [n, T, …], one response at a time."""
            padded = jnp.pad(x, ((0, 0), (0, max_length), *((0, 0),) * (x.ndim - 2)))
            nowhere, size = (0,) * (x.ndim - 2), (1, max_length, *x.shape[2:])
            places = prefix.row, prefix.start
            return jax.lax.map(lambda at: jax.lax.dynamic_slice(padded, (*at, *nowhere), size)[0], places)

        tokens = of_prefixes(prefix.tokens)
        tokens = jnp.where(length_mask(prefix_lengths, max_length), tokens, sampled.tokens)
        routes = jax.tree.map(lambda r: of_prefixes(flatten_routes(r)), prefix_kv.routes)
        return cls(sampled._replace(tokens=tokens), routes, prefix_lengths + 1)

    def add_phase(
        self, state: LoopState, position: Int[Array, " n"], prefix_lengths: Int[Array, " n"]
    ) -> "ResponseBuffer":
        """Copy in the tokens and routes of the phase ending in `state`; `position` is each response's in the queue."""
        T, B = self.sampled.tokens.shape[1], state.positions.shape[0]
        at = jnp.arange(T, dtype=jnp.int32)[None]
        row, held = state.first_row[position, None] + at, state.slot[position, None]
        # A token's routes are one row below it, in the step that feeds it.
        sampled_here = (row >= 0) & (row < state.row) & (held < B) & (at > prefix_lengths[:, None])
        fed_here = _has_successor(sampled_here)
        slot = jnp.minimum(held, B - 1)

        def take(old: Array, log: Array, row: Array, here: Array) -> Array:
            new = log[jnp.clip(row, 0, log.shape[0] - 1), slot]
            return jnp.where(here.reshape(here.shape + (1,) * (old.ndim - 2)), new, old)

        return ResponseBuffer(
            jax.tree.map(lambda old, log: take(old, log, row, sampled_here), self.sampled, state.log.sampled),
            jax.tree.map(lambda old, log: take(old, log, row + 1, fed_here), self.routes, state.log.routes),
            jnp.maximum(self.lengths, jnp.where(sampled_here, at + 1, 0).max(axis=1)),
        )

    def rollout(self, loop: DecodeLoop, *, prompt_length: int) -> tuple[Rollout, Bool[Array, " n"]]:
        """Cut each response at its token limit or at the first EOS after its prefix.

        Also returns True for each response that reached neither.
        """
        prefilled, limits, pad_id = loop.prefilled, loop.limits, loop.stop.pad_id
        tokens, at = self.sampled.tokens, jnp.arange(self.sampled.tokens.shape[1])[None]
        available = at < jnp.minimum(limits, self.lengths)[:, None]
        eos = is_eos(tokens, loop.eos_ids) & available & (at >= loop.prefix_lengths[:, None])
        mask = available & (jnp.cumsum(eos, axis=1) - eos == 0)
        stopped = eos.any(axis=1)
        action_mask = mask & (at >= loop.prefix_lengths[:, None])
        P, S = prefilled.prompts.tokens.shape
        padding, group_size = ((0, 0), (0, prompt_length - S)), len(tokens) // P

        def joined(prompt: Array, response: Array, fill: int) -> Array:
            """[P, S, L, K] and [n, T, L·K] -> [n, prompt_length + T, L, K], with `fill` where no token was fed."""
            prompt = jnp.pad(prompt, (*padding, (0, 0), (0, 0)), constant_values=fill)
            response = jnp.where(_has_successor(mask)[..., None], response, fill)
            whole = jnp.concatenate([jnp.repeat(flatten_routes(prompt), group_size, axis=0), response], axis=1)
            return whole.reshape(*whole.shape[:2], *prompt.shape[2:])

        routes, prompt_routes = self.routes, prefilled.prompt_kv.routes
        rollout = Rollout(
            prompts=jnp.repeat(jnp.pad(prefilled.prompts.tokens, padding, constant_values=pad_id), group_size, axis=0),
            prompt_lengths=jnp.repeat(prefilled.prompts.lengths, group_size, axis=0),
            tokens=jnp.where(mask, tokens, pad_id),
            mask=mask,
            action_mask=action_mask,
            truncated=~stopped & (mask.sum(axis=1) == limits),
            behaviour_logprobs=jnp.where(mask, self.sampled.behaviour_logprobs, 0),
            logprobs=jnp.where(mask, self.sampled.logprobs, 0),
            routes=RouterRecord(
                joined(prompt_routes.experts, routes.experts, -1),
                jax.tree.map(partial(joined, fill=0), prompt_routes.logprobs, routes.logprobs),
            ),
        )
        return rollout, ~stopped & ~rollout.truncated


def _has_successor(mask: Bool[Array, "n T"]) -> Bool[Array, "n T"]:
    """True where the next token is in the mask: this token was fed to sample it."""
    return jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))
