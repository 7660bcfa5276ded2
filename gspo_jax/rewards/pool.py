"""A pool of killable worker processes: a call that exceeds its timeout is killed, with all that it has started.

Workers are plain child processes that exchange JSON over pipes; worker.py says what they keep calls from, and what not.
They see few environment variables, none of which may hold a secret, and an empty home folder. multiprocessing would not
do: its fork copies jax's threads, and its spawn imports the parent's `__main__`, jax included, into every replacement.
"""

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from gspo_jax import limited
from gspo_jax.rewards import scores
from gspo_jax.sandbox.box import deadline

_STARTUP_TIMEOUT_S = 60.0
"""Seconds a worker may take to import its functions."""
_MARGIN_S = 2.0
"""Seconds beyond the timeout after which a worker that has not ended a call, or itself, is killed."""
_MAX_TRIES = 2
_MAX_REPLY_BYTES = 1 << 17
"""Bytes of a reply; a worker that sends more is not read any further. Its own limit is half of that."""
_PROGRAM = "gspo_jax.rewards.worker"


Value = TypeVar("Value", covariant=True)


@dataclass(frozen=True)
class Outcome(Generic[Value]):
    """The result of one call: a value, or None and the reason."""

    value: Value | None
    error: str | None = None
    raised: bool = False
    """True if the function itself raised; `error` is then its traceback."""
    queued_s: float | None = None
    """Seconds that the call waited for a worker; None if there was no call of one."""


def to_outcome(returned: Any) -> Outcome[float]:
    """Return the outcome of what a reward function has returned; None, NaN and what is beyond MOST are failures.

    Raises:
      TypeError: it is no number.
    """
    score = scores.as_float(returned)
    wrong = scores.fault(score)
    return Outcome(None, wrong) if wrong else Outcome(score)


class WorkerFailed(RuntimeError):
    """A worker ended by itself or sent something that is no reply."""


class CallEnded(RuntimeError):
    """A call ended the process that ran it; its worker can go on."""


