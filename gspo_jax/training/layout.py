"""Packed rows, as the trainer computes them.

Responses, [B, N, …] for N = S + T positions, map to rows of a forward pass, [R, M, …], and back to tokens, [B, T].
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Shaped

from gspo_jax.kernels.packed_attention import Spans
from gspo_jax.kernels.scopes import at_most
from gspo_jax.models.moe import Routing
from gspo_jax.models.transformer import Output, Remat, Transformer
from gspo_jax.parallel.rows import by_batch_shard, shards, take_rows
from gspo_jax.training.packing import Packing, turns_at_full_length
from gspo_jax.types import Responses

State = TypeVar("State")
Tree = TypeVar("Tree")


@struct.dataclass
class Layout:
    """One row per batch shard, holding prompts, each followed by responses to it.

    The B places are a mini-batch's, B / shards per shard. Places that are empty, or have a response in another row, are
    not live: they get zeros, and their mask is False. Each scored position predicts its own token.
    """

    responses: Responses
    live: Bool[Array, " B"]
    """True where the response is in the row."""
    prompt: Int[Array, " B"]
    """Row offset of the prompt."""
    start: Int[Array, " B"]
    """Row offset of the response."""
    place: Int[Array, "R M"]
    """Place, within the shard, of each position's response, or of the first with this prompt."""
    column: Int[Array, "R M"]
    """Position among that response's N."""
    in_response: Bool[Array, "R M"]
    spans: Spans

    @classmethod
    def of(cls, responses: Responses, packing: Packing, kind: int, turn: Array | int) -> "Layout":
        """Return each shard's row of one micro-batch, from a mini-batch's responses in their places."""
        length = packing.row_lengths[kind]
        lengths, here = responses.mask.sum(axis=1), (packing.kind == kind) & (packing.turn == turn)
        live = here & (packing.responses >= 0) & (lengths > 0)
        responses = dataclasses.replace(responses, mask=responses.mask & live[:, None])
        prompt, start = packing.prompt, packing.start
        find = by_batch_shard(partial(_positions, length=length, prompt_columns=responses.prompts.shape[1]))
        return cls(responses, live, prompt, start, *find(live, prompt, start, responses.prompt_lengths, lengths))

    @property
    def targets(self) -> Int[Array, "R M"]:
        """The token at each scored position."""
        return self.rows(_all_tokens(self.responses))

    @property
    def valid(self) -> Bool[Array, "R M"]:
        """False on padding."""
        return self.spans.valid

    def forward(self, model: Transformer, routing: Routing | None, remat: Remat) -> Output:
        return model(self.targets, spans=self.spans, routing=routing, remat=remat)

    def rows(self, x: Shaped[Array, "B N *rest"]) -> Shaped[Array, "R M *rest"]:
        """Return values at the rows' positions, the first response's for a shared prompt; undefined on padding."""

        def gather(x: Array, place: Array, column: Array) -> Array:
            return x[place[0], column[0]][None]

        return by_batch_shard(gather)(x, self.place, self.column)

    def rows_of_tokens(self, x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "R M *rest"]:
        """Return tokens' values at their own positions; undefined on prompts and padding."""

        def gather(x: Array, place: Array, column: Array) -> Array:
            return x[place[0], jnp.maximum(column[0], 0)][None]

        return by_batch_shard(gather)(x, self.place, self.column - self.responses.prompts.shape[1])

    def whole(self, x: Shaped[Array, "R M *rest"], fill: Any) -> Shaped[Array, "B N *rest"]:
        """Invert `rows`, with `fill` where not live and past the ends of prompt and response."""
        S, T = self.responses.prompts.shape[1], self.responses.tokens.shape[1]

        def cut(x: Array, live: Array, prompt: Array, start: Array, lengths: Array, mask: Array) -> Array:
            in_prompt = (jnp.arange(S)[None] < lengths[:, None]) & live[:, None]
            real = jnp.concatenate([in_prompt, mask], axis=1).reshape(*mask.shape[:1], S + T, *(1,) * (x.ndim - 2))
            found = jnp.concatenate([_slices(x[0], prompt, S), _slices(x[0], start, T)], axis=1)
            return jnp.where(real, found, jnp.asarray(fill, x.dtype))

        r = self.responses
        return by_batch_shard(cut)(x, self.live, self.prompt, self.start, r.prompt_lengths, r.mask)

    def predicting(self, x: Shaped[Array, "R M *rest"]) -> Shaped[Array, "R M *rest"]:
        """Return values at the position that predicts each position's token: the one before, or the prompt's last.

        Undefined on prompts and padding.
        """

        def shift(x: Array, live: Array, prompt: Array, start: Array, lengths: Array) -> Array:
            (row,) = x
            before = jnp.concatenate([row[:1], row[:-1]])
            last = row[jnp.where(live, prompt + lengths - 1, 0)]
            return before.at[jnp.where(live, start, row.shape[0])].set(last, mode="drop")[None]

        return by_batch_shard(shift)(x, self.live, self.prompt, self.start, self.responses.prompt_lengths)

    def scored(self, x: Shaped[Array, "R M *rest"]) -> Shaped[Array, "B T *rest"]:
        """Return tokens' values from scored positions."""
        return self.own(x)

    def own(self, x: Shaped[Array, "R M *rest"]) -> Shaped[Array, "B T *rest"]:
        """Return values at the tokens' own positions; 0 outside the mask."""
        where = self.responses.mask, self.start, self.place, self.column - self.responses.prompts.shape[1]
        return by_batch_shard(_own)(x, *where, self.in_response)


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """Layouts of n micro-batches for one forward pass: a shard's n rows are adjacent, [R n, M]."""

    parts: Sequence[Layout]

    @property
    def targets(self) -> Int[Array, "Rn M"]:
        """The token at each scored position."""
        return _adjacent([part.targets for part in self.parts])

    @property
    def valid(self) -> Bool[Array, "Rn M"]:
        """False on padding."""
        return _adjacent([part.valid for part in self.parts])

    def forward(self, model: Transformer, routing: Routing | None, remat: Remat) -> Output:
        spans = _adjacent([part.spans for part in self.parts])
        return model(self.targets, spans=spans, routing=routing, remat=remat)

    def rows(self, values: Sequence[Tree]) -> Tree:
        """Return values [B, N, …] of each part at the rows' positions, as `Layout.rows`."""
        return _adjacent([jax.tree.map(part.rows, x) for part, x in zip(self.parts, values, strict=True)])

    def rows_of_tokens(self, values: Sequence[Tree]) -> Tree:
        """Return values [B, T, …] of each part at the tokens' own positions, as `Layout.rows_of_tokens`."""
        return _adjacent([jax.tree.map(part.rows_of_tokens, x) for part, x in zip(self.parts, values, strict=True)])

    def whole(self, x: Shaped[Array, "Rn M *rest"], fill: Any) -> Shaped[Array, "n B N *rest"]:
        """Invert `rows`, as `Layout.whole`."""
        return jnp.stack([part.whole(own, fill) for part, own in self._of_parts(x)])

    def predicting(self, x: Shaped[Array, "Rn M *rest"]) -> Shaped[Array, "Rn M *rest"]:
        """Return values at the position that predicts each position's token, as `Layout.predicting`."""
        return _adjacent([part.predicting(own) for part, own in self._of_parts(x)])

    def scored(self, x: Shaped[Array, "Rn M *rest"]) -> Shaped[Array, "n B T *rest"]:
        """Return tokens' values from scored positions."""
        return jnp.stack([part.scored(own) for part, own in self._of_parts(x)])

    def _of_parts(self, x: Shaped[Array, "Rn M *rest"]) -> Iterator[tuple[Layout, Shaped[Array, "R M *rest"]]]:
        apart = x.reshape(-1, len(self.parts), *x.shape[1:])
        return ((part, apart[:, n]) for n, part in enumerate(self.parts))


