"""Pool of worker processes. A call beyond its timeout is killed with everything it started.

Workers exchange JSON over pipes. They see few environment variables, none of them secret, and an empty home folder
(isolation: worker.py). multiprocessing does not fit: fork copies jax's threads, and spawn imports the parent's
`__main__`, including jax, into every worker.
"""

import contextlib
import json
import os
import secrets as random_bytes
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from gspo_jax import limited, secrets
from gspo_jax.calls.outcomes import Outcome
from gspo_jax.rewards import scores
from gspo_jax.sandbox.box import deadline
from gspo_jax.sandbox.crew import Crew

_STARTUP_TIMEOUT_S = 60.0
_MARGIN_S = 2.0
"""Seconds beyond the timeout before a stuck worker is killed."""
_MAX_TRIES = 2
_MAX_REPLY_BYTES = 1 << 17
"""Most bytes read of a reply. The worker's own limit is half."""
_PROGRAM = "gspo_jax.rewards.worker"


def to_outcome(returned: Any) -> Outcome[float]:
    """Return the outcome for a return value. None, NaN and values beyond MOST are failures.

    Raises:
      TypeError: it is not a number.
    """
    score = scores.as_float(returned)
    wrong = scores.fault(score)
    return Outcome(None, wrong) if wrong else Outcome(score)


class WorkerFailed(RuntimeError):
    """A worker ended or sent a malformed reply."""


class CallEnded(RuntimeError):
    """A call ended its own process. The worker survives."""


class Pool(Crew["_Worker"]):
    """`workers` processes that call functions of `modules` with a timeout of `timeout_s`.

    A module is a dotted name or a .py file's path.
    """

    _CLOSED = "the reward pool was closed while it was scoring"

    def __init__(self, *modules: str, workers: int, timeout_s: float, environment: Sequence[str] = ()) -> None:
        """Start the workers, which see the environment variables of these names."""
        self._modules, self._timeout_s = modules, timeout_s
        self._variables = {name: os.environ[name] for name in environment if name in os.environ}
        self._home = tempfile.TemporaryDirectory(prefix="gspo_jax-rewards-", ignore_cleanup_errors=True)
        super().__init__(workers=workers)

    def submit(self, reference: str, prompt: str, completion: str, record: dict[str, Any]) -> Future[Outcome[float]]:
        """Queue a call of `module:name`. The future never raises, whatever the function does.

        A call beyond the timeout is killed. A call that ends its process or worker, or garbles the reply, is retried
        once.
        """
        request = (
            json.dumps({"function": reference, "prompt": prompt, "completion": completion, "record": record}) + "\n"
        )
        return self._threads.submit(self._call, request.encode(), time.monotonic())

    def close(self) -> None:
        """Kill the workers with everything they started, and drop queued calls. Idempotent."""
        super().close()
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

    def _new(self) -> "_Worker":
        return _Worker(self._modules, self._timeout_s, self._variables | {"HOME": self._home.name})


class _Worker:
    def __init__(self, modules: Sequence[str], timeout_s: float, variables: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM, str(timeout_s), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=limited.environment(**variables),
            start_new_session=True,  # only the trainer gets Ctrl-C; it closes its workers
        )
        self._modules, self._timeout_s = modules, timeout_s
        self._ready = False
        self._expired = False
        self._reaping = threading.Lock()

    def call(self, request: bytes) -> Outcome[float]:
        """Return the outcome of a request, or raise CallEnded, WorkerFailed or TimeoutError.

        The worker is unusable after the latter two.
        """
        if not self._ready:
            with deadline(_STARTUP_TIMEOUT_S, self._expire):
                if self._read_line() != b"ready":
                    raise RuntimeError(f"the reward worker for {', '.join(self._modules)} printed before it was ready")
            self._ready = True
        # For a worker that cannot end the call itself.
        with deadline(self._timeout_s + _MARGIN_S, self._expire):
            nonce = random_bytes.token_hex(16).encode()
            try:
                assert self.process.stdin is not None
                self.process.stdin.write(nonce + b"\n" + request)
                self.process.stdin.flush()
            except OSError:
                pass  # dead; reading finds out how it ended
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
                return Outcome(None, secrets.redacted(error), raised=True)
            case {"ended": str(how)}:
                raise CallEnded(f"the call's process ended with {how}")
            case {"timed_out": True}:
                return _killed(self._timeout_s)
        raise WorkerFailed("the reward worker's reply is not JSON with a score")

    @property
    def pid(self) -> int:
        return self.process.pid

    def close(self) -> None:
        with self._reaping:
            if self.process.returncode is None:
                os.kill(self.process.pid, signal.SIGTERM)  # it then kills even processes outside its group
        with deadline(_MARGIN_S, self._expire):
            self._reap()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # closing flushes unread input
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
            modules = ", ".join(self._modules)
            raise RuntimeError(
                f"the reward worker for {modules} could not start: exit code {code}; see its traceback above"
            )
        raise WorkerFailed(f"the reward worker ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}")

    def _reap(self) -> int:
        """Reap the process, kill the rest of its group, and return its exit code."""
        with contextlib.suppress(ChildProcessError):  # reaped by another thread
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self._kill_group()
        with self._reaping:
            return self.process.wait()

    def _kill_group(self) -> None:
        with self._reaping:
            if self.process.returncode is None:  # until then its group number is not reused
                os.killpg(self.process.pid, signal.SIGKILL)

    def _expire(self) -> None:
        self._expired = True
        self._kill_group()


def _killed(timeout_s: float) -> Outcome[float]:
    return Outcome(None, f"killed after {timeout_s:g} s")
