"""A pool of killable worker processes: a call that exceeds its timeout has its worker killed and replaced.

Workers are plain child processes that exchange JSON over pipes. multiprocessing would not do: its fork copies jax's
threads, and its spawn imports the parent's `__main__`, jax included, into every replacement.
"""

import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_STARTUP_TIMEOUT_S = 60.0
"""Seconds a worker may take to import its functions."""
_MAX_TRIES = 2


Value = TypeVar("Value", covariant=True)


@dataclass(frozen=True)
class Outcome(Generic[Value]):
    """The result of one call: a value, or None and the reason."""

    value: Value | None
    error: str | None = None
    raised: bool = False
    """True if the function itself raised; `error` is then its traceback."""


def to_outcome(score: float | None) -> Outcome[float]:
    """Return the outcome of a reward function's return value; None, NaN and infinities are failures."""
    if score is None or not math.isfinite(score):
        return Outcome(None, f"returned {score}")
    return Outcome(float(score))


class WorkerDied(RuntimeError):
    """A worker exited on its own, without having been timed out."""


class Pool:
    """`workers` processes that call the functions of `module`, each call limited to `timeout_s` seconds."""

    def __init__(self, module: str, *, workers: int, timeout_s: float) -> None:
        self._module, self._timeout_s = module, timeout_s
        self._closed = False
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._all: set[_Worker] = set()
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for _ in range(workers):
            self._idle.put(self._start())

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return sorted(worker.process.pid for worker in self._all)

    def submit(self, name: str, prompt: str, completion: str, record: dict[str, str]) -> Future[Outcome[float]]:
        """Queue `module.name(prompt, completion, record)`; the future never raises for what the function does.

        A call that exceeds the timeout has its worker killed. If a worker dies by itself, it is replaced and the call
        is tried once more.
        """
        request = json.dumps({"name": name, "prompt": prompt, "completion": completion, "record": record}) + "\n"
        return self._threads.submit(self._call, request.encode())

    def close(self) -> None:
        """Kill the workers and drop calls that have not begun; a second call does nothing."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._all):
            self._stop(worker)

    def _call(self, request: bytes) -> Outcome[float]:
        worker = self._idle.get()  # never blocks: one worker per thread
        error = ""
        try:
            for _ in range(_MAX_TRIES):
                try:
                    return worker.call(request, self._timeout_s)
                except TimeoutError:
                    worker = self._replace(worker)
                    return Outcome(None, f"killed after {self._timeout_s:g} s")
                except WorkerDied as death:
                    worker = self._replace(worker)
                    error = f"{death}, {_MAX_TRIES} times"
            return Outcome(None, error)
        finally:
            self._idle.put(worker)

    def _start(self) -> "_Worker":
        worker = _Worker(self._module, self._timeout_s)
        self._all.add(worker)
        return worker

    def _stop(self, worker: "_Worker") -> None:
        self._all.discard(worker)
        worker.kill()

    def _replace(self, worker: "_Worker") -> "_Worker":
        self._stop(worker)
        if self._closed:
            raise RuntimeError("the reward pool was closed while it was scoring")
        return self._start()


class _Worker:
    """One child process, used by one thread at a time."""

    def __init__(self, module: str, timeout_s: float) -> None:
        # The worker gets this process's import path; -P keeps the current directory off it.
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gspo_jax.rewards.worker", module, str(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C reaches only the trainer, which then closes its workers
        )
        self._module = module
        self._ready = False
        self._expired = False

    def call(self, request: bytes, timeout_s: float) -> Outcome[float]:
        """Send one request and wait for its outcome; raises TimeoutError (the worker is dead by then) or WorkerDied."""
        if not self._ready:
            with self._deadline(_STARTUP_TIMEOUT_S):
                self._read()
            self._ready = True
        with self._deadline(timeout_s):
            try:
                assert self.process.stdin is not None
                self.process.stdin.write(request)
                self.process.stdin.flush()
            except OSError:
                pass  # the worker is dead; reading finds out how it ended
            reply = self._read()
        if "error" in reply:
            return Outcome(None, reply["error"], raised=True)
        return to_outcome(reply["score"])

    def kill(self) -> None:
        """Kill the process and reap it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # closing flushes what the worker never read
                pipe.close()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line.endswith(b"\n"):
            return json.loads(line)
        if self._expired:
            raise TimeoutError
        code = self.process.wait()
        if code > 0 and not self._ready:
            # Trying again would not help.
            raise RuntimeError(
                f"the reward worker for {self._module} could not start: exit code {code}; see its traceback above"
            )
        raise WorkerDied(f"the reward worker ended with {_describe_exit(code)}")

    @contextlib.contextmanager
    def _deadline(self, seconds: float) -> Iterator[None]:
        """Kill the process unless the block ends within `seconds`; a blocked read or write then returns."""
        timer = threading.Timer(seconds, self._expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _expire(self) -> None:
        self._expired = True
        self.process.kill()


def _describe_exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
