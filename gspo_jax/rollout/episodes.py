"""Responses that take several sampling calls: partial rollouts, cut off by an early exit, and multi-turn episodes.

Between calls the responses are on the host. The next call continues them, with the tokens they have as prefixes. Every
token keeps the log-probs and routes of the policy that sampled it, and every response keeps its key, so that cutting a
response off changes nothing but the policy that samples the rest of it.

Partial rollouts are described in Kimi k1.5, https://arxiv.org/abs/2501.12599.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int, Key, Shaped, UInt32

from gspo_jax.parallel import hosts
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rollout.prefixes import Prefix
from gspo_jax.rollout.sampler import Sampler
from gspo_jax.rollout.shard import Decoded
from gspo_jax.types import EpisodeBatch, Prompts, Rollout, RouterRecord

Reply = Callable[[Sequence[str], Sequence[list[int]], Sequence[Any]], Sequence[list[int] | None]]
"""Environment: (prompt texts, response tokens so far, data records) -> tokens of its replies, None to end an episode.

In a run of several processes, all call it after every sampling call, each with its own episodes.
"""


@struct.dataclass
class Episodes:
    """B episodes on the host, unfinished or ended, those of a group in adjacent rows."""

    rollout: Rollout
    """The responses so far."""
    texts: Shaped[np.ndarray, " B"]
    """Prompt text of each response."""
    records: Shaped[np.ndarray, " B"]
    """Data record of each prompt, such as its answer."""
    keys: UInt32[np.ndarray, "B words"]
    """Key data of each response."""
    ended: Bool[np.ndarray, " B"]
    """True for episodes that are over."""
    turns: Int[np.ndarray, " B"]
    """Turns the policy has finished."""
    stale_tokens: Int[np.ndarray, " B"]
    """Tokens sampled by policies older than the current one."""

    def __len__(self) -> int:
        return len(self.ended)

    @property
    def sampled_tokens(self) -> Int[np.ndarray, " B"]:
        """Tokens of each response that a policy has sampled."""
        return np.asarray(self.rollout.action_mask).sum(axis=1)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """All arrays by their names in a checkpoint, i.e. everything but texts and records."""
        routes = self.rollout.routes
        named: dict[str, Any] = {name: getattr(self.rollout, name) for name in _ROLLOUT_FIELDS}
        named |= {saved: getattr(self, field) for field, saved in _SAVED_NAMES.items()} | {"experts": routes.experts}
        if routes.logprobs is not None:
            named["router_logprobs"] = routes.logprobs
        return named

    @classmethod
    def from_arrays(cls, named: Mapping[str, Any], texts: Sequence[str], records: Sequence[Any]) -> "Episodes":
        """The inverse of `to_arrays`, given texts and records."""
        routes = RouterRecord(named["experts"], named.get("router_logprobs"))
        rollout = Rollout(**{name: named[name] for name in _ROLLOUT_FIELDS}, routes=routes)
        objects = {"texts": np.array(texts, object), "records": np.array(records, object)}
        return cls(rollout, **objects, **{field: named[saved] for field, saved in _SAVED_NAMES.items()})

    def complete(self, group_size: int) -> Bool[np.ndarray, " P"]:
        """True for groups in which every episode has ended."""
        return self.ended.reshape(-1, group_size).all(axis=1)

    def groups(self, chosen: Int[np.ndarray, " N"], group_size: int) -> "Episodes":
        """The episodes of the chosen groups, in the order given."""
        rows = group_rows(chosen, group_size)
        return jax.tree.map(lambda x: x[rows], self)


_ROLLOUT_FIELDS = tuple(field.name for field in dataclasses.fields(Rollout) if field.name != "routes")
_SAVED_NAMES = {"keys": "keys", "ended": "ended", "turns": "turns", "stale_tokens": "older"}
"""Array fields of `Episodes`, with their names in checkpoints."""


def group_rows(groups: Int[np.ndarray, " N"], group_size: int) -> Int[np.ndarray, " B"]:
    """Row numbers of the given groups, one group after the other."""
    return (groups[:, None] * group_size + np.arange(group_size)).reshape(-1)


def spread_over_shards(groups: Int[np.ndarray, " N"], shards: int) -> Int[np.ndarray, " N"]:
    """The same groups, in the order in which one after the other goes to the next of the batch shards.

    From the oldest to the newest, every shard then gets groups of all ages. In the order of their ages, one shard would
    get the oldest ones alone: few responses, all of them long, and the others would wait for it.
    """
    return groups.reshape(-1, shards).T.reshape(-1)


def concatenate(parts: Iterable[Episodes]) -> Episodes:
    """Concatenate episodes along the rows."""
    return jax.tree.map(lambda *each: np.concatenate(each), *parts)


class Player:
    """Plays episodes with a sampler: in one turn, or in several where an environment replies."""

    def __init__(
        self, sampler: Sampler, *, reply: Reply | None = None, max_turns: int = 1, opening: Sequence[int] = ()
    ):
        """Take the sampler and, for multi-turn episodes, the environment.

        Args:
          sampler: samples the responses; its token limit applies to whole episodes.
          reply: the environment; None: none.
          max_turns: maximum number of policy turns; the environment is not asked to reply to the last one.
          opening: tokens that every response starts with, treated like an environment's: they are no actions.
        """
        self._sampler, self._reply, self._max_turns, self._opening = sampler, reply, max_turns, list(opening)

    @property
    def shards(self) -> int:
        """Number of batch shards that a sampling call's responses are split over, in order."""
        return mesh_lib.batch_shards(dict(self._sampler.mesh.shape))

    def begin(
        self, prompts: Prompts, texts: Sequence[str], records: Sequence[Any], key: Key[Array, ""], *, first: int = 0
    ) -> Episodes:
        """A new group of episodes for each prompt, which contain at most the opening.

        Args:
          prompts: on the host, [P, S].
          texts: text of each prompt.
          records: data record of each prompt.
          key: shared by all responses; response i uses `fold_in(key, first + i)`.
          first: number of the first response.
        """
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
        return Episodes(
            Rollout(**fields, routes=self._sampler.empty_routes(B, S + T)),
            texts=np.repeat(np.array(texts, object), G),
            records=np.repeat(np.array(records, object), G),
            keys=keys,
            ended=np.zeros(B, bool),
            turns=np.zeros(B, np.int32),
            stale_tokens=np.zeros(B, np.int32),
        )

    def resume(self, episodes: Episodes, *, min_ended: float = 1.0) -> Episodes:
        """The episodes after one more sampling call and the environment's replies to the turns that ended in it."""
        sampler, rollout, live = self._sampler, episodes.rollout, ~episodes.ended
        max_length = sampler.stop.max_length
        lengths: Any = np.where(live, np.asarray(rollout.mask).sum(axis=1), 0).astype(np.int32)
        prefix, limits, one_per_group = None, None, slice(None, None, sampler.group_size)
        if lengths.any():
            prefix = Prefix(rollout.tokens, lengths)
        if prefix is not None or not live.all():
            limits = np.where(live, max_length, 0).astype(np.int32)
        decoded = sampler.resume(
            Prompts(rollout.prompts[one_per_group], rollout.prompt_lengths[one_per_group]),
            episodes.keys,
            prefix=prefix,
            limits=limits,
            min_ended=min_ended,
        )
        episodes = merge_decoded(episodes, hosts.allgather(decoded))
        return episodes if self._reply is None else self._add_replies(episodes, live & episodes.ended, self._reply)

    def play(
        self, prompts: Prompts, texts: Sequence[str], records: Sequence[Any], key: Key[Array, ""], *, first: int = 0
    ) -> EpisodeBatch:
        """Play a group of whole episodes to each prompt; see `begin` for the arguments."""
        if self._reply is None and not self._opening:  # one call is enough, and the rollout stays on the devices
            rollout = jax.block_until_ready(self._sampler(prompts, key, first=first))
            G = self._sampler.group_size
            rows = (np.repeat(np.array(each, object), G) for each in (texts, records))
            ones = np.ones(G * len(texts), np.int32)
            return EpisodeBatch(rollout, *rows, turns=ones, stale_tokens=0 * ones)
        episodes = self.begin(prompts, texts, records, key, first=first)
        while not episodes.ended.all():
            episodes = self.resume(episodes)
        return self.to_batch(episodes)

    def to_batch(self, episodes: Episodes) -> EpisodeBatch:
        """The batch of finished episodes, with the rollout moved to the devices."""
        rollout = hosts.shard_rows(self._sampler.mesh, episodes.rollout)
        return EpisodeBatch(rollout, episodes.texts, episodes.records, episodes.turns, episodes.stale_tokens)

    def _add_replies(self, episodes: Episodes, turn_over: Bool[np.ndarray, " B"], reply: Reply) -> Episodes:
        """Append the environment's replies where a turn is over, and reopen those episodes.

        Without a reply the episode has ended. A reply that leaves no room for another token ends it too, as truncated.
        Each process asks the environment about its own rows only.
        """
        tokens, mask, truncated, ended = (
            np.array(x)
            for x in (episodes.rollout.tokens, episodes.rollout.mask, episodes.rollout.truncated, episodes.ended)
        )
        own = hosts.own_rows(self._sampler.mesh, len(ended))
        asked = own[(turn_over & ~truncated & (episodes.turns < self._max_turns))[own]]
        responses = [tokens[row][mask[row]].tolist() for row in asked]
        replies = reply(episodes.texts[asked].tolist(), responses, episodes.records[asked].tolist())
        for row, response, said in zip(asked, responses, replies, strict=True):
            length = len(response)
            if said is None:
                continue
            if length + len(said) >= self._sampler.stop.max_length:
                truncated[row] = True
                continue
            tokens[row, length : length + len(said)] = said
            mask[row, length : length + len(said)] = True
            ended[row] = False
        changed = [x[own] for x in (tokens, mask, truncated, ended)]
        tokens, mask, truncated, ended = hosts.allgather_rows(self._sampler.mesh, changed, len(ended))
        rollout = dataclasses.replace(episodes.rollout, tokens=tokens, mask=mask, truncated=truncated)
        return dataclasses.replace(episodes, rollout=rollout, ended=ended)


