"""Errors that end a command with one sentence."""

import difflib
import errno
import os
import re
from collections.abc import Iterable, Iterator

_FULL_OR_BROKEN = {
    errno.ENOSPC: "make room on that disk, for data and for inodes",
    errno.EDQUOT: "make room within the quota of this account",
    errno.EFBIG: "raise this machine's limit on the size of files (ulimit -f)",
    errno.EROFS: "make that file system writable, or use another",
    errno.EIO: "check that disk, or use another",
    errno.EMFILE: "raise the limit on the open files of a process (ulimit -n)",
    errno.ENFILE: "raise this machine's limit on open files (fs.file-max)",
}
"""Disk errors that no program handles, with remedies."""
_REFUSED = {
    errno.EACCES: "give this account access to it, or use another place",
    errno.EPERM: "give this account access to it, or use another place",
    errno.ENOENT: "check that it exists, and that nothing removed it meanwhile",
}
"""Errors that may come from probing for access, with remedies."""


class UserError(ValueError):
    """An error the user can fix: one sentence with the value, the limit and the remedy."""


class StopRequested(Exception):
    """Raised in all processes of a run at the same point, after a signal to one."""


class Diverged(RuntimeError):
    """Non-finite gradients or parameters. Starting again would end the same way."""


class ScoringFailed(RuntimeError):
    """Rewards or an environment failed for good. The run goes on from its newest checkpoint once they are mended."""


def choices(name: str, known: Iterable[str]) -> str:
    """Return a message's end about an unknown `name`: the closest of `known`, if any, then all."""
    names = list(known)
    near = nearest(name, names)
    return (f"did you mean {near!r}? " if near else "") + f"there are {', '.join(names)}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the closest of `known`, if any, ignoring case, blanks and punctuation: "Dr. GRPO"."""

    def letters(text: str) -> str:
        return "".join(filter(str.isalnum, text)).lower()

    names = {letters(each): each for each in known}
    found = difflib.get_close_matches(letters(name), names, n=1)
    return names[found[0]] if found else None


def fault(error: BaseException, place: str) -> str | None:
    """Return a sentence with path and remedy if a disk caused the error.

    `place` is named if the disk's error has no path.
    """
    for known, contexts in ((_FULL_OR_BROKEN | _REFUSED, False), (_FULL_OR_BROKEN, True)):
        for each in _causes(error, contexts=contexts):
            code, path = _system_error(each)
            if code in known:
                return f"{path or f'a file, probably in {place}'}: {os.strerror(code)}; {known[code]}"
    return None


def _causes(error: BaseException, *, contexts: bool) -> Iterator[BaseException]:
    left: list[BaseException | None] = [error]
    seen = set()
    while left:
        each = left.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        left += [each.__cause__, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ())]
        if contexts:
            left.append(each.__context__)


def _system_error(error: BaseException) -> tuple[int, str | None]:
    """Return errno and path of a system error, else 0. TensorStore and Rust give it as text."""
    if isinstance(error, OSError):
        return error.errno or 0, None if error.filename is None else str(error.filename)
    code, path = re.search(r"os[_ ]error(?:_code='| )(\d+)", str(error)), re.search(r'"(/[^"]+)"', str(error))
    return (0, None) if code is None else (int(code[1]), None if path is None else path[1])
