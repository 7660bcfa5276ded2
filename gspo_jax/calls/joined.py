"""One result of several calls."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from gspo_jax.calls import failures
from gspo_jax.calls.calls import Result


def joined(
    parts: Sequence[Future[Result[Any]]], merge: Callable[[list[Result[Any]]], Result[Any]]
) -> Future[Result[Any]]:
    """Return a future of `merge(results)`, called once when all parts are done. It never raises, as theirs do not."""
    whole, left, lock = Future[Result[Any]](), len(parts), threading.Lock()

    def finish() -> None:
        try:
            result = merge([_of(part) for part in parts])
        except Exception as error:  # a callback's exception would be lost, and the future never done
            result = Result(None, failures.cause_of(error), failures.cause_of(error), raised=True)
        with suppress(InvalidStateError):  # cancelled
            whole.set_result(result)

    def one_less(_: object) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            finish()

    for part in parts:
        part.add_done_callback(one_less)
    if not parts:
        finish()
    return whole


def mean(results: Sequence[Result[float]]) -> Result[float]:
    """Return the mean of the values that there are; without any, the most frequent failure."""
    values = [result.value for result in results if result.value is not None]
    waited_s, retries = max(result.waited_s for result in results), sum(result.retries for result in results)
    if values:
        return Result(sum(values) / len(values), waited_s=waited_s, retries=retries)
    cause = Counter(result.cause for result in results).most_common(1)[0][0]
    first = next(result for result in results if result.cause == cause)
    return Result(None, cause, first.error, first.raised, waited_s, retries)


def done(result: Result[Any]) -> Future[Result[Any]]:
    """Return a future that is done."""
    future = Future[Result[Any]]()
    future.set_result(result)
    return future


def _of(part: Future[Result[Any]]) -> Result[Any]:
    return Result(None, "the call was cancelled", "the call was cancelled") if part.cancelled() else part.result()