def _adjacent(trees: Sequence[Tree]) -> Tree:
    """Return arrays [R, …] of n trees as one of [R n, …]."""

    def join(*xs: Array) -> Array:
        return jnp.stack(xs, axis=1).reshape(len(xs) * len(xs[0]), *xs[0].shape[1:])

    return jax.tree.map(join, *trees)


def mask_of_rows(layout: Layout, mask: Bool[Array, "B T"]) -> Bool[Array, "R M"]:
    """Return the mask at the tokens' own positions; False on prompts and padding."""
    nothing = jnp.zeros((mask.shape[0], layout.responses.prompts.shape[1]), bool)
    return layout.rows(jnp.concatenate([nothing, mask], axis=1)) & layout.valid


def predicted(layout: Layout, mask: Bool[Array, "B T"]) -> Float[Array, "R M"]:
    """Return how many of the mask's tokens each position predicts.

    That is one or none, but for the last position of a prompt, which predicts the first token of all its responses.
    """
    _, transposed = jax.vjp(lambda x: layout.scored(layout.predicting(x)), jnp.zeros(layout.valid.shape))
    return transposed(mask.astype(jnp.float32))[0]


def _all_tokens(responses: Responses) -> Int[Array, "B N"]:
    return jnp.concatenate([responses.prompts, responses.tokens], axis=1)


def _positions(
    live: Bool[Array, " B"],
    prompt: Int[Array, " B"],
    start: Int[Array, " B"],
    prompt_lengths: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    length: int,
    prompt_columns: int,
) -> tuple[Array, Array, Array, Spans]:
    at = jnp.arange(length, dtype=jnp.int32)

    def within(first: Array, count: Array) -> Bool[Array, "M B"]:
        return live[None] & (first[None] <= at[:, None]) & (at[:, None] < (first + count)[None])

    own, shared = within(start, lengths), within(prompt, prompt_lengths)
    place = (own | shared).argmax(axis=1).astype(jnp.int32)
    in_response, in_prompt = own.any(axis=1), shared.any(axis=1)
    begin = jnp.where(in_response, start[place], prompt[place])
    valid = in_response | in_prompt
    column = jnp.where(valid, at - begin + prompt_columns * in_response, 0)
    before = jnp.where(in_response, prompt[place], 0)
    spans = Spans(
        prompt_start=before,
        prompt_end=before + jnp.where(in_response, prompt_lengths[place], 0),
        own_start=jnp.where(valid, begin, at + 1),
    )
    return jax.tree.map(lambda x: x[None], (place, column, in_response, spans))


