"""Drafts of a response's next tokens: what followed its newest tokens where they occurred before.

A drafted token is accepted only if it is the one that the policy samples in its place, so drafts never change a
response. Prompt lookup: https://github.com/apoorvumang/prompt-lookup-decoding. Drafts from earlier rollouts:
https://arxiv.org/abs/2511.13841.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from gspo_jax.types import TextRows

Drafter = Literal["own", "group", "history"]
"""What drafts are copied from: the prompt and the response itself; also the group's other responses; also earlier
responses to the prompt."""

CONTEXT = 8
"""Most newest tokens that are compared."""
MOST = 8
"""Most drafts per step."""
LEAST = 2
"""Fewest that have to occur for a draft."""


class Texts(NamedTuple):
    """Rows of tokens that P groups of Q responses may copy from."""

    tokens: Int[Array, "P R M"]
    lengths: Int[Array, "P Q R"]
    """Tokens of each row that a response may read; 0: none."""


def readable(
    drafter: Drafter, own: Bool[Array, "#P Q R"], prompts: TextRows, responses: TextRows, earlier: TextRows | None
) -> list[Texts]:
    """Return what Q responses of each group may copy from.

    Args:
      own: True for a response's own row of `responses`, those of its group.
      prompts: a row per group.
      earlier: earlier responses to the prompt; None: none are kept.
    """
    (P, _), Q = responses.lengths.shape, own.shape[1]

    def all_of(rows: TextRows) -> Texts:
        return Texts(rows.tokens, jnp.broadcast_to(rows.lengths[:, None], (P, Q, rows.lengths.shape[1])))

    found = [all_of(responses), all_of(prompts)]
    if drafter == "own":
        found[0] = Texts(responses.tokens, jnp.where(own, found[0].lengths, 0))
    if drafter == "history" and earlier is not None:
        found.append(all_of(earlier))
    return found


class Drafted(NamedTuple):
    tokens: Int[Array, "P Q k"]
    """Undefined past `count`."""
    count: Int[Array, "P Q"]
    matched: Int[Array, "P Q"]
    """Newest tokens, at most `CONTEXT`, that the drafts follow in the text."""


def newest_tokens(
    prompts: Int[Array, "P S"],
    prompt_lengths: Int[Array, " P"],
    tokens: Int[Array, "P Q T"],
    lengths: Int[Array, "P Q"],
) -> Int[Array, "P Q context"]:
    """Return the last `CONTEXT` tokens of prompt and response, the newest first; -1 before the prompt."""
    at = lengths[..., None] - jnp.arange(1, CONTEXT + 1)[None, None]
    in_prompt = prompt_lengths[:, None, None] + at
    own = jnp.take_along_axis(tokens, jnp.maximum(at, 0), axis=2)
    before = jnp.take_along_axis(prompts[:, None], jnp.clip(in_prompt, 0, prompts.shape[1] - 1), axis=2)
    return jnp.where(at >= 0, own, jnp.where(in_prompt >= 0, before, -1))


def propose(newest: Int[Array, "P Q context"], sources: Sequence[Texts], count: int) -> Drafted:
    """Return up to `count` tokens that follow the longest occurrence of a response's newest tokens, at least `LEAST`.

    Of equally long ones that of the first source, there the last in the text, there that of the first row.

    Args:
      newest: as of `newest_tokens`.
    """
    found = [_longest(newest, texts, count) for texts in sources]
    best = found[0]
    for other in found[1:]:
        longer = other.matched > best.matched
        best = Drafted(
            jnp.where(longer[..., None], other.tokens, best.tokens),
            jnp.where(longer, other.count, best.count),
            jnp.where(longer, other.matched, best.matched),
        )
    return best._replace(count=jnp.where(best.matched >= LEAST, best.count, 0))


def _longest(newest: Array, texts: Texts, count: int) -> Drafted:
    tokens, lengths = texts
    (P, R, M), Q, context = tokens.shape, newest.shape[1], newest.shape[2]
    padded = jnp.pad(tokens, ((0, 0), (0, 0), (context - 1, 0)), constant_values=-2)
    matched, occurs = jnp.zeros((P, Q, R, M), jnp.int32), jnp.ones((P, Q, R, M), bool)
    for back in range(context):
        here = padded[:, None, :, context - 1 - back : context - 1 - back + M]
        occurs &= here == newest[:, :, back][..., None, None]
        matched += occurs
    at, row = jnp.arange(M)[None, None, None], jnp.arange(R)[None, None, :, None]
    matched = jnp.where(at + 1 < lengths[..., None], matched, 0)  # what comes next is known
    best = ((matched * M + at) * R + R - 1 - row).max(axis=(2, 3))
    matched, place = jnp.divmod(best, M * R)
    at, row = place // R, R - 1 - place % R
    following = (row * M + at + 1)[..., None] + jnp.arange(count)[None, None]
    drafts = jnp.take_along_axis(tokens.reshape(P, 1, R * M), jnp.minimum(following, R * M - 1), axis=2)
    known = jnp.take_along_axis(lengths, row[..., None], axis=2)[..., 0] - at - 1
    return Drafted(drafts, jnp.where(matched > 0, jnp.minimum(known, count), 0), matched)


def accepted(drafts: Int[Array, "*b k"], count: Int[Array, "*b"], sampled: Int[Array, "*b n"]) -> Int[Array, "*b"]:
    """Return how many drafts equal what was sampled in their place, up to the first that does not. n ≥ k."""
    k = drafts.shape[-1]
    at = jnp.arange(k).reshape((1,) * count.ndim + (k,))
    right = (drafts == sampled[..., :k]) & (at < count[..., None])
    return jnp.cumprod(right, axis=-1).sum(axis=-1, dtype=jnp.int32)
