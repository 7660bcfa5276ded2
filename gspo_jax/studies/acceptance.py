"""What drafts would have saved in given responses: a decode that knows them, step by step."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from gspo_jax.rollout.drafts import Drafter, Texts, accepted, newest_tokens, propose

POSITIONS = (0, 32, 128, 512, 2048)
"""Bounds of the response positions told apart."""
_TOGETHER = 2**24
"""Positions compared at a time."""


@dataclass(frozen=True)
class Group:
    """Responses to a prompt, in tokens."""

    prompt: Sequence[int]
    responses: Sequence[Sequence[int]]
    earlier: Sequence[Sequence[int]] = ()
    """Responses of earlier epochs, the newest first."""


class Advances(NamedTuple):
    """A decode's steps: one row per step, one column per response."""

    position: Int[np.ndarray, "steps B"]
    """Tokens of the response before the step; -1: it took no step."""
    advance: Int[np.ndarray, "steps B"]
    """Tokens that the step added."""
    drafted: Int[np.ndarray, "steps B"]


@dataclass(frozen=True)
class Acceptance:
    """What one drafter does with drafts of one length."""

    drafter: Drafter
    drafts: int
    """Most drafts per step."""
    tokens_per_step: float
    """Per response: 1 without drafts."""
    accepted: float
    """Share of the drafts."""
    with_draft: float
    """Share of the steps."""
    by_position: dict[str, float]
    """Tokens per step in ranges of the response, such as 32-128."""
    by_group: tuple[float, float, float]
    """Lower quartile, median and upper quartile over groups."""

    def facts(self) -> dict[str, object]:
        """Return the numbers by name."""
        low, median, high = self.by_group
        return {
            "drafter": self.drafter,
            "drafts": self.drafts,
            "tokens_per_step": self.tokens_per_step,
            "accepted": self.accepted,
            "with_draft": self.with_draft,
            "by_position": self.by_position,
            "by_group": {"25%": low, "50%": median, "75%": high},
        }


def measure(
    groups: Sequence[Group], drafter: Drafter, drafts: int, *, together: int | None = None, least: int | None = None
) -> Acceptance:
    """Decode known responses with drafts.

    Args:
      together: responses of a group decoded at a time, as slots allow; None: all.
      least: newest tokens that have to occur for a draft; None: as in decoding.

    Raises:
      ValueError: there is no response of two tokens.
    """
    taken, gained, drafted, rows = [], [], [], []
    options = {} if least is None else {"least": least}
    for part in _parts(groups, with_earlier=drafter == "history"):
        found = _decode(part, drafter, drafts, together, options)
        active = found.position >= 0
        taken.append(found.position[active])
        gained.append(found.advance[active])
        drafted.append(found.drafted[active])
        steps = active.sum(axis=0).reshape(part.lengths.shape).sum(axis=1)
        sums = np.where(active, found.advance, 0).sum(axis=0).reshape(part.lengths.shape).sum(axis=1)
        rows += [total / count for total, count in zip(sums, steps, strict=True) if count]
    if not rows:
        raise ValueError("no response has two tokens")
    position, advance, count = (np.concatenate(x) for x in (taken, gained, drafted))
    ends = (*POSITIONS[1:], np.inf)
    inside = {
        f"{low}-{high}" if high < np.inf else f"{low}-": (position >= low) & (position < high)
        for low, high in zip(POSITIONS, ends, strict=True)
    }
    low, median, high = np.quantile(rows, (0.25, 0.5, 0.75))
    return Acceptance(
        drafter,
        drafts,
        tokens_per_step=float(advance.mean()),
        accepted=float((advance - 1).sum() / max(1, count.sum())),
        with_draft=float((count > 0).mean()),
        by_position={name: float(advance[here].mean()) for name, here in inside.items() if here.any()},
        by_group=(float(low), float(median), float(high)),
    )


class _Part(NamedTuple):
    """Groups of equally many responses, padded."""

    prompts: Int[np.ndarray, "P S"]
    prompt_lengths: Int[np.ndarray, " P"]
    tokens: Int[np.ndarray, "P Q T"]
    lengths: Int[np.ndarray, "P Q"]
    earlier: Int[np.ndarray, "P H T"]
    earlier_lengths: Int[np.ndarray, "P H"]


