"""Prefixes of responses, packed into rows for a sampling call to prefill and continue.

A row holds prompts, each followed by uncut prefixes of responses to it, and padding at its end. Rows are prefilled one
by one, so compute and memory follow the actual prefixes.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int

from gspo_jax.kernels.packed_attention import Spans
from gspo_jax.types import Prompts

LEAST = 1024
"""Minimum tokens of a row, as in `training.packing`."""


class Prefix(NamedTuple):
    """Tokens that responses start with: sampled earlier, from an environment, or given as text."""

    tokens: Int[Array, "B Q"]
    """Right-padded."""
    lengths: Int[Array, " B"]
    """Fewer than the response's token limit; 0 for no prefix."""


class PackedPrefix(NamedTuple):
    """Prefixes of B responses in R rows of M tokens, equally many per batch shard."""

    lengths: Int[Array, " B"]
    row: Int[Array, " B"]
    """Row of each prefix, within its shard."""
    start: Int[Array, " B"]
    """Offset of each prefix in its row."""
    tokens: Int[Array, "R M"]
    spans: Spans
    number: Int[Array, " B"] | None = None
    """Place of each prefix among those in its row; None, as `ends`, for a model without states."""
    ends: Int[Array, "R E"] | None = None
    """Last token of each of the row's prefixes, in their order; M for none."""


class Place(NamedTuple):
    """Position of a prefix and its prompt in a shard's rows."""

    row: int
    prompt: int
    start: int


def pack(prompts: Prompts, prefix: Prefix, *, shards: int, limit: int, with_ends: bool = False) -> PackedPrefix:
    """Pack prefixes into rows, on the host. Row count and length take few values, as programs depend on them.

    Each shard holds B / shards responses, adjacent if to the same prompt, of at most `limit` tokens. With `with_ends`,
    for a model with states, the count of `ends` in a row takes few values too.
    """
    heads, head_lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
    tokens, lengths = np.asarray(prefix.tokens), np.asarray(prefix.lengths)
    prompt_of = np.arange(len(lengths)) // (len(lengths) // len(heads))
    longest = row_tokens(heads.shape[1], limit)
    places, rows, width = place(lengths, head_lengths[prompt_of], prompt_of, shards=shards, longest=longest)
    row, start = np.zeros((2, len(lengths)), np.int32)
    filled, begin, end = np.zeros((3, shards * rows, width), np.int32)
    own_start = np.tile(np.arange(1, width + 1, dtype=np.int32), (shards * rows, 1))  # of padding, which sees nothing
    for shard, own in enumerate(places):
        for i, at in own.items():
            row[i], start[i] = at.row, at.start
            here, head = shard * rows + at.row, head_lengths[prompt_of[i]]
            prompt, response = slice(at.prompt, at.prompt + head), slice(at.start, at.start + lengths[i])
            filled[here, prompt], own_start[here, prompt] = heads[prompt_of[i], :head], at.prompt
            filled[here, response], own_start[here, response] = tokens[i, : lengths[i]], at.start
            begin[here, response], end[here, response] = at.prompt, at.prompt + head
    spans: Any = begin, end, own_start
    arrays: tuple[Any, ...] = lengths.astype(np.int32), row, start, filled, Spans(*spans)
    return PackedPrefix(*arrays, *(_ends(lengths, row, start, places, rows, width) if with_ends else ()))


def _ends(
    lengths: np.ndarray, row: np.ndarray, start: np.ndarray, places: list[dict[int, Place]], rows: int, width: int
) -> tuple[Any, Any]:
    """Return the number of each prefix in its row, and the rows' ends."""
    number, found = np.zeros(len(lengths), np.int32), []
    for own in places:
        of_rows: list[list[int]] = [[] for _ in range(rows)]
        for i in sorted(own, key=lambda i: (row[i], start[i])):
            number[i] = len(of_rows[row[i]])
            of_rows[row[i]].append(int(start[i] + lengths[i]) - 1)
        found += of_rows
    ends = np.full((len(found), few(max(1, *map(len, found)))), width, np.int32)
    for i, own in enumerate(found):
        ends[i, : len(own)] = own
    return number, ends


def place(
    lengths: Int[np.ndarray, " B"],
    prompts: Int[np.ndarray, " B"],
    groups: Int[np.ndarray, " B"],
    *,
    shards: int,
    longest: int,
) -> tuple[list[dict[int, Place]], int, int]:
    """Return each shard's places by response, the rows per shard, and the tokens of a row.

    Rows have `longest` tokens, unless a single shorter one suffices. Empty prefixes get no place.
    """
    own = np.split(np.arange(len(lengths)), shards)
    found = [_fill(lengths, prompts, groups, i[lengths[i] > 0], width=longest) for i in own]
    rows = few(max((at.row + 1 for places in found for at in places.values()), default=1))
    if rows > 1:
        return found, rows, longest
    used = max((at.start + int(lengths[i]) for places in found for i, at in places.items()), default=1)
    return found, 1, bucket(used, longest)


def _fill(
    lengths: np.ndarray, prompts: np.ndarray, groups: np.ndarray, chosen: Int[np.ndarray, " b"], *, width: int
) -> dict[int, Place]:
    """Place prefixes, longest first, where they add the fewest tokens."""
    rows: list[dict[int, list[int]]] = []
    room: list[int] = []
    for i in chosen[np.argsort(-lengths[chosen], kind="stable")]:
        group, added = int(groups[i]), [int(lengths[i]) + (groups[i] not in row) * int(prompts[i]) for row in rows]
        fitting = [r for r, tokens in enumerate(added) if tokens <= room[r]]
        if fitting:
            best = min(fitting, key=lambda r: added[r])
            room[best] -= added[best]
        else:
            best = len(rows)
            rows.append({})
            room.append(width - int(lengths[i] + prompts[i]))
        rows[best].setdefault(group, []).append(int(i))
    places = {}
    for number, row in enumerate(rows):
        at = 0
        for members in row.values():
            prompt, at = at, at + int(prompts[members[0]])
            for i in members:
                places[i], at = Place(number, prompt, at), at + int(lengths[i])
    return places


def row_tokens(prompt: int, limit: int) -> int:
    return max(LEAST, prompt + limit)


def few(rows: int) -> int:
    """Return the least of 1, 2, 3, 4, 6, 8, 12, … that is not below `rows`."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power >= 4 and rows <= power * 3 // 4 else power


def bucket(longest: int, size: int) -> int:
    """Return the least of a quarter, a half, three quarters and all of `size` that holds `longest`."""
    quarter = -(-size // 4)
    return min(-(-longest // quarter) * quarter, size)
