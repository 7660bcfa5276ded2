"""Verdicts of isolated reward functions that need no worker: (prompt, completion, record) -> score or None.

Comparing numbers takes microseconds, math-verify's parsers milliseconds. On None, a worker calls the reward function.
Runs in the trainer's process, so it must be linear in the completion's length.
"""

import re
from collections.abc import Callable
from typing import Any

from gspo_jax.rewards.answers import announced
from gspo_jax.rewards.comparison import same
from gspo_jax.rewards.quantities import number
from gspo_jax.thoughts import answer_part

Record = dict[str, Any]
Decider = Callable[[str, str, Record], float | None]
_NUMBER_OR_MATH = re.compile(r"[\d$\[(\\]")


def math_verify(prompt: str, completion: str, record: Record) -> float | None:
    """Score 1 if the final answer is written like record["answer"], 0 if it surely differs or is missing, else None."""
    found = announced(answer_part(prompt, completion) or "")
    return 0.0 if found is None else _compared(found.text, record)


def math_verify_flexible(prompt: str, completion: str, record: Record) -> float | None:
    """Score like `math_verify` if an answer is announced, 0 if nothing could be one."""
    part = answer_part(prompt, completion)
    if part is None:
        return 0.0
    found = announced(part)
    if found is not None:
        return _compared(found.text, record)
    reference = record.get("answer")
    if isinstance(reference, str) and _NUMBER_OR_MATH.search(part) is None and number(reference) is not None:
        return 0.0
    return None


DECIDERS: dict[str, Decider] = {
    f"gspo_jax.rewards.isolated:{decide.__name__}": decide for decide in (math_verify, math_verify_flexible)
}
"""Reference of a reward function -> function that may decide without it."""


def _compared(answer: str, record: Record) -> float | None:
    reference = record.get("answer")
    if not isinstance(reference, str):
        return None
    verdict = same(answer, reference)
    return None if verdict is None else float(verdict)
