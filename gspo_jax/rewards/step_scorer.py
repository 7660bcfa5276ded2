"""Process supervision: scores of steps inside completions, placed on the tokens that end them."""

import bisect
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
from gspo_jax.rewards import steps as known
from gspo_jax.rewards.functions import EPISODE
from gspo_jax.rewards.pool import Outcome
from gspo_jax.rewards.scorer import BrokenWatch, Row, attempt, check_names, check_weights, zip_rows

Steps = list[tuple[int, float]]
"""(end, reward) of each step; `end` counts the completion's characters up to and including it."""
Turns = tuple[list[int], list[float]]
"""An episode's rewarded turns: tokens up to the end of each, and its reward."""

_MAX_BYTES_PER_CHARACTER = 4
"""Maximum bytes, and so tokens, of one UTF-8 character."""


@dataclass(frozen=True)
class StepScores:
    """Step rewards of B completions."""

    steps: list[Steps]
    """Steps in order. Rewards ending at the same character are summed by weight.

    Empty where a function with nonzero weight failed.
    """
    by_name: dict[str, Float[np.ndarray, " B"]]
    """Unweighted mean reward per step by function, float32. NaN where it found no step or failed."""
    failed: Bool[np.ndarray, " B"]


class StepScorer:
    """Weighted step-reward functions.

    A function fails if it raises, or returns an invalid score (scores.py) or an end outside the completion. The
    completion then has no steps. Functions with weight 0 are only recorded. The rewards of an environment's object have
    no steps here: `place_turn_rewards` places them.
    """

    def __init__(self, functions: Mapping[str, float], *, own: Mapping[str, str] | None = None) -> None:
        """Look up the functions. Arguments and errors are `Scorer`'s."""
        check_weights("step reward", functions)
        own = own or {}
        check_names("step reward", functions, [*known.NAMES, *own])
        self.turn_weight = functions.get(known.TURNS, 0.0)
        """Weight of an environment's rewards."""
        self._names = tuple(functions)
        self._weights = {name: weight for name, weight in functions.items() if name != known.TURNS}
        self._watches = {name: BrokenWatch("step reward", name) for name in self._weights}
        self._functions: dict[str, Callable[[str, str, dict[str, Any]], Steps]] = {
            name: references.function(own.get(name, f"{known.__name__}:{name}")) for name in self._weights
        }

    def score(
        self, prompts: Sequence[str], completions: Sequence[str], records: Sequence[dict[str, Any]]
    ) -> StepScores:
        """Find and score the steps of B completions.

        Raises:
          RuntimeError: a function is broken (`BrokenWatch`).
        """
        rows = zip_rows(prompts, completions, records)
        outcomes = {name: [attempt(_find_steps, f, row) for row in rows] for name, f in self._functions.items()}
        for name, results in outcomes.items():
            self._watches[name].report(rows, results)
        of_turns: list[Steps] = [record.get(EPISODE, []) for record in records]
        found = {name: [o.value for o in results] for name, results in outcomes.items()} | {known.TURNS: of_turns}
        by_name = {name: np.asarray([_mean_reward(each) for each in found[name]], np.float32) for name in self._names}
        weights = {name: weight for name, weight in self._weights.items() if weight}
        merged = [_merge_steps([(w, outcomes[name][i].value) for name, w in weights.items()]) for i in range(len(rows))]
        beyond = [any(scores.fault(self.turn_weight * reward) for _, reward in each) for each in of_turns]
        failed = np.array([steps is None for steps in merged], bool) | np.array(beyond, bool)
        return StepScores([steps or [] for steps in merged], by_name, failed)


def place_step_rewards(
    steps: Sequence[Steps],
    tokens: Int[np.ndarray, "B T"],
    mask: Bool[np.ndarray, "B T"],
    decode: Callable[[list[int]], str],
) -> tuple[Float[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """Place the rewards of steps on the tokens that end them.

    A step ends at the first token whose decoded prefix contains the whole step. Rewards at the same token are summed.

    Args:
      steps: steps per response; `end` counts characters of the decoded tokens under `mask`.
      tokens: token ids.
      mask: True on a response's tokens.
      decode: ids -> text.

    Returns:
      Rewards, float32, 0 where no step ends, and a mask, True where one ends.

    Raises:
      ValueError: `steps` does not have B entries, or a step ends beyond its text.
    """
    if len(steps) != len(tokens):
        raise ValueError(f"{len(steps)} lists of steps for {len(tokens)} responses; give one per response")
    rewards, is_step = np.zeros(tokens.shape, np.float32), np.zeros(tokens.shape, bool)
    for row, found in enumerate(steps):
        if not found:
            continue  # without decoding; most rows have no steps
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


def place_turn_rewards(
    turns: Sequence[Turns], mask: Bool[np.ndarray, "B T"]
) -> tuple[Float[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """Place the rewards of turns on their last tokens, an end-of-sequence token where a turn ends with one.

    Args:
      turns: per response.
      mask: True on a response's tokens.

    Returns:
      Rewards, float32, 0 elsewhere, and a mask, True where a rewarded turn ends.
    """
    rewards, is_end = np.zeros(mask.shape, np.float32), np.zeros(mask.shape, bool)
    for row, (ends, given) in enumerate(turns):
        at = np.flatnonzero(mask[row])[np.array(ends, int) - 1]
        rewards[row, at], is_end[row, at] = given, True
    return rewards, is_end


def _find_end_tokens(ends: list[int], ids: list[int], text: str, decode: Callable[[list[int]], str]) -> list[int]:
    """For each of the ascending `ends`, return the first i such that ids[: i + 1] decode to at least text[:end].

    `text` is decode(ids). Bisection decodes each token about log T times.
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
    # The tokens are one character, or the decoder treats the start of a text differently.
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
    """Merge (weight, steps) pairs, None if a function failed or a sum is beyond MOST."""
    total: defaultdict[int, float] = defaultdict(float)
    for weight, steps in found:
        if steps is None:
            return None
        for end, reward in steps:
            total[end] += weight * reward
    if any(scores.fault(reward) for reward in total.values()):
        return None
    return sorted(total.items())