def _slices(row: Shaped[Array, "M *rest"], starts: Int[Array, " B"], length: int) -> Shaped[Array, "B length *rest"]:
    padded = jnp.pad(row, ((0, length), *((0, 0),) * (row.ndim - 1)))
    return jax.vmap(partial(jax.lax.dynamic_slice_in_dim, padded, slice_size=length))(starts)


@jax.custom_vjp
def _own(x: Array, mask: Array, start: Array, place: Array, column: Array, in_response: Array) -> Array:
    """Gather one shard's tokens [B, T, …] from its row [1, M, …]; the gradient is a gather too."""
    del place, column, in_response
    return jnp.where(_like(mask, x), _slices(x[0], start, mask.shape[1]), 0)


def _own_backward(residuals: tuple[Array, ...], grads: Array) -> tuple[Array | None, ...]:
    place, column, in_response = residuals
    return jnp.where(_like(in_response, grads), grads[place, jnp.maximum(column, 0)], 0), None, None, None, None, None


def _like(mask: Bool[Array, "a b"], x: Shaped[Array, "c d *rest"]) -> Bool[Array, "a b ..."]:
    """Return the mask with an axis of one for each of the rest."""
    return mask.reshape(*mask.shape, *(1,) * (x.ndim - 2))


_own.defvjp(lambda x, mask, start, *row: (_own(x, mask, start, *row), row), _own_backward)


def deal(tree: Any, packing: Packing) -> Any:
    """Deal responses' values, [B, …], to a packing's places, [M, Q, …]; empty places get zeros."""
    return take_rows(tree, jnp.asarray(packing.responses))


def collect(values: Shaped[Array, "M Q *rest"], packing: Packing, count: int) -> Shaped[Array, "B *rest"]:
    """Return the values of places, [M, Q, …], in the order of the batch's `count` responses; inverts `deal`."""
    places = jnp.asarray(packing.responses).reshape(-1)
    flat = values.reshape(-1, *values.shape[2:])
    return (
        jnp.zeros((count, *flat.shape[1:]), flat.dtype).at[jnp.where(places < 0, count, places)].set(flat, mode="drop")
    )


def fold_rows(
    add: Callable[[State, Layout], State], state: State, responses: Responses, packing: Packing, *, group_size: int
) -> State:
    """Fold `state = add(state, layout)` over a mini-batch's micro-batches.

    Loops declare the trip counts of full-length responses; the packing sets the actual ones.
    """
    for kind, usual in enumerate(_turns_at_full_length(responses, packing, group_size)):

        def turn(number: Array, state: State, kind: int = kind) -> State:
            return add(state, Layout.of(responses, packing, kind, number))

        with jax.named_scope(at_most(usual)):
            state = jax.lax.fori_loop(0, packing.turns[kind], turn, state)
    return state


def fold_all_rows(
    add: Callable[[State, Int[Array, " n"], SideBySide], State],
    state: State,
    responses: Responses,
    packing: Packing,
    *,
    at_once: int,
    group_size: int,
) -> State:
    """Fold `state = add(state, minibatches, layouts)` over all mini-batches' micro-batches, n = `at_once` at a time.

    `minibatches` has the number of each micro-batch's mini-batch. The last micro-batches may be empty. Trip counts are
    as in `fold_rows`.
    """
    count = packing.turns.shape[0]
    for kind, usual in enumerate(_turns_at_full_length(responses, packing, group_size)):
        turns = jnp.asarray(packing.turns)[:, kind]
        ends = jnp.cumsum(turns)
        begins = ends - turns

        def some(number: Array, state: State, kind: int = kind, ends: Array = ends, begins: Array = begins) -> State:
            numbers = number * at_once + jnp.arange(at_once, dtype=jnp.int32)
            minibatches = jnp.minimum((ends[None] <= numbers[:, None]).sum(axis=1, dtype=jnp.int32), count - 1)

            def part(n: int) -> Layout:
                own = partial(jax.tree.map, lambda x: jnp.asarray(x)[minibatches[n]])
                turn = jnp.where(numbers[n] < ends[-1], numbers[n] - begins[minibatches[n]], -1)
                return Layout.of(own(responses), own(packing), kind, turn)

            return add(state, minibatches, SideBySide([part(n) for n in range(at_once)]))

        with jax.named_scope(at_most(-(-usual * count // at_once))):
            state = jax.lax.fori_loop(0, -(-ends[-1] // at_once), some, state)
    return state


def _turns_at_full_length(responses: Responses, packing: Packing, group_size: int) -> tuple[int, ...]:
    return turns_at_full_length(
        packing.size // shards(),
        packing.row_lengths,
        prompt=responses.prompts.shape[-1],
        response=responses.tokens.shape[-1],
        group_size=group_size,
    )
