"""Reward functions that wait for others: coroutine functions, plain functions in threads, functions of whole batches.

Each question is asked once: equal ones, of responses alike or of a response asked ahead of its batch, share the answer.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from gspo_jax.calls import failures
from gspo_jax.calls.calls import Calls
from gspo_jax.calls.outcomes import Outcome, mapped
from gspo_jax.rewards import scores
from gspo_jax.secrets import redacted

Row = tuple[str, str, dict[str, Any]]
"""(prompt, completion, record): the arguments of every reward function."""
Answers = list["Future[Outcome[float]]"]

_KEPT = 1 << 16
"""Answers kept, the newest."""
_BYTES_PER_TOKEN = 4
"""Of a text whose tokenizer is another's."""


@runtime_checkable
class Asker(Protocol):
    """Reward that makes calls of its own, as one that compares the responses of a group."""

    def ask(self, rows: Sequence[Row], calls: Calls) -> Answers:
        """Begin to score rows, a group's adjacent, and return futures that never raise."""
        ...


class Questions:
    """One reward function's questions."""

    def __init__(self, function: Callable[..., Any] | Asker, calls: Calls) -> None:
        self.calls = calls
        self._function: Any = function
        self.is_single = not isinstance(function, Asker) and not getattr(function, "batched", False)
        """True if each response is a question of its own, which can be asked before its batch is complete."""
        self._kept = OrderedDict[bytes, "Future[Outcome[float]]"]()
        self._lock = threading.Lock()

    def ahead(self, rows: Sequence[Row]) -> None:
        """Ask now what will be asked again by `ask`. A failure is kept until then."""
        if self.is_single:
            for row in rows:
                self._answer(row)

    def ask(self, rows: Sequence[Row]) -> Answers:
        """Return the answers. They never raise, and cancelling one has no effect."""
        if not rows:
            return []
        if isinstance(self._function, Asker):
            return self._function.ask(rows, self.calls)
        if not self.is_single:
            return self._of_batch(self._function, rows)
        return [self._answer(row, once=True) for row in rows]

    def _answer(self, row: Row, *, once: bool = False) -> "Future[Outcome[float]]":
        key = hashlib.blake2b(json.dumps(row, sort_keys=True, default=repr).encode(), digest_size=16).digest()
        with self._lock:
            future = self._kept.get(key)
            if future is None:
                asked = self.calls.submit(self._function, *row, tokens=_tokens([row]))
                future = self._kept[key] = mapped(asked, score_of)
            self._kept.move_to_end(key)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        if once:
            future.add_done_callback(lambda done: self._drop_failure(key, done))
        return future

    def _drop_failure(self, key: bytes, future: "Future[Outcome[float]]") -> None:
        with self._lock:
            if future.result().value is None and self._kept.get(key) is future:
                del self._kept[key]

    def _of_batch(self, function: Callable[..., Any], rows: Sequence[Row]) -> Answers:
        columns = [list(column) for column in zip(*rows, strict=True)]
        whole = self.calls.submit(function, *columns, tokens=_tokens(rows))
        return [mapped(whole, lambda outcome, i=i: _share(outcome, i, len(rows))) for i in range(len(rows))]


def score_of(outcome: Outcome[Any]) -> Outcome[float]:
    """Return a call's outcome with its value as a score."""
    if outcome.error is not None:
        return outcome
    return _judged(outcome, outcome.value)


def _judged(outcome: Outcome[Any], value: Any) -> Outcome[float]:
    given: dict[str, Any] = {"queued_s": outcome.queued_s, "retries": outcome.retries}
    try:
        score = scores.as_float(value)
    except Exception as error:
        return Outcome(None, redacted(f"{type(error).__name__}: {error}"), raised=True, **given)
    wrong = scores.fault(score)
    return Outcome(None, wrong, **given) if wrong else Outcome(score, **given)


def _share(outcome: Outcome[Any], place: int, count: int) -> Outcome[float]:
    """Return one row's outcome of a function of the whole batch."""
    if outcome.error is not None:
        return outcome
    returned: Any = outcome.value
    try:
        values = list(returned)
    except TypeError:
        values = None
    if values is None or len(values) != count:
        what = "no list" if values is None else f"{len(values)} scores"
        return Outcome(None, f"returned {what} for {count} completions; return one score for each", raised=True)
    value = values[place]
    if isinstance(value, Exception):
        return Outcome(None, failures.cause_of(value), raised=not failures.is_failure(value))
    return _judged(outcome, value)


def _tokens(rows: Sequence[Row]) -> int:
    return sum(len(prompt.encode()) + len(completion.encode()) for prompt, completion, _ in rows) // _BYTES_PER_TOKEN