def merge_decoded(episodes: Episodes, decoded: Decoded) -> Episodes:
    """The episodes with the tokens that a call, fetched to the host, sampled for those that had not ended.

    Log-probs and routes recorded by earlier calls stay as they were.
    """
    old, new, live = episodes.rollout, decoded.rollout, ~episodes.ended
    sampled, known = new.action_mask, old.routes.experts >= 0
    fields: dict[str, Any] = {
        "tokens": np.where(live[:, None], new.tokens, old.tokens),
        "mask": np.where(live[:, None], new.mask, old.mask),
        "action_mask": old.action_mask | sampled,
        "truncated": np.where(live, new.truncated, old.truncated),
        "behaviour_logprobs": np.where(sampled, new.behaviour_logprobs, old.behaviour_logprobs),
        "logprobs": np.where(sampled, new.logprobs, old.logprobs),
        "routes": jax.tree.map(lambda a, b: np.where(known, a, b), old.routes, new.routes),
    }
    rollout = dataclasses.replace(old, **fields)
    turn_over = live & ~decoded.unfinished
    ended, turns = episodes.ended | turn_over, episodes.turns + turn_over
    return dataclasses.replace(episodes, rollout=rollout, ended=ended, turns=turns)


class Buffer:
    """Buffer of partial rollouts: keeps more groups in flight than a batch needs, so that no call waits for stragglers.

    A batch takes the oldest complete groups. The rest stay in the buffer and resume in the next iteration, under the
    policy of that iteration.
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
        """Start empty, or from the episodes of a checkpoint.

        Args:
          player: plays the episodes.
          groups: groups per batch.
          group_size: responses per group.
          in_flight: groups per sampling call, more than `groups`.
          min_ended: share of a shard's unfinished responses after whose end a sampling call returns.
          episodes: initial content, oldest groups first; None: empty.
        """
        self._player, self._groups, self._group_size, self._in_flight = player, groups, group_size, in_flight
        self._min_ended = min_ended
        self.episodes = episodes
        """Episodes left in the buffer, oldest groups first; None before the first batch."""
        self.started = self.calls = 0
        """Responses started, and sampling calls made, since the last weight sync."""

    def __len__(self) -> int:
        """Number of groups in the buffer."""
        return 0 if self.episodes is None else len(self.episodes) // self._group_size

    def on_weight_sync(self) -> None:
        """Mark all tokens sampled so far as stale; call whenever the sampler loads another policy's weights."""
        self.started = self.calls = 0
        if self.episodes is not None:
            stale: Any = self.episodes.sampled_tokens.astype(np.int32)
            self.episodes = dataclasses.replace(self.episodes, stale_tokens=stale)

    def batch(self, begin: Callable[[int], Episodes]) -> EpisodeBatch:
        """The next batch, made of the oldest complete groups.

        `begin(first)` returns new episodes in whole groups, with responses numbered from `first`.
        """
        while len(self) < self._in_flight:
            new = begin(self.started)
            self.started += len(new)
            self.episodes = new if self.episodes is None else concatenate([self.episodes, new])
        episodes, G = self.episodes, self._group_size
        assert episodes is not None
        while (complete := episodes.complete(G)).sum() < self._groups:
            # Unfinished groups first, the oldest first; if these are too few, complete ones fill up the fixed shape.
            oldest = np.sort(np.argsort(complete, kind="stable")[: self._in_flight])
            chosen = spread_over_shards(oldest, self._player.shards)
            resumed = self._player.resume(episodes.groups(chosen, G), min_ended=self._min_ended)
            order = np.concatenate([chosen, np.setdiff1d(np.arange(len(self)), chosen)])
            rest = episodes.groups(order[len(chosen) :], G)
            episodes = concatenate([resumed, rest]).groups(np.argsort(order), G)
            self.calls += 1
        done = np.flatnonzero(complete)[: self._groups]
        self.episodes = episodes.groups(np.setdiff1d(np.arange(len(self)), done), G)
        return self._player.to_batch(episodes.groups(done, G))
