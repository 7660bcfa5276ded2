"""Process supervision: score the steps inside completions and map their rewards to the tokens that end them.

Step rewards (steps.py) cannot hang, so they run in this process and not in workers.
"""

import bisect
import importlib
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from gspo_jax import references
from gspo_jax.rewards import scores
from gspo_jax.rewards.pool import Outcome
from gspo_jax.rewards.scorer import Row, Watch, attempt, check_names, check_weights, zip_rows

Steps = list[tuple[int, float]]
"""(end, reward) of each step; `end` counts the completion's characters up to and including the step."""

_MAX_BYTES_PER_CHARACTER = 4
"""Maximum bytes, and so maximum tokens, of one UTF-8 character."""


@dataclass(frozen=True)
class StepScores:
    """Step rewards of one batch of B completions."""

    steps: list[Steps]
    """Steps of each completion in order; rewards that end at the same character are summed with their weights.

    Empty where a function with a nonzero weight failed.
    """
    by_name: dict[str, Float[np.ndarray, " B"]]
    """Unweighted mean reward per step of each function, float32; NaN where it found no step or failed."""
    failed: Bool[np.ndarray, " B"]
    """True where a function with a nonzero weight failed."""


class StepScorer:
    """Finds and scores the steps of completions with step-reward functions, given by name and weight.

    A function fails on a completion if it raises, or returns a reward that is no score (scores.py) or an end outside
    the completion; the completion then has no steps. Functions with weight 0 are recorded only.
    """

    def __init__(
        self,
        functions: Mapping[str, float],
        *,
        own: Mapping[str, str] | None = None,
        module: str = "gspo_jax.rewards.steps",
    ) -> None:
        """Look up the functions.

        Args:
          functions: name -> weight; with weight 0 a score is recorded but not added.
          own: functions beside the catalogue's, name -> reference (see references.py).
          module: module of the functions, which its `__all__` lists.

        Raises:
          UserError: no function is given, one is unknown, or a weight is not finite.
          BadReference: a reference of `own` leads to no function.
        """
        check_weights("step reward", functions)
        here, own = importlib.import_module(module), own or {}
        check_names("step reward", functions, [*here.__all__, *own])
        self._weights = dict(functions)
        self._watches = {name: Watch("step reward", name) for name in functions}
        self._functions: dict[str, Callable[[str, str, dict[str, Any]], Steps]] = {
            name: references.function(own.get(name, f"{module}:{name}")) for name in functions
        }

    def score(
        self, prompts: Sequence[str], completions: Sequence[str], records: Sequence[dict[str, Any]]
    ) -> StepScores:
        """Find the steps of B completions.

        Raises:
          RuntimeError: a function is broken (see `Watch`); with its first traceback.
        """
        rows = zip_rows(prompts, completions, records)
        outcomes = {name: [attempt(_find_steps, f, row) for row in rows] for name, f in self._functions.items()}
        for name, results in outcomes.items():
            self._watches[name].report(rows, results)
        by_name = {
            name: np.asarray([_mean_reward(o.value) for o in outcomes[name]], np.float32) for name in self._weights
        }
        weights = {name: weight for name, weight in self._weights.items() if weight}
        merged = [_merge_steps([(w, outcomes[name][i].value) for name, w in weights.items()]) for i in range(len(rows))]
        failed = np.array([steps is None for steps in merged], bool)
        return StepScores([steps or [] for steps in merged], by_name, failed)


def place_step_rewards(
    steps: Sequence[Steps],
    tokens: Int[np.ndarray, "B T"],
    mask: Bool[np.ndarray, "B T"],
    decode: Callable[[list[int]], str],
) -> tuple[Float[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """Place the rewards of steps on the tokens that end them.

    A step ends at the first token whose decoded prefix contains the whole step. Rewards of steps that end in the same
    token are summed.

    Args:
      steps: steps of each response; `end` counts characters of `decode` of its tokens under the mask.
      tokens: token ids of the responses.
      mask: True on a response's tokens.
      decode: ids -> text.

    Returns:
      Rewards, float32, 0 where no step ends; and a mask that is True where one ends.

    Raises:
      ValueError: `steps` does not have B entries, or a step ends beyond its text.
    """
    if len(steps) != len(tokens):
        raise ValueError(f"{len(steps)} lists of steps for {len(tokens)} responses; give one per response")
    rewards, is_step = np.zeros(tokens.shape, np.float32), np.zeros(tokens.shape, bool)
    for row, found in enumerate(steps):
        if not found:
            continue  # most rows have no steps, and then need no decoding
        found = sorted(found)
        places = np.flatnonzero(mask[row])
        ids = tokens[row, places].tolist()
        text = decode(ids)
        if found[-1][0] > len(text):
            raise ValueError(f"a step of response {row} ends at {found[-1][0]}, beyond its {len(text)} characters")
        at = places[_find_end_tokens([end for end, _ in found], ids, text, decode)]
        np.add.at(rewards[row], at, [reward for _, reward in found])
        is_step[row, at] = True
    return rewards, is_step


def _find_end_tokens(ends: list[int], ids: list[int], text: str, decode: Callable[[list[int]], str]) -> list[int]:
    """For each of the ascending `ends`, return the first i such that ids[: i + 1] decode to at least text[:end].

    `text` is decode(ids). Bisects the tokens: the halves decode independently unless the cut splits a character. Each
    token is thus decoded about log T times, regardless of the number of steps.
    """
    if not ends or len(ids) == 1:
        return [0] * len(ends)
    middle = len(ids) // 2
    for cut in range(middle, min(middle + _MAX_BYTES_PER_CHARACTER, len(ids))):
        left, right = decode(ids[:cut]), decode(ids[cut:])
        if left + right == text:
            i = bisect.bisect_right(ends, len(left))
            later = _find_end_tokens([end - len(left) for end in ends[i:]], ids[cut:], right, decode)
            return _find_end_tokens(ends[:i], ids[:cut], left, decode) + [cut + j for j in later]
    # No cut works: the tokens are one character, or the decoder treats the beginning of a text differently.
    return [
        bisect.bisect_left(
            range(len(ids) - 1), True, key=lambda i, end=end: decode(ids[: i + 1]).startswith(text[:end])
        )
        for end in ends
    ]


def _find_steps(function: Callable[[str, str, dict[str, Any]], Steps], row: Row) -> Outcome[Steps]:
    steps = []
    for end, returned in function(*row):
        reward, end, length = scores.as_float(returned), operator.index(end), len(row[1])
        if reward is None or (wrong := scores.fault(reward)):
            return Outcome(None, f"{wrong} as a step's reward")
        if not 1 <= end <= length:
            return Outcome(None, f"returned a step that ends at character {end} of {length}")
        steps.append((end, reward))
    return Outcome(steps)


def _mean_reward(steps: Steps | None) -> float:
    return sum(reward for _, reward in steps) / len(steps) if steps else math.nan


def _merge_steps(found: list[tuple[float, Steps | None]]) -> Steps | None:
    """Merge (weight, steps) pairs into steps sorted by end; None if a function failed, or a sum is beyond MOST."""
    total: defaultdict[int, float] = defaultdict(float)
    for weight, steps in found:
        if steps is None:
            return None
        for end, reward in steps:
            total[end] += weight * reward
    if any(scores.fault(reward) for reward in total.values()):
        return None
    return sorted(total.items())
