"""Simulated sampling time for given response lengths.

Slots, pages, phases and early exits follow rollout/loop.py and rollout/polled.py, partial rollouts rollout/episodes.py.
Left out, at milliseconds per call: moving slots between phases, loading prefixes into the cache, and the host.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gspo_jax.rollout.episodes import spread_over_shards

NEVER = np.iinfo(np.int64).max


class Step(NamedTuple):
    """Cost of one decode step of a batch shard."""

    slots: int
    """Busy or idle."""
    fixed_s: float
    """Seconds without attention to the slots' own tokens."""
    key_s: float
    """Seconds per cache column that a slot reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """Size and step costs of the decoder."""

    shards: int
    lockstep: int
    """Adjacent shards that step together: an expert group."""
    steps: tuple[Step, ...]
    """Step of each phase. Each phase has fewer slots, by default half as many."""
    prompt: int
    """Columns of a prompt, which every busy slot reads beside its own."""
    page: int
    """Columns read together."""
    pages: int | None
    """A shard's pages of keys and values, where responses share them as they grow. None: enough for all slots."""
    poll_steps: int | None
    """Steps after which all shards wait for the slowest, if any."""
    share: float = 1.0
    """Share of the unfinished responses that must end before a call returns: of all, after the piece in which they do,
    or of an expert group if a call is one program."""
    tokens_per_step: float = 1.0
    """Tokens that a slot samples in a step: above 1 with drafts."""

    def in_steps(self) -> "Decoder":
        """Return the decoder in whose unit a slot takes one step: columns, pages and prompts count so many steps."""
        times = self.tokens_per_step
        steps = tuple(step._replace(key_s=step.key_s * times) for step in self.steps)
        sizes = {"prompt": round(self.prompt / times), "page": max(1, round(self.page / times))}
        return dataclasses.replace(self, steps=steps, tokens_per_step=1.0, **sizes)


@dataclasses.dataclass(frozen=True)
class SamplingCall:
    """One sampling call."""

    sampled: Int[np.ndarray, " B"]
    """Tokens per response."""
    seconds: float
    steps: int
    """Maximum over shards."""
    used_s: float
    """Seconds a slot decoded, averaged over each phase's slots."""
    idle_s: float
    """Seconds a slot idled."""
    waiting_s: float
    """Seconds a slot's shard waited for others."""
    times: Float[np.ndarray, " t"]
    """Seconds from the start."""
    in_use: Float[np.ndarray, " t"]
    """Slots in use at `times`, over all shards."""
    width: Float[np.ndarray, " t"]
    """Slots of the shards' phases at `times`. Waiting shards count 0."""


MOMENTS = 400
"""Length of `SamplingCall.times`."""


