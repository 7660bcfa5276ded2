"""Step rewards: (prompt, completion, record) -> [(end, reward), ...], one pair per step.

`end` counts the characters of the completion up to and including the step. The functions run in the trainer's process,
so they must not hang. To add one, write it here and list its name in `__all__`.
"""

import re
from collections import Counter

from gspo_jax.rewards.functions import Record, ascii_operators
from gspo_jax.rewards.notation import MAX_CHARACTERS

__all__ = ["countdown_steps"]

# A run's quantifiers are possessive: without backtracking, finding all runs takes linear time.
_NUMBER = r"[0-9]++(?:\.[0-9]++)?+"
_SIGN = r"(?:[+−*/×÷·^-]|\\(?:times|div|cdot))++"
_TERM = rf"[-( ]*+{_NUMBER}[ )]*+"
_RUN = re.compile(  # 3*5=15 | -2+7=5 | (3+5)*7=56=56: all that signs and brackets join, whether or not it is a step
    rf"(?:\( *+)?+-?+{_NUMBER}[ )]*+(?:{_SIGN}{_TERM})*+"
    # In `3-5=-2 -2+7=5` the second -2 begins a step: after a result and a space, a minus before a digit is a sign.
    rf"(?:=++{_TERM}(?:(?!(?<= )-[0-9]){_SIGN}{_TERM})*+)*+"
)
_STEP = re.compile(rf"(?P<left>-?{_NUMBER}) *(?P<operator>[-+*/]) *(?P<right>-?{_NUMBER}) *= *(?P<result>-?{_NUMBER})")


def countdown_steps(prompt: str, completion: str, record: Record) -> list[tuple[int, float]]:
    """Reward each equation `a+b=c` (or - * /) before the last `####`: 1 for a valid countdown step, else 0.

    A step is valid if c is correct (a division must leave no remainder) and a and b are each one of record["numbers"]
    or the result of an earlier valid step, and not yet used. So k numbers allow at most k - 1 valid steps, whatever
    else the completion says. Equations inside something longer (`3*5+7=22`, `3*5=15+7=22`, `(3*5=15)`) are not steps.
    """
    del prompt  # all step rewards share one signature
    available = Counter(map(int, record["numbers"].split()))
    mark = completion.rfind("####")
    work = completion[:mark] if mark >= 0 else completion
    steps: list[tuple[int, float]] = []
    for run in _RUN.finditer(work):
        text = run[0].rstrip(" ")
        step = _STEP.fullmatch(ascii_operators(text))
        if step is not None:
            steps.append((run.start() + len(text), float(_apply_step(available, step))))
    return steps


def _apply_step(available: Counter[int], step: re.Match[str]) -> bool:
    """Return whether a step is valid; if it is, replace its operands in `available` by its result."""
    a, b, c = (_parse_whole_number(step[name]) for name in ("left", "right", "result"))
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


def _parse_whole_number(text: str) -> int | None:
    """Parse a whole number; None if it has a decimal point or is too long to parse cheaply."""
    return int(text) if "." not in text and len(text) <= MAX_CHARACTERS else None
