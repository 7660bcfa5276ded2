"""Reward functions that wait for others: coroutine functions, plain functions in threads, functions of whole batches.

Each question is asked once: equal ones, of responses alike or of a response asked ahead of its batch, share the answer.
"""

import dataclasses
import hashlib
import json
import pickle
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
        found = [self._answer(row) for row in rows]
        for key, future in found:  # not earlier: an equal row of this batch is not asked about again
            future.add_done_callback(lambda done, key=key: self._drop_failure(key, done))
        return [future for _, future in found]

    def _answer(self, row: Row) -> "tuple[bytes, Future[Outcome[float]]]":
        key = hashlib.blake2b(_written(row), digest_size=16).digest()
        with self._lock:
            future = self._kept.get(key)
            if future is None:
                function: Any = self._function
                asked = self.calls.submit(function, *row, tokens=_tokens([row]))
                future = self._kept[key] = mapped(asked, score_of)
            self._kept.move_to_end(key)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return key, future

    def _drop_failure(self, key: bytes, future: "Future[Outcome[float]]") -> None:
        with self._lock:
            if future.result().value is None and self._kept.get(key) is future:
                del self._kept[key]

    def _of_batch(self, function: Callable[..., Any], rows: Sequence[Row]) -> Answers:
        columns = [list(column) for column in zip(*rows, strict=True)]
        whole = mapped(
            self.calls.submit(function, *columns, tokens=_tokens(rows)), lambda each: _list_of(each, len(rows))
        )
        return [mapped(whole, lambda outcome, i=i: _share(outcome, i)) for i in range(len(rows))]


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


def _list_of(outcome: Outcome[Any], count: int) -> Outcome[list[Any]]:
    """Return the outcome of a function of the whole batch with a list of `count` values."""
    if outcome.error is not None:
        return outcome
    returned: Any = outcome.value
    try:
        values = list(returned)
    except Exception:
        values = None
    if values is not None and len(values) == count:
        return dataclasses.replace(outcome, value=values)
    what = "no list" if values is None else f"{len(values)} scores"
    return Outcome(None, f"returned {what} for {count} completions; return one score for each", raised=True)


def _share(outcome: Outcome[list[Any]], place: int) -> Outcome[float]:
    """Return one row's outcome of a function of the whole batch."""
    if outcome.value is None:
        return Outcome(None, outcome.error, outcome.raised, outcome.queued_s, outcome.cause, outcome.retries)
    value = outcome.value[place]
    if isinstance(value, Exception):
        return Outcome(None, failures.cause_of(value), raised=not failures.is_failure(value))
    return _judged(outcome, value)


def _tokens(rows: Sequence[Row]) -> int:
    texts = (text for prompt, completion, _ in rows for text in (prompt, completion))
    return sum(len(text.encode(errors="replace")) for text in texts) // _BYTES_PER_TOKEN


def _written(row: Row) -> bytes:
    """Return a text that only equal rows have, of JSON or, for what JSON has not, as it is pickled."""
    try:
        return json.dumps(row, sort_keys=True).encode()
    except (TypeError, ValueError):
        pass
    try:
        return pickle.dumps(row)
    except Exception:
        return repr(row).encode(errors="backslashreplace")
