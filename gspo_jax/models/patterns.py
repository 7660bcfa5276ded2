"""Matching of module names with a folder's patterns, in its own process: `python -m gspo_jax.models.patterns`.

Python's regular expressions backtrack: one of ten characters can take years on a name of forty.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

from gspo_jax import limited

_NAMES = 16
"""Few names per question, to fit the time limit."""

_program = limited.Process("gspo_jax.models.patterns")


class NoPattern(ValueError):
    """An invalid pattern, named by the message."""


def first_matches(patterns: Sequence[str], names: Sequence[str]) -> list[int | None]:
    """Return, per name, the first pattern's index that matches it, or the part after one of its dots.

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
    """Answer a question of `first_matches`."""
    try:
        compiled = list(enumerate(map(_compiled, question["patterns"])))
    except NoPattern as error:
        return {"wrong": str(error)}
    return {"found": [next((i for i, p in compiled if p.fullmatch(name)), None) for name in question["names"]]}


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        re.compile(pattern)  # reports the position of an error
        return re.compile(rf"(.*\.)?({pattern})")  # as peft matches
    except (re.error, RecursionError, OverflowError) as error:
        raise NoPattern(f"{pattern!r:.100}, no pattern ({error!s:.200})") from None


if __name__ == "__main__":
    limited.serve(answer)
