"""Reward functions that run in the trainer's process: (prompt, completion, record) -> score.

They must be cheap and must not hang. Slow ones belong in isolated.py. They run in another thread under the interpreter
lock: they cannot set signal handlers, and they delay the trainer's Python code. Add new functions to `__all__`.
"""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from gspo_jax.rewards.answers import BOX, boxed_content, final_answer
from gspo_jax.rewards.comparison import same
from gspo_jax.rewards.notation import MAX_CHARACTERS, plain
from gspo_jax.thoughts import answer_part

__all__ = ["answer_format", "countdown", "environment", "exact_answer"]

Record = dict[str, Any]
EPISODE = "episode"
"""Field of a record with what an environment's object gave: (characters up to a turn's end, reward) of each reward."""

_ANSWER_MARK = re.compile(r"(?<!#)####(?!#)")
_ARITHMETIC = re.compile(r"(?=.*[0-9])[0-9+\-−*/()., $%]+")
_EXPRESSION = re.compile(r"[0-9+\-*/() ]+")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def exact_answer(prompt: str, completion: str, record: Record) -> float:
    """Score 1 if the final answer is written like record["answer"], else 0.

    `comparison.same` compares numbers by value, choices by letter, anything else as text. Raises ValueError if
    record["answer"] is empty.
    """
    answer, reference = final_answer(prompt, completion), record["answer"]
    if not reference.strip():
        raise ValueError("the reference answer is empty")
    return float(answer is not None and same(answer, reference) is True)


def environment(prompt: str, completion: str, record: Record) -> float:
    """Return the sum of the rewards that the environment's object gave to an episode's turns, 0 if it gave none."""
    del prompt, completion
    return sum(reward for _, reward in record.get(EPISODE, ()))


def answer_format(prompt: str, completion: str, record: Record) -> float:
    r"""Score 1 if the completion has exactly one final answer, right or wrong, else 0.

    That is one `####` with a number or arithmetic expression up to the end, or one nonempty `\boxed{}`. Thoughts do not
    count, and an unclosed thought scores 0.
    """
    del record
    part = answer_part(prompt, completion)
    if part is None:
        return 0.0
    marks = len(_ANSWER_MARK.findall(part))
    if box := BOX.search(part):
        alone = marks == 0 and BOX.search(part, box.end()) is None
        return float(alone and bool((boxed_content(part, box.end()) or "").strip()))
    if marks != 1:
        return 0.0
    last = part[part.rfind("####") + 4 :].strip()
    if len(last) > MAX_CHARACTERS:
        return 0.0
    return float("\n" not in last and _ARITHMETIC.fullmatch(plain(last)) is not None)


def countdown(prompt: str, completion: str, record: Record) -> float:
    """Score 1 if the final answer uses each of record["numbers"] exactly once and equals record["target"], else 0.

    Expressions may use + - * / and brackets and are evaluated exactly. A trailing `= 22` is ignored.
    """
    answer = final_answer(prompt, completion)
    return float(answer is not None and expression_value(answer, record["numbers"]) == Fraction(record["target"]))


def expression_value(answer: str, numbers: str) -> Fraction | None:
    """Return the value of an expression that uses each of `numbers` ("3 5 7") exactly once, else None.

    A trailing `= 22` is ignored.
    """
    text = ascii_operators(answer.partition("=")[0]).strip()
    if _EXPRESSION.fullmatch(text) is None:
        return None
    used: list[int] = []
    value = evaluate(text, used)
    return value if sorted(used) == sorted(map(int, numbers.split())) else None


def evaluate(text: str, used: list[int] | None = None) -> Fraction | None:
    """Return the exact value of an expression of whole numbers, + - * / and brackets, else None.

    Append the numbers to `used`. Also None on division by zero.
    """
    try:
        return _evaluate(ast.parse(text, mode="eval").body, [] if used is None else used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):  # MemoryError: too deep
        return None


def ascii_operators(text: str) -> str:
    r"""Return `text` with × and \times written as *, and ÷ as /."""
    return text.replace("×", "*").replace("÷", "/").replace("\\times", "*")


def _evaluate(node: ast.expr, used: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(value)):
            used.append(value)
            return Fraction(value)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, used), _evaluate(right, used))
    raise ValueError(f"{type(node).__name__} is not allowed")
