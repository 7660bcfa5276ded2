"""Responses that take more than one sampling call: those that an early end has cut off, and those of several turns.

Between two calls they are on the host. A call goes on from what they have as prefixes: each token keeps the log-probs
and the routes of the policy that drew it, and the key of a response goes along, so that cutting it off changes nothing
but the policy that draws the rest.

Partial rollouts are those of Kimi k1.5, https://arxiv.org/abs/2501.12599.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int, Key, Shaped, UInt32

from gspo_jax.parallel import hosts
from gspo_jax.rollout.decoder import Decoded, Prefix
from gspo_jax.rollout.sampler import Sampler, bucket
from gspo_jax.types import Prompts, Rollout, RouterRecord

Reply = Callable[[str, list[int], Any], list[int] | None]
"""(prompt, response so far, record of the prompt) -> what the environment says, in tokens; None ends the episode."""


@struct.dataclass
class Episodes:
    """B responses on the host, those of a group in adjacent rows, on their way or ended."""

    rollout: Rollout
    """What there is of them."""
    texts: Shaped[np.ndarray, " B"]
    """The prompt of each response."""
    records: Shaped[np.ndarray, " B"]
    """What the data says of each prompt, such as its answer."""
    keys: UInt32[np.ndarray, "B words"]
    """The data of each response's key."""
    ended: Bool[np.ndarray, " B"]
    """Nothing more comes."""
    turns: Int[np.ndarray, " B"]
    """Turns that have ended."""
    older: Int[np.ndarray, " B"]
    """Tokens that policies before the current one have drawn."""

    def __len__(self) -> int:
        return len(self.ended)

    @property
    def drawn(self) -> Int[np.ndarray, " B"]:
        """Tokens that a policy has drawn."""
        return np.asarray(self.rollout.action_mask).sum(axis=1)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """All but the objects, by name."""
        routes = self.rollout.routes
        named: dict[str, Any] = {name: getattr(self.rollout, name) for name in _OF_ROLLOUT}
        named |= {name: getattr(self, name) for name in _OWN} | {"experts": routes.experts}
        if routes.logprobs is not None:
            named["router_logprobs"] = routes.logprobs
        return named

    @classmethod
    def from_arrays(cls, named: Mapping[str, Any], texts: Sequence[str], records: Sequence[Any]) -> "Episodes":
        """The inverse, with the objects."""
        routes = RouterRecord(named["experts"], named.get("router_logprobs"))
        rollout = Rollout(**{name: named[name] for name in _OF_ROLLOUT}, routes=routes)
        objects = {"texts": np.array(texts, object), "records": np.array(records, object)}
        return cls(rollout, **objects, **{name: named[name] for name in _OWN})

    def complete(self, group_size: int) -> Bool[np.ndarray, " P"]:
        """The groups all of whose responses have ended."""
        return self.ended.reshape(-1, group_size).all(axis=1)

    def groups(self, chosen: Int[np.ndarray, " N"], group_size: int) -> "Episodes":
        """Those of some groups, in this order."""
        rows = rows_of(chosen, group_size)
        return jax.tree.map(lambda x: x[rows], self)


_OF_ROLLOUT = tuple(field.name for field in dataclasses.fields(Rollout) if field.name != "routes")
_OWN = tuple(f.name for f in dataclasses.fields(Episodes) if f.name not in ("rollout", "texts", "records"))


class Played(NamedTuple):
    """A batch of episodes that have ended: the rollout on the devices, all else row by row on the host."""

    rollout: Rollout
    texts: Shaped[np.ndarray, " B"]
    """The prompt of each response."""
    records: Shaped[np.ndarray, " B"]
    """What the data says of it."""
    turns: Int[np.ndarray, " B"]
    """Of the policy."""
    older: Int[np.ndarray, " B"]
    """Tokens that policies before the current one have drawn."""


def rows_of(groups: Int[np.ndarray, " N"], group_size: int) -> Int[np.ndarray, " B"]:
    """The rows of groups, one group after the other."""
    return (groups[:, None] * group_size + np.arange(group_size)).reshape(-1)


def joined(parts: Iterable[Episodes]) -> Episodes:
    """One after the other."""
    return jax.tree.map(lambda *each: np.concatenate(each), *parts)


