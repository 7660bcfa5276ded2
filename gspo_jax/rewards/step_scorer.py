"""Rewards of the steps inside completions, and the tokens they belong to: what process supervision learns from.

Step rewards (steps.py) cannot hang, so they run here and not in processes of their own.
"""

import bisect
import importlib
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from gspo_jax.rewards.pool import Outcome
from gspo_jax.rewards.scorer import Row, attempt, check_names, check_weights, join_rows, report

Steps = list[tuple[int, float]]
"""(end, reward) of each step: the characters of the completion up to and including it, and what it earns."""

_LONGEST_CHARACTER = 4
"""Bytes of UTF-8, so as many tokens at most."""


@dataclass(frozen=True)
class StepScores:
    """The step rewards of one batch."""

    steps: list[Steps]
    """Of each completion: the weighted sum of what ends at one place, by place; none where a function with a weight
    failed."""
    by_name: dict[str, Float[np.ndarray, " B"]]
    """float32; each function's mean reward per step, unweighted; NaN where it found no step or failed."""
    failed: Bool[np.ndarray, " B"]
    """Where a function with a weight failed."""


class StepScorer:
    """Calls step rewards by name and adds up what ends at the same character.

    A function that raises, or returns a reward that is not finite or an end that is not in the completion, leaves that
    completion without steps. Steps of a function whose weight is 0 are only recorded.
    """

    def __init__(self, functions: Mapping[str, float], *, module: str = "gspo_jax.rewards.steps") -> None:
        """Finds the functions.

        Args:
          functions: name -> weight; a weight of 0 records a score without adding it.
          module: where the functions are, named in its `__all__`.

        Raises:
          UserError: no function, an unknown one, or a weight that is not finite.
        """
        check_weights("step reward", functions)
        here = importlib.import_module(module)
        check_names("step reward", functions, here.__all__)
        self._weights = dict(functions)
        self._functions: dict[str, Callable[[str, str, dict[str, str]], Steps]] = {
            name: getattr(here, name) for name in functions
        }

    def score(
        self, prompts: Sequence[str], completions: Sequence[str], records: Sequence[dict[str, str]]
    ) -> StepScores:
        """The steps of B completions; raises RuntimeError with the first traceback if a function raises on all."""
        rows = join_rows(prompts, completions, records)
        outcomes = {name: [attempt(_find, f, row) for row in rows] for name, f in self._functions.items()}
        for name, results in outcomes.items():
            report("step reward", name, results)
        by_name = {name: np.asarray([_mean(o.value) for o in outcomes[name]], np.float32) for name in self._weights}
        weights = {name: weight for name, weight in self._weights.items() if weight}
        merged = [_merge([(w, outcomes[name][i].value) for name, w in weights.items()]) for i in range(len(rows))]
        failed = np.array([steps is None for steps in merged], bool)
        return StepScores([steps or [] for steps in merged], by_name, failed)


def to_tokens(
    steps: Sequence[Steps],
    tokens: Int[np.ndarray, "B T"],
    mask: Bool[np.ndarray, "B T"],
    decode: Callable[[list[int]], str],
) -> tuple[Float[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """The rewards of steps at the tokens that end them, and which tokens those are.

    A step ends at the first token with which the text so far holds the step whole. Two that end in one token add up.

    Args:
      steps: of each completion, their ends counted in `decode` of its tokens under the mask.
      tokens: responses.
      mask: True on a response's tokens.
      decode: ids -> text.

    Returns:
      The rewards, float32, 0 where no step ends; and True where one ends.

    Raises:
      ValueError: other than B lists of steps, or a step that ends beyond its text.
    """
    if len(steps) != len(tokens):
        raise ValueError(f"{len(steps)} lists of steps for {len(tokens)} responses")
    rewards, is_step = np.zeros(tokens.shape, np.float32), np.zeros(tokens.shape, bool)
    for row, found in enumerate(steps):
        if not found:
            continue  # the most common case costs nothing
        found = sorted(found)
        places = np.flatnonzero(mask[row])
        ids = tokens[row, places].tolist()
        text = decode(ids)
        if found[-1][0] > len(text):
            raise ValueError(f"a step of response {row} ends at {found[-1][0]}, beyond its {len(text)} characters")
        at = places[_locate([end for end, _ in found], ids, text, decode)]
        np.add.at(rewards[row], at, [reward for _, reward in found])
        is_step[row, at] = True
    return rewards, is_step


def _locate(ends: list[int], ids: list[int], text: str, decode: Callable[[list[int]], str]) -> list[int]:
    """The first i for each of the increasing `ends` such that ids[: i + 1] say text[:end]; text is decode(ids).

    Halves the tokens: each half is a text of its own wherever the cut splits no character. This decodes every token
    about log T times, however many steps there are.
    """
    if not ends or len(ids) == 1:
        return [0] * len(ends)
    middle = len(ids) // 2
    for cut in range(middle, min(middle + _LONGEST_CHARACTER, len(ids))):
        left, right = decode(ids[:cut]), decode(ids[cut:])
        if left + right == text:
            i = bisect.bisect_right(ends, len(left))
            later = _locate([end - len(left) for end in ends[i:]], ids[cut:], right, decode)
            return _locate(ends[:i], ids[:cut], left, decode) + [cut + j for j in later]
    # No cut will do, as within one character, or where a decoder changes what begins a text.
    return [
        bisect.bisect_left(
            range(len(ids) - 1), True, key=lambda i, end=end: decode(ids[: i + 1]).startswith(text[:end])
        )
        for end in ends
    ]


def _find(function: Callable[[str, str, dict[str, str]], Steps], row: Row) -> Outcome[Steps]:
    steps = [(operator.index(end), float(reward)) for end, reward in function(*row)]
    length = len(row[1])
    for end, reward in steps:
        if not math.isfinite(reward):
            return Outcome(None, f"returned the reward {reward}")
        if not 1 <= end <= length:
            return Outcome(None, f"returned a step that ends at {end} of {length} characters")
    return Outcome(steps)


def _mean(steps: Steps | None) -> float:
    return sum(reward for _, reward in steps) / len(steps) if steps else math.nan


def _merge(found: list[tuple[float, Steps | None]]) -> Steps | None:
    """Steps by increasing end, from each function's weight and steps; None if one of them failed."""
    total: defaultdict[int, float] = defaultdict(float)
    for weight, steps in found:
        if steps is None:
            return None
        for end, reward in steps:
            total[end] += weight * reward
    return sorted(total.items())
