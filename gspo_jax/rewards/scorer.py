"""Weighted reward functions of batches of completions. A function may fail on single rows.

Functions run in the scoring thread (functions.py), in killable workers if they may hang (isolated.py; certain.py skips
calls), ask a sandbox (code.py), or wait for others (asking.py), as the user's own.
"""

import collections
import dataclasses
import importlib
import itertools
import math
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from absl import logging
from jaxtyping import Bool, Float

from gspo_jax import references, secrets, signals
from gspo_jax.calls import calls
from gspo_jax.calls.calls import Calls, Limits
from gspo_jax.calls.outcomes import Outcome, settled
from gspo_jax.errors import ScoringFailed, StopRequested, UserError, choices
from gspo_jax.parallel import hosts
from gspo_jax.rewards import code, code_records, functions, served
from gspo_jax.rewards.asking import Asker, Questions, Row
from gspo_jax.rewards.certain import DECIDERS
from gspo_jax.rewards.pool import Pool, to_outcome
from gspo_jax.rewards.scores import MOST, NONE
from gspo_jax.sandbox import Request, Sandbox, Verdict
from gspo_jax.thoughts import answer_part

RewardFunction = Callable[[str, str, dict[str, Any]], float | None]
_NOT_ASKED = Outcome[float](None)
LOOK_S = 0.2
"""Seconds between checks for a stop request while workers score."""
_AGAIN_S = 1.0
"""Seconds until a loop that seems to be stalled is looked at again: this whole process may have been suspended."""
BAD_RECORDS = 8
"""Consecutive records on which a function that once worked may raise. With more, it is broken."""
FEWEST_FAILURES = 8
"""Failures of a batch that do not end the run, whatever their share."""
Function = TypeVar("Function")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Scores:
    """Rewards of B completions."""

    total: Float[np.ndarray, " B"]
    """Weighted sum of the functions, float32; NaN if one with nonzero weight failed or the sum is beyond MOST."""
    by_name: dict[str, Float[np.ndarray, " B"]]
    """Unweighted scores by function, float32; NaN where it failed."""
    failures: int
    seconds: float
    queued_s: list[float]
    """Seconds that each call waited for a worker or sandbox."""
    without_worker: Bool[np.ndarray, " B"] | None
    """True for rows that needed no worker or sandbox; None if no function needs one."""
    failed: dict[str, Bool[np.ndarray, " B"]] = dataclasses.field(default_factory=dict)
    """True where a function outside this thread was asked and has no score, unless it returned None."""
    since: float = 0.0
    """Time of the first question, by `time.monotonic`, perhaps asked ahead."""
    until: float = 0.0
    """Time of the last answer."""
    retries: int = 0
    """Calls made again after failures that pass."""