class Player:
    """Plays episodes with a sampler: turn by turn where an environment replies, otherwise in one turn."""

    def __init__(self, sampler: Sampler, *, reply: Reply | None = None, turns: int = 1, opening: Sequence[int] = ()):
        """Takes the sampler, and the environment where there is one.

        Args:
          sampler: its token limit is that of a whole episode.
          reply: the environment.
          turns: those of the policy are at most so many; the reply to the last is not asked for.
          opening: tokens that every response begins with, as if the environment had said them.
        """
        self._sampler, self._reply, self._turns, self._opening = sampler, reply, turns, list(opening)

    def begin(
        self, prompts: Prompts, texts: Sequence[str], records: Sequence[Any], key: Key[Array, ""], *, first: int = 0
    ) -> Episodes:
        """Episodes that have only been opened, a group to each prompt; `first` numbers the first response's key."""
        G, T = self._sampler.group_size, self._sampler.length
        keys = self._sampler.keys(prompts, key, first)
        B, S, opened = len(keys), prompts.tokens.shape[1], len(self._opening)
        tokens, mask = np.full((B, T), self._sampler.pad_id, np.int32), np.zeros((B, T), bool)
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
            Rollout(**fields, routes=self._sampler.no_routes(B, S + T)),
            texts=np.repeat(np.array(texts, object), G),
            records=np.repeat(np.array(records, object), G),
            keys=keys,
            ended=np.zeros(B, bool),
            turns=np.zeros(B, np.int32),
            older=np.zeros(B, np.int32),
        )

    def go_on(self, episodes: Episodes, *, enough: float = 1.0, budget: int | None = None) -> Episodes:
        """One sampling call, which may end early (see `decoder.generate`), and the replies to the turns that end."""
        sampler, rollout, live = self._sampler, episodes.rollout, ~episodes.ended
        lengths: Any = np.where(live, np.asarray(rollout.mask).sum(axis=1), 0).astype(np.int32)
        prefix, limits, every = None, None, slice(None, None, sampler.group_size)
        if lengths.any():
            prefix = Prefix(rollout.tokens[:, : bucket(int(lengths.max()), sampler.length)], lengths)
        if prefix is not None or not live.all():
            limits = np.where(live, sampler.length, 0).astype(np.int32)
        decoded = sampler.go_on(
            Prompts(rollout.prompts[every], rollout.prompt_lengths[every]),
            episodes.keys,
            prefix=prefix,
            limits=limits,
            enough=enough,
            budget=budget,
        )
        episodes = merged(episodes, hosts.everywhere(decoded))
        return episodes if self._reply is None else self._replied(episodes, live & episodes.ended, self._reply)

    def play(
        self, prompts: Prompts, texts: Sequence[str], records: Sequence[Any], key: Key[Array, ""], *, first: int = 0
    ) -> Played:
        """Whole episodes; arguments as `begin`."""
        if self._reply is None and not self._opening:  # they stay on the devices
            rollout = jax.block_until_ready(self._sampler(prompts, key, first=first))
            G = self._sampler.group_size
            rows = (np.repeat(np.array(each, object), G) for each in (texts, records))
            once = np.ones(G * len(texts), np.int32)
            return Played(rollout, *rows, turns=once, older=0 * once)
        episodes = self.begin(prompts, texts, records, key, first=first)
        while not episodes.ended.all():
            episodes = self.go_on(episodes)
        return self.played(episodes)

    def played(self, episodes: Episodes) -> Played:
        """Episodes that have ended, with the rollout on the devices."""
        rollout = hosts.to_rows(self._sampler.mesh, episodes.rollout)
        return Played(rollout, episodes.texts, episodes.records, episodes.turns, episodes.older)

    def _replied(self, episodes: Episodes, over: Bool[np.ndarray, " B"], reply: Reply) -> Episodes:
        """With what the environment says to the turns that are over; an episode without a reply has ended.

        A reply that leaves no room for another token ends it at its limit: the response is truncated. Each process asks
        for its own rows.
        """
        tokens, mask, truncated, ended = (
            np.array(x)
            for x in (episodes.rollout.tokens, episodes.rollout.mask, episodes.rollout.truncated, episodes.ended)
        )
        own = hosts.own_rows(self._sampler.mesh, len(ended))
        for row in own[(over & ~truncated & (episodes.turns < self._turns))[own]]:
            length = int(mask[row].sum())
            text: Any = episodes.texts[row]
            said = reply(text, tokens[row, :length].tolist(), episodes.records[row])
            if said is None:
                continue
            if length + len(said) >= self._sampler.length:
                truncated[row] = True
                continue
            tokens[row, length : length + len(said)] = said
            mask[row, length : length + len(said)] = True
            ended[row] = False
        changed = [x[own] for x in (tokens, mask, truncated, ended)]
        tokens, mask, truncated, ended = hosts.shared(self._sampler.mesh, changed, len(ended))
        rollout = dataclasses.replace(episodes.rollout, tokens=tokens, mask=mask, truncated=truncated)
        return dataclasses.replace(episodes, rollout=rollout, ended=ended)


