"""Reward functions that may hang or eat memory on a hostile answer: run only in a worker process that can be killed.

Imported by workers, so it must stay without jax. A new one is a function here and its name in `__all__`.
"""

import logging

from math_verify import parse, verify

__all__ = ["math_verify"]

# It warns that its own timeouts are off: they use signals, fail off the main thread, and killing the worker is surer.
logging.getLogger("math_verify").setLevel(logging.ERROR)

parse("$1$", parsing_timeout=None)  # type: ignore[arg-type]  # builds its tables before the first deadline runs


def math_verify(prompt: str, completion: str, record: dict[str, str]) -> float:
    """1 where the completion's final answer equals record["answer"] as mathematics (1/2 is 0.5), by math-verify.

    Raises ValueError where record["answer"] itself cannot be read.
    """
    del prompt  # every reward has the same arguments
    answer = record["answer"]
    gold = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None)  # type: ignore[arg-type]
    if not gold:
        raise ValueError(f"the reference answer {answer!r} cannot be parsed")
    return float(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))  # type: ignore[arg-type]