class Scorer(AbstractContextManager["Scorer"]):
    """Weighted reward functions.

    A score is NaN if the function raises or returns None, NaN or a number beyond scores.MOST, and for isolated
    functions if the call is killed after `timeout_s`, or ends its process twice. A program that hangs scores 0; NaN if
    its tests or the sandbox are at fault. No row ever gets a made-up score.
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
        askers: Mapping[str, Callable[..., Any] | Asker] | None = None,
        limits: Limits = Limits(),  # noqa: B008  frozen
        most_failed: float = 1.0,
        environment: Sequence[str] = (),
    ) -> None:
        """Look up the functions, and start workers and sandboxes if needed.

        Args:
          functions: name -> weight; a score with weight 0 is only recorded. Without any, all rewards are 0.
          own: name -> reference (references.py) of further functions; `rewards.own_process` isolates one.
          timeout_s: seconds per call of an isolated function, or for a program's tests.
          workers: number of worker processes, and of sandboxes.
          unsafe: run programs without a sandbox, with this account's rights.
          scores: (name, record) -> whether the function scores the record. If not, it adds 0 and its own score is NaN.
          askers: further functions by name, made from a config, as a judge.
          limits: of the calls of each function that waits for others.
          most_failed: share of a batch's responses without a score by one function with which `confirm` ends the run.
          environment: names of environment variables that worker processes see, and whose values no message has.

        Raises:
          UserError: a function is unknown, a number is out of range, or there is no sandbox.
          BadReference: a reference of `own` leads to no function.
        """
        if functions:
            check_weights("reward", functions)
        if workers < 1 or not 0 < timeout_s < math.inf:
            raise UserError(
                f"scoring.workers is {workers} and scoring.timeout_s {timeout_s}; both must be above 0, and finite"
            )
        for name in environment:
            secrets.keep(name)
        self._weights, self._scores = dict(functions), scores
        self._watches = {name: BrokenWatch("reward", name) for name in functions}
        self._functions, self._isolated, self._programs, waiting = find(functions, own or {}, askers or {})
        self._questions = {name: Questions(function, Calls(limits)) for name, function in waiting.items()}
        self._served: list[served.Served] = [waiting[name] for name in served.NAMES if name in waiting]  # type: ignore[misc]
        self._timeout_s, self._limits, self._most_failed = timeout_s, limits, most_failed
        self._causes: dict[str, collections.Counter[str]] = {}
        self._asked_since: float | None = None
        self._pool: Pool | None = None
        self._sandbox = Sandbox(workers=workers, unsafe=unsafe) if self._programs else None
        if self._isolated:
            modules = dict.fromkeys(reference.rpartition(":")[0] for reference in self._isolated.values())
            self._pool = Pool(*modules, workers=workers, timeout_s=timeout_s, environment=environment)
        self._deciders = {name: DECIDERS.get(reference) for name, reference in self._isolated.items()}
        self._closed = False
        self.interrupted: Callable[[], bool] = lambda: False
        """Polled between calls. True ends the scoring."""

    @property
    def asks_ahead(self) -> bool:
        """True if `ahead` has any effect."""
        return any(questions.is_single for questions in self._questions.values())

    def ahead(self, prompts: Sequence[str], completions: Sequence[str], records: Sequence[dict[str, Any]]) -> None:
        """Begin calls for completions that will be scored later, as others are still being sampled."""
        rows = zip_rows(prompts, completions, records)
        for name, questions in self._questions.items():
            if asked := [row for row in rows if self._scores(name, row[2])]:
                if self._asked_since is None:
                    self._asked_since = time.monotonic()
                    self._renew()
                questions.ahead(asked)

    def score(self, prompts: Sequence[str], completions: Sequence[str], records: Sequence[dict[str, Any]]) -> Scores:
        """Score B completions. Every process calls it, with its own completions.

        Raises:
          ScoringFailed: a function is broken (`BrokenWatch`); with its first traceback.
          StopRequested: the scoring was interrupted in any process.
        """
        return unless_stopped(lambda: self.score_here(prompts, completions, records))

    def score_here(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        records: Sequence[dict[str, Any]],
        *,
        lost: Sequence[bool] | None = None,
    ) -> Scores:
        """Score B completions without consulting other processes. Any thread may call it.

        `lost` ones are not scored, whatever they are.

        Raises like `score`, and RuntimeError if the scorer is closed.
        """
        if self._closed:
            raise RuntimeError("the scorer is closed")
        begun = time.monotonic()
        since, self._asked_since = self._asked_since or begun, None
        rows = zip_rows(prompts, completions, records)
        lost = [False] * len(rows) if lost is None else lost
        kept = list(zip(records, lost, strict=True))
        asked = {name: [not gone and self._scores(name, record) for record, gone in kept] for name in self._weights}
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
                if weight:  # 0 * NaN would spoil rows over a score that is only recorded
                    total += np.where(asked[name], np.float32(weight) * by_name[name], np.float32(0))
        total[~(np.abs(total) <= MOST) | np.asarray(lost, bool)] = np.nan  # the weighted sum may exceed it
        elsewhere = (*self._isolated, *self._programs)
        called = [[o.queued_s is not None for o in outcomes[name]] for name in elsewhere]
        failed = {
            name: np.asarray([_failed(o) for o in outcomes[name]], bool) for name in (*elsewhere, *self._questions)
        }
        return Scores(
            total,
            by_name,
            int(np.isnan(total).sum()),
            seconds=time.monotonic() - begun,
            queued_s=[o.queued_s for results in outcomes.values() for o in results if o.queued_s is not None],
            without_worker=np.asarray([not any(uses) for uses in zip(*called, strict=True)], bool) if called else None,
            failed=failed,
            since=since,
            until=time.monotonic(),
            retries=sum(o.retries for name in self._questions for o in outcomes[name]),
        )

    def confirm(
        self,
        failed: Mapping[str, Bool[np.ndarray, " B"]],
        by_name: Mapping[str, Any],
        lost: Bool[np.ndarray, " B"] | None = None,
    ) -> None:
        """Check that a batch, of all processes, has the scores that it needs. `lost` are failed episodes.

        Raises:
          ScoringFailed: a function has none for more than the permitted share of the responses it was asked about, or
            the environment failed in more.
        """
        if lost is not None:
            check_share("the environment failed in", int(lost.sum()), len(lost), "episodes", self._most_failed)
        for name, each in failed.items():
            count, answered = int(each.sum()), int(np.isfinite(by_name[name]).sum())
            what, causes = f"reward {name!r} failed on", self._causes.get(name)
            check_share(what, count, count + answered, "responses", self._most_failed, causes)

    def take_metrics(self) -> dict[str, float]:
        """Return what asking servers has cost this process since the last time."""
        return {name: value for each in self._served for name, value in each.take_metrics().items()}

    def asks(self, name: str, record: dict[str, Any]) -> bool:
        """Return True if a function scores completions for a record."""
        return self._scores(name, record)

    def close(self) -> None:
        """End any scoring in other threads, and kill workers and sandboxes. Idempotent."""
        self._closed = True
        for questions in self._questions.values():
            questions.calls.close()
        for started in (self._pool, self._sandbox):
            if started is not None:
                started.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def outcomes(
        self, rows: Sequence[Row], asked: Mapping[str, Sequence[bool]] | None = None
    ) -> dict[str, list[Outcome[float]]]:
        """Return every function's outcome on every row. `asked` selects rows by function.

        Raises:
          StopRequested: the scoring was interrupted.
        """
        asked = asked or {name: [True] * len(rows) for name in self._weights}
        pending: dict[str, list[Future[Outcome[float]]]] = {name: [] for name in (*self._isolated, *self._programs)}
        try:
            self._renew()
            for name, questions in self._questions.items():
                answers = iter(questions.ask(list(itertools.compress(rows, asked[name]))))
                pending[name] = [next(answers) if wanted else settled(_NOT_ASKED) for wanted in asked[name]]
            for name in (*self._isolated, *self._programs):
                for row, wanted in zip(rows, asked[name], strict=True):
                    self._go_on()
                    pending[name].append(self._begin(name, row) if wanted else settled(_NOT_ASKED))
            outcomes: dict[str, list[Outcome[float]]] = {name: [] for name in self._functions}
            for name, results in outcomes.items():
                for row, wanted in zip(rows, asked[name], strict=True):
                    self._go_on()
                    results.append(attempt(_score, self._functions[name], row) if wanted else _NOT_ASKED)
            waiting = {future for futures in pending.values() for future in futures}
            while waiting:
                waiting = wait(waiting, timeout=LOOK_S).not_done
                self._go_on()
                if self._questions:
                    check_loop(self._limits, ", ".join(self._questions))
            self._go_on()  # closed calls end with outcomes of their own
            outcomes |= {name: [future.result() for future in futures] for name, futures in pending.items()}
            for name, results in outcomes.items():
                self._causes[name] = collections.Counter(str(o.failed_by) for o in results if _failed(o))
            return outcomes
        finally:
            for futures in pending.values():
                for future in futures:
                    future.cancel()  # matters only after an exception

    def _renew(self) -> None:
        for questions in self._questions.values():
            questions.calls.renew()

    def _go_on(self) -> None:
        if self._closed or self.interrupted():
            raise StopRequested

    def _begin(self, name: str, row: Row) -> Future[Outcome[float]]:
        if name in self._programs:
            return self._ask(name, row)
        decider, pool = self._deciders[name], self._pool
        assert pool is not None
        score = None if decider is None else decider(*row)
        return pool.submit(self._isolated[name], *row) if score is None else settled(Outcome(score))

    def _ask(self, name: str, row: Row) -> Future[Outcome[float]]:
        """Start judging a program. Thoughts are not part of it."""
        prompt, completion, record = row
        wrong = code_records.defect(name, prompt, record)
        if wrong:
            return settled(Outcome(None, wrong))
        answer = answer_part(prompt, completion)
        if answer is None:
            return settled(Outcome(0.0))
        try:
            request = self._programs[name](prompt, answer, record, timeout_s=self._timeout_s)
        except Exception:
            return settled(Outcome(None, traceback.format_exc(), raised=True))
        assert self._sandbox is not None
        return self._sandbox.submit(request, lambda verdict: _judged(name, verdict))


def _judged(name: str, verdict: Verdict) -> Outcome[float]:
    if verdict.broken:
        return Outcome(None, verdict.broken, queued_s=verdict.queued_s)
    return Outcome(code.score(name, verdict), queued_s=verdict.queued_s)


def check_share(
    what: str, failed: int, count: int, of: str, most: float, causes: collections.Counter[str] | None = None
) -> None:
    """Raise ScoringFailed, "`what` 9 of 10 `of` …", if the share of failures is above `most`, and they are not few."""
    if failed >= FEWEST_FAILURES and failed > most * count:
        cause = causes.most_common(1)[0][0] if causes else "see the warnings above, perhaps of another process"
        raise ScoringFailed(
            f"{what} {failed} of {count} {of}, most often by: {cause}; the limit is scoring.most_failed={most:g}. Mend "
            "what it asks, then start the same command again"
        )


def check_loop(limits: Limits, names: str) -> None:
    """Raise ScoringFailed if a coroutine function keeps the calls of all others waiting, among those `names`."""
    if calls.stalled_s() <= limits.deadline_s:
        return
    time.sleep(_AGAIN_S)
    if (stalled_s := calls.stalled_s()) > limits.deadline_s:
        raise ScoringFailed(
            f"a coroutine function has kept all calls waiting for {stalled_s:.0f} s, among those of {names}: it waits "
            "without await, as by time.sleep or requests; await what it waits for, or write def instead of async def, "
            "which runs in a thread"
        )


def unless_stopped(score: Callable[[], Value]) -> Value:
    """Return `score()`, or raise in all processes what any raises of these. Every process must call it.

    Raises:
      StopRequested: the scoring was interrupted.
      ScoringFailed: a function is broken.
      UserError: a function returned what it must not.
    """
    found: list[Value] = []
    failure: ScoringFailed | UserError | None = None
    try:
        found.append(score())
    except StopRequested:
        pass
    except (ScoringFailed, UserError) as error:
        failure = error
    if not hosts.any_process(not found):
        return found[0]
    if hosts.any_process(isinstance(failure, UserError)):
        raise UserError(hosts.first_nonempty(str(failure) if isinstance(failure, UserError) else "")) from failure
    if hosts.any_process(failure is not None):
        raise failure or ScoringFailed("a function failed in another process, which says more")
    raise StopRequested


class Found(NamedTuple):
    """Reward functions by how they are called."""

    here: dict[str, RewardFunction]
    isolated: dict[str, str]
    """References, for workers."""
    programs: dict[str, Callable[..., Request]]
    """For a sandbox."""
    waiting: dict[str, Callable[..., Any] | Asker]
    """Called many at a time."""


def find(
    names: Collection[str], own: Mapping[str, str], askers: Mapping[str, Callable[..., Any] | Asker] | None = None
) -> Found:
    """Look up reward functions. See `Scorer` for arguments and exceptions."""
    askers = askers or {}
    found = Found({}, {}, {name: getattr(code, name) for name in names if name in code.__all__}, {})
    others = [name for name in names if name not in (*found.programs, *functions.__all__, *own, *askers)]
    if others:  # slow to import
        there = importlib.import_module("gspo_jax.rewards.isolated")
        check_names("reward", others, [*functions.__all__, *there.__all__, *code.__all__, *served.NAMES, *own])
        if asks := [name for name in others if name in served.NAMES]:
            raise UserError(
                f"the reward {asks[0]!r} asks the server of a config's {asks[0]}.url, and there is no config here; "
                "evaluate a run with it, or give a function of yours"
            )
    for name in names:
        if name in found.programs:
            continue
        if name in askers:
            found.waiting[name] = askers[name]
            continue
        reference = own.get(name, f"gspo_jax.rewards.{'isolated' if name in others else 'functions'}:{name}")
        function = references.function(reference)
        if name in others or getattr(function, "own_process", False):
            found.isolated[name] = reference
        elif name in own:
            found.waiting[name] = function
        else:
            found.here[name] = function
    return found


def is_graded(name: str, own: Mapping[str, str]) -> bool:
    """Return True if a reward function is marked by `rewards.graded`. Arguments and errors are `find`'s."""
    if name in served.NAMES:
        return False
    found = find([name], own)
    known = found.here | found.programs | found.waiting
    function = references.function(found.isolated[name]) if name in found.isolated else known[name]
    return bool(getattr(function, "graded", False))


