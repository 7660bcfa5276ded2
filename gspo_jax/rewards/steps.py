"""Step rewards: (prompt, completion, record) -> [(end, reward), ...], one pair per step.

`end` counts the completion's characters up to and including the step. The functions run in the trainer's process, so
they must not hang. Add new ones to `__all__`.
"""

import re
from collections import Counter

from gspo_jax.rewards.functions import Record, ascii_operators
from gspo_jax.rewards.notation import MAX_CHARACTERS

__all__ = ["countdown_steps"]

TURNS = "environment"
"""Name of the rewards that an environment's object gives to turns: they belong to tokens, and to no place in a text."""
NAMES = (*__all__, TURNS)
"""Every name of the catalogue."""

# Possessive quantifiers find all runs in linear time.
_NUMBER = r"[0-9]++(?:\.[0-9]++)?+"
_SIGN = r"(?:[+−*/×÷·^-]|\\(?:times|div|cdot))++"
_TERM = rf"[-( ]*+{_NUMBER}[ )]*+"
_RUN = re.compile(  # 3*5=15 | -2+7=5 | (3+5)*7=56=56: all joined by signs and brackets
    rf"(?:\( *+)?+-?+{_NUMBER}[ )]*+(?:{_SIGN}{_TERM})*+"
    # In `3-5=-2 -2+7=5` the second -2 begins a step: after a result and a space, a minus before a digit is a sign.
    rf"(?:=++{_TERM}(?:(?!(?<= )-[0-9]){_SIGN}{_TERM})*+)*+"
)
_STEP = re.compile(rf"(?P<left>-?{_NUMBER}) *(?P<operator>[-+*/]) *(?P<right>-?{_NUMBER}) *= *(?P<result>-?{_NUMBER})")


def countdown_steps(prompt: str, completion: str, record: Record) -> list[tuple[int, float]]:
    """Reward each equation `a+b=c` (or - * /) before the last `####`: 1 for a valid countdown step, else 0.

    A step is valid if c is correct (division without remainder) and a and b are unused: numbers of record["numbers"] or
    results of earlier valid steps. So k numbers allow at most k - 1 valid steps. Equations inside something longer
    (`3*5+7=22`, `3*5=15+7=22`, `(3*5=15)`) are not steps.
    """
    del prompt
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
    """Return True if a step is valid, and then apply it to `available`."""
    a, b, c = (_parse_whole_number(step[name]) for name in ("left", "right", "result"))
    if a is None or b is None or c is None or not Counter((a, b)) <= available:
        return False
    right = {"+": a + b == c, "-": a - b == c, "*": a * b == c, "/": b != 0 and b * c == a}[step["operator"]]
    if right:
        available.subtract((a, b))
        available[c] += 1
    return right


def _parse_whole_number(text: str) -> int | None:
    return int(text) if "." not in text and len(text) <= MAX_CHARACTERS else None
