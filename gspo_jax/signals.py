"""Signals that ask a command to end: SIGTERM, Ctrl-C (SIGINT) and the end of a terminal (SIGHUP).

One that is ignored when Python starts, such as SIGHUP under nohup, stays ignored. A command ends of them in order and
with a sentence, from its first import on; a run stops and is saved (parallel/preemption.py).
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
"""Presses of Ctrl-C that end a process at once, whatever it is doing."""
_CLOSING_S = 1.0
"""Seconds within which several SIGHUPs are one: the kernel and the shell each send some when a terminal is closed."""
_ORDERLY_S = 2.0
"""Seconds that a command has to end in order; one that waits in a library of C++ does not even learn of the signal."""

Heard = Callable[[signal.Signals, int], None]
"""Called with a signal and the number of presses so far: of every SIGINT, and SIGHUP, but of no SIGTERM.

Launchers and platforms send SIGTERM beside or after the others, and so often that it says nothing about a person.
"""


class Ended(SystemExit):
    """Raised in the main thread of a command by a signal; its code is the one that a shell reports."""


RAISED = (KeyboardInterrupt, Ended)
"""What a signal raises, and no code that is called."""

_outermost: list[dict[signal.Signals, Any]] = []  # handlers of the process without `heard`, while signals are heard
_commands: list["_Command"] = []  # the one of this process, if it is a command


@contextmanager
def heard(act: Heard, numbers: Iterable[signal.Signals] = ASKS) -> Iterator[None]:
    """Call `act`, in a thread, for each such signal inside the block, instead of dying of it.

    Enter it in the main thread. Python runs a handler only between two of its own instructions, and a compilation is
    one of them; a thread hears of the signal at once. Processes that are forked inside the block die of these signals
    as ever.
    """
    undo = _listen(act, lambda *_: None, numbers)
    try:
        yield
    finally:
        undo()


def end_command() -> None:
    """From now on, have these signals end this process at once, with a sentence, where no `heard` block hears them."""
    if not _commands:
        _commands.append(_Command())
        atexit.register(flush)
        _listen(_commands[0].hear, _commands[0].handle, ASKS)


def in_order() -> None:
    """From now on, have them raise `Ended` in the main thread, so that what this command has opened is closed.

    Not among imports: some libraries of C++ abort if what they import raises.
    """
    end_command()
    _commands[0].in_order = True


def is_over() -> None:
    """Have the signals end this command no longer, if it is one: its result is saved, and it is about to exit."""
    for command in _commands:
        command.over = True


def say(text: str) -> None:
    """Print a line to stderr, if that still leads anywhere: a terminal may be closed."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def flush() -> None:
    """Flush stdout and stderr; drop what a closed terminal or pipe does not take: Python would exit with 120 for it."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError as error:
            if error.errno in (errno.EIO, errno.EPIPE):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except ValueError:  # it is closed
            pass


class _Command:
    """Ends a command when a signal comes, with one sentence."""

    def __init__(self) -> None:
        self.over = self.in_order = False
        self._saying, self._ending = threading.Lock(), False

    def hear(self, number: signal.Signals, presses: int) -> None:
        """End the process, in the thread that hears, unless the main thread does so in order."""
        if self.over and presses < INSISTS:
            return
        self._say(number)
        if self.in_order and presses < INSISTS:
            time.sleep(_ORDERLY_S)
        exits.leave(exits.SIGNALLED + number)

    def handle(self, number: int, _: FrameType | None) -> None:
        """End the process in order, in the main thread; once, as a second signal must not disturb that."""
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
    """Hear signals until the returned function is called; `handler` is called for them too, in the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    found = {number: signal.getsignal(number) for number in numbers}
    earlier = {number: before for number, before in found.items() if before != signal.SIG_IGN}

    def read() -> None:
        presses, hung_up = 0, -_CLOSING_S
        while told := os.read(reader, 1):
            if told[0] not in earlier:  # one that a library handles
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
    """Die of the signals again, in a child that was forked while they were heard; the pipe is its parent's."""
    for earlier in _outermost:
        signal.set_wakeup_fd(-1)
        for number, before in earlier.items():
            signal.signal(number, before)
    _outermost.clear()
    _commands.clear()


os.register_at_fork(after_in_child=_forget)