def check_weights(kind: str, functions: Mapping[str, float]) -> None:
    """Raise UserError if `functions` is empty or a weight is not finite."""
    if not functions:
        raise UserError(f"no {kind} function is given; name at least one with its weight")
    for name, weight in functions.items():
        if not math.isfinite(weight):
            raise UserError(f"the weight {weight} of {kind} {name!r} is not finite; use a finite number")


def check_names(kind: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Raise UserError, listing `known`, for a name outside it."""
    for name in names:
        if name not in known:
            raise UserError(f"no {kind} {name!r}; {choices(name, known)}")


def zip_rows(prompts: Sequence[str], completions: Sequence[str], records: Sequence[dict[str, Any]]) -> list[Row]:
    """Return (prompt, completion, record) rows. Raise ValueError if the lengths differ."""
    if not len(prompts) == len(completions) == len(records):
        raise ValueError(
            f"lengths differ: {len(prompts)} prompts, {len(completions)} completions and {len(records)} records"
        )
    return list(zip(prompts, completions, records, strict=True))


def attempt(call: Callable[[Function, Row], Outcome[Value]], function: Function, row: Row) -> Outcome[Value]:
    """Return `call(function, row)`, or an outcome with the traceback if it raises, even SystemExit."""
    try:
        return call(function, row)
    except signals.RAISED:
        raise
    except BaseException:
        return Outcome(None, traceback.format_exc(), raised=True)


class BrokenWatch:
    """Distinguishes a broken function from one that fails on single records, over all batches of a run.

    A function is broken if it raises on two records before its first success, or later on more than BAD_RECORDS in a
    row.
    """

    def __init__(self, kind: str, name: str) -> None:
        self._kind, self._name = kind, name
        self._allowed, self._raised_on = 1, 0

    def report(self, rows: Sequence[Row], outcomes: Sequence[Outcome[Any]]) -> None:
        """Log failed calls. Raise ScoringFailed if the function is broken; servers that fail do not make it so."""
        what, count = f"{self._kind} {self._name!r}", len(outcomes)
        failures = [o for o in outcomes if o.error is not None]
        judged = [(row, o) for row, o in zip(rows, outcomes, strict=True) if o.raised or o.cause is None]
        if not all(o.raised for _, o in judged):
            self._allowed, self._raised_on = BAD_RECORDS, 0
        elif judged:
            # Responses to a prompt are adjacent.
            self._raised_on += 1 + sum(a[0] != b[0] or a[2] != b[2] for (a, _), (b, _) in itertools.pairwise(judged))
            if self._raised_on > self._allowed:
                first = secrets.redacted(judged[0][1].error or "")
                raise ScoringFailed(f"{what} raised on all {len(judged)} completions; the first error:\n{first}")
        if failures:
            causes = collections.Counter(secrets.redacted(str(o.failed_by)) for o in failures)
            most = ", ".join(f"{cause} ({times} x)" for cause, times in causes.most_common(3))
            told = [secrets.redacted(str(o.error)) for o in failures if o.raised or o.error not in causes]
            first = f"; the first error: {told[0]}" if told else ""
            logging.warning("%s failed on %d of %d completions: %s%s", what, len(failures), count, most, first)


def _failed(outcome: Outcome[float]) -> bool:
    return outcome.error is not None and outcome.error != NONE


def _score(function: RewardFunction, row: Row) -> Outcome[float]:
    return to_outcome(function(*row))
