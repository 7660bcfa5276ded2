"""Packing: responses of different lengths share fixed-length rows, with equal work on every shard.

A micro-batch is one row per batch shard. A row holds prompts, each followed by uncut responses to it, and padding at
its end. `Packer` assigns responses to rows on the host, from lengths alone. A mini-batch fills full rows first, then
short ones.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from gspo_jax.types import Packing

SHORT = 4
"""Length of full rows relative to short ones."""
LEAST = 1024
"""Minimum row budget in tokens: shorter rows cost more in small operations than they save in padding."""
_STEP = 32
"""Default budgets are multiples of this."""
_SPARE = 0.03
_SLACK = 0.02
"""Accepted excess of the busiest shard's work."""
_MOVES = 200
"""Maximum moves of responses to even out shards."""


def row_lengths(budget: int) -> tuple[int, ...]:
    """Return the lengths of full and short rows, without short rows if under `LEAST` tokens."""
    return (budget, budget // SHORT) if budget >= SHORT * LEAST else (budget,)


def tokens_at_full_length(responses: int, *, prompt: int, response: int, group_size: int) -> int:
    """Return the tokens of full-length `responses`, with one prompt per group."""
    share = math.gcd(responses, group_size)
    return responses // share * (prompt + share * response)


def default_budget(responses: int, *, prompt: int, response: int, group_size: int) -> int:
    """Return the default row budget: the smallest with little waste on full-length responses.

    Repeated prompts and unused row ends may cost at most `_SPARE` of a shard's tokens.
    """
    size = {"prompt": prompt, "response": response, "group_size": group_size}
    whole = tokens_at_full_length(responses, **size)
    parts = [prompt + count * response for count in range(1, group_size)]
    groups = [count * (prompt + group_size * response) for count in range(1, responses // group_size + 1)]
    for budget in (tokens + -tokens % _STEP for tokens in (*parts, *groups)):
        (turns, *_) = turns_at_full_length(responses, (budget,), **size)
        if budget >= LEAST and turns * budget <= (1 + _SPARE) * whole:
            return min(budget, whole)
    return whole


def places_per_shard(responses: int, shards: int) -> int:
    """Return a shard's places: more than its equal share, since long responses leave other shards more."""
    share = -(-responses // shards)
    return min(responses, share + max(share // 4, 2))


def turns_at_full_length(
    responses: int, row_lengths: Sequence[int], *, prompt: int, response: int, group_size: int
) -> tuple[int, ...]:
    """Return the micro-batches of each kind that full-length `responses` need: full rows alone."""
    budget, *short = row_lengths
    in_row = math.prod(full_row(budget, prompt=prompt, response=response, group_size=group_size))
    return (-(-responses // in_row), *[0] * len(short))


def full_row(budget: int, *, prompt: int, response: int, group_size: int) -> tuple[int, int]:
    """Return (groups in a row, responses of each) at full length: whole groups, or part of one."""
    group = prompt + group_size * response
    return (budget // group, group_size) if budget >= group else (1, (budget - prompt) // response)


def take_minibatch(batch: Any, index: Array | int, *, count: int, group_size: int) -> Any:
    """Return mini-batch `index` of `count`, the groups numbered `index` modulo `count`, of arrays by row."""

    def cut(x: Array) -> Array:
        rows, *rest = x.shape
        groups = x.reshape(rows // (count * group_size), count, group_size, *rest)
        return groups[:, index].reshape(rows // count, *rest)

    return jax.tree.map(cut, batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packer:
    """Packs batches for an update's programs."""

    group_size: int
    minibatches: int
    """Per batch; mini-batch i has the groups numbered i modulo this."""
    shards: int
    row_lengths: tuple[int, ...]
    """Tokens of each kind of row, longest first; the first fits any response with its prompt."""
    pair_cost: float = 0.0
    """Work of a (query, key) pair relative to a token."""

    def __call__(self, lengths: Int[np.ndarray, " B"], prompt_lengths: Int[np.ndarray, " B"]) -> Packing:
        """Pack each mini-batch into few token slots, with equal work per shard."""
        numbers = np.arange(len(lengths), dtype=np.int32)
        found = [self._pack(own, lengths[own], prompt_lengths[own]) for own in self.parts(numbers)]
        fields: dict[str, Any] = {name: np.stack([one[name] for one in found]) for name in found[0]}
        return Packing(**fields, row_lengths=self.row_lengths, size=len(lengths) // self.minibatches)

    def parts(self, column: Shaped[np.ndarray, " B"]) -> list[Shaped[np.ndarray, " b"]]:
        cut = {"count": self.minibatches, "group_size": self.group_size}
        return [take_minibatch(column, index, **cut) for index in range(self.minibatches)]

    def _pack(
        self, numbers: Int[np.ndarray, " b"], lengths: Int[np.ndarray, " b"], prompts: Int[np.ndarray, " b"]
    ) -> dict[str, np.ndarray]:
        places = places_per_shard(len(lengths), self.shards)
        least = -(-needed_tokens(lengths, prompts, self.group_size) // self.shards)
        tries = _by_slots(self.row_lengths, least, most=places)
        rows = next(rows for turns in tries if (rows := _Rows(lengths, prompts, self, turns=turns)).fill(places))
        rows.even_out(places)
        found = rows.described(places)
        responses = found["responses"]
        return found | {"responses": np.where(responses >= 0, numbers[responses], -1)}

    def metrics(
        self, packing: Packing, lengths: Int[np.ndarray, " B"], prompt_lengths: Int[np.ndarray, " B"]
    ) -> dict[str, float]:
        columns = list(zip(self.parts(lengths), self.parts(prompt_lengths), strict=True))
        needed = sum(needed_tokens(n, s, self.group_size) for n, s in columns)
        loads = np.array([self.loads(packing, index, lengths, prompt_lengths) for index in range(len(columns))])
        return {
            "packing/microbatches": float(packing.turns.sum() / len(columns)),
            "packing/fill": needed / float(packing.slots.sum() * self.shards),
            "packing/imbalance": float((loads.max(axis=1) / loads.mean(axis=1)).max()),
        }

    def loads(
        self, packing: Packing, minibatch: int, lengths: Int[np.ndarray, " B"], prompts: Int[np.ndarray, " B"]
    ) -> Float[np.ndarray, " shards"]:
        """Return each shard's work in a mini-batch, in tokens."""
        own, shared = work(lengths, prompts, self.pair_cost)
        places = packing.responses[minibatch]
        shard = np.arange(len(places)) // (len(places) // self.shards)
        rows = np.stack([shard, packing.kind[minibatch], packing.turn[minibatch], packing.prompt[minibatch]])
        live = (places >= 0) & (lengths[places] > 0)
        total = np.bincount(shard[live], own[places[live]], self.shards)
        prompts_of, first = np.unique(rows[:, live], axis=1, return_index=True)
        return total + np.bincount(prompts_of[0], shared[places[live][first]], self.shards)


def needed_tokens(lengths: Int[np.ndarray, " b"], prompts: Int[np.ndarray, " b"], group_size: int) -> int:
    """Return the tokens of all responses, plus one prompt per non-empty group."""
    live = (lengths > 0).reshape(-1, group_size).any(axis=1)
    return int(lengths.sum() + prompts[::group_size][live].sum())


def work(
    lengths: Int[np.ndarray, "*n"], prompt_lengths: Int[np.ndarray, "*n"], pair_cost: float
) -> tuple[Float[np.ndarray, "*n"], Float[np.ndarray, "*n"]]:
    """Return the work of each response without its prompt, and of each prompt, in tokens."""
    n, s = np.asarray(lengths, np.float64), np.asarray(prompt_lengths, np.float64)
    return n + pair_cost * (s * n + n * (n + 1) / 2), s + pair_cost * s * (s + 1) / 2


def _by_slots(row_lengths: tuple[int, ...], least: int, *, most: int) -> Iterator[tuple[int, ...]]:
    """Yield counts of each kind with at least `least` token slots per shard, fewest slots first."""
    full, *short = row_lengths
    some = range(SHORT) if short else range(1)
    first = max(0, least // full - 1)
    every = ((a, *[b] * len(short)) for a, b in itertools.product(range(first, most + 1), some) if a + b)
    slots = {turns: int(np.dot(turns, row_lengths)) for turns in every}
    return (turns for turns in sorted(slots, key=lambda t: (slots[t], t[1:])) if slots[turns] >= least)


class _Rows:
    def __init__(self, lengths: np.ndarray, prompts: np.ndarray, packer: Packer, *, turns: tuple[int, ...]):
        self.lengths, self.prompts, self.groups = lengths, prompts, np.arange(len(lengths)) // packer.group_size
        self.own, self.shared = work(lengths, prompts, packer.pair_cost)
        self.shards, self.turns = packer.shards, turns
        self.kind = np.repeat(np.arange(len(turns)), [packer.shards * count for count in turns])
        self.room = np.array(packer.row_lengths)[self.kind]
        self._clear()

    def _clear(self) -> None:
        self.row = np.full(len(self.lengths), -1)
        self.used, self.work = np.zeros(len(self.room), np.int64), np.zeros(len(self.room))
        self.count = np.zeros(len(self.room), np.int64)
        self.members = np.zeros((len(self.room), self.groups[-1] + 1), np.int32)

    def fill(self, places: int) -> bool:
        """Put every response into a row and deal the rows to shards; return False if that fails.

        Longest first, evenly if possible, else tightly; again with fewer per row if a shard gets more than `places`.
        """
        order = [i for i in np.argsort(-self.lengths, kind="stable") if self.lengths[i]]
        few = max(1, places // sum(self.turns))
        for choose in (self._evenly, self._tightly):
            for most in (places, few):
                self._clear()
                if not all(choose(i, most) for i in order):
                    break
                self._deal()
                if self._held().max() <= places:
                    return True
        return False

    def _held(self) -> Int[np.ndarray, " shards"]:
        return np.bincount(self.shard, self.count, self.shards).astype(int)

    def _fits(self, i: int, most: int) -> tuple[Bool[np.ndarray, " R"], Int[np.ndarray, " R"], Bool[np.ndarray, " R"]]:
        there = self.members[:, self.groups[i]] > 0
        added = self.lengths[i] + np.where(there, 0, self.prompts[i])
        return (self.used + added <= self.room) & (self.count < most), added, there

    def _evenly(self, i: int, most: int) -> bool:
        """Put response i with its group while the row is below its share of the work, else into the emptiest row."""
        fits, _, there = self._fits(i, most)
        if not fits.any():
            return False
        after = (self.work + self.own[i] + np.where(there, 0, self.shared[i])) / self.room
        together = fits & there & (after <= self.own.sum() / self.room.sum())
        row = np.where(together, after, -1).argmax() if together.any() else np.where(fits, after, np.inf).argmin()
        self._add(i, int(row))
        return True

    def _tightly(self, i: int, most: int) -> bool:
        """Put response i into the row it leaves fullest, preferring a row that has its prompt."""
        fits, added, _ = self._fits(i, most)
        if not fits.any():
            return False
        left = self.room - self.used - added + 2 * (added - self.lengths[i])
        self._add(i, int(np.where(fits, left, np.inf).argmin()))
        return True

    def _add(self, i: int, row: int, sign: int = 1) -> None:
        group = self.groups[i]
        with_prompt = self.members[row, group] == (0 if sign > 0 else 1)
        self.used[row] += sign * (self.lengths[i] + with_prompt * self.prompts[i])
        self.work[row] += sign * (self.own[i] + with_prompt * self.shared[i])
        self.members[row, group] += sign
        self.count[row] += sign
        self.row[i] = row if sign > 0 else -1

    def _deal(self) -> None:
        """Deal similar rows to shards as a micro-batch, the heaviest to the idlest shard."""
        self.shard, self.turn = np.zeros_like(self.kind), np.zeros_like(self.kind)
        load = np.zeros(self.shards)
        for kind, count in enumerate(self.turns):
            rows = np.flatnonzero(self.kind == kind)
            rows = rows[np.argsort(-self.work[rows], kind="stable")].reshape(count, self.shards)
            for turn, part in enumerate(rows):
                idlest = np.argsort(load, kind="stable")
                self.shard[part], self.turn[part] = idlest, turn
                load[idlest] += self.work[part]

    def even_out(self, places: int) -> None:
        """Relieve the busiest shard until no move helps."""
        if self.shards == 1:
            return
        least = max(self.work.sum() / self.shards, (self.own + self.shared)[self.lengths > 0].max(initial=0))
        for _ in range(_MOVES):
            load = np.bincount(self.shard, self.work, self.shards)
            busiest = int(load.argmax())
            if load[busiest] <= (1 + _SLACK) * least or not self._relieve(busiest, load, places):
                return

    def _relieve(self, busiest: int, load: np.ndarray, places: int) -> bool:
        """Make the best move or swap of one response of the busiest shard; return False if none helps.

        Candidates ignore shared prompts, so the best may be undone.
        """
        each, tokens = self.own + self.shared, self.lengths + self.prompts
        here = np.flatnonzero((self.row >= 0) & (self.shard[self.row] == busiest))
        there = np.flatnonzero((self.row >= 0) & (self.shard[self.row] != busiest))
        held = self._held()
        rows = np.flatnonzero(self.shard != busiest)
        # Move a response `here` to another shard, or swap it with one `there`.
        gain = each[here][:, None]
        to = load[self.shard[rows]][None] + gain
        to = np.where(self.used[rows] + tokens[here][:, None] <= self.room[rows], to, np.inf)
        to[:, held[self.shard[rows]] >= places] = np.inf
        moved = np.maximum(load[busiest] - gain, to)
        change = gain - each[there][None]
        fits = self.used[self.row[there]] - self.lengths[there] + tokens[here][:, None] <= self.room[self.row[there]]
        back = self.used[self.row[here]] - self.lengths[here]
        fits &= back[:, None] + tokens[there][None] <= self.room[self.row[here]][:, None]
        swapped = np.maximum(load[busiest] - change, load[self.shard[self.row[there]]][None] + change)
        swapped = np.where(fits & (change > 0), swapped, np.inf)
        best = [(x.min(initial=np.inf), kind) for kind, x in enumerate((moved, swapped))]
        value, kind = min(best)
        if not value < load[busiest] * (1 - 1e-6):
            return False
        at, other = np.unravel_index((moved, swapped)[kind].argmin(), (moved, swapped)[kind].shape)
        i, home = int(here[at]), int(self.row[here[at]])
        away = int(rows[other]) if kind == 0 else int(self.row[there[other]])
        exchange = [(i, home, away)] + ([(int(there[other]), away, home)] if kind else [])
        self._exchange(exchange)
        if np.bincount(self.shard, self.work, self.shards)[self.shard[[home, away]]].max() < load[busiest] * (1 - 1e-6):
            return True
        self._exchange([(response, target, source) for response, source, target in exchange])
        return False

    def _exchange(self, moves: list[tuple[int, int, int]]) -> None:
        for response, source, _ in moves:
            self._add(response, source, -1)
        for response, _, target in moves:
            self._add(response, target)

    def described(self, places: int) -> dict[str, np.ndarray]:
        fields = {name: np.zeros(self.shards * places, np.int32) for name in ("kind", "turn", "prompt", "start")}
        responses = np.full(self.shards * places, -1, np.int32)
        held, used = np.zeros(self.shards, np.int64), np.zeros(len(self.room), np.int64)
        before: tuple[int, int] | None = None
        prompt = 0
        # By row, then group. Empty responses, in no row, fill free places.
        for i in np.lexsort((self.groups, np.where(self.row < 0, len(self.room), self.row))):
            row, group = int(self.row[i]), int(self.groups[i])
            shard = int(self.shard[row]) if row >= 0 else int(held.argmin())
            place = shard * places + held[shard]
            held[shard] += 1
            responses[place] = i
            if row < 0:
                continue
            if (row, group) != before:
                before, prompt = (row, group), int(used[row])
                used[row] += self.prompts[i]
            for name, value in (("kind", self.kind[row]), ("turn", self.turn[row]), ("prompt", prompt)):
                fields[name][place] = value
            fields["start"][place] = used[row]
            used[row] += self.lengths[i]
        assert held.max() <= places and (used == self.used).all()
        return {"responses": responses, **fields, "turns": np.array(self.turns, np.int32)}
