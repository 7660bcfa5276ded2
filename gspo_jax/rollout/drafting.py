"""Drafts within the decode loop: what they are copied from, and how many of them a step feeds.

A step that feeds Q tokens per slot computes Q times as many rows, and takes longer than one of Q = 1 only where rows
outweigh what every step costs: with B slots, about (F + Q B) / (F + B) times as long, for F `fixed_rows`. Of two or
three widths Q, each compiled, the next step has the one with the most expected tokens per time. A draft is right with
the frequency of the recent ones, and only if those before it are.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels.backend import platform
from gspo_jax.rollout.drafts import Drafter, accepted, newest_tokens, propose, readable
from gspo_jax.types import Prompts, TextRows

_BETWEEN = 4
"""Tokens per slot and step of a width between one and the widest, if that is at least twice as wide."""
_FIXED_ROWS = {"cpu": 16, "gpu": 500, "tpu": 160}
"""Rows that take as long as what every step costs. Of the 30B recipe's compiled steps on v5p:4x4x4, with one token a
slot and with four: 110 with 16 slots a chip, 227 with 64. Timed on one H200 (docs/gpu.md): 380 and 620 of
Qwen3-30B-A3B with 16 and 64 slots, 580 to 2000 of Qwen3-0.6B with 16 to 256. Of a CPU's, with the tiny model: about
16."""
_ELSEWHERE = 128
"""The same of other platforms; a guess."""
_WORTH = 1.15
"""Widths that at best make a decode less than so many times as fast are not compiled."""
_MEMORY = 0.98
"""Weight of a step's drafts against those of the step after it."""
_PRIOR = 8.0, 4.0
"""Drafts assumed before the first, and how many of these were right."""


@dataclasses.dataclass(frozen=True)
class Drafting:
    """Choose what decode steps draft, and how many tokens they feed."""

    drafter: Drafter = "own"
    tokens: int = 0
    """Most drafts per slot and step."""
    fixed_rows: int | None = None
    """None: by the platform."""
    always: bool = False
    """Take the widest steps alone, whether they pay or not, as `plan` does."""

    def widths(self, slots: int) -> tuple[int, ...]:
        """Return the tokens per slot that steps of so many slots may feed."""
        if self.always:
            return (1 + self.tokens,)
        fixed = self._fixed
        allowed = [_BETWEEN, 1 + self.tokens] if 1 + self.tokens >= 2 * _BETWEEN else [1 + self.tokens]
        return 1, *(q for q in allowed if q > 1 and q * (fixed + slots) > _WORTH * (fixed + q * slots))

    def widest(self, counts: list[int]) -> int:
        """Return the most tokens per slot of steps with any of these numbers of slots."""
        return max(self.widths(slots)[-1] for slots in counts)

    def best(self, widths: tuple[int, ...], gained: Float[Array, " widths"], slots: int) -> Int[Array, ""]:
        """Return the number of the width with the most of its expected tokens per time."""
        rows = jnp.array([self._fixed + q * slots for q in widths], jnp.float32)
        return jnp.argmax(gained / rows).astype(jnp.int32)

    @property
    def _fixed(self) -> int:
        return _FIXED_ROWS.get(platform(), _ELSEWHERE) if self.fixed_rows is None else self.fixed_rows


NO_DRAFTS = Drafting()


