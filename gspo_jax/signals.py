"""Signals that end a command: SIGTERM, Ctrl-C (SIGINT) and the end of a terminal (SIGHUP).

A signal ignored at Python's start, e.g. SIGHUP under nohup, stays ignored. A run stops and is saved
(parallel/preemption.py).
"""

import atexit
import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from gspo_jax import exits

ASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
INSISTS = 3
"""Presses of Ctrl-C that end a process at once."""
_CLOSING_S = 1.0
"""SIGHUPs within so many seconds count once: kernel and shell each send some at a terminal's end."""
_ORDERLY_S = 2.0
"""Seconds for a command to end in order. A wait in a C++ library never sees the signal."""

Heard = Callable[[signal.Signals, int], None]
"""Handler of a signal and the number of presses so far, which counts SIGINT and SIGHUP.

SIGTERM does not count: launchers send it repeatedly, and with other signals.
"""


class Ended(SystemExit):
    """Raised in a command's main thread by a signal, with the code that a shell reports."""


RAISED = (KeyboardInterrupt, Ended)
"""Raised only by signals."""

_outermost: list[dict[signal.Signals, Any]] = []  # handlers of the process outside `heard`, while signals are heard
_commands: list["_Command"] = []  # this process's command, if any


@contextmanager
def heard(act: Heard, numbers: Iterable[signal.Signals] = ASKS) -> Iterator[None]:
    """Call `act`, in a thread, for these signals inside the block, instead of dying.

    Enter it in the main thread. Python runs handlers only between instructions, and a compilation is one, but a thread
    hears the signal at once. Processes forked inside the block die as usual.
    """
    undo = _listen(act, lambda *_: None, numbers)
    try:
        yield
    finally:
        undo()


def end_command() -> None:
    """Make these signals end this process at once, with a sentence, outside `heard` blocks."""
    if not _commands:
        _commands.append(_Command())
        atexit.register(flush)
        _listen(_commands[0].hear, _commands[0].handle, ASKS)


def in_order() -> None:
    """Make them raise `Ended` in the main thread, so the command closes what it opened.

    Call it after imports: some C++ libraries abort if their imports raise.
    """
    end_command()
    _commands[0].in_order = True


def is_over() -> None:
    """Ignore the signals from now on: the command is about to exit."""
    for command in _commands:
        command.over = True


def say(text: str) -> None:
    """Print a line to stderr, if it is open."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def flush() -> None:
    """Flush stdout and stderr. Drop output to a closed terminal or pipe: Python would exit with 120."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError as error:
            if error.errno in (errno.EIO, errno.EPIPE):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except ValueError:  # it is closed
            pass


class _Command:
    def __init__(self) -> None:
        self.over = self.in_order = False
        self._saying, self._ending = threading.Lock(), False

    def hear(self, number: signal.Signals, presses: int) -> None:
        """End the process from the listening thread, unless the main thread does."""
        if self.over and presses < INSISTS:
            return
        self._say(number)
        if self.in_order and presses < INSISTS:
            time.sleep(_ORDERLY_S)
        exits.leave(exits.SIGNALLED + number)

    def handle(self, number: int, _: FrameType | None) -> None:
        """End the process once, in order, in the main thread."""
        if self.over or self._ending or not self.in_order:
            return
        self._ending = True
        self._say(signal.Signals(number))
        raise Ended(exits.SIGNALLED + number)

    def _say(self, number: signal.Signals) -> None:
        if self._saying.acquire(blocking=False):  # the first of both threads
            with contextlib.suppress(OSError):  # not print, which this may interrupt
                os.write(2, f"\n{number.name} has ended this command before it was done\n".encode())


def _listen(
    act: Heard, handler: Callable[[int, FrameType | None], None], numbers: Iterable[signal.Signals]
) -> Callable[[], None]:
    """Hear signals until the returned function is called. `handler` runs in the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    found = {number: signal.getsignal(number) for number in numbers}
    earlier = {number: before for number, before in found.items() if before != signal.SIG_IGN}

    def read() -> None:
        presses, hung_up = 0, -_CLOSING_S
        while told := os.read(reader, 1):
            if told[0] not in earlier:  # a library handles it
                continue
            number, now = signal.Signals(told[0]), time.monotonic()
            if number == signal.SIGHUP:
                presses += now - hung_up > _CLOSING_S
                hung_up = now
            presses += number == signal.SIGINT
            act(number, presses)

    thread = threading.Thread(target=read, name="signals", daemon=True)
    thread.start()
    if not _outermost:
        _outermost.append(earlier)
    first = _outermost[0] is earlier
    outer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in earlier:
        signal.signal(number, handler)

    def undo() -> None:
        signal.set_wakeup_fd(outer)
        for number, before in earlier.items():
            signal.signal(number, before)
        if first:
            _outermost.clear()
        os.close(writer)
        thread.join()
        os.close(reader)

    return undo


def _forget() -> None:
    """Restore the signals in a forked child."""
    for earlier in _outermost:
        signal.set_wakeup_fd(-1)
        for number, before in earlier.items():
            signal.signal(number, before)
    _outermost.clear()
    _commands.clear()


os.register_at_fork(after_in_child=_forget)