def merged(episodes: Episodes, decoded: Decoded) -> Episodes:
    """With what a call on the host has drawn for those that had not ended; what was known before stays as it was."""
    old, new, live = episodes.rollout, decoded.rollout, ~episodes.ended
    drawn, known = new.action_mask, old.routes.experts >= 0
    fields: dict[str, Any] = {
        "tokens": np.where(live[:, None], new.tokens, old.tokens),
        "mask": np.where(live[:, None], new.mask, old.mask),
        "action_mask": old.action_mask | drawn,
        "truncated": np.where(live, new.truncated, old.truncated),
        "behaviour_logprobs": np.where(drawn, new.behaviour_logprobs, old.behaviour_logprobs),
        "logprobs": np.where(drawn, new.logprobs, old.logprobs),
        "routes": jax.tree.map(lambda a, b: np.where(known, a, b), old.routes, new.routes),
    }
    rollout = dataclasses.replace(old, **fields)
    over = live & ~decoded.unfinished
    return dataclasses.replace(episodes, rollout=rollout, ended=episodes.ended | over, turns=episodes.turns + over)


class Buffer:
    """Partial rollouts: more groups are under way than make a batch, and no call waits for the slowest of them.

    A batch is made of the oldest groups that are complete. The others stay and go on in the next iteration, under its
    policy.
    """

    def __init__(
        self,
        player: Player,
        *,
        groups: int,
        group_size: int,
        under_way: int,
        share: float,
        budget: int | None = None,
        left: Episodes | None = None,
    ):
        """`groups` make a batch.

        Args:
          under_way: how many groups go into a call, more than `groups`.
          share: of their responses that have not ended, how many end a call that ends early.
          budget: tokens drawn that do; None for no such end.
          left: what is in the buffer to begin with.
        """
        self._player, self._groups, self._group_size, self._under_way = player, groups, group_size, under_way
        self._share, self._budget = share, budget
        self.episodes = left
        """What is left, the oldest groups first; None before the first batch."""
        self.begun = self.calls = 0
        """Responses begun, and sampling calls, since the policy is the current one."""

    def __len__(self) -> int:
        """Groups in the buffer."""
        return 0 if self.episodes is None else len(self.episodes) // self._group_size

    def newer_policy(self) -> None:
        """From now on another policy draws."""
        self.begun = self.calls = 0
        if self.episodes is not None:
            self.episodes = dataclasses.replace(self.episodes, older=self.episodes.drawn.astype(np.int32))

    def batch(self, begin: Callable[[int], Episodes]) -> Played:
        """The next batch; `begin(first)` gives new episodes, of whole groups, the first being response `first`."""
        while len(self) < self._under_way:
            new = begin(self.begun)
            self.begun += len(new)
            self.episodes = new if self.episodes is None else joined([self.episodes, new])
        episodes, G = self.episodes, self._group_size
        assert episodes is not None
        while (complete := episodes.complete(G)).sum() < self._groups:
            # Those on their way, the oldest first; where there are too few, complete ones keep the shape.
            chosen = np.sort(np.argsort(complete, kind="stable")[: self._under_way])
            gone_on = self._player.go_on(episodes.groups(chosen, G), enough=self._share, budget=self._budget)
            order = np.concatenate([chosen, np.setdiff1d(np.arange(len(self)), chosen)])
            rest = episodes.groups(order[len(chosen) :], G)
            episodes = joined([gone_on, rest]).groups(np.argsort(order), G)
            self.calls += 1
        done = np.flatnonzero(complete)[: self._groups]
        self.episodes = episodes.groups(np.setdiff1d(np.arange(len(self)), done), G)
        return self._player.played(episodes.groups(done, G))
