"""An iteration step by step: every decode step of every slot in turn, every row filled token by token, in plain loops.

The oracle of `planning/decoding.py` and `planning/iteration.py`, of which it imports nothing.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass
class Decoding:
    """A decoder: shards with a queue and slots each, whose steps take time."""

    shards: int
    lockstep: int
    slots: int
    fixed: list[float]
    """Seconds of a step in each phase; the slots are halved from one to the next."""
    key: float
    """Seconds for each column of the cache that the slots of a shard read."""
    prompt: int
    """Columns that every busy slot reads beside its own."""
    page: int
    pages: int | None
    """A shard's pages, where responses take them as they grow."""
    poll: int | None
    share: float = 1.0


def generate(decoding: Decoding, done: np.ndarray, lengths: np.ndarray) -> tuple[float, int, np.ndarray]:
    """Sample on from `done` tokens of each response; return the seconds, the steps, and how far each response comes."""
    N, lockstep, slots = decoding.shards, decoding.lockstep, decoding.slots
    per_shard = len(lengths) // N
    done, groups = done.copy(), N // lockstep
    unfinished = done < lengths
    done += unfinished  # by prefill
    queues = [
        [i for i in range(shard * per_shard, (shard + 1) * per_shard) if unfinished[i] and done[i] < lengths[i]]
        for shard in range(N)
    ]
    over = np.array([per_shard - len(queue) for queue in queues])
    least = np.full(N, per_shard)
    if decoding.share < 1:
        live = unfinished.reshape(N, per_shard).sum(axis=1)
        least = per_shard - np.array([math.floor(round((1 - decoding.share) * n, 4)) for n in live])
    held = np.full((N, slots), -1)
    size = decoding.page

    def fed(response: int) -> int:
        return int(done[response]) - 1  # the newest token has no key yet

    def fill(shard: int) -> None:
        """Give free slots to the next responses while pages are left: its own and one more, for it and all others."""
        inside = [i for i in held[shard] if i >= 0]
        taken = sum(math.ceil(fed(i) / size) for i in inside)
        promised = len(inside)
        for slot in range(slots):
            if held[shard, slot] >= 0 or not queues[shard]:
                continue
            wanted = math.ceil(fed(queues[shard][0]) / size) + 1
            if decoding.pages is not None and taken + promised + wanted > decoding.pages:
                return
            promised += wanted
            held[shard, slot] = queues[shard].pop(0)

    def dry() -> np.ndarray:
        """True for shards whose next step needs more pages than they have."""
        if decoding.pages is None:
            return np.zeros(N, bool)
        return np.where(held >= 0, -(-done[held] // size), 0).sum(axis=1) > decoding.pages  # one more token than fed

    for shard in range(N):
        fill(shard)
    waiting = np.array([len(queue) for queue in queues])

    def goes_on(fewer: int) -> np.ndarray:
        here = ((held >= 0).sum(axis=1) + waiting > fewer).reshape(groups, lockstep).any(axis=1)
        return here if decoding.poll else here & ((over - least).reshape(groups, lockstep).sum(axis=1) < 0)

    seconds, steps = np.zeros(groups), np.zeros(groups, int)
    of_piece, before = np.zeros(groups), np.zeros(groups, int)  # since all shards last waited for one another
    phase = np.zeros(groups, int)
    fewer = [*(slots >> (i + 1) for i in range(len(decoding.fixed) - 1)), 0]
    while True:
        going = np.array([goes_on(f) for f in fewer])
        for _ in fewer:  # a group may go through several phases at once
            phase = np.minimum(phase + ~going[phase, np.arange(groups)], len(fewer) - 1)
        running = goes_on(0)
        ready = running if decoding.poll is None else running & (steps - before < decoding.poll)
        if not ready.any():
            seconds[:] += of_piece.max()
            of_piece[:], before = 0, steps.copy()
            if not running.any() or (decoding.poll and decoding.share < 1 and over.sum() >= least.sum()):
                return seconds.max(), steps.max(), done
            continue
        own = np.repeat(ready, lockstep)
        while (short := own & dry()).any():
            for shard in np.flatnonzero(short):
                inside = np.flatnonzero(held[shard] >= 0)
                held[shard, inside[np.argmin(done[held[shard, inside]])]] = -1
        busy = held >= 0
        columns = (
            np.where(busy, done[held] + decoding.prompt + size / 2, 0).sum(axis=1).reshape(groups, lockstep).max(axis=1)
        )
        of_piece += np.where(ready, np.array(decoding.fixed)[phase] + decoding.key * columns, 0.0)
        steps += ready
        moving = busy & own[:, None]
        done[held[moving]] += 1
        ended = moving & (done[held] == lengths[held])
        held[ended] = -1
        over += ended.sum(axis=1)
        for shard in np.flatnonzero(ended.any(axis=1)):
            fill(shard)
            waiting[shard] = len(queues[shard])


@dataclass
class Group:
    """The responses to one prompt."""

    lengths: np.ndarray
    done: np.ndarray

    @property
    def complete(self) -> bool:
        return bool((self.done == self.lengths).all())

    @property
    def begun(self) -> int:
        """Tokens of responses that go on."""
        return int(self.done[self.done < self.lengths].sum())


class Rollouts:
    """Partial rollouts: `in_flight` groups in each call, of which the batch takes the oldest that are complete."""

    def __init__(self, decoding: Decoding, draw, *, prompts: int, size: int, in_flight: int):
        self.decoding, self.draw, self.prompts, self.size, self.in_flight = decoding, draw, prompts, size, in_flight
        self.groups: list[Group] = []

    def next(self) -> tuple[list[tuple[float, np.ndarray]], np.ndarray]:
        """(seconds, prefixes) of each call, and the lengths of the batch's groups."""
        while len(self.groups) < self.in_flight:
            lengths = self.draw(self.prompts * self.size).reshape(self.prompts, self.size).astype(int)
            self.groups += [Group(own, np.zeros(self.size, int)) for own in lengths]
        calls = []
        while sum(group.complete for group in self.groups) < self.prompts:
            open_ones = [i for i, group in enumerate(self.groups) if not group.complete]
            filling = [i for i, group in enumerate(self.groups) if group.complete]
            oldest = sorted((open_ones + filling)[: self.in_flight])
            N = self.decoding.shards
            shards: list[list[Group]] = [[] for _ in range(N)]
            for turn in range(0, len(oldest), N):  # dealt, one to each shard: the most tokens to that with the fewest
                longest = sorted((self.groups[i] for i in oldest[turn : turn + N]), key=lambda g: -g.begun)
                for group, shard in zip(
                    longest, sorted(shards, key=lambda own: sum(g.begun for g in own)), strict=True
                ):
                    shard.append(group)
            chosen = [group for shard in shards for group in shard]
            done, lengths = (np.concatenate([getattr(g, name) for g in chosen]) for name in ("done", "lengths"))
            seconds, _, after = generate(self.decoding, done, lengths)
            calls.append((seconds, np.where(done < lengths, done, 0)))
            for i, group in enumerate(chosen):
                group.done = after[i * self.size : (i + 1) * self.size]
        batch = [i for i, group in enumerate(self.groups) if group.complete][: self.prompts]
        taken = np.array([self.groups[i].lengths for i in batch])
        self.groups = [group for i, group in enumerate(self.groups) if i not in batch]
        return calls, taken


def filled(lengths: Iterable[np.ndarray], *, prompt: int, row_tokens: int) -> list[int]:
    """The pairs of a query and a key that attention sees in each of the rows that the responses of groups fill.

    The responses come in turn, longest first, into the first row with room; each row has a group's prompt once.
    """
    found: list[tuple[int, set[int], int]] = []
    for length, group in sorted(((int(n), g) for g, own in enumerate(lengths) for n in own), reverse=True):
        pairs = (
            sum(range(prompt + 1, prompt + length + 1)) if length < 64 else length * prompt + length * (length + 1) // 2
        )
        for i, (used, groups, seen) in enumerate(found):
            added = length + (0 if group in groups else prompt)
            if used + added <= row_tokens:
                found[i] = used + added, groups | {group}, seen + pairs
                break
        else:
            found.append((prompt + length, {group}, pairs))
    return [pairs + len(groups) * prompt * (prompt + 1) // 2 for _, groups, pairs in found]


def rows(lengths: Iterable[np.ndarray], *, prompt: int, row_tokens: int) -> tuple[int, int]:
    """Rows that the responses of groups fill, and the pairs that attention then sees."""
    pairs = filled(lengths, prompt=prompt, row_tokens=row_tokens)
    return len(pairs), sum(pairs)


def prefix_rows(prefix: np.ndarray, *, shards: int, size: int, prompt: int, row_tokens: int) -> tuple[int, int]:
    """Rows that each shard reads the prefixes of its responses again in, and the pairs it computes or waits for."""
    found = []
    for own in np.split(prefix.reshape(-1, size), shards):
        found.append(filled([group[group > 0] for group in own], prompt=prompt, row_tokens=row_tokens))
    allowed = sorted(part * 2**n for part in (2, 3) for n in range(20))
    turns = list(itertools.zip_longest(*found, fillvalue=0))
    return min(n for n in [0, 1, *allowed] if n >= len(turns)), sum(max(turn) for turn in turns)
