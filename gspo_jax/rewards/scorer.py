"""Scores of a batch of completions under weighted reward functions, whatever the completions do to them.

Cheap functions (functions.py) run here; those that may hang (isolated.py) run in processes that can be killed.
"""

import importlib
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from absl import logging
from jaxtyping import Float

from gspo_jax.rewards.pool import Outcome, Pool
from gspo_jax.types import UserError, choices


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
        if not functions:
            raise UserError("no reward function is given; name one or more with their weights")
        if workers < 1 or not timeout_s > 0:
            raise UserError(f"workers {workers} and timeout_s {timeout_s} must be above 0")
        for name, weight in functions.items():
            if not math.isfinite(weight):
                raise UserError(f"the weight {weight} of reward {name!r} is not finite")
        self._weights = dict(functions)
        here = importlib.import_module(module)
        self._functions: dict[str, Callable[[str, str, dict[str, str]], float | None]] = {
            name: getattr(here, name) for name in functions if name in here.__all__
        }
        self._isolated = [name for name in functions if name not in self._functions]
        self._pool: Pool | None = None
        if self._isolated:
            _check_names(self._isolated, here.__all__, importlib.import_module(isolated_module).__all__)
            self._pool = Pool(isolated_module, workers=workers, timeout_s=timeout_s)

    def score(self, prompts: Sequence[str], completions: Sequence[str], records: Sequence[dict[str, str]]) -> Scores:
        """The scores of B completions; raises RuntimeError with the first traceback if a function raises on all."""
        if not len(prompts) == len(completions) == len(records):
            raise ValueError(f"{len(prompts)} prompts, {len(completions)} completions and {len(records)} records")
        rows = list(zip(prompts, completions, records, strict=True))
        outcomes = self._run(rows)
        by_name = {name: np.asarray([o.score for o in outcomes[name]], np.float32) for name in self._weights}
        for name, results in outcomes.items():
            _report(name, results)
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

    def _run(self, rows: list[tuple[str, str, dict[str, str]]]) -> dict[str, list[Outcome]]:
        pending = {}
        if self._pool is not None:
            pending = {name: [self._pool.submit(name, *row) for row in rows] for name in self._isolated}
        try:
            outcomes = {name: [_call(f, *row) for row in rows] for name, f in self._functions.items()}
            return outcomes | {name: [future.result() for future in futures] for name, futures in pending.items()}
        finally:
            for futures in pending.values():
                for future in futures:
                    future.cancel()  # only where one raised, or on Ctrl-C: the rest is not wanted any more


def _call(
    function: Callable[[str, str, dict[str, str]], float | None], prompt: str, completion: str, record: dict[str, str]
) -> Outcome:
    try:
        return Outcome.of(function(prompt, completion, record))
    except Exception:
        return Outcome(math.nan, traceback.format_exc(), raised=True)


def _report(name: str, outcomes: list[Outcome]) -> None:
    """Raises where all raised: the function is broken, not the answers. Warns once where some failed."""
    errors = [o.error for o in outcomes if o.error is not None]
    if not errors:
        return
    if all(o.raised for o in outcomes):
        raise RuntimeError(f"reward {name!r} raised on every one of {len(outcomes)} completions, first:\n{errors[0]}")
    logging.warning("reward %r failed on %d of %d completions, first: %s", name, len(errors), len(outcomes), errors[0])


def _check_names(names: list[str], here: list[str], isolated: list[str]) -> None:
    known = [*here, *isolated]
    for name in names:
        if name not in isolated:
            raise UserError(f"no reward {name!r}; {choices(name, known)}")
