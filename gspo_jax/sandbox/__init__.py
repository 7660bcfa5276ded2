"""Sandbox that judges model-written code by tests in isolated processes.

`Sandbox` keeps boxes (box.py) warm. inside/ runs in them.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from gspo_jax.errors import UserError
from gspo_jax.sandbox.box import Box, BoxFailed, check_bubblewrap
from gspo_jax.sandbox.crew import Crew

__all__ = ["Request", "Sandbox", "Verdict", "check_bubblewrap"]

_PATIENCE, _PATIENCE_ALONE = 0.5, 1.0
"""Extra share of its time limit for a program that waits for a processor."""
_PROBE_S = 30.0
"""Seconds for the first program. Its judge may still be starting."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class Request:
    """A program and its tests (fields as in inside/judge.py)."""

    program: str | Sequence[str]
    """Source, or candidates (inside/choose.py)."""
    asked: Mapping[str, Any]
    wall_s: float
    """Seconds for all tests of functions together, or per input of a program."""
    prelude: str = ""

    @property
    def within_s(self) -> float:
        """Seconds for the whole request."""
        runs = len(self.asked.get("inputs", [""]))
        return self.wall_s * runs * (4 if self.asked.get("checker") else 1)  # a checker may run three times


@dataclass(frozen=True)
class Verdict:
    """Verdict on a program."""

    passed: tuple[bool, ...] = ()
    """Whether each test passed."""
    why: str = ""
    """Why the first test failed, or how the program ended."""
    output: str = ""
    """Output of a program run without tests."""
    broken: str = ""
    """Why there is no verdict. The program is not at fault."""
    queued_s: float = 0.0


class Sandbox(Crew[Box]):
    """Judge of programs in warm boxes, each used by one thread at a time."""

    _CLOSED = "the sandbox was closed while it was judging"

    def __init__(self, *, workers: int, unsafe: bool = False) -> None:
        """Start the boxes.

        Raises:
          UserError: programs cannot be isolated on this machine and `unsafe` is not set.
        """
        if not unsafe:
            check_bubblewrap()
        self._unsafe, self._workers = unsafe, workers
        self._gate, self._places = threading.Lock(), threading.Semaphore(workers)
        super().__init__(workers=workers)
        probe = self.judge(Request("print(1)", {"inputs": [""]}, _PROBE_S))
        if probe.output != "1\n":
            self.close()
            raise UserError(
                f"the sandbox for code does not work on this machine: {probe.broken or probe.why}; allow user "
                "namespaces, or set scoring.unsafe=True to run what the model writes with this account's rights"
            )

    def submit(self, request: Request, read: Callable[[Verdict], Value]) -> "Future[Value]":
        """Queue a request. The future holds `read(verdict)`."""
        submitted = time.monotonic()
        return self._threads.submit(lambda: read(self._judge(request, submitted)))

    def judge(self, request: Request) -> Verdict:
        """Return the verdict on a program."""
        return self.submit(request, lambda verdict: verdict).result()

    def _judge(self, request: Request, submitted: float) -> Verdict:
        """Judge, and retry once, alone, if the sandbox ended or the program was starved."""
        box = self._idle.get()  # never blocks: one box per thread
        sources = [request.program] if isinstance(request.program, str) else list(request.program)
        message = {"program": sources, "prelude": request.prelude, **request.asked}
        queued_s, why = time.monotonic() - submitted, ""
        try:
            for turn, patience in ((self._beside_others, _PATIENCE), (self._alone, _PATIENCE_ALONE)):
                limits = {"wall_s": request.wall_s, "patience_s": patience * request.wall_s}
                message["limits"] = limits | {"final": turn == self._alone}
                with turn():
                    try:
                        reply = box.judge(message, within_s=(1 + patience) * request.within_s)
                    except BoxFailed as failure:
                        box, why = self._replace(box), f"{failure}, 2 times"
                        continue
                if "starved" not in reply:
                    return Verdict(**reply | {"passed": tuple(reply.get("passed", ())), "queued_s": queued_s})
            return Verdict(broken=why, queued_s=queued_s)
        finally:
            self._idle.put(box)

    @contextlib.contextmanager
    def _beside_others(self) -> Iterator[None]:
        with self._gate:
            self._places.acquire()
        try:
            yield
        finally:
            self._places.release()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._gate:  # so no later one takes a place
            for _ in range(self._workers):
                self._places.acquire()
            try:
                yield
            finally:
                self._places.release(self._workers)

    def _new(self) -> Box:
        return Box(unsafe=self._unsafe)
