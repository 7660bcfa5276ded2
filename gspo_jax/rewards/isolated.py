"""Reward functions that may hang or exhaust memory on a hostile answer; they run only in killable worker processes.

Workers import this module, so it must not import jax. Of the environment variables, they see those that pool.py lists,
and `HOME` is an empty folder. To add a reward, write a function here and list its name in `__all__`. Where a verdict is
certain without a call, certain.py gives it.
"""

import logging
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from gspo_jax.rewards.certain import announced

__all__ = ["math_verify", "math_verify_flexible"]

# Silences the warning that its own timeouts are off. They rely on signals, which work only in the main thread; killing
# the process is more reliable.
logging.getLogger("math_verify").setLevel(logging.ERROR)

parse("$1$", parsing_timeout=None)  # type: ignore[arg-type]  # builds its tables before the first deadline starts


def math_verify(prompt: str, completion: str, record: dict[str, Any]) -> float:
    r"""Score 1 if math-verify finds the final answer mathematically equal to record["answer"] (1/2 is 0.5), else 0.

    The final answer has to be announced, by `####`, `\boxed{}`, "answer is" or "answer:"; nothing before the last of
    these is read. Raises ValueError if record["answer"] itself cannot be parsed.
    """
    answer = announced(completion)
    return 0.0 if answer is None else math_verify_flexible(prompt, answer, record)


def math_verify_flexible(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """Score like `math_verify`, but the last number or formula of any text: "3*6=18. Then we" answers 18.

    Raises ValueError if record["answer"] itself cannot be parsed.
    """
    del prompt  # all rewards share one signature
    gold = _parse_reference(record["answer"])
    return float(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))  # type: ignore[arg-type]


@lru_cache(maxsize=1 << 12)  # a group shares its reference, and parsing it takes as long as parsing a response
def _parse_reference(answer: str) -> list[Any]:
    gold = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None)  # type: ignore[arg-type]
    if not gold:
        raise ValueError(f"the reference answer {answer!r} cannot be parsed")
    return gold
