"""Errors that end a command with one sentence, and the parts of such sentences."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """An error the user can fix: one sentence with the value, the limit and the remedy.

    Entry points print the message without a traceback.
    """


class StopRequested(Exception):
    """Raised in all processes of a run at the same point, after one of them got a signal."""


class Diverged(RuntimeError):
    """Training went bad: gradients or parameters that are not finite. Starting again would end the same way."""


def choices(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown `name`: the closest of the `known` names, if any, then all."""
    names = list(known)
    near = nearest(name, names)
    return (f"did you mean {near!r}? " if near else "") + f"there are {', '.join(names)}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The closest of the `known` names, if one is close; case, blanks and punctuation do not count: "Dr. GRPO"."""

    def letters(text: str) -> str:
        return "".join(filter(str.isalnum, text)).lower()

    names = {letters(each): each for each in known}
    found = difflib.get_close_matches(letters(name), names, n=1)
    return names[found[0]] if found else None
