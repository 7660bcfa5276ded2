"""What a command gets from its shell, mended where it can be: standard streams, limits on files and threads."""

import contextlib
import errno
import os
import resource
import sys
from typing import Any, TextIO

from gspo_jax.errors import UserError

MIN_FILES = 256
"""Open files that a run needs at least."""
MIN_THREADS = 256
"""Threads that a run of one process starts at most on a few cores."""
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)
"""Errors of a stream that nothing reads any more."""


class Lasting:
    """A text stream whose writes go nowhere once its reader is gone: a run does not end for want of one."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text; return its length."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if error.errno not in _GONE:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def keep_streams() -> None:
    """Open what the shell closed of the three standard streams on nothing, and keep the others from ending the run.

    Otherwise the next file to be opened would take the number of a closed stream, and get what libraries print.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  open until exit
    sys.stdout, sys.stderr = Lasting(sys.stdout), Lasting(sys.stderr)  # type: ignore[assignment]


def raise_limits() -> None:
    """Raise this process's limits on open files and threads as far as its account may.

    Raises:
      UserError: that is not far enough for a run.
    """
    limits = [(resource.RLIMIT_NOFILE, MIN_FILES, "open files", "n")]
    if os.geteuid():  # root may start as many as it likes
        limits += [(resource.RLIMIT_NPROC, MIN_THREADS, "processes and threads of this account", "u")]
    for kind, least, what, flag in limits:
        _, hard = resource.getrlimit(kind)
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit than it says
            resource.setrlimit(kind, (hard, hard))
        if hard != resource.RLIM_INFINITY and hard < least:
            raise UserError(
                f"at most {hard} {what} are allowed here, and a run needs {least}; raise the limit where it is set "
                f"(ulimit -{flag} {least})"
            )
