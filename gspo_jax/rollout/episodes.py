"""Responses over several sampling calls: partial rollouts, cut off by an early exit, and multi-turn episodes.

Between calls the responses are on the host; the next call continues them as prefixes. Tokens keep the log-probs and
routes of the policy that sampled them, and responses their keys. Partial rollouts: Kimi k1.5,
https://arxiv.org/abs/2501.12599.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from absl import logging
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key, Shaped, UInt32

from gspo_jax.parallel import hosts
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rollout import sampler as sampler_lib
from gspo_jax.rollout.history import History
from gspo_jax.rollout.loop import Decoded
from gspo_jax.rollout.prefixes import Prefix
from gspo_jax.rollout.sampler import Sampler
from gspo_jax.types import Batch, KeptRecord, Prompts, Rollout, RouterRecord

_LOOK_S = 0.2
"""Seconds between looks for an answer while all episodes wait."""


@dataclasses.dataclass(frozen=True)
class TurnOver:
    """An episode whose turn is over."""

    id: bytes
    """The same for all turns of an episode, and of no other."""
    text: str
    """Its prompt."""
    record: Any
    tokens: list[int]
    """Everything since the prompt."""
    turns: list[list[int]]
    """The policy's own turns, the newest last."""
    starts: list[int]
    """Tokens before each of these."""


class Answer(NamedTuple):
    """An environment's answer to a turn."""

    reply: list[int] | None
    """Tokens; None ends the episode."""
    reward: float = math.nan
    failed: bool = False
    """True if the environment failed, which leaves the episode without a score."""


@runtime_checkable
class Environment(Protocol):
    """Environment on token ids. Every process asks about its own episodes, and calls all methods at the same points."""

    asks_last: bool
    """True if it is also asked after an episode's last turn, for its reward."""

    def open(self, turns: Sequence[TurnOver]) -> list[tuple[list[int] | None, bool]]:
        """Begin episodes. Return the tokens of each prompt, None to keep it, and whether the environment failed."""
        ...

    def text(self, prompt: list[int]) -> str:
        """Return the text of a prompt that it wrote."""
        ...

    def begin(self, turns: Sequence[TurnOver]) -> "list[Future[Answer]]":
        """Begin to answer. The futures never raise."""
        ...

    def wait(self, pending: "Sequence[Future[Answer]]", *, within_s: float = math.inf) -> None:
        """Wait for answers. May raise to end the sampling, in all processes."""
        ...

    def finish(self, ids: Sequence[bytes]) -> None:
        """Hear that episodes are over."""
        ...


Heard = Callable[[Sequence[str], Sequence[list[int]], Sequence[Any]], None]
"""Hears of episodes that have ended: prompt texts, response tokens and data records."""


@runtime_checkable
class Plays(Protocol):
    """Source of batches: a `Player`, a `Buffer`, `rounds.Rounds`, or your own."""

    def play(self, prompts: Iterator[Prompts], key: Key[Array, ""], *, first: int = 0) -> Batch:
        """Return a batch of finished responses, to the next prompts or to earlier ones.

        Response i, counted from `first`, has the key `fold_in(key, i)`.
        """
        ...


