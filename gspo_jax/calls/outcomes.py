"""What becomes of a call."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

Value = TypeVar("Value", covariant=True)
Other = TypeVar("Other")


@dataclass(frozen=True)
class Outcome(Generic[Value]):
    """Result of one call: a value, or None and the reason."""

    value: Value | None
    error: str | None = None
    raised: bool = False
    """True if the function itself made a mistake. `error` is then its traceback."""
    queued_s: float | None = None
    """Seconds the call waited for a worker or its turn, None if there was no call."""
    cause: str | None = None
    """A few words, the same for all failures of a kind; None: the last line of `error`."""
    retries: int = 0

    @property
    def failed_by(self) -> str | None:
        """A few words to count failures by; None if the call did not fail."""
        if self.cause is not None or self.error is None:
            return self.cause
        return self.error.strip().rpartition("\n")[2]


def mapped(future: "Future[Value]", then: Callable[[Any], Other]) -> "Future[Other]":
    """Return a future of `then(result)`. Cancelling it has no effect, as others may wait for it."""
    other = Future[Other]()
    other.set_running_or_notify_cancel()

    def done(future: "Future[Value]") -> None:
        try:
            other.set_result(then(future.result()))
        except BaseException as error:
            other.set_exception(error)

    future.add_done_callback(done)
    return other


def joined(futures: "Sequence[Future[Value]]", then: Callable[[list[Any]], Other]) -> "Future[Other]":
    """Return a future of `then(results)` of one or more futures. Cancelling it has no effect."""
    other, left, lock = Future[Other](), len(futures), threading.Lock()
    other.set_running_or_notify_cancel()

    def done(_: "Future[Value]") -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            try:
                other.set_result(then([future.result() for future in futures]))
            except BaseException as error:
                other.set_exception(error)

    for future in futures:
        future.add_done_callback(done)
    return other


def mean(outcomes: "Sequence[Outcome[float]]") -> "Outcome[float]":
    """Return the mean of the values that there are; without any, the most frequent failure."""
    values = [outcome.value for outcome in outcomes if outcome.value is not None]
    queued_s = max((outcome.queued_s for outcome in outcomes if outcome.queued_s is not None), default=None)
    retries = sum(outcome.retries for outcome in outcomes)
    if values:
        return Outcome(sum(values) / len(values), queued_s=queued_s, retries=retries)
    cause = Counter(outcome.failed_by for outcome in outcomes).most_common(1)[0][0]
    first = next(outcome for outcome in outcomes if outcome.failed_by == cause)
    return replace(first, queued_s=queued_s, retries=retries)


def settled(value: Other) -> "Future[Other]":
    """Return a future that has its result."""
    future = Future[Other]()
    future.set_result(value)
    return future
