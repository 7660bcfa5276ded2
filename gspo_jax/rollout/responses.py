"""Responses of a shard as the decode loop samples them, and cut into a `Rollout`."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, Shaped

from gspo_jax.rollout.prefilled import Prefilled, flatten_routes, length_mask
from gspo_jax.rollout.sampling import SampledTokens, StopRule, is_eos
from gspo_jax.types import KeptRecord, Rollout, RouterRecord

BLOCK = 32
"""Tokens whose routes are written together: rows of a TPU's tile of int8, which it cannot write in part."""


@struct.dataclass
class StepLog:
    """Sampled tokens and routes of the newest steps, by row (step) and column (slot)."""

    sampled: SampledTokens
    """[rows, B]."""
    routes: RouterRecord
    """Routes of the tokens fed in the step, [rows, B, L·K]; see `flatten_routes`."""
    taken: Bool[Array, "rows B"] | None = None
    """True where a row's token is the response's; None: in all rows since the slot took its response."""

    def of_slot(self, rows: Array, slot: Array) -> tuple[SampledTokens, RouterRecord, Array]:
        """Return a slot's own tokens and routes, in order and first of all, and how many the first `rows` rows have."""
        own = jax.tree.map(lambda x: x[:, slot], (self.sampled, self.routes))
        if self.taken is None:
            return *own, rows
        taken = self.taken[:, slot] & (jnp.arange(len(self.taken)) < rows)
        order = jnp.argsort(~taken, stable=True)
        return *jax.tree.map(lambda x: x[order], own), taken.sum(dtype=jnp.int32)


@struct.dataclass
class ResponseBuffer:
    """The n responses of a shard, in their own order, with room for the rows of a log past the longest.

    Undefined past their lengths.
    """

    sampled: SampledTokens
    """[n, M], kept ids [n, K, M]: TPUs pad the last dimension to 128. Prefixes have log-probs 0."""
    routes: RouterRecord
    """Routes of tokens fed to the model, [n, M / BLOCK, BLOCK, L·K]."""
    lengths: Int[Array, " n"]

    @classmethod
    def start(cls, prefilled: Prefilled, max_length: int, rows: int) -> "ResponseBuffer":
        """Start with each response's prefix and first sampled token; `rows` of the log are whole blocks."""
        prefix_lengths, size = prefilled.prefix_lengths, _in_blocks(max_length) + rows + BLOCK
        is_first = jnp.arange(size)[None] == prefix_lengths[:, None]

        def begun(d: Array) -> Array:
            """[n, …] -> [n, …, M]."""
            return jnp.where(jnp.expand_dims(is_first, range(1, d.ndim)), d[..., None], jnp.zeros((), d.dtype))

        sampled = jax.tree.map(begun, prefilled.first)
        prefix, prefix_kv = prefilled.prefix, prefilled.prefix_kv
        if prefix is None or prefix_kv is None:
            blocks = len(prefix_lengths), size // BLOCK, BLOCK
            routes = jax.tree.map(
                lambda r: jnp.zeros((*blocks, r.shape[-2] * r.shape[-1]), r.dtype), prefilled.prompt_kv.routes
            )
            return cls(sampled, routes, prefix_lengths + 1)

        def of_prefixes(x: Array) -> Array:
            """[R, N, …] -> [n, M, …], one response at a time."""
            padded = jnp.pad(x, ((0, 0), (0, size), *((0, 0),) * (x.ndim - 2)))
            nowhere, shape = (0,) * (x.ndim - 2), (1, size, *x.shape[2:])
            places = prefix.row, prefix.start
            return jax.lax.map(lambda at: jax.lax.dynamic_slice(padded, (*at, *nowhere), shape)[0], places)

        tokens = of_prefixes(prefix.tokens)
        tokens = jnp.where(length_mask(prefix_lengths, size), tokens, sampled.tokens)
        routes = jax.tree.map(lambda r: _blocks(of_prefixes(flatten_routes(r))), prefix_kv.routes)
        return cls(sampled._replace(tokens=tokens), routes, prefix_lengths + 1)

    def add(
        self, log: StepLog, rows: Array, slot: Array, response: Array, length: Array, prefix_length: Array
    ) -> "ResponseBuffer":
        """Copy in what the first `rows` rows of the log have of a slot's response, which is `length` tokens long.

        Of N own rows, row r has the token `length - N + r`, and the routes of the one before, which was fed for it.
        """
        sampled, routes, rows = log.of_slot(rows, slot)

        def put(old: Array, own: Array) -> Array:
            """Copy from the first token that was not sampled earlier on. What follows the last is undefined."""
            size, nowhere, own = len(own), (0,) * (own.ndim - 1), jnp.moveaxis(own, 0, -1)
            first = jnp.maximum(length - rows, prefix_length + 1)
            padded = jnp.pad(own, [(0, 0)] * len(nowhere) + [(0, size)])
            own = jax.lax.dynamic_slice(padded, (*nowhere, first - (length - rows)), own.shape)
            return jax.lax.dynamic_update_slice(old, own[None], (response, *nowhere, first))

        def put_blocks(old: Array, own: Array) -> Array:
            size = len(own) + BLOCK
            first = jnp.maximum(length - rows - 1, prefix_length)
            block = first // BLOCK
            padded = jnp.pad(own, ((BLOCK, size), (0, 0)))
            own = jax.lax.dynamic_slice_in_dim(padded, block * BLOCK - (length - rows - 1) + BLOCK, size)
            at, shape = (response, block, 0, 0), (1, size // BLOCK, BLOCK, own.shape[1])
            is_new = (block * BLOCK + jnp.arange(size) >= first)[:, None]
            merged = jnp.where(is_new, own, jax.lax.dynamic_slice(old, at, shape).reshape(own.shape))
            return jax.lax.dynamic_update_slice(old, merged.reshape(shape), at)

        return ResponseBuffer(
            jax.tree.map(put, self.sampled, sampled),
            jax.tree.map(put_blocks, self.routes, routes),
            jax.lax.dynamic_update_index_in_dim(self.lengths, length, response, 0),
        )

    def rollout(
        self, prefilled: Prefilled, limits: Int[Array, " n"], stop: StopRule, *, prompt_length: int
    ) -> tuple[Rollout, Bool[Array, " n"]]:
        """Cut each response at its token limit or at the first EOS after its prefix.

        Also returns True for each response that reached neither.
        """
        T, prefix_lengths = stop.max_length, prefilled.prefix_lengths
        sampled = jax.tree.map(lambda x: x[..., :T], self.sampled)
        fed = jax.tree.map(lambda x: x.reshape(len(x), x.shape[1] * BLOCK, x.shape[-1])[:, :T], self.routes)
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

        prompt_routes, kept = prefilled.prompt_kv.routes, sampled.kept
        if kept is not None:
            ids, logprobs = (jnp.swapaxes(x, 1, 2) for x in (kept.ids, kept.logprobs))
            own = action_mask[..., None]
            kept = KeptRecord(jnp.where(own, ids, -1), jnp.where(own, logprobs, 0), kept.whole & action_mask)
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
            kept=kept,
        )
        return rollout, ~stopped & ~rollout.truncated


def log_rows(max_length: int, most: int) -> int:
    """Return the rows of a log for responses of `max_length` tokens, at most `most`, in whole blocks."""
    return min(most, _in_blocks(max_length))


def _in_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK


def _blocks(x: Shaped[Array, "n M X"]) -> Shaped[Array, "n B b X"]:
    return x.reshape(len(x), x.shape[1] // BLOCK, BLOCK, x.shape[-1])