@struct.dataclass
class Episodes:
    """B episodes on the host, unfinished or ended, a group's adjacent."""

    rollout: Rollout
    texts: Shaped[np.ndarray, " B"]
    records: Shaped[np.ndarray, " B"]
    keys: UInt32[np.ndarray, "B words"]
    ended: Bool[np.ndarray, " B"]
    turns: Int[np.ndarray, " B"]
    """Turns the policy has finished."""
    stale_tokens: Int[np.ndarray, " B"]
    """Tokens sampled by older policies."""
    waiting: Bool[np.ndarray, " B"]
    """True for episodes whose environment has not answered yet."""
    failed: Bool[np.ndarray, " B"]
    """True for episodes whose environment failed."""
    turn_ends: Int[np.ndarray, "B turns"]
    """Tokens up to the end of each turn, 0 past the last."""
    turn_rewards: Float[np.ndarray, "B turns"]
    """The environment's, NaN where it gave none."""

    @property
    def live(self) -> Bool[np.ndarray, " B"]:
        """True for episodes that can be sampled now."""
        return ~self.ended & ~self.waiting

    def __len__(self) -> int:
        return len(self.ended)

    @property
    def sampled_tokens(self) -> Int[np.ndarray, " B"]:
        """Tokens sampled by a policy."""
        return np.asarray(self.rollout.action_mask).sum(axis=1)

    @property
    def prefix_lengths(self) -> Int[np.ndarray, " B"]:
        """Tokens that responses go on from; 0 if they cannot be sampled now."""
        return np.where(self.live, np.asarray(self.rollout.mask).sum(axis=1), 0).astype(np.int32)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return all arrays by checkpoint name, i.e. everything but texts and records."""
        routes = self.rollout.routes
        named: dict[str, Any] = {name: getattr(self.rollout, name) for name in _ROLLOUT_FIELDS}
        named |= {saved: getattr(self, field) for field, saved in _SAVED_NAMES.items()} | {"experts": routes.experts}
        if routes.logprobs is not None:
            named["router_logprobs"] = routes.logprobs
        if (kept := self.rollout.kept) is not None:
            named |= {saved: getattr(kept, field) for field, saved in _SAVED_KEPT.items()}
        return named

    @classmethod
    def from_arrays(cls, named: Mapping[str, Any], texts: Sequence[str], records: Sequence[Any]) -> "Episodes":
        """Invert `to_arrays`, given texts and records."""
        routes = RouterRecord(named["experts"], named.get("router_logprobs"))
        kept = None
        if _SAVED_KEPT["ids"] in named:
            kept = KeptRecord(**{field: named[saved] for field, saved in _SAVED_KEPT.items()})
        rollout = Rollout(**{name: named[name] for name in _ROLLOUT_FIELDS}, routes=routes, kept=kept)
        objects = {"texts": np.array(texts, object), "records": np.array(records, object)}
        return cls(rollout, **objects, **{field: np.asarray(named[saved]) for field, saved in _SAVED_NAMES.items()})

    def complete(self, group_size: int) -> Bool[np.ndarray, " P"]:
        return self.ended.reshape(-1, group_size).all(axis=1)

    def groups(self, chosen: Int[np.ndarray, " N"], group_size: int) -> "Episodes":
        rows = group_rows(chosen, group_size)
        return jax.tree.map(lambda x: x[rows], self)


_ROLLOUT_FIELDS = tuple(field.name for field in dataclasses.fields(Rollout) if field.name not in ("routes", "kept"))
_SAVED_NAMES = {
    "keys": "keys",
    "ended": "ended",
    "turns": "turns",
    "stale_tokens": "older",
    **{name: name for name in ("waiting", "failed", "turn_ends", "turn_rewards")},
}
"""Array fields of `Episodes`, with their names in checkpoints."""
_SAVED_KEPT = {field.name: f"kept_{field.name}" for field in dataclasses.fields(KeptRecord)}
"""The same of `KeptRecord`."""


def group_rows(groups: Int[np.ndarray, " N"], group_size: int) -> Int[np.ndarray, " B"]:
    return (groups[:, None] * group_size + np.arange(group_size)).reshape(-1)


def spread_over_shards(
    groups: Int[np.ndarray, " N"], tokens: Int[np.ndarray, " N"], shards: int
) -> Int[np.ndarray, " N"]:
    """Deal groups to batch shards, one each in turn: that with the most tokens to the shard that has the fewest.

    Sorted by age, one shard would get the oldest: few responses, all long, and the others would wait. Prefixes take
    rows on every shard as on the shard with the most.

    Args:
      tokens: of each group's prefixes.
    """
    dealt, held = np.empty((shards, len(groups) // shards), groups.dtype), np.zeros(shards, np.int64)
    turns = zip(groups.reshape(-1, shards), tokens.reshape(-1, shards), strict=True)
    for turn, (own, more) in enumerate(turns):
        most, to = np.argsort(-more, kind="stable"), np.argsort(held, kind="stable")
        dealt[to, turn] = own[most]
        held[to] += more[most]
    return dealt.reshape(-1)


def concatenate(parts: Iterable[Episodes]) -> Episodes:
    return jax.tree.map(lambda *each: np.concatenate(each), *parts)


def new_batch(rollout: Rollout, prompts: Prompts) -> Batch:
    B = len(rollout.prompt_lengths)
    own = {"texts": _repeated(prompts.texts, B), "records": _repeated(prompts.records, B)}
    own |= {"turns": np.ones(B, np.int32), "stale_tokens": np.zeros(B, np.int32), "failed": np.zeros(B, bool)}
    return _with_columns(rollout, own)


@jax.jit
def _columns(rollout: Rollout) -> dict[str, Array]:
    return {
        "prompt_lengths": rollout.prompt_lengths,
        "lengths": rollout.mask.sum(axis=1),
        "drawn": rollout.action_mask.sum(axis=1),
        "truncated": rollout.truncated,
    }


def _with_columns(rollout: Rollout, own: Mapping[str, Any]) -> Batch:
    return Batch(rollout=rollout, **own, **hosts.allgather(_columns(rollout)))


def _repeated(column: Sequence[Any] | None, count: int) -> Shaped[np.ndarray, " B"]:
    whole = np.full(1, None) if column is None else np.empty(len(column), object)
    whole[:] = column
    return np.repeat(whole, count // len(whole))


class Player:
    """Plays episodes with a sampler, and an environment if there are several turns."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        environment: Environment | None = None,
        patience_s: float = math.inf,
        max_turns: int = 1,
        opening: Sequence[int] = (),
        history: History | None = None,
    ):
        """Take the sampler and, for multi-turn episodes, the environment.

        The sampler's token limit applies to whole episodes. The last of `max_turns` gets no reply. Every response
        starts with `opening`; these tokens, like an environment's, are no actions. Finished episodes enter `history`,
        which drafts are copied from. `patience_s`: see `resume`.
        """
        self._sampler, self._environment, self._max_turns = sampler, environment, max_turns
        self._opening, self._patience_s = list(opening), patience_s
        self._pending: dict[bytes, Future[Answer]] = {}
        self.history = history
        self.heard: Heard | None = None
        """Called with the prompts, tokens and records of this process's episodes as they end."""

    @property
    def shards(self) -> int:
        """Batch shards that split a sampling call's responses, in order."""
        return mesh_lib.batch_shards(dict(self._sampler.mesh.shape))

    @property
    def policies(self) -> int:
        return self._sampler.policies

    def begin(self, prompts: Prompts, key: Key[Array, ""], *, first: int = 0) -> Episodes:
        """Begin a group of episodes per prompt, holding only the opening. Every process calls it."""
        G, T = self._sampler.group_size, self._sampler.stop.max_length
        keys = self._sampler.keys(prompts, key, first)
        B, S, opened = len(keys), prompts.tokens.shape[1], len(self._opening)
        tokens, mask = np.full((B, T), self._sampler.stop.pad_id, np.int32), np.zeros((B, T), bool)
        tokens[:, :opened], mask[:, :opened] = self._opening, True
        fields: dict[str, Any] = {
            "prompts": np.repeat(prompts.tokens, G, axis=0),
            "prompt_lengths": np.repeat(prompts.lengths, G),
            "tokens": tokens,
            "mask": mask,
            "action_mask": np.zeros((B, T), bool),
            "truncated": np.zeros(B, bool),
            **{name: np.zeros((B, T), np.float32) for name in ("behaviour_logprobs", "logprobs")},
        }
        episodes = Episodes(
            Rollout(**fields, routes=self._sampler.empty_routes(B, S + T), kept=self._sampler.empty_kept(B)),
            texts=_repeated(prompts.texts, B),
            records=_repeated(prompts.records, B),
            keys=keys,
            ended=np.zeros(B, bool),
            turns=np.zeros(B, np.int32),
            stale_tokens=np.zeros(B, np.int32),
            waiting=np.zeros(B, bool),
            failed=np.zeros(B, bool),
            turn_ends=np.zeros((B, self._max_turns), np.int32),
            turn_rewards=np.full((B, self._max_turns), np.nan, np.float32),
        )
        return episodes if self._environment is None else self._opened(episodes, self._environment)

    def resume(self, episodes: Episodes, *, min_ended: float = 1.0, patient: bool = True) -> Episodes:
        """Make one sampling call, and ask the environment about turns that ended in it.

        With `patient`, its answers are awaited. Otherwise answers that come within `patience_s` are taken, and an
        episode without one waits while others are sampled. If all wait, no call is made.
        """
        if not patient:
            episodes = self._answered(episodes, patient=False)
        live = episodes.live
        if live.any():
            episodes = self._sampled(episodes, live, min_ended=min_ended)
        elif self._environment is not None and not episodes.ended.all():
            self._environment.wait(list(self._pending.values()), within_s=_LOOK_S)
        if patient:
            episodes = self._answered(episodes, patient=True)
        self._tell(episodes, live & episodes.ended)
        return episodes

    def _sampled(self, episodes: Episodes, live: Bool[np.ndarray, " B"], *, min_ended: float) -> Episodes:
        sampler, rollout = self._sampler, episodes.rollout
        max_length = sampler.stop.max_length
        lengths: Any = episodes.prefix_lengths
        prefix, limits, one_per_group = None, None, slice(None, None, sampler.group_size)
        if lengths.any():
            prefix = Prefix(rollout.tokens, lengths)
        if prefix is not None or not live.all():
            limits = np.where(live, max_length, 0).astype(np.int32)
        prompts = Prompts(rollout.prompts[one_per_group], rollout.prompt_lengths[one_per_group])
        decoded = sampler.resume(
            self._with_earlier(prompts),
            episodes.keys,
            prefix=prefix,
            limits=limits,
            min_ended=min_ended,
        )
        episodes = merge_decoded(episodes, hosts.allgather(decoded))
        return episodes if self._environment is None else self._asked(episodes, live, self._environment)

    def play(self, prompts: Iterator[Prompts], key: Key[Array, ""], *, first: int = 0) -> Batch:
        """Play whole episodes to the next prompts."""
        return self.answer(next(prompts), key, first=first)

    def answer(self, prompts: Prompts, key: Key[Array, ""], *, first: int = 0) -> Batch:
        """Play a group of whole episodes to each prompt [P, S], on the host.

        Response i uses the key `fold_in(key, first + i)`.
        """
        if self._environment is None and not self._opening:  # one call suffices, and the rollout stays on the devices
            B, heard = len(prompts.lengths) * self._sampler.group_size, None
            if self.heard is not None:
                heard = self._hearing(_repeated(prompts.texts, B), _repeated(prompts.records, B))
            rollout = self._sampler(self._with_earlier(prompts), key, first=first, heard=heard)
            batch = new_batch(rollout, prompts)
            if self.history is not None:
                G = self._sampler.group_size
                texts, lengths = (np.repeat(np.asarray(x), G, axis=0) for x in (prompts.tokens, prompts.lengths))
                self.history.add(texts, lengths, hosts.allgather(rollout.tokens), batch.lengths)
            return batch
        return self.to_batch(self.finish(self.begin(prompts, key, first=first)))

    def finish(self, episodes: Episodes) -> Episodes:
        """Play the unfinished episodes to their ends."""
        while not episodes.ended.all():
            episodes = self.resume(episodes)
        return episodes

    def to_batch(self, episodes: Episodes) -> Batch:
        rollout: Any = episodes.rollout
        if self.history is not None:
            texts = rollout.prompts, rollout.prompt_lengths, rollout.tokens
            self.history.add(*texts, rollout.mask.sum(axis=1))
        own = {name: getattr(episodes, name) for name in ("texts", "records", "turns", "stale_tokens", "failed")}
        if self._environment is not None:
            own["turn_ends"] = episodes.turn_ends
            if self._environment.asks_last:
                own["turn_rewards"] = episodes.turn_rewards
        return _with_columns(hosts.shard_rows(self._sampler.mesh, rollout), own)

    def _hearing(self, texts: Shaped[np.ndarray, " B"], records: Shaped[np.ndarray, " B"]) -> sampler_lib.Heard | None:
        if (heard := self.heard) is None:
            return None
        return lambda rows, tokens: heard(texts[rows].tolist(), tokens, records[rows].tolist())

    def _tell(self, episodes: Episodes, ended: Bool[np.ndarray, " B"]) -> None:
        """Tell of this process's episodes that have just ended, if others have not: the batch follows at once."""
        gives_rewards = self._environment is not None and self._environment.asks_last
        hearing = self._hearing(episodes.texts, episodes.records)
        if hearing is None or episodes.ended.all() or gives_rewards:  # the batch adds these to the records
            return
        own = hosts.own_rows(self._sampler.mesh, len(ended))
        asked = ended & ~episodes.failed
        rows, rollout = own[asked[own]], episodes.rollout
        hearing(rows, [np.asarray(rollout.tokens[row])[np.asarray(rollout.mask[row])].tolist() for row in rows])

    def _with_earlier(self, prompts: Prompts) -> Prompts:
        return prompts if self.history is None else dataclasses.replace(prompts, earlier=self.history.of(prompts))

    def _own(self, count: int) -> Int[np.ndarray, " n"]:
        return hosts.own_rows(self._sampler.mesh, count)

    def _turn_over(self, episodes: Episodes, row: int) -> TurnOver:
        rollout: Any = episodes.rollout
        mask, drawn, ends = rollout.mask[row], rollout.action_mask[row], episodes.turn_ends[row]
        spans = list(itertools.pairwise([0, *ends[: episodes.turns[row]].tolist()]))
        turns = [rollout.tokens[row, a:b][drawn[a:b]].tolist() for a, b in spans]
        return TurnOver(
            id=episodes.keys[row].tobytes(),
            text=episodes.texts[row],
            record=episodes.records[row],
            tokens=rollout.tokens[row][mask].tolist(),
            turns=turns,
            starts=[b - len(turn) for (_, b), turn in zip(spans, turns, strict=True)],
        )

    def _opened(self, episodes: Episodes, environment: Environment) -> Episodes:
        """Let the environment begin the episodes. One whose prompt is not that of its group has failed."""
        rollout: Any = episodes.rollout
        G, own = self._sampler.group_size, self._own(len(episodes))
        prompts, lengths, failed = rollout.prompts[own], rollout.prompt_lengths[own], episodes.failed[own]
        opened = environment.open([self._turn_over(episodes, row) for row in own.tolist()])
        for place, (prompt, wrong) in enumerate(opened):
            failed[place] = wrong
            if prompt is not None:
                prompts[place], lengths[place] = self._sampler.stop.pad_id, len(prompt)
                prompts[place, : len(prompt)] = prompt
        prompts, lengths, failed = self._gathered((prompts, lengths, failed), len(episodes))
        first = np.argmin(failed.reshape(-1, G), axis=1)  # of those that did not fail
        chosen = np.repeat(np.arange(0, len(episodes), G) + first, G)
        other = ~failed & ((prompts != prompts[chosen]).any(axis=1) | (lengths != lengths[chosen]))
        if other.any():
            logging.warning(
                "the environment's reset gave %d of %d episodes another prompt than the first of their group, and they "
                "have no score; make it depend on the record alone",
                *(other.sum(), len(other)),
            )
        failed = failed | other
        old, texts = rollout.prompts, episodes.texts.copy()
        rollout = dataclasses.replace(rollout, prompts=prompts[chosen], prompt_lengths=lengths[chosen])
        for row in range(0, len(episodes), G):
            if (rollout.prompts[row] != old[row]).any():
                texts[row : row + G] = environment.text(rollout.prompts[row, : rollout.prompt_lengths[row]].tolist())
        return dataclasses.replace(episodes, rollout=rollout, texts=texts, failed=failed)

    def _asked(self, episodes: Episodes, live: Bool[np.ndarray, " B"], environment: Environment) -> Episodes:
        """Note the turns that ended in a call, and begin to ask about those that may have a reply or a reward."""
        over, turns, rollout = live & episodes.ended, episodes.turns, episodes.rollout
        ends = episodes.turn_ends.copy()
        rows = np.flatnonzero(over)
        ends[rows, turns[rows] - 1] = np.asarray(rollout.mask)[rows].sum(axis=1)
        may = (turns < self._max_turns) | environment.asks_last
        asks = over & may & ~np.asarray(rollout.truncated) & ~episodes.failed
        episodes = dataclasses.replace(
            episodes, turn_ends=ends, waiting=episodes.waiting | asks, ended=episodes.ended & ~asks
        )
        own = self._own(len(over))
        self._begin(episodes, own[asks[own]], environment)
        environment.finish([episodes.keys[row].tobytes() for row in own[(over & ~asks)[own]]])
        return episodes

    def _begin(self, episodes: Episodes, rows: Int[np.ndarray, " n"], environment: Environment) -> None:
        turns = [self._turn_over(episodes, row) for row in rows.tolist()]
        self._pending |= zip((turn.id for turn in turns), environment.begin(turns), strict=True)

    def _answered(self, episodes: Episodes, *, patient: bool) -> Episodes:
        """Take the environment's answers, all or those that have come.

        An answer that leaves no room for another token truncates the episode.
        """
        environment = self._environment
        if environment is None or not episodes.waiting.any():
            return episodes
        own, limit = self._own(len(episodes)), self._sampler.stop.max_length
        rows = own[episodes.waiting[own]]
        ids = {int(row): episodes.keys[row].tobytes() for row in rows}
        unasked = [row for row, id in ids.items() if id not in self._pending]  # after a resume
        self._begin(episodes, np.array(unasked, int), environment)
        within_s = math.inf if patient else self._patience_s
        environment.wait([self._pending[id] for id in ids.values()], within_s=within_s)
        rollout: Any = episodes.rollout
        changed = (rollout.tokens, rollout.mask, rollout.truncated, episodes.ended, episodes.waiting, episodes.failed)
        tokens, mask, truncated, ended, waiting, failed, rewards = (
            np.array(x) for x in (*changed, episodes.turn_rewards)
        )
        for row, id in ids.items():
            if not self._pending[id].done():
                continue
            answer, length = self._pending.pop(id).result(), int(mask[row].sum())
            waiting[row], failed[row] = False, answer.failed
            rewards[row, episodes.turns[row] - 1] = answer.reward
            ended[row] = answer.reply is None or answer.failed or episodes.turns[row] >= self._max_turns
            if answer.reply is not None and not ended[row]:
                behind = length + len(answer.reply)
                ended[row] = truncated[row] = behind >= limit
                if not ended[row]:
                    tokens[row, length:behind], mask[row, length:behind] = answer.reply, True
        environment.finish([id for row, id in ids.items() if ended[row]])
        all_changed = [x[own] for x in (tokens, mask, truncated, ended, waiting, failed, rewards)]
        tokens, mask, truncated, ended, waiting, failed, rewards = self._gathered(all_changed, len(ended))
        rollout = dataclasses.replace(rollout, tokens=tokens, mask=mask, truncated=truncated)
        own_columns = {"ended": ended, "waiting": waiting, "failed": failed, "turn_rewards": rewards}
        return dataclasses.replace(episodes, rollout=rollout, **own_columns)

    def _gathered(self, own: Any, count: int) -> Any:
        return hosts.allgather_rows(self._sampler.mesh, own, count)


