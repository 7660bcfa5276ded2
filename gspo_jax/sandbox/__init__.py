"""A sandbox for code that a model wrote: judged by tests, in processes that can reach nothing else.

`Sandbox` keeps boxes (box.py) warm and judges on all of them at a time. What runs inside is in inside/.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from gspo_jax.errors import UserError
from gspo_jax.sandbox.box import Box, BoxFailed, check_bubblewrap

__all__ = ["Request", "Sandbox", "Verdict", "check_bubblewrap"]

_PATIENCE, _PATIENCE_ALONE = 0.5, 1.0
"""How much longer than its time, as a share of it, a program may take if it waits for a processor."""
_PROBE_S = 30.0
"""Seconds that the first program may take: a judge may still be starting."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class Request:
    """A program and what to judge it by; inside/judge.py says what the fields hold."""

    program: str | Sequence[str]
    """A source, or several, of which the first that compiles is judged (inside/choose.py)."""
    asked: Mapping[str, Any]
    """Tests of functions, or inputs of the whole program."""
    wall_s: float
    """Seconds that the tests of functions may take together, or the program for each of its inputs."""
    prelude: str = ""
    """Source that is run before the program."""

    @property
    def within_s(self) -> float:
        """Seconds that all of it may take."""
        runs = len(self.asked.get("inputs", [""]))
        return self.wall_s * runs * (4 if self.asked.get("checker") else 1)  # a checker may have to run three times


@dataclass(frozen=True)
class Verdict:
    """Verdict of a judge about a program."""

    passed: tuple[bool, ...] = ()
    """Whether the program passes each test."""
    why: str = ""
    """Why the first failed test failed, or how the program ended."""
    output: str = ""
    """Text that the program printed, if it was only run."""
    broken: str = ""
    """Why there is no verdict; the program is not at fault."""
    queued_s: float = 0.0
    """Seconds that the request waited for a sandbox."""


class _Turns:
    """Many threads beside each other, or one alone, which waits only for those that have begun."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running, self._one_is_alone = 0, False

    @contextlib.contextmanager
    def beside_others(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._one_is_alone)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._one_is_alone)
            self._one_is_alone = True
            self._changed.wait_for(lambda: not self._running)
        try:
            yield
        finally:
            with self._changed:
                self._one_is_alone = False
                self._changed.notify_all()


class Sandbox:
    """Boxes that are kept warm, each used by one thread at a time."""

    def __init__(self, *, workers: int, unsafe: bool = False) -> None:
        """Start them.

        Raises:
          UserError: programs cannot be isolated on this machine, and running them all the same is not allowed.
        """
        if not unsafe:
            check_bubblewrap()
        self._unsafe, self._closed = unsafe, False
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
        self._turns = _Turns()
        self._all: set[Box] = set()
        self._idle: queue.SimpleQueue[Box] = queue.SimpleQueue()
        for _ in range(workers):
            self._idle.put(self._start())
        probe = self.judge(Request("print(1)", {"inputs": [""]}, _PROBE_S))
        if probe.output != "1\n":
            self.close()
            raise UserError(
                f"the sandbox for code does not work on this machine: {probe.broken or probe.why}; allow user "
                "namespaces, or set scoring.unsafe=True to run what the model writes with this account's rights"
            )

    @property
    def pids(self) -> list[int]:
        """Process ids of the boxes."""
        return sorted(box.pid for box in self._all)

    def submit(self, request: Request, read: Callable[[Verdict], Value]) -> "Future[Value]":
        """Queue a request; the future holds what `read` makes of the verdict."""
        submitted = time.monotonic()
        return self._threads.submit(lambda: read(self._judge(request, submitted)))

    def judge(self, request: Request) -> Verdict:
        """Return the verdict about a program."""
        return self.submit(request, lambda verdict: verdict).result()

    def close(self) -> None:
        """End all boxes, with all processes in them, and drop what has not begun; repeating is harmless."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for box in list(self._all):
            self._stop(box)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _judge(self, request: Request, submitted: float) -> Verdict:
        """Try twice, the second time with nothing beside it: if the sandbox ends, or others took the program's time."""
        box = self._idle.get()  # never blocks: one box per thread
        sources = [request.program] if isinstance(request.program, str) else list(request.program)
        message = {"program": sources, "prelude": request.prelude, **request.asked}
        queued_s, why = time.monotonic() - submitted, ""
        try:
            for turn, patience in ((self._turns.beside_others, _PATIENCE), (self._turns.alone, _PATIENCE_ALONE)):
                limits = {"wall_s": request.wall_s, "patience_s": patience * request.wall_s}
                message["limits"] = limits | {"final": turn == self._turns.alone}
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

    def _start(self) -> Box:
        box = Box(unsafe=self._unsafe)
        self._all.add(box)
        return box

    def _stop(self, box: Box) -> None:
        self._all.discard(box)
        box.close()

    def _replace(self, box: Box) -> Box:
        self._stop(box)
        new = self._start()
        if self._closed:  # asked only now, so that `close` or this thread stops the new one
            self._stop(new)
            raise RuntimeError("the sandbox was closed while it was judging")
        return new
