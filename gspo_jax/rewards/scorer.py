"""Scores of a batch of completions under weighted reward functions, whatever the completions do to them.

Cheap functions (functions.py) run here; those that may hang (isolated.py) run in processes that can be killed.
"""

import importlib
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from absl import logging
from jaxtyping import Float

from gspo_jax.rewards.pool import Outcome, Pool, scored
from gspo_jax.types import UserError, choices

Row = tuple[str, str, dict[str, str]]
"""A prompt, a completion of it and its record: the arguments of every reward."""
Function = TypeVar("Function")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Scores:
    """The rewards of one batch."""

    total: Float[np.ndarray, " B"]
    """float32; the weighted sum, NaN where a function with a weight failed."""
    by_name: dict[str, Float[np.ndarray, " B"]]
    """Each function's own scores, unweighted; NaN where it failed."""
    failures: int
    """Rows without a total."""


class Scorer:
    """Calls reward functions by name and adds them up.

    A function that raises, or returns None, NaN or an infinity, gives that row NaN; so does an isolated one that is
    killed after `timeout_s` or whose worker dies twice. Rows are never given a made-up score.
    """

    def __init__(
        self,
        functions: Mapping[str, float],
        *,
        timeout_s: float = 2.0,
        workers: int = 1,
        module: str = "gspo_jax.rewards.functions",
        isolated_module: str = "gspo_jax.rewards.isolated",
    ) -> None:
        """Finds the functions; starts workers only if one needs them.

        Args:
          functions: name -> weight; a weight of 0 records a score without adding it.
          timeout_s: of one call of an isolated function.
          workers: processes for isolated functions.
          module: where in-process functions are, named in its `__all__`.
          isolated_module: where isolated functions are, named in its `__all__`; it must not import jax.

        Raises:
          UserError: no function, an unknown one, or a number out of range.
        """
        check_weights("reward", functions)
        if workers < 1 or not timeout_s > 0:
            raise UserError(f"workers {workers} and timeout_s {timeout_s} must be above 0")
        self._weights = dict(functions)
        here = importlib.import_module(module)
        self._functions: dict[str, Callable[[str, str, dict[str, str]], float | None]] = {
            name: getattr(here, name) for name in functions if name in here.__all__
        }
        self._isolated = [name for name in functions if name not in self._functions]
        self._pool: Pool | None = None
        if self._isolated:
            there = importlib.import_module(isolated_module)
            check_names("reward", self._isolated, there.__all__, also=here.__all__)
            self._pool = Pool(isolated_module, workers=workers, timeout_s=timeout_s)

    def score(self, prompts: Sequence[str], completions: Sequence[str], records: Sequence[dict[str, str]]) -> Scores:
        """The scores of B completions; raises RuntimeError with the first traceback if a function raises on all."""
        rows = join_rows(prompts, completions, records)
        outcomes = self._run(rows)
        for name, results in outcomes.items():
            report("reward", name, results)
        by_name = {
            name: np.asarray([math.nan if o.value is None else o.value for o in outcomes[name]], np.float32)
            for name in self._weights
        }
        total = np.zeros(len(rows), np.float32)
        for name, weight in self._weights.items():
            if weight:  # 0 * NaN would void rows for a score that is only recorded
                total += np.float32(weight) * by_name[name]
        return Scores(total, by_name, int(np.isnan(total).sum()))

    def close(self) -> None:
        """Ends the workers; a second call does nothing."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, rows: list[Row]) -> dict[str, list[Outcome[float]]]:
        pending = {}
        if self._pool is not None:
            pending = {name: [self._pool.submit(name, *row) for row in rows] for name in self._isolated}
        try:
            outcomes = {name: [attempt(_score, f, row) for row in rows] for name, f in self._functions.items()}
            return outcomes | {name: [future.result() for future in futures] for name, futures in pending.items()}
        finally:
            for futures in pending.values():
                for future in futures:
                    future.cancel()  # only where one raised, or on Ctrl-C: the rest is not wanted any more


def check_weights(kind: str, functions: Mapping[str, float]) -> None:
    """Raises UserError where there is no function, or a weight is not finite; `kind` is what they are called."""
    if not functions:
        raise UserError(f"no {kind} function is given; name one or more with their weights")
    for name, weight in functions.items():
        if not math.isfinite(weight):
            raise UserError(f"the weight {weight} of {kind} {name!r} is not finite")


def check_names(kind: str, names: Iterable[str], known: Sequence[str], *, also: Sequence[str] = ()) -> None:
    """Raises UserError for a name that is not known; `also`: names that its message lists beside them."""
    for name in names:
        if name not in known:
            raise UserError(f"no {kind} {name!r}; {choices(name, [*also, *known])}")


def join_rows(prompts: Sequence[str], completions: Sequence[str], records: Sequence[dict[str, str]]) -> list[Row]:
    """The arguments of each completion's call; raises ValueError where their numbers differ."""
    if not len(prompts) == len(completions) == len(records):
        raise ValueError(f"{len(prompts)} prompts, {len(completions)} completions and {len(records)} records")
    return list(zip(prompts, completions, records, strict=True))


def attempt(call: Callable[[Function, Row], Outcome[Value]], function: Function, row: Row) -> Outcome[Value]:
    """What `call` makes of a function on one row, or the outcome of its raising."""
    try:
        return call(function, row)
    except Exception:
        return Outcome(None, traceback.format_exc(), raised=True)


def report(kind: str, name: str, outcomes: Sequence[Outcome[Any]]) -> None:
    """Raises where all raised: the function is broken, not the answers. Warns once where some failed."""
    errors = [o.error for o in outcomes if o.error is not None]
    if not errors:
        return
    if all(o.raised for o in outcomes):
        raise RuntimeError(f"{kind} {name!r} raised on every one of {len(outcomes)} completions, first:\n{errors[0]}")
    logging.warning(
        "%s %r failed on %d of %d completions, first: %s", kind, name, len(errors), len(outcomes), errors[0]
    )


def _score(function: Callable[[str, str, dict[str, str]], float | None], row: Row) -> Outcome[float]:
    return scored(function(*row))