def merge_decoded(episodes: Episodes, decoded: Decoded) -> Episodes:
    """Merge a call's tokens, fetched to the host, into the unfinished episodes.

    Earlier log-probs, kept ids and routes stay.
    """
    old, new, live = episodes.rollout, decoded.rollout, episodes.live
    sampled, known = new.action_mask, old.routes.experts >= 0
    fields: dict[str, Any] = {
        "tokens": np.where(live[:, None], new.tokens, old.tokens),
        "mask": np.where(live[:, None], new.mask, old.mask),
        "action_mask": old.action_mask | sampled,
        "truncated": np.where(live, new.truncated, old.truncated),
        "behaviour_logprobs": np.where(sampled, new.behaviour_logprobs, old.behaviour_logprobs),
        "logprobs": np.where(sampled, new.logprobs, old.logprobs),
        "routes": jax.tree.map(lambda a, b: np.where(known, a, b), old.routes, new.routes),
        "kept": jax.tree.map(
            lambda a, b: np.where(np.expand_dims(sampled, tuple(range(2, b.ndim))), b, a), old.kept, new.kept
        ),
    }
    rollout = dataclasses.replace(old, **fields)
    turn_over = live & ~decoded.unfinished
    ended, turns = episodes.ended | turn_over, episodes.turns + turn_over
    return dataclasses.replace(episodes, rollout=rollout, ended=ended, turns=turns)


