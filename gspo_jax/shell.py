"""Repairs of a command's environment: standard streams, limits on files and threads."""

import contextlib
import errno
import os
import resource
import sys
from typing import Any, TextIO

from gspo_jax.errors import UserError

MIN_FILES = 256
"""Minimum open files for a run."""
MIN_THREADS = 256
"""Maximum threads of a one-process run on a few cores."""
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)
"""Errors of a stream without a reader."""


class Lasting:
    """A text stream that drops writes once its reader is gone."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text and return its length."""
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
    """Open closed standard streams on /dev/null, and keep broken ones from ending the run.

    Otherwise the next opened file would take a closed stream's number and its output.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  open until exit
    sys.stdout, sys.stderr = Lasting(sys.stdout), Lasting(sys.stderr)  # type: ignore[assignment]


def raise_limits() -> None:
    """Raise this process's limits on open files and threads to the hard limits.

    Raises:
      UserError: a run needs more.
    """
    limits = [(resource.RLIMIT_NOFILE, MIN_FILES, "open files", "n")]
    if os.geteuid():  # root has no limit on threads
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
