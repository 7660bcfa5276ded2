"""Score batches of completions with weighted reward functions, tolerating functions that fail on single rows.

Cheap functions (functions.py) run in this process, in the thread that scores. Functions that may hang (isolated.py) run
in killable workers, unless their verdict is certain without a call (certain.py). Those that score programs (code.py)
ask a sandbox.
"""

import importlib
import itertools
import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from absl import logging
from jaxtyping import Bool, Float

from gspo_jax import references, signals
from gspo_jax.errors import StopRequested, UserError, choices
from gspo_jax.parallel import hosts
from gspo_jax.rewards import code, code_records
from gspo_jax.rewards.certain import DECIDERS
from gspo_jax.rewards.pool import Outcome, Pool, to_outcome
from gspo_jax.rewards.scores import MOST
from gspo_jax.sandbox import Request, Sandbox, Verdict
from gspo_jax.thoughts import answer_part

Row = tuple[str, str, dict[str, Any]]
"""(prompt, completion, record): the arguments of every reward function."""
_NOT_ASKED = Outcome[float](None)
"""The outcome of a function that does not score a record's completions."""
LOOK_S = 0.2
"""Seconds between two looks whether the scoring is interrupted, while workers score."""
BAD_RECORDS = 8
"""Records in a row on which a function that has worked before may raise; with more it counts as broken."""
Function = TypeVar("Function")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Scores:
    """Rewards of one batch of B completions."""

    total: Float[np.ndarray, " B"]
    """Weighted sum of the functions, float32; NaN where one with a nonzero weight failed, or it is beyond MOST."""
    by_name: dict[str, Float[np.ndarray, " B"]]
    """Unweighted scores of each function, float32; NaN where it failed."""
    failures: int
    """Number of rows whose total is NaN."""
    seconds: float
    """Wall-clock seconds that the scoring took."""
    queued_s: list[float]
    """Seconds that each call of an isolated function waited for a worker, and each program for a sandbox."""
    without_worker: Bool[np.ndarray, " B"] | None
    """True for rows that no worker or sandbox was asked about; None if no function needs one."""


