"""Many calls at a time: coroutines in one event loop, plain functions in threads.

The loop is the process's only one, so that a client made by a user's module serves every call. Calls end by a deadline,
are tried again after failures that pass, and are not made at all once nothing answers any more.
"""

import asyncio
import contextlib
import dataclasses
import inspect
import itertools
import math
import queue
import random
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from absl import logging

from gspo_jax.calls import failures
from gspo_jax.calls.failures import CallFailed
from gspo_jax.calls.outcomes import Outcome
from gspo_jax.secrets import redacted

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 20.0
"""Seconds before the second attempt, doubled with each; and the most, also of those that a server asks for."""
_BEAT_S = 0.5
_MOST_IDLE = 64
"""Threads kept for the next calls."""
_CLOSED: Outcome[Any] = Outcome(None, "the calls were closed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of calls."""

    concurrency: int = 64
    """Calls in flight."""
    tokens: int | None = None
    """Tokens in flight, by the sizes that `submit` is given; None: any number."""
    deadline_s: float = 45.0
    """Seconds of a call, from its first attempt on."""
    tries: int = 4


class Calls(AbstractContextManager["Calls"]):
    """Makes calls within limits, and takes none more once as many as may be in flight have failed in a row."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._loop = _loop()
        self._room = _Room(limits.concurrency, limits.tokens)
        self._running = set[asyncio.Task[Outcome[Any]]]()
        self._failed_in_a_row, self._last_cause = 0, ""
        self._closed = False

    def submit(
        self, function: Callable[..., Any], *arguments: Any, tokens: int = 0, parts: int = 1
    ) -> Future[Outcome[Any]]:
        """Call a function or coroutine function, and return a future of its outcome, which never raises.

        `tokens` are those that the call takes of `Limits.tokens`. One that makes several calls in a row, `parts`, has
        the time of as many.
        """
        future = Future[Outcome[Any]]()
        future.set_running_or_notify_cancel()  # others may wait for it, so it cannot be cancelled
        asked = _Asked(function, arguments, tokens, parts * self.limits.deadline_s)
        self._loop.call_soon_threadsafe(self._start, asked, future)
        return future

    def renew(self) -> None:
        """Forget earlier failures: whoever did not answer may be there again."""
        self._failed_in_a_row = 0

    def close(self) -> None:
        """Cancel all calls. Idempotent."""
        self._closed = True
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._running])

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self, asked: "_Asked", future: Future[Any]) -> None:
        def settle(task: asyncio.Task[Outcome[Any]]) -> None:  # also if the task was cancelled before it began
            self._running.discard(task)
            if task.cancelled():
                result = _CLOSED
            else:
                error = task.exception()
                result = task.result() if error is None else Outcome(None, _trace(error), raised=True)
            future.set_result(result)

        task = self._loop.create_task(self._outcome(asked))
        self._running.add(task)
        task.add_done_callback(settle)

    async def _outcome(self, asked: "_Asked") -> Outcome[Any]:
        async with self._room.taken(asked.tokens):
            queued_s = time.monotonic() - asked.since
            return dataclasses.replace(await self._attempts(asked), queued_s=queued_s)

    async def _attempts(self, asked: "_Asked") -> Outcome[Any]:
        if self._closed:
            return _CLOSED
        if self._failed_in_a_row >= self.limits.concurrency:
            cause = self._last_cause
            return Outcome(None, f"not called, as the last {self._failed_in_a_row} calls failed: {cause}", cause=cause)
        ends = time.monotonic() + asked.deadline_s
        for retries in itertools.count():
            try:
                value = await asked.within(ends - time.monotonic())
                self._failed_in_a_row = 0
                return Outcome(value, retries=retries)
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                if not failures.is_failure(error):
                    return Outcome(None, _trace(error), raised=True, cause=failures.cause_of(error))
                wait_s = self._wait_s(error, retries)
                if wait_s is None or time.monotonic() + wait_s >= ends:
                    return self._failed(error, retries)
            await asyncio.sleep(wait_s)
        raise AssertionError

    def _wait_s(self, error: BaseException, retries: int) -> float | None:
        """Return the seconds before another attempt, at random from the upper half; None if there is to be none."""
        if retries + 1 >= self.limits.tries or not failures.passes(error):
            return None
        asked_s = failures.after_s(error)
        if asked_s is not None:
            return asked_s if asked_s <= LONGEST_WAIT_S else None
        return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**retries) * random.uniform(0.5, 1)

    def _failed(self, error: BaseException, retries: int) -> Outcome[Any]:
        cause = failures.cause_of(error)
        self._failed_in_a_row, self._last_cause = self._failed_in_a_row + 1, cause
        return Outcome(None, failures.sentence_of(error), cause=cause, retries=retries)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A call that is asked for."""

    function: Callable[..., Any]
    arguments: Any
    tokens: int
    deadline_s: float
    since: float = dataclasses.field(default_factory=time.monotonic)

    async def within(self, seconds: float) -> Any:
        """Return what the function returns. One that does not heed its end is left behind."""
        task = asyncio.get_running_loop().create_task(called(self.function, *self.arguments))
        try:
            done, _ = await asyncio.wait([task], timeout=max(0.0, seconds))
        except asyncio.CancelledError:
            _leave(task)
            raise
        if not done:
            _leave(task)
            raise CallFailed(f"no answer within {self.deadline_s:g} s")
        if task.cancelled():
            raise CallFailed("the function cancelled its own call")
        return task.result()


async def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns: awaited, or called in a thread unless it is a coroutine function."""
    try:
        value = await (function(*arguments) if is_async(function) else _threads.submit(function, arguments))
        return await value if inspect.isawaitable(value) else value
    except (KeyboardInterrupt, SystemExit) as error:  # would end the loop
        raise _not_stop(error) from None


def is_async(function: Callable[..., Any]) -> bool:
    """Return True for coroutine functions, and objects whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _trace(error: BaseException) -> str:
    """Return the traceback from the function on, and those of its causes, without secrets."""
    told = traceback.TracebackException.from_exception(error)
    left: list[traceback.TracebackException | None] = [told]
    while left:
        if each := left.pop():
            each.stack = traceback.StackSummary.from_list([x for x in each.stack if x.filename != __file__])
            left += [each.__cause__, each.__context__, *(each.exceptions or ())]
    return redacted("".join(told.format()))


def _leave(task: "asyncio.Task[Any]") -> None:
    """Cancel a task, and hear of it however it ends, or asyncio reports that nobody asked for its exception."""
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    task.cancel()


class _Room:
    """Calls and tokens in flight. One larger than all is let in alone. First come, first served."""

    def __init__(self, calls: int, tokens: int | None) -> None:
        self._calls, self._tokens = calls, math.inf if tokens is None else tokens
        self._most = self._tokens
        self._waiting: list[tuple[float, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def taken(self, tokens: float) -> AsyncIterator[None]:
        tokens = min(tokens, self._most)
        await self._enter(tokens)
        try:
            yield
        finally:
            self._leave(tokens)

    async def _enter(self, tokens: float) -> None:
        if not self._waiting and self._fits(tokens):
            self._take(tokens)
            return
        turn = (tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        try:
            await turn[1]
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif not turn[1].cancelled():  # it had been let in
                self._leave(tokens)
            raise

    def _leave(self, tokens: float) -> None:
        self._calls, self._tokens = self._calls + 1, self._tokens + tokens
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.pop(0)
            if not turn.cancelled():
                self._take(size)
                turn.set_result(None)

    def _fits(self, tokens: float) -> bool:
        return self._calls > 0 and self._tokens >= tokens

    def _take(self, tokens: float) -> None:
        self._calls, self._tokens = self._calls - 1, self._tokens - tokens


class _Threads:
    """Daemon threads, started as needed, so that one that hangs holds up neither others nor the process's end."""

    def __init__(self) -> None:
        self._idle = 0
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def submit(self, function: Callable[..., Any], arguments: Any) -> "asyncio.Future[Any]":
        """Call in a thread. The future is the running loop's."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if not done.done():
                done.set_result(value) if error is None else done.set_exception(error)

        def work() -> None:
            value, error = None, None
            try:
                value = function(*arguments)
            except BaseException as raised:
                error = _not_stop(raised)
            loop.call_soon_threadsafe(settle, value, error)

        with self._lock:
            fresh = self._idle == 0
            self._idle -= not fresh
        self._tasks.put(work)
        if fresh:
            threading.Thread(target=self._serve, name="calls", daemon=True).start()
        return done

    def _serve(self) -> None:
        while True:
            self._tasks.get()()
            with self._lock:
                if self._idle >= _MOST_IDLE:
                    return
                self._idle += 1


_threads = _Threads()


def _not_stop(error: BaseException) -> BaseException:
    """Return the error, in place of one that asyncio treats in ways of its own."""
    if isinstance(error, StopIteration | asyncio.CancelledError | KeyboardInterrupt | SystemExit):
        return RuntimeError(f"raised {type(error).__name__}({error})").with_traceback(error.__traceback__)
    return error


def _tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what went wrong in a task that nobody waits for, without secrets."""
    del loop
    error = context.get("exception")
    logging.warning("%s%s", context["message"], "" if error is None else f": {failures.cause_of(error)}")


class _Beating:
    """The process's event loop, in a thread of its own, and when it last had time."""

    def __init__(self) -> None:
        self.loop, self.beat = asyncio.new_event_loop(), time.monotonic()
        threading.Thread(target=self._run, name="calls", daemon=True).start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.set_exception_handler(_tell)
        self._note()
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of a task, which holds it too
                self.loop.run_forever()

    def _note(self) -> None:
        self.beat = time.monotonic()
        self.loop.call_later(_BEAT_S, self._note)


_lock = threading.Lock()
_beating: list[_Beating] = []


def _loop() -> asyncio.AbstractEventLoop:
    with _lock:
        if not _beating:
            _beating.append(_Beating())
    return _beating[0].loop


def stalled_s() -> float:
    """Return for how long a coroutine has kept the event loop from all others."""
    return max(0.0, time.monotonic() - _beating[0].beat - _BEAT_S) if _beating else 0.0


def run(coroutine: Awaitable[Any]) -> Any:
    """Return what a coroutine returns in the calls' event loop. Not to be called in that loop."""

    async def waited() -> Any:
        return await coroutine

    return asyncio.run_coroutine_threadsafe(waited(), _loop()).result()