@struct.dataclass
class DraftState:
    """Texts of n responses, and the drafts of B slots for the next step."""

    texts: Int[Array, "n T"]
    """Tokens of the responses so far."""
    tokens: Int[Array, "B k"]
    """Drafts for the next step."""
    count: Int[Array, " B"]
    tried: Float[Array, ""]
    """Recent drafts whose predecessors were right, of the whole expert group."""
    right: Float[Array, ""]
    width: Int[Array, ""]
    """Number of the next step's width."""

    @classmethod
    def start(cls, texts: Int[Array, "n T"], slots: int, drafts: int) -> "DraftState":
        """Return the state before the first step."""
        none, (tried, right) = jnp.zeros((slots, drafts), jnp.int32), (jnp.float32(x) for x in _PRIOR)
        return cls(texts, none, jnp.zeros(slots, jnp.int32), tried, right, jnp.zeros((), jnp.int32))

    def gained(self, widths: tuple[int, ...], active: Bool[Array, " B"]) -> Float[Array, " widths"]:
        """Return the tokens that this shard's slots are expected to gain in a step of each width."""
        rate = self.right / self.tried
        powers = jnp.cumsum(rate ** jnp.arange(1, self.tokens.shape[1] + 1))  # of 1, 2 … drafts
        powers = jnp.concatenate([jnp.zeros(1), powers])
        count = jnp.where(active, self.count, 0)
        return jnp.stack([active.sum() + powers[jnp.minimum(count, q - 1)].sum() for q in widths])

    def trials(
        self, sampled: Int[Array, "B Q"], active: Bool[Array, " B"]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return how many drafts of a step were tried, and right. One more than was fed can be told."""
        told = min(sampled.shape[1], self.tokens.shape[1])
        count = jnp.where(active, jnp.minimum(self.count, told), 0)
        right = accepted(self.tokens[:, :told], count, sampled)
        tried = right + (right < count)
        return tried.sum().astype(jnp.float32), right.sum().astype(jnp.float32)

    def remembered(self, tried: Float[Array, ""], right: Float[Array, ""]) -> "DraftState":
        """Add a step's drafts to the recent ones."""
        return dataclasses.replace(self, tried=_MEMORY * self.tried + tried, right=_MEMORY * self.right + right)

    def with_new(self, held: "Held", tokens: Int[Array, "B Q"], taken: Bool[Array, "B Q"]) -> "DraftState":
        """Add the tokens that slots took in a step to the texts."""
        n, T = self.texts.shape
        chosen = held.responses[None] == jnp.arange(n)[:, None]
        chosen &= held.active[None]
        slot, place, texts = chosen.argmax(axis=1), jnp.arange(T)[None], self.texts
        first, is_held = held.lengths[slot][:, None], chosen.any(axis=1)
        for j in range(tokens.shape[1]):
            here = (is_held & taken[slot, j])[:, None] & (place == first + j)
            texts = jnp.where(here, tokens[slot, j][:, None], texts)
        return dataclasses.replace(self, texts=texts)


class Held(NamedTuple):
    """The responses in B slots."""

    responses: Int[Array, " B"]
    """Undefined if idle."""
    lengths: Int[Array, " B"]
    """Tokens so far."""
    active: Bool[Array, " B"]
    aligned: bool
    """True if slot b holds response b, for all."""


def drafted(
    state: DraftState,
    held: Held,
    prompts: Prompts,
    known: Int[Array, " n"],
    room: Int[Array, " B"],
    *,
    drafter: Drafter,
) -> DraftState:
    """Return the state with drafts for the next step.

    Args:
      prompts: of the shard, [P, S].
      known: tokens of each response so far.
      room: most drafts of each slot.
    """
    (n, T), (B, k), P = state.texts.shape, state.tokens.shape, len(prompts.lengths)
    G, before, starts = n // P, prompts.earlier, (prompts.tokens, prompts.lengths)
    texts = TextRows(state.texts.reshape(P, G, T), known.reshape(P, G))
    if held.aligned:
        own, mine, at = jnp.eye(G, dtype=bool)[None], texts.tokens, texts.lengths
    else:  # each slot with its group's texts
        prompt, member = jnp.divmod(held.responses, G)
        texts, starts, before = jax.tree.map(lambda x: x[prompt], (texts, starts, before))
        own = (jnp.arange(G)[None] == member[:, None])[:, None]
        mine, at = state.texts[held.responses][:, None], held.lengths[:, None]
    starts, start_lengths = starts
    newest = newest_tokens(starts, start_lengths, mine, at)
    opening = TextRows(starts[:, None], start_lengths[:, None])
    found = propose(newest, readable(drafter, own, opening, texts, before), k)
    count = jnp.clip(found.count.reshape(B), 0, room)
    return dataclasses.replace(state, tokens=found.tokens.reshape(B, k), count=jnp.where(held.active, count, 0))
