"""Worker process for isolated reward functions: `python -m gspo_jax.rewards.worker TIMEOUT_S MODULE…`.

The worker imports each MODULE (a dotted name or path of a .py file) and holds the pipes to the pool. A runner forked
from it makes the calls, so the worker can kill a hanging call on time with everything it started, even if it holds the
GIL or the pool was killed, and fork another. It also replaces a runner that has left a process or thread behind, or
piled up memory or open files.

The runner has no descriptor to the pool, and returns scores in shared memory: nothing that a function prints or writes
can pass for a score. A function can still falsify scores of its runner by searching the runner's memory. Functions can
reach network and files. Denying it takes a sandbox.

For each call the pool writes two lines: a nonce, which never reaches the runner, and a JSON request, `{"function",
"prompt", "completion", "record"}`. The worker answers with one line: the nonce, a space, and one of `{"score"}`,
`{"error"}`, `{"ended"}`, `{"timed_out"}`. To start fast, it must not import jax. Linux only.
"""

import contextlib
import ctypes
import errno
import inspect
import json
import math
import mmap
import operator
import os
import resource
import select
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Awaitable
from typing import Any, BinaryIO

import psutil

from gspo_jax import limited, references, secrets
from gspo_jax.rewards.scores import as_float

_LIMITS = {
    resource.RLIMIT_AS: 4 << 30,  # a MemoryError instead of an exhausted machine
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_FSIZE: 1 << 30,  # stderr may be a long log
    resource.RLIMIT_NOFILE: 256,
}
"""Resource limits. RLIMIT_NPROC would count the trainer's threads too."""
_SLOT_BYTES = 1 << 16
_TRACEBACK_CHARACTERS = 5000
"""Characters kept of a traceback's end, each at most 12 bytes of JSON."""
_HEADER = struct.Struct("<Q?")
"""Length of the reply, 0 until complete, and whether the runner is spent."""
_PILED_BYTES, _PILED_FILES = 1 << 30, 64
"""Growth that replaces a runner."""
_NO_MORE = errno.EMFILE, errno.ENOMEM

# From linux/prctl.h.
_SET_PARENT_DEATH_SIGNAL = 1
_SET_DUMPABLE = 4
_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Answer requests until stdin closes or SIGTERM arrives, then kill all descendants."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # keeps library output out of the replies
    for kind, most in _LIMITS.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    timeout_s = float(sys.argv[1])
    for name in os.environ.keys() - limited.environment().keys() - {"HOME"}:
        secrets.keep(name)
    for module in sys.argv[2:]:
        references.module(module)
    _prctl(_SET_DUMPABLE, 0)  # denies the runner this process's /proc/PID/fd and mem
    _prctl(_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        with contextlib.suppress(BrokenPipeError, EOFError):  # pool gone
            _send(replies, b"ready")
            runner = _Runner(timeout_s, requests, replies)
            while nonce := requests.readline().rstrip():
                reply = runner.call(requests.readline())
                if runner.spent:
                    runner.close()
                _send(replies, nonce + b" " + reply)
                if runner.spent:  # not earlier: no nonce may be in memory
                    runner = _Runner(timeout_s, requests, replies)
    finally:
        _kill_descendants()
    # The pool was killed, and nobody else removes its workers' folder.
    with contextlib.suppress(OSError):  # another worker was faster, or a call left a file
        os.rmdir(os.environ["HOME"])


class _Runner:
    """Forked process that makes the calls, one at a time."""

    def __init__(self, timeout_s: float, requests: BinaryIO, replies: BinaryIO) -> None:
        self._timeout_s, self._pool = timeout_s, requests.fileno()
        self._slot = mmap.mmap(-1, _SLOT_BYTES)
        theirs, ours = os.pipe()
        self._bell, bell = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)  # if a call kills the worker
                requests.close()
                replies.close()
                os.close(ours)
                os.close(self._bell)
                with os.fdopen(theirs, "rb") as incoming:
                    _run(timeout_s, incoming, bell, self._slot)
            finally:
                os._exit(1)
        os.close(theirs)
        os.close(bell)
        self._requests = os.fdopen(ours, "wb")
        self._end = os.pidfd_open(self._pid)
        self._events = select.poll()
        self._events.register(self._bell, select.POLLIN)
        self._events.register(self._end, select.POLLIN)
        self._events.register(self._pool, 0)  # reports only that the pool closed its end, or died
        self.spent = False

    def call(self, request: bytes) -> bytes:
        """Return the reply to a request. Raise EOFError if the pool ends meanwhile."""
        deadline = time.monotonic() + self._timeout_s
        self._slot[: _HEADER.size] = bytes(_HEADER.size)
        with contextlib.suppress(BrokenPipeError):  # ended, as polling will report
            self._requests.write(request)
            self._requests.flush()
        while (remaining_s := deadline - time.monotonic()) > 0:
            events = dict(self._events.poll(math.ceil(1000 * remaining_s)))
            if self._pool in events:
                raise EOFError
            if events.get(self._bell, 0) & select.POLLIN:
                os.read(self._bell, _SLOT_BYTES)  # functions can ring it too
            length, self.spent = _HEADER.unpack(self._slot[: _HEADER.size])
            if length:
                return self._slot[_HEADER.size : _HEADER.size + length]
            if self._end in events:
                self.spent = True
                code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
                return json.dumps({"ended": f"signal {-code}" if code < 0 else f"exit code {code}"}).encode()
        self.spent = True
        return b'{"timed_out": true}'

    def close(self) -> None:
        _kill_descendants()
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        os.close(self._bell)
        os.close(self._end)
        self._slot.close()


