"""Step rewards, none of which can hang: (prompt, completion, record) -> [(end, reward), ...], one for each step.

`end` counts the characters of the completion up to and including the step. A new step reward is a function here and its
name in `__all__`.
"""

import re
from collections import Counter

from gspo_jax.rewards.functions import LONGEST, Record, ascii_operators

__all__ = ["countdown_steps"]

# The quantifiers of a run are possessive: they never give back what they read, so that finding the runs is linear.
_NUMBER = r"[0-9]++(?:\.[0-9]++)?+"
_SIGN = r"(?:[+−*/×÷·^-]|\\(?:times|div|cdot))++"
_TERM = rf"[-( ]*+{_NUMBER}[ )]*+"
_RUN = re.compile(  # 3*5=15 | -2+7=5 | (3+5)*7=56=56: all that signs and brackets join, a step or not
    rf"(?:\( *+)?+-?+{_NUMBER}[ )]*+(?:{_SIGN}{_TERM})*+"
    # In `3-5=-2 -2+7=5` the second -2 begins a step: behind a result, a minus that touches only its number is its sign.
    rf"(?:=++{_TERM}(?:(?!(?<= )-[0-9]){_SIGN}{_TERM})*+)*+"
)
_STEP = re.compile(rf"(?P<left>-?{_NUMBER}) *(?P<operator>[-+*/]) *(?P<right>-?{_NUMBER}) *= *(?P<result>-?{_NUMBER})")


def countdown_steps(prompt: str, completion: str, record: Record) -> list[tuple[int, float]]:
    """Each equation `a+b=c` (or - * /) before the last `####`: 1 where it is a valid step towards a countdown, else 0.

    Valid: a and b are each one of record["numbers"] or the result of an earlier valid step, not used before, and c is
    right, which leaves a division no remainder. So k numbers have k - 1 valid steps at most, whatever else is written.
    What is part of something longer (`3*5+7=22`, `3*5=15+7=22`, `(3*5=15)`) is no step.
    """
    del prompt  # every step reward has the same arguments
    available = Counter(map(int, record["numbers"].split()))
    mark = completion.rfind("####")
    work = completion[:mark] if mark >= 0 else completion
    steps: list[tuple[int, float]] = []
    for run in _RUN.finditer(work):
        text = run[0].rstrip(" ")
        step = _STEP.fullmatch(ascii_operators(text))
        if step is not None:
            steps.append((run.start() + len(text), float(_take(available, step))))
    return steps


def _take(available: Counter[int], step: re.Match[str]) -> bool:
    """Whether a step is valid; if so, its operands are taken from `available` and its result is put there."""
    a, b, c = (_whole(step[name]) for name in ("left", "right", "result"))
    if a is None or b is None or c is None or not Counter((a, b)) <= available:
        return False
    match step["operator"]:
        case "+":
            right = a + b == c
        case "-":
            right = a - b == c
        case "*":
            right = a * b == c
        case _:
            right = b != 0 and b * c == a
    if right:
        available.subtract((a, b))
        available[c] += 1
    return right


def _whole(text: str) -> int | None:
    """A whole number; None for one with a point, or too long to be read cheaply."""
    return int(text) if "." not in text and len(text) <= LONGEST else None
