"""Reward functions that may hang or exhaust memory on a hostile answer; they run only in killable worker processes.

Workers import this module, so it must not import jax. Of the environment variables, they see those that pool.py lists,
and `HOME` is an empty folder. To add a reward, write a function here and list its name in `__all__`. Where a verdict is
certain without a call, certain.py gives it.
"""

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from gspo_jax.rewards import certain
from gspo_jax.rewards.answers import Announcement, announced, for_parser, formula_for_parser, is_formula, number, written
from gspo_jax.thoughts import answer_part

__all__ = ["math_verify", "math_verify_flexible"]

# Silences the warning that its own timeouts are off. They rely on signals, which work only in the main thread; killing
# the process is more reliable.
logging.getLogger("math_verify").setLevel(logging.ERROR)

parse("$1$", parsing_timeout=None)  # type: ignore[arg-type]  # builds its tables before the first deadline starts

_DELIMITER = re.compile(r"(?<!\\)\$|\\[([]|\\boxed")


def math_verify(prompt: str, completion: str, record: dict[str, Any]) -> float:
    r"""Score 1 if the final answer is mathematically equal to record["answer"] (1/2 is 0.5), else 0.

    The final answer has to be announced, see `answers.announced`, and nothing else is read. math-verify decides where
    the two are written differently. Raises ValueError if it cannot parse record["answer"].
    """
    score = certain.math_verify(prompt, completion, record)
    if score is not None:
        return score
    found = announced(answer_part(prompt, completion) or "")
    assert found is not None  # the score would be 0
    return _verified(_said(found), record)


def math_verify_flexible(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """Score like `math_verify`; without an announced answer, by the last number or formula: "So it is 18" answers 18.

    Raises ValueError if math-verify cannot parse record["answer"].
    """
    score = certain.math_verify_flexible(prompt, completion, record)
    if score is not None:
        return score
    part = answer_part(prompt, completion) or ""
    found = announced(part)
    return _verified(for_parser(part) if found is None else _said(found), record)


def _said(answer: Announcement) -> str:
    """A text in which math-verify finds this answer."""
    value = number(answer.text)
    text = formula_for_parser(answer.text) if value is None else written(value)
    return f"\\boxed{{{text}}}" if answer.boxed or is_formula(text) else f"The answer is {text}"


def _verified(completion: str, record: dict[str, Any]) -> float:
    gold = _parse_reference(record["answer"])
    return float(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))  # type: ignore[arg-type]


@lru_cache(maxsize=1 << 12)  # a group shares its reference, and parsing it takes as long as parsing a response
def _parse_reference(answer: str) -> list[Any]:
    value = number(answer)
    text = formula_for_parser(answer) if value is None else written(value)
    gold = parse(text if _DELIMITER.search(text) else f"${text}$", parsing_timeout=None)  # type: ignore[arg-type]
    if not gold:
        raise ValueError(f"the reference answer {answer!r} cannot be parsed")
    return gold