class Pool:
    """`workers` processes that call the functions of `modules`, each call limited to `timeout_s` seconds.

    A module is a dotted name or the path of a .py file.
    """

    def __init__(self, *modules: str, workers: int, timeout_s: float) -> None:
        self._modules, self._timeout_s = modules, timeout_s
        self._closed = False
        self._home = tempfile.TemporaryDirectory(prefix="gspo_jax-rewards-", ignore_cleanup_errors=True)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._all: set[_Worker] = set()
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for _ in range(workers):
            self._idle.put(self._start())

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return sorted(worker.process.pid for worker in self._all)

    def submit(self, reference: str, prompt: str, completion: str, record: dict[str, Any]) -> Future[Outcome[float]]:
        """Queue a call of the function `module:name`; the future never raises for what the function does.

        A call that exceeds the timeout is killed. If it ends its process or its worker, or the worker's reply makes no
        sense, it is tried once more.
        """
        request = (
            json.dumps({"function": reference, "prompt": prompt, "completion": completion, "record": record}) + "\n"
        )
        return self._threads.submit(self._call, request.encode(), time.monotonic())

    def close(self) -> None:
        """Kill the workers, with all they have started, and drop calls that have not begun; repeating is harmless."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._all):
            self._stop(worker)
        self._home.cleanup()

    def _call(self, request: bytes, submitted: float) -> Outcome[float]:
        queued_s = time.monotonic() - submitted
        return replace(self._outcome(request), queued_s=queued_s)

    def _outcome(self, request: bytes) -> Outcome[float]:
        worker = self._idle.get()  # never blocks: one worker per thread
        error = ""
        try:
            for _ in range(_MAX_TRIES):
                try:
                    return worker.call(request)
                except TimeoutError:
                    worker = self._replace(worker)
                    return _killed(self._timeout_s)
                except CallEnded as end:
                    error = f"{end}, {_MAX_TRIES} times"
                except WorkerFailed as failure:
                    worker = self._replace(worker)
                    error = f"{failure}, {_MAX_TRIES} times"
            return Outcome(None, error)
        finally:
            self._idle.put(worker)

    def _start(self) -> "_Worker":
        worker = _Worker(self._modules, self._timeout_s, self._home.name)
        self._all.add(worker)
        return worker

    def _stop(self, worker: "_Worker") -> None:
        self._all.discard(worker)
        worker.kill()

    def _replace(self, worker: "_Worker") -> "_Worker":
        self._stop(worker)
        new = self._start()
        if self._closed:  # asked only now, so that `close` or this thread stops the new one
            self._stop(new)
            raise RuntimeError("the reward pool was closed while it was scoring")
        return new


class _Worker:
    """One worker process and what it starts, used by one thread at a time."""

    def __init__(self, modules: Sequence[str], timeout_s: float, home: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM, str(timeout_s), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=limited.environment(HOME=home),
            start_new_session=True,  # Ctrl-C reaches only the trainer, which then closes its workers
        )
        self._modules, self._timeout_s = modules, timeout_s
        self._ready = False
        self._expired = False
        self._reaping = threading.Lock()

    def call(self, request: bytes) -> Outcome[float]:
        """Send one request and wait for its outcome; raises CallEnded, WorkerFailed or TimeoutError.

        After the latter two, the worker is of no more use.
        """
        if not self._ready:
            with deadline(_STARTUP_TIMEOUT_S, self._expire):
                if self._read_line() != b"ready":
                    raise RuntimeError(f"the reward worker for {', '.join(self._modules)} printed before it was ready")
            self._ready = True
        # The worker itself ends a call on time; this deadline is for a worker that cannot.
        with deadline(self._timeout_s + _MARGIN_S, self._expire):
            nonce = secrets.token_hex(16).encode()
            try:
                assert self.process.stdin is not None
                self.process.stdin.write(nonce + b"\n" + request)
                self.process.stdin.flush()
            except OSError:
                pass  # the worker is dead; reading finds out how it ended
            line = self._read_line()
        if not line.startswith(nonce + b" "):
            raise WorkerFailed("the reward worker's reply does not belong to the call")
        try:
            reply = json.loads(line[len(nonce) :])
        except (ValueError, RecursionError):
            reply = None
        match reply:
            case {"score": float() | None as score}:
                return to_outcome(score)
            case {"error": str(error)}:
                return Outcome(None, error, raised=True)
            case {"ended": str(how)}:
                raise CallEnded(f"the call's process ended with {how}")
            case {"timed_out": True}:
                return _killed(self._timeout_s)
        raise WorkerFailed("the reward worker's reply is not JSON with a score")

    def kill(self) -> None:
        """End the process and all that it has started, and reap it."""
        with self._reaping:
            if self.process.returncode is None:
                os.kill(self.process.pid, signal.SIGTERM)  # it then ends even what has left its process group
        with deadline(_MARGIN_S, self._expire):
            self._reap()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # closing flushes what the worker never read
                pipe.close()

    def _read_line(self) -> bytes:
        assert self.process.stdout is not None
        line = self.process.stdout.readline(_MAX_REPLY_BYTES)
        if line.endswith(b"\n"):
            return line[:-1]
        if len(line) == _MAX_REPLY_BYTES:
            raise WorkerFailed(f"the reward worker's reply is longer than {_MAX_REPLY_BYTES} bytes")
        code = self._reap()
        if self._expired:
            raise TimeoutError
        if code > 0 and not self._ready:
            # Trying again would not help.
            modules = ", ".join(self._modules)
            raise RuntimeError(
                f"the reward worker for {modules} could not start: exit code {code}; see its traceback above"
            )
        raise WorkerFailed(f"the reward worker ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}")

    def _reap(self) -> int:
        """Wait for the process to end, kill what is left of its group, and return its exit code."""
        with contextlib.suppress(ChildProcessError):  # another thread has reaped it
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self._kill_group()
        with self._reaping:
            return self.process.wait()

    def _kill_group(self) -> None:
        with self._reaping:
            if self.process.returncode is None:  # until it is reaped, no other group can have its number
                os.killpg(self.process.pid, signal.SIGKILL)

    def _expire(self) -> None:
        """Kill the process group; a blocked read or write then returns."""
        self._expired = True
        self._kill_group()


def _killed(timeout_s: float) -> Outcome[float]:
    return Outcome(None, f"killed after {timeout_s:g} s")
