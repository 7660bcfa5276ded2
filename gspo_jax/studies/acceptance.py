"""What drafts would have saved in given responses: a decode that knows them, step by step."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from gspo_jax.rollout.drafts import Drafter, accepted, newest_tokens, propose, readable
from gspo_jax.types import TextRows

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


class _Steps(NamedTuple):
    """A decode: one row per step, one column per response, -1 where a response takes no step."""

    position: Int[np.ndarray, "steps B"]
    """Tokens of the response before the step."""
    advance: Int[np.ndarray, "steps B"]
    """Tokens that the step adds."""
    drafted: Int[np.ndarray, "steps B"]


@dataclass(frozen=True)
class Acceptance:
    """Tokens per step, and right drafts, of one drafter with so many drafts a step."""

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


def measure(groups: Sequence[Group], drafter: Drafter, drafts: int, *, together: int | None = None) -> Acceptance:
    """Return what drafts gain in known responses.

    Args:
      together: responses of a group decoded at a time, as slots allow; None: all.

    Raises:
      ValueError: there is no response of two tokens.
    """
    taken, gained, drafted, rows = [], [], [], []
    for part in _parts(groups, with_earlier=drafter == "history"):
        found = _decode(part, drafter, drafts, together)
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

    prompts: Int[Array, "P S"]
    prompt_lengths: Int[Array, " P"]
    tokens: Int[Array, "P Q T"]
    lengths: Int[Array, "P Q"]
    earlier: Int[Array, "P H T"]
    earlier_lengths: Int[Array, "P H"]


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


def _padded(rows: Sequence[Sequence[int]]) -> tuple[Int[Array, "n M"], Int[Array, " n"]]:
    lengths = np.array(list(map(len, rows)), np.int32)
    tokens = np.zeros((len(rows), _rounded(int(lengths.max()))), np.int32)
    for row, (given, length) in enumerate(zip(rows, lengths, strict=True)):
        tokens[row, :length] = given
    return jnp.asarray(tokens), jnp.asarray(lengths)


def _decode(part: _Part, drafter: Drafter, drafts: int, together: int | None) -> _Steps:
    known, found = jnp.minimum(part.lengths, 1), []
    while (known < part.lengths).any():
        known, *step = _step(part, known, drafter, drafts, together)
        found.append(step)
    none = np.zeros((0, part.lengths.size), np.int32)
    return _Steps(*map(np.stack, zip(*found, strict=True))) if found else _Steps(none, none, none)


@functools.partial(jax.jit, static_argnames=("drafter", "drafts", "together"))
def _step(
    part: _Part, known: Int[Array, "P Q"], drafter: Drafter, drafts: int, together: int | None
) -> tuple[Array, Array, Array, Array]:
    """Return the tokens known after a step, and the step's row of each field of `_Steps`."""
    active = known < part.lengths
    if together is not None:
        active &= jnp.cumsum(active, axis=1) <= together
    begun = jnp.where(active | (known > 1), known, 0)
    earlier = TextRows(part.earlier, part.earlier_lengths)
    starts = TextRows(part.prompts[:, None], part.prompt_lengths[:, None])
    own = jnp.eye(known.shape[1], dtype=bool)[None]
    sources = readable(drafter, own, starts, TextRows(part.tokens, begun), earlier)
    newest = newest_tokens(part.prompts, part.prompt_lengths, part.tokens, known)
    found = propose(newest, sources, drafts)
    at = known[..., None] + jnp.arange(drafts)[None, None]
    following = jnp.take_along_axis(part.tokens, jnp.minimum(at, part.tokens.shape[2] - 1), axis=2)
    advance = jnp.minimum(1 + accepted(found.tokens, found.count, following), part.lengths - known)
    position, advance, count = (jnp.where(active, x, -1) for x in (known, advance, found.count))
    return known + jnp.maximum(advance, 0), position.reshape(-1), advance.reshape(-1), count.reshape(-1)