class Scorer:
    """Scores completions with reward functions, given by name and weight.

    A row's score is NaN if the function raises or returns None, NaN or a number beyond scores.MOST, and for isolated
    functions also if the call is killed after `timeout_s`, or ends its process twice. A program that hangs scores 0; if
    its tests are at fault, or the sandbox is, the score is NaN. No row ever gets a made-up score.
    """

    def __init__(
        self,
        functions: Mapping[str, float],
        *,
        own: Mapping[str, str] | None = None,
        timeout_s: float = 2.0,
        workers: int = 1,
        unsafe: bool = False,
        scores: Callable[[str, dict[str, Any]], bool] = lambda name, record: True,
        module: str = "gspo_jax.rewards.functions",
        isolated_module: str = "gspo_jax.rewards.isolated",
    ) -> None:
        """Look up the functions, and start workers or sandboxes if one of them needs these.

        Args:
          functions: name -> weight; with weight 0 a score is recorded but not added.
          own: functions beside the catalogue's, name -> reference (see references.py); those decorated with
            `rewards.own_process` are isolated.
          timeout_s: seconds that one call of an isolated function, or the tests of a program, may take.
          workers: number of processes for isolated functions, and of sandboxes.
          unsafe: whether programs run without a sandbox, with this account's rights.
          scores: (name, record) -> whether this function scores completions for the record. One that does not counts 0
            in the sum, and its own score is NaN.
          module: module of the in-process functions, which its `__all__` lists.
          isolated_module: module of the isolated functions, which its `__all__` lists; it must not import jax.

        Raises:
          UserError: no function is given, one is unknown, a number is out of range, or there is no sandbox.
          BadReference: a reference of `own` leads to no function.
        """
        check_weights("reward", functions)
        if workers < 1 or not 0 < timeout_s < math.inf:
            raise UserError(
                f"scoring.workers is {workers} and scoring.timeout_s {timeout_s}; both must be above 0, and finite"
            )
        self._weights, self._scores = dict(functions), scores
        self._watches = {name: Watch("reward", name) for name in functions}
        found = find(functions, own or {}, module=module, isolated_module=isolated_module)
        self._functions, self._isolated, self._programs = found.here, found.isolated, found.programs
        self._timeout_s = timeout_s
        self._pool: Pool | None = None
        self._sandbox = Sandbox(workers=workers, unsafe=unsafe) if self._programs else None
        if self._isolated:
            modules = dict.fromkeys(reference.rpartition(":")[0] for reference in self._isolated.values())
            self._pool = Pool(*modules, workers=workers, timeout_s=timeout_s)
        self._deciders = {name: DECIDERS.get(reference) for name, reference in self._isolated.items()}
        self._closed = False
        self.interrupted: Callable[[], bool] = lambda: False
        """Asked between two calls of a function; True ends the scoring."""

    def score(self, prompts: Sequence[str], completions: Sequence[str], records: Sequence[dict[str, Any]]) -> Scores:
        """Score B completions; in a run of several processes, all call it, each with its own completions.

        Raises:
          RuntimeError: a function is broken (see `Watch`); with its first traceback.
          StopRequested: the scoring was interrupted, in this process or another one.
        """
        return unless_stopped(lambda: self.score_here(prompts, completions, records))

    def score_here(
        self, prompts: Sequence[str], completions: Sequence[str], records: Sequence[dict[str, Any]]
    ) -> Scores:
        """Score B completions without asking other processes whether they go on; it may run in any thread.

        Raises:
          RuntimeError: a function is broken (see `Watch`), with its first traceback; or the scorer is closed.
          StopRequested: the scoring was interrupted in this process.
        """
        if self._closed:
            raise RuntimeError("the scorer is closed")
        begun = time.monotonic()
        rows = zip_rows(prompts, completions, records)
        asked = {name: [self._scores(name, record) for record in records] for name in self._weights}
        outcomes = self.outcomes(rows, asked)
        for name, results in outcomes.items():
            mine = asked[name]
            self._watches[name].report(list(itertools.compress(rows, mine)), list(itertools.compress(results, mine)))
        by_name = {
            name: np.asarray([math.nan if o.value is None else o.value for o in outcomes[name]], np.float32)
            for name in self._weights
        }
        total = np.zeros(len(rows), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for name, weight in self._weights.items():
                if weight:  # 0 * NaN would make rows NaN over a score that is only recorded
                    total += np.where(asked[name], np.float32(weight) * by_name[name], np.float32(0))
        total[~(np.abs(total) <= MOST)] = np.nan  # by their weights, scores may add up to what none may be
        called = [[o.queued_s is not None for o in outcomes[name]] for name in (*self._isolated, *self._programs)]
        return Scores(
            total,
            by_name,
            int(np.isnan(total).sum()),
            seconds=time.monotonic() - begun,
            queued_s=[o.queued_s for results in outcomes.values() for o in results if o.queued_s is not None],
            without_worker=np.asarray([not any(uses) for uses in zip(*called, strict=True)], bool) if called else None,
        )

    def asks(self, name: str, record: dict[str, Any]) -> bool:
        """Return whether a function scores completions for a record."""
        return self._scores(name, record)

    def close(self) -> None:
        """End a scoring in another thread, and kill workers and sandboxes; a second call does nothing."""
        self._closed = True
        for started in (self._pool, self._sandbox):
            if started is not None:
                started.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def outcomes(
        self, rows: Sequence[Row], asked: Mapping[str, Sequence[bool]] | None = None
    ) -> dict[str, list[Outcome[float]]]:
        """Return the outcomes of every function on every row, with the reason where there is no score.

        Args:
          rows: what to score.
          asked: by function, whether a row is scored by it; by default all are.

        Raises:
          StopRequested: the scoring was interrupted.
        """
        asked = asked or {name: [True] * len(rows) for name in self._weights}
        pending: dict[str, list[Future[Outcome[float]]]] = {name: [] for name in (*self._isolated, *self._programs)}
        try:
            for name, futures in pending.items():
                for row, wanted in zip(rows, asked[name], strict=True):
                    self._go_on()
                    futures.append(self._begin(name, row) if wanted else _done(_NOT_ASKED))
            outcomes: dict[str, list[Outcome[float]]] = {name: [] for name in self._functions}
            for name, results in outcomes.items():
                for row, wanted in zip(rows, asked[name], strict=True):
                    self._go_on()
                    results.append(attempt(_score, self._functions[name], row) if wanted else _NOT_ASKED)
            waiting = {future for futures in pending.values() for future in futures}
            while waiting:
                waiting = wait(waiting, timeout=LOOK_S).not_done
                self._go_on()
            return outcomes | {name: [future.result() for future in futures] for name, futures in pending.items()}
        finally:
            for futures in pending.values():
                for future in futures:
                    future.cancel()  # has an effect only after an exception or Ctrl-C

    def _go_on(self) -> None:
        if self._closed or self.interrupted():
            raise StopRequested

    def _begin(self, name: str, row: Row) -> Future[Outcome[float]]:
        """The outcome of a function that does not run here: there at once if no worker or sandbox has to be asked."""
        if name in self._programs:
            return self._ask(name, row)
        decider, pool = self._deciders[name], self._pool
        assert pool is not None
        score = None if decider is None else decider(*row)
        return pool.submit(self._isolated[name], *row) if score is None else _done(Outcome(score))

    def _ask(self, name: str, row: Row) -> Future[Outcome[float]]:
        """The outcome of judging a program; what is only thought is none."""
        prompt, completion, record = row
        wrong = code_records.defect(name, prompt, record)
        if wrong:
            return _done(Outcome(None, wrong))
        answer = answer_part(prompt, completion)
        if answer is None:
            return _done(Outcome(0.0))
        try:
            request = self._programs[name](prompt, answer, record, timeout_s=self._timeout_s)
        except Exception:  # as any reward may raise on a single row
            return _done(Outcome(None, traceback.format_exc(), raised=True))
        assert self._sandbox is not None
        return self._sandbox.submit(request, lambda verdict: _judged(name, verdict))


def _judged(name: str, verdict: Verdict) -> Outcome[float]:
    """The outcome that a verdict of the sandbox gives to a function."""
    if verdict.broken:
        return Outcome(None, verdict.broken, queued_s=verdict.queued_s)
    return Outcome(code.score(name, verdict), queued_s=verdict.queued_s)


def _done(outcome: Outcome[float]) -> Future[Outcome[float]]:
    future: Future[Outcome[float]] = Future()
    future.set_result(outcome)
    return future


def unless_stopped(score: Callable[[], Value]) -> Value:
    """Return `score()`, or raise StopRequested in all processes if it does so in one; all have to call it."""
    found: list[Value] = []
    with suppress(StopRequested):
        found.append(score())
    if hosts.any_process(not found):
        raise StopRequested
    return found[0]


@dataclass(frozen=True)
class Found:
    """Reward functions, by name."""

    here: dict[str, Callable[[str, str, dict[str, Any]], float | None]]
    """Functions that run in this process."""
    isolated: dict[str, str]
    """References of those that need a process of their own."""
    programs: dict[str, Callable[..., Request]]
    """Functions that ask the sandbox about programs."""


def find(
    names: Iterable[str],
    own: Mapping[str, str],
    *,
    module: str = "gspo_jax.rewards.functions",
    isolated_module: str = "gspo_jax.rewards.isolated",
) -> Found:
    """Look up reward functions; see `Scorer` for the arguments and for what is raised."""
    here, isolated = importlib.import_module(module), dict[str, str]()
    names = list(names)
    programs: dict[str, Callable[..., Request]] = {n: getattr(code, n) for n in names if n in code.__all__}
    names = [name for name in names if name not in programs]
    others = [name for name in names if name not in here.__all__ and name not in own]
    if others:  # their module takes a second to import
        there = importlib.import_module(isolated_module)
        check_names("reward", others, [*here.__all__, *there.__all__, *code.__all__, *own])
    functions = {}
    for name in names:
        reference = own.get(name, f"{isolated_module if name in others else module}:{name}")
        function = references.function(reference)
        if name in others or getattr(function, "own_process", False):
            isolated[name] = reference
        else:
            functions[name] = function
    return Found(functions, isolated, programs)


def check_weights(kind: str, functions: Mapping[str, float]) -> None:
    """Raise UserError if `functions` is empty or a weight is not finite; `kind` names them in messages."""
    if not functions:
        raise UserError(f"no {kind} function is given; name at least one with its weight")
    for name, weight in functions.items():
        if not math.isfinite(weight):
            raise UserError(f"the weight {weight} of {kind} {name!r} is not finite; use a finite number")


def check_names(kind: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Raise UserError for a name that is not in `known`, which its message lists."""
    for name in names:
        if name not in known:
            raise UserError(f"no {kind} {name!r}; {choices(name, known)}")


def zip_rows(prompts: Sequence[str], completions: Sequence[str], records: Sequence[dict[str, Any]]) -> list[Row]:
    """Return (prompt, completion, record) rows; raises ValueError if the lengths differ."""
    if not len(prompts) == len(completions) == len(records):
        raise ValueError(
            f"lengths differ: {len(prompts)} prompts, {len(completions)} completions and {len(records)} records"
        )
    return list(zip(prompts, completions, records, strict=True))


def attempt(call: Callable[[Function, Row], Outcome[Value]], function: Function, row: Row) -> Outcome[Value]:
    """Return `call(function, row)`, or an outcome with the traceback if it raises, be it what `sys.exit` raises."""
    try:
        return call(function, row)
    except signals.RAISED:
        raise
    except BaseException:
        return Outcome(None, traceback.format_exc(), raised=True)


class Watch:
    """Tells, over all batches of a run, a function that is broken from one that fails on single records.

    It is broken if it raises on everything: on two records before it has worked once, or later on more than
    BAD_RECORDS in a row. A batch may hold a single record that a function is asked about, and that one may be bad.
    """

    def __init__(self, kind: str, name: str) -> None:
        """`kind` and `name` are those of the function, in messages."""
        self._kind, self._name = kind, name
        self._allowed, self._raised_on = 1, 0

    def report(self, rows: Sequence[Row], outcomes: Sequence[Outcome[Any]]) -> None:
        """Log a warning if some calls of a batch failed; raise RuntimeError if the function is broken."""
        what, count = f"{self._kind} {self._name!r}", len(outcomes)
        errors = [o.error for o in outcomes if o.error is not None]
        if not all(o.raised for o in outcomes):
            self._allowed, self._raised_on = BAD_RECORDS, 0
        elif rows:
            # The responses to a prompt are adjacent.
            self._raised_on += 1 + sum(a[0] != b[0] or a[2] != b[2] for a, b in itertools.pairwise(rows))
            if self._raised_on > self._allowed:
                raise RuntimeError(f"{what} raised on all {count} completions; the first error:\n{errors[0]}")
        if errors:
            logging.warning(
                "%s failed on %d of %d completions; the first error: %s", what, len(errors), count, errors[0]
            )


def _score(function: Callable[[str, str, dict[str, Any]], float | None], row: Row) -> Outcome[float]:
    return to_outcome(function(*row))