def _run(timeout_s: float, requests: BinaryIO, bell: int, slot: mmap.mmap) -> None:
    _prctl(_SET_CHILD_SUBREAPER, 1)  # makes orphans countable children
    bytes_, files = _held()
    most = bytes_ + _PILED_BYTES, files + _PILED_FILES
    for number, line in enumerate(requests):
        request = json.loads(line)
        _limit_cpu(timeout_s)
        try:
            function = references.function(request["function"])
            value = function(request["prompt"], request["completion"], request["record"])
            reply = {"score": as_float(_awaited(value) if inspect.isawaitable(value) else value)}
        except BaseException as error:  # even sys.exit() is the function's failure
            is_full = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _NO_MORE)
            if is_full and number:  # earlier calls may be to blame
                os._exit(1)
            end = traceback.format_exc()[-2 * _TRACEBACK_CHARACTERS :]  # what a cut leaves of a secret looks like none
            reply = {"error": secrets.redacted(end)[-_TRACEBACK_CHARACTERS:]}
        body = json.dumps(reply).encode()
        slot[_HEADER.size : _HEADER.size + len(body)] = body
        has_piled = any(map(operator.gt, _held(), most))
        slot[: _HEADER.size] = _HEADER.pack(len(body), has_piled or _has_children() or threading.active_count() > 1)
        os.write(bell, b"!")


def _awaited(value: Awaitable[Any]) -> Any:
    import asyncio  # slow, and seldom needed

    async def waited() -> Any:
        return await value

    return asyncio.run(waited())


def _held() -> tuple[int, int]:
    """Return bytes of address space and number of open files."""
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[0])
    return pages * resource.getpagesize(), len(os.listdir("/proc/self/fd"))


def _limit_cpu(timeout_s: float) -> None:
    usage, hard = resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_CPU)[1]
    most = math.ceil(usage.ru_utime + usage.ru_stime + timeout_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _has_children() -> bool:
    """Return True if children are still running. Reap ended ones."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _kill_descendants() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _send(replies: BinaryIO, line: bytes) -> None:
    replies.write(line + b"\n")
    replies.flush()


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


if __name__ == "__main__":
    main()