def decode(decoder: Decoder, prefix: Int[np.ndarray, " B"], left: Int[np.ndarray, " B"]) -> SamplingCall:
    """Simulate one call on B responses, split evenly over the shards in order.

    Responses begin with `prefix` tokens and have `left` to sample, 0 if they ended before.
    """
    if (times := decoder.tokens_per_step) > 1:
        steps = np.where(left > 0, 1 + np.ceil((left - 1) / times), 0).astype(np.int64)
        call = decode(decoder.in_steps(), np.ceil(prefix / times).astype(np.int64), steps)
        tokens = 1 + np.round((call.sampled - 1) * times)
        sampled = np.where(call.sampled == steps, left, np.clip(tokens, np.minimum(call.sampled, 1), left))
        return dataclasses.replace(call, sampled=sampled.astype(call.sampled.dtype))
    N, most = decoder.shards, decoder.steps[0].slots
    prefix, left = (x.reshape(N, -1).astype(np.int64) for x in (prefix, left))
    needed = np.maximum(left - 1, 0)  # prefill samples the first token
    queued = (needed > 0).sum(axis=1)
    if decoder.pages is None:
        start, end = _schedule(needed, min(most, left.shape[1]))
    else:
        start, end = _schedule_by_pages(prefix, needed, most, decoder.page, decoder.pages)
    gone = np.sort(end, axis=1)
    ends = np.sort(np.where(end - start == needed, end, NEVER), axis=1)  # the others were set aside
    horizon = int(np.where(gone < NEVER, gone, 0).max(initial=0))
    busy, ages = _by_step(prefix, start, end, needed > 0, horizon)

    groups = N // decoder.lockstep
    leaves = np.full(groups, NEVER)
    if decoder.share < 1:
        spared = np.floor(np.float32(1 - decoder.share) * (left > 0).sum(axis=1, dtype=np.float32)).astype(np.int64)
        enough, poll = queued - spared, decoder.poll_steps
        if poll is None:
            leaves = _after(np.sort(ends.reshape(groups, -1), axis=1), enough.reshape(groups, -1).sum(axis=1))
        else:
            (last,) = _after(np.sort(ends.reshape(1, -1), axis=1), enough.sum(keepdims=True))
            leaves[:] = NEVER if last == NEVER else max(1, -(-last // poll)) * poll

    def through(waiting: int) -> Int[np.ndarray, " groups"]:
        """Return the steps after which no shard of a group has more than `waiting` responses, or enough have ended."""
        return np.minimum(_after(gone, queued - waiting).reshape(groups, -1).max(axis=1), leaves)

    over = through(0)
    counts = [step.slots for step in decoder.steps]
    bounds = [np.zeros(groups, np.int64)]
    for fewer in [*counts[1:], 0]:
        bounds.append(np.minimum(over, np.maximum(through(fewer), bounds[-1])))

    read = (ages + (decoder.prompt + decoder.page / 2) * busy).reshape(groups, decoder.lockstep, -1).max(axis=1)
    in_use = busy.reshape(groups, decoder.lockstep, -1).sum(axis=1)
    taken = np.clip(np.repeat(over, decoder.lockstep)[:, None] - start, 0, end - start)
    sampled = np.where(left > 0, 1 + np.where(needed > 0, taken, 0), 0)
    return _timed(decoder, bounds, read, in_use, sampled.reshape(-1))


def _schedule(needed: Int[np.ndarray, "N n"], slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each response's start and end step: in order, each in the first free slot."""
    start = np.full(needed.shape, NEVER)
    end, free, shards = start.copy(), np.zeros((len(needed), slots), np.int64), np.arange(len(needed))
    order = np.argsort(needed == 0, axis=1, kind="stable")
    for position in range(int((needed > 0).sum(axis=1).max(initial=0))):
        response = order[:, position]
        some = needed[shards, response] > 0
        rows, response, slot = shards[some], response[some], free[some].argmin(axis=1)
        start[rows, response] = free[rows, slot]
        end[rows, response] = free[rows, slot] = free[rows, slot] + needed[rows, response]
    return start, end


def _schedule_by_pages(
    prefix: Int[np.ndarray, "N n"], needed: Int[np.ndarray, "N n"], slots: int, page: int, pages: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return each response's start and end step, at which it may have been set aside.

    From event to event: a response ends, or the pages run dry and the one with the fewest tokens leaves.
    """
    N, n = needed.shape
    order, queued = np.argsort(needed == 0, axis=1, kind="stable"), (needed > 0).sum(axis=1)
    start, end = np.full((2, N, n), NEVER)
    held, age, left = np.full((N, slots), -1), *np.zeros((2, N, slots), np.int64)
    now, following, rank, shards = *np.zeros((2, N), np.int64), np.arange(slots), np.arange(N)[:, None]

    freed = np.ones(N, bool)
    while True:
        idle = held < 0
        position = following[:, None] + rank
        response = order[shards, np.minimum(position, n - 1)]
        given = (rank < idle.sum(axis=1)[:, None]) & (position < queued[:, None]) & freed[:, None]
        needs = np.where(given, -(-np.take_along_axis(prefix, response, axis=1) // page) + 1, 0)
        room = pages - np.where(idle, 0, -(-age // page) + 1).sum(axis=1)
        given &= needs.cumsum(axis=1) <= room[:, None]
        rows, taken = np.nonzero(given)
        at = np.argsort(~idle, axis=1, kind="stable")[rows, taken]
        response = response[rows, taken]
        held[rows, at], start[rows, response] = response, now[rows]
        age[rows, at], left[rows, at] = prefix[rows, response], needed[rows, response]
        following += given.sum(axis=1)
        busy = held >= 0
        if not busy.any():
            return start, end
        ahead = np.where(busy, left, NEVER).min(axis=1)
        # Every slot takes a page in any `page` steps, and first when it has filled its own.
        free = pages - np.where(busy, -(-age // page), 0).sum(axis=1)
        full = np.sort(np.where(busy, -age % page, NEVER), axis=1)
        rounds, beyond = np.divmod(free, np.maximum(busy.sum(axis=1), 1))
        lasts = rounds * page + full[np.arange(N), beyond]
        steps = np.where(busy.any(axis=1), np.minimum(ahead, lasts), 0)
        now, age, left = now + steps, age + steps[:, None], left - steps[:, None]
        leaves = busy & (left == 0)
        freed, dry = leaves.any(axis=1), busy.any(axis=1) & (steps < ahead)
        youngest = np.where(busy, age, NEVER).argmin(axis=1)
        leaves |= dry[:, None] & (rank == youngest[:, None])
        rows, at = np.nonzero(leaves)
        end[rows, held[rows, at]] = now[rows]
        held[rows, at] = -1


def _after(ends: Int[np.ndarray, "N n"], count: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """Return the step after which `count` responses of each shard have ended."""
    at = np.take_along_axis(ends, np.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    return np.where(count > 0, at, 0)


def _by_step(
    prefix: np.ndarray, start: np.ndarray, end: np.ndarray, queued: np.ndarray, horizon: int
) -> tuple[Int[np.ndarray, "N steps"], Int[np.ndarray, "N steps"]]:
    """Return slots in use per step, and the sum of their ages: tokens fed, this step's included.

    A response has age prefix + 1 + (step − start), so running sums over events suffice.
    """
    busy, offset = np.zeros((2, len(prefix), horizon + 1), np.int64)
    rows = np.nonzero(queued)[0]
    begun, ended, base = start[queued], end[queued], (prefix - start + 1)[queued]
    for at, sign in ((begun, 1), (ended, -1)):
        np.add.at(busy, (rows, at), sign)
        np.add.at(offset, (rows, at), sign * base)
    busy, offset = busy.cumsum(axis=1)[:, :horizon], offset.cumsum(axis=1)[:, :horizon]
    return busy, offset + np.arange(horizon) * busy


def _timed(
    decoder: Decoder, bounds: Sequence[np.ndarray], read: np.ndarray, in_use: np.ndarray, sampled: np.ndarray
) -> SamplingCall:
    """Return the call of lockstep groups that change phase at the steps `bounds`."""
    groups, horizon = read.shape
    at = np.arange(horizon)
    seconds = np.zeros((groups, horizon))
    width = np.zeros((groups, horizon), np.int64)
    for step, first, last in zip(decoder.steps, bounds[:-1], bounds[1:], strict=True):
        here = (at >= first[:, None]) & (at < last[:, None])
        seconds = np.where(here, step.fixed_s + step.key_s * read, seconds)
        width = np.where(here, step.slots * decoder.lockstep, width)
    poll = max(horizon, 1) if decoder.poll_steps is None else decoder.poll_steps
    pieces = -(-horizon // poll)
    by_piece = np.pad(seconds, ((0, 0), (0, pieces * poll - horizon))).reshape(groups, pieces, poll)
    slowest = by_piece.sum(axis=2).max(axis=0)
    starts = slowest.cumsum() - slowest
    begins = (starts[:, None] + by_piece.cumsum(axis=2) - by_piece).reshape(groups, -1)[:, :horizon]
    total, stepping = float(slowest.sum()), float(seconds.sum() / groups)
    share = np.divide(in_use, width, out=np.zeros(width.shape), where=width > 0)
    used = float((seconds * share).sum() / groups)

    times = np.linspace(0, total, MOMENTS, endpoint=False)
    used_at, width_at = np.zeros(MOMENTS), np.zeros(MOMENTS)
    for begin, spent, busy, slots in zip(begins, seconds, in_use, width, strict=True):
        step = np.searchsorted(begin, times, side="right") - 1
        inside = (step >= 0) & (times < begin[step] + spent[step])
        used_at[inside] += busy[step[inside]]
        width_at[inside] += slots[step[inside]]
    return SamplingCall(
        sampled=sampled,
        seconds=total,
        steps=int(bounds[-1].max()),
        used_s=used,
        idle_s=stepping - used,
        waiting_s=total - stepping,
        times=times,
        in_use=used_at,
        width=width_at,
    )


class Sampled(NamedTuple):
    """Samples of one iteration."""

    lengths: Int[np.ndarray, "P G"]
    """Lengths of the responses to learn from."""
    calls: list[SamplingCall]
    prefixes: list[Int[np.ndarray, " B"]]
    """Tokens that each call's responses begin with."""


def whole(decoder: Decoder, draw: Callable[[int], np.ndarray], *, groups: int, size: int) -> Iterator[Sampled]:
    """Yield iterations of whole responses. `draw(n)` draws n lengths."""
    while True:
        lengths = draw(groups * size)
        prefix = np.zeros_like(lengths)
        yield Sampled(lengths.reshape(groups, size), [decode(decoder, prefix, lengths)], [prefix])


def partial(
    decoder: Decoder, draw: Callable[[int], np.ndarray], *, groups: int, size: int, in_flight: int
) -> Iterator[Sampled]:
    """Yield iterations with partial rollouts, `in_flight` groups per call. See `episodes.Buffer`."""
    lengths = done = np.zeros((0, size), np.int64)
    while True:
        while len(lengths) < in_flight:
            lengths = np.concatenate([lengths, draw(groups * size).reshape(groups, size)])
            done = np.concatenate([done, np.zeros((groups, size), np.int64)])
        calls, prefixes = [], []
        while (complete := (done == lengths).all(axis=1)).sum() < groups:
            oldest = np.sort(np.argsort(complete, kind="stable")[:in_flight])
            tokens = np.where(done < lengths, done, 0).sum(axis=1)[oldest]
            chosen = spread_over_shards(oldest, tokens, decoder.shards)
            left = lengths[chosen] - done[chosen]
            prefix = np.where(left > 0, done[chosen], 0).reshape(-1)
            calls.append(decode(decoder, prefix, left.reshape(-1)))
            prefixes.append(prefix)
            done[chosen] += calls[-1].sampled.reshape(-1, size)
        taken = np.flatnonzero(complete)[:groups]
        yield Sampled(lengths[taken], calls, prefixes)
        lengths, done = (np.delete(x, taken, axis=0) for x in (lengths, done))