def _parts(groups: Sequence[Group], *, with_earlier: bool) -> Iterator[_Part]:
    """Yield groups of similar lengths, as many at a time as memory allows."""
    by_size: dict[int, list[Group]] = {}
    for group in groups:
        by_size.setdefault(len(group.responses), []).append(group)
    for size, own in by_size.items():
        own = sorted(own, key=_longest)
        while own:
            longest = _rounded(_longest(own[0]))
            count = max(1, _TOGETHER // (size * (size + 1) * longest))
            part = [group for group in own[:count] if _longest(group) <= longest]
            own = own[len(part) :]
            earlier = [list(group.earlier) if with_earlier else [] for group in part]
            most = max(1, *map(len, earlier))
            filled = [rows[place] if place < len(rows) else () for rows in earlier for place in range(most)]
            tokens = _padded([response for group in part for response in group.responses])
            yield _Part(
                *_padded([group.prompt for group in part]),
                *(x.reshape(len(part), size, *x.shape[1:]) for x in tokens),
                *(x.reshape(len(part), most, *x.shape[1:]) for x in _padded(filled)),
            )


def _longest(group: Group) -> int:
    return max(map(len, group.responses))


def _rounded(length: int) -> int:
    """Return the least power of two, at least 16, that is not below `length`: few shapes are compiled."""
    return max(16, 1 << (length - 1).bit_length())


def _padded(rows: Sequence[Sequence[int]]) -> tuple[Int[np.ndarray, "n M"], Int[np.ndarray, " n"]]:
    lengths = np.array(list(map(len, rows)), np.int32)
    tokens = np.zeros((len(rows), _rounded(int(lengths.max()))), np.int32)
    for row, (given, length) in enumerate(zip(rows, lengths, strict=True)):
        tokens[row, :length] = given
    return tokens, lengths


def _decode(part: _Part, drafter: Drafter, drafts: int, together: int | None, options: Mapping[str, int]) -> Advances:
    step = _step(drafter, drafts, together, tuple(options.items()))
    known, steps = jnp.minimum(part.lengths, 1), []
    while (np.asarray(known) < part.lengths).any():
        known, found = step(part, known)
        steps.append(found)
    if not steps:
        return Advances(*(np.zeros((0, part.lengths.size), np.int32),) * 3)
    return Advances(*map(np.stack, zip(*steps, strict=True)))


@functools.cache
def _step(drafter: Drafter, drafts: int, together: int | None, options: tuple[tuple[str, int], ...]):
    @jax.jit
    def step(part: _Part, known: Int[Array, "P Q"]) -> tuple[Array, Advances]:
        active = known < part.lengths
        if together is not None:
            active &= jnp.cumsum(active, axis=1) <= together
        newest = newest_tokens(part.prompts, part.prompt_lengths, part.tokens, known)
        found = propose(newest, sources(part, known, active, drafter), drafts, **dict(options))
        at = known[..., None] + jnp.arange(drafts)[None, None]
        following = jnp.take_along_axis(part.tokens, jnp.minimum(at, part.tokens.shape[2] - 1), axis=2)
        advance = jnp.minimum(1 + accepted(found.tokens, found.count, following), part.lengths - known)
        return (
            known + jnp.where(active, advance, 0),
            Advances(*(jnp.where(active, x, -1).reshape(-1) for x in (known, advance, found.count))),
        )

    return step


def sources(part: _Part, known: Int[Array, "P Q"], active: Bool[Array, "P Q"], drafter: Drafter) -> list[Texts]:
    """Return what the drafter reads after `known` tokens of each response."""
    P, Q = known.shape
    if drafter == "none":
        return [Texts(part.prompts[:, None], jnp.zeros((P, Q, 1), jnp.int32))]
    own = jnp.eye(Q, dtype=bool)[None]
    started = active | (known > 1)
    lengths = jnp.broadcast_to(jnp.where(started, known, 0)[:, None], (P, Q, Q))
    found = [
        Texts(part.tokens, jnp.where(own, lengths, 0) if drafter == "own" else lengths),
        Texts(part.prompts[:, None], jnp.broadcast_to(part.prompt_lengths[:, None, None], (P, Q, 1))),
    ]
    if drafter == "history":
        H = part.earlier.shape[1]
        found.append(Texts(part.earlier, jnp.broadcast_to(part.earlier_lengths[:, None], (P, Q, H))))
    return found
