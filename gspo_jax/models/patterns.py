"""Matches names of modules with a folder's patterns, in a program of its own: `python -m gspo_jax.models.patterns`.

Regular expressions of Python backtrack: one of ten characters can take years on a name of forty.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

from gspo_jax import limited

_NAMES = 16
"""Names in a question: few, so that time enough is allowed for each with every pattern."""

_program = limited.Process("gspo_jax.models.patterns")


class NoPattern(ValueError):
    """Raised for a pattern that is none; the message names it."""


def first_matches(patterns: Sequence[str], names: Sequence[str]) -> list[int | None]:
    """Return, for each name, the index of the first pattern that matches it, or what is behind one of its dots.

    Raises:
      NoPattern: one is no regular expression.
      limited.TooMuch: they take too much time or memory.
    """
    found: list[int | None] = []
    for start in range(0, len(names), _NAMES):
        reply = _program.ask({"patterns": list(patterns), "names": list(names[start : start + _NAMES])})
        if "wrong" in reply:
            raise NoPattern(reply["wrong"])
        found += reply["found"]
    return found


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Answer a question of `first_matches`: what is `found`, or `wrong`."""
    try:
        compiled = list(enumerate(map(_compiled, question["patterns"])))
    except NoPattern as error:
        return {"wrong": str(error)}
    return {"found": [next((i for i, p in compiled if p.fullmatch(name)), None) for name in question["names"]]}


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        re.compile(pattern)  # which says where in the pattern an error is
        return re.compile(rf"(.*\.)?({pattern})")  # as peft finds what a pattern is for
    except (re.error, RecursionError, OverflowError) as error:
        raise NoPattern(f"{pattern!r:.100}, no pattern ({error!s:.200})") from None


if __name__ == "__main__":
    limited.serve(answer)