class Buffer:
    """Buffer of partial rollouts: keeps more groups in flight than a batch needs, so no call waits for stragglers.

    A batch takes the oldest complete groups. The rest resume under the next iteration's policy.
    """

    def __init__(
        self,
        player: Player,
        *,
        groups: int,
        group_size: int,
        in_flight: int,
        min_ended: float,
        episodes: Episodes | None = None,
    ):
        """Start empty, or from a checkpoint's episodes, oldest groups first.

        A sampling call takes `in_flight` groups, more than the `groups` of a batch, and returns once the share
        `min_ended` of the unfinished responses has ended (see `decoder.decode`).
        """
        self._player, self._groups, self._group_size, self._in_flight = player, groups, group_size, in_flight
        self._min_ended = min_ended
        self.episodes = episodes
        """Oldest groups first; None before the first batch."""
        self.started = self.calls = self._policies = 0
        """Responses started and sampling calls made with the newest policy."""

    def __len__(self) -> int:
        return 0 if self.episodes is None else len(self.episodes) // self._group_size

    @property
    def history(self) -> History | None:
        return self._player.history

    def play(self, prompts: Iterator[Prompts], key: Key[Array, ""], *, first: int = 0) -> Batch:
        """Return a batch of the oldest complete groups. `first` is ignored: the buffer numbers new responses itself."""
        del first
        self._see_weights()
        while len(self) < self._in_flight:
            new = self._player.begin(next(prompts), key, first=self.started)
            self.started += len(new)
            self.episodes = new if self.episodes is None else concatenate([self.episodes, new])
        episodes, G = self.episodes, self._group_size
        assert episodes is not None
        while (complete := episodes.complete(G)).sum() < self._groups:
            # Unfinished groups first, oldest first. Complete ones fill up the fixed shape.
            oldest = np.sort(np.argsort(complete, kind="stable")[: self._in_flight])
            tokens = episodes.prefix_lengths.reshape(-1, G).sum(axis=1)
            chosen = spread_over_shards(oldest, tokens[oldest], self._player.shards)
            resumed = self._player.resume(episodes.groups(chosen, G), min_ended=self._min_ended, patient=False)
            order = np.concatenate([chosen, np.setdiff1d(np.arange(len(self)), chosen)])
            rest = episodes.groups(order[len(chosen) :], G)
            episodes = concatenate([resumed, rest]).groups(np.argsort(order), G)
            self.calls += 1
        done = np.flatnonzero(complete)[: self._groups]
        self.episodes = episodes.groups(np.setdiff1d(np.arange(len(self)), done), G)
        return self._player.to_batch(episodes.groups(done, G))

    def _see_weights(self) -> None:
        """Mark all tokens sampled by earlier policies as stale."""
        if self._policies == self._player.policies:
            return
        self._policies, self.started, self.calls = self._player.policies, 0, 0
        if self.episodes is not None:
            stale: Any = self.episodes.sampled_tokens.astype(np.int32)
            self.episodes = dataclasses.replace(self.episodes, stale_tokens=stale)
