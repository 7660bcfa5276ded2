r"""Reward functions that run in the trainer's process: (prompt, completion, record) -> score.

They must be cheap and must not hang; anything that may take long belongs in isolated.py. They run beside the main
thread and hold the interpreter lock: they cannot set signal handlers, and they delay the trainer's own Python code. The
final answer is the text after the last `####` up to the end of its line, or the content of the last `\boxed{}`,
whichever comes later. To add a reward, write a function here and list its name in `__all__`.
"""

import ast
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

__all__ = ["answer_format", "countdown", "exact_answer"]

Record = dict[str, Any]

MAX_CHARACTERS = 200
"""Maximum characters of a final answer, or of a number in a step. Longer ones score 0: every function stays linear."""
_ANSWER_MARK = re.compile(r"(?<!#)####(?!#)")
BOX_START = "\\boxed{"
_NUMBER = re.compile(  # 65 | 1,234.50 | 1{,}234 | -$7 | .5 | 65% | 65 apples
    r"(?:\\?\$)?(?P<sign>[-+−]?)\s*(?:\\?\$)?(?P<whole>[0-9]{1,3}(?:(?:,|\{,\})[0-9]{3})+|[0-9]*)(?P<part>\.[0-9]*)?"
    r"\s*(?:\\?%|[A-Za-z°][A-Za-z° ]*\.?)?"
)
_ARITHMETIC = re.compile(r"(?=.*[0-9])[0-9+\-−*/()., $%]+")
_EXPRESSION = re.compile(r"[0-9+\-*/() ]+")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def exact_answer(prompt: str, completion: str, record: Record) -> float:
    """Score 1 if the final answer equals record["answer"], else 0.

    Compares them as numbers (1,234.0 equals 1234); if neither is a number, as text up to white space.
    """
    del prompt  # all rewards share one signature
    answer = final_answer(completion)
    if answer is None:
        return 0.0
    got, wanted = number(answer), number(record["answer"])
    if got is None and wanted is None:
        return float(answer.split() == record["answer"].split())
    return float(got == wanted)


def answer_format(prompt: str, completion: str, record: Record) -> float:
    r"""Score 1 if the completion has exactly one final answer, else 0, whether or not it is right.

    That is either one `####` followed by a number or an arithmetic expression up to the end of the completion, or one
    `\boxed{}` that is not empty.
    """
    del prompt, record
    marks = len(_ANSWER_MARK.findall(completion))
    if completion.count(BOX_START):
        return float(marks == 0 and completion.count(BOX_START) == 1 and bool(final_answer(completion)))
    if marks != 1:
        return 0.0
    last = completion[completion.rfind("####") + 4 :].strip()
    if len(last) > MAX_CHARACTERS:
        return 0.0
    return float(_ARITHMETIC.fullmatch(last) is not None)


def countdown(prompt: str, completion: str, record: Record) -> float:
    """Score 1 if the final answer uses each of record["numbers"] exactly once and equals record["target"], else 0.

    Expressions may use + - * / and brackets and are evaluated exactly; a trailing `= 22` is ignored.
    """
    del prompt
    answer = final_answer(completion)
    return float(answer is not None and expression_value(answer, record["numbers"]) == Fraction(record["target"]))


def expression_value(answer: str, numbers: str) -> Fraction | None:
    """Return the value of an expression that uses each of `numbers`, such as "3 5 7", exactly once, else None.

    A trailing `= 22` is ignored.
    """
    text = ascii_operators(answer.partition("=")[0]).strip()
    if _EXPRESSION.fullmatch(text) is None:
        return None
    used: list[int] = []
    value = evaluate(text, used)
    return value if sorted(used) == sorted(map(int, numbers.split())) else None


def evaluate(text: str, used: list[int] | None = None) -> Fraction | None:
    """Return the exact value of an expression, or None if it has anything but whole numbers, + - * / and brackets.

    Append the numbers to `used`. Also None on division by zero.
    """
    try:
        return _evaluate(ast.parse(text, mode="eval").body, [] if used is None else used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):  # MemoryError: nested too deeply
        return None


def final_answer(completion: str) -> str | None:
    r"""Return the completion's final answer (see the module docstring), or None if missing or too long.

    A `\boxed{}` that never closes does not count.
    """
    mark, box = completion.rfind("####"), completion.rfind(BOX_START)
    answer = boxed_content(completion, box + len(BOX_START)) if box > mark else None
    if answer is None and mark >= 0:
        end = completion.find("\n", mark)
        answer = completion[mark + 4 : end if end >= 0 else None]
    if answer is None or len(answer) > MAX_CHARACTERS:
        return None
    return answer.strip(" \t*`")


def number(text: str) -> Decimal | None:
    """Parse a number as people write it, with separators, a currency sign or a unit; None if it is not a number."""
    text = text.strip()
    if len(text) > 2 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()  # LaTeX's $65$
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_CHARACTERS else None
    if match is None:
        return None
    digits = re.sub(r"[,{}]", "", match["whole"]) + (match["part"] or "")
    if not digits.strip("."):
        return None
    return Decimal(("-" if match["sign"] in ("-", "−") else "") + digits)


def ascii_operators(text: str) -> str:
    r"""Return `text` with × and \times written as *, and ÷ as /."""
    return text.replace("×", "*").replace("÷", "/").replace("\\times", "*")


def boxed_content(text: str, start: int) -> str | None:
    """Return the content of the `\\boxed{` that opens right before `start`; None if it does not close in time.

    Braces inside are balanced; the content has at most MAX_CHARACTERS characters.
    """
    depth = 1
    for i in range(start, min(len(text), start + MAX_CHARACTERS + 1)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start:i]
    return None


def _evaluate(node: ast.expr, used: list[int]) -> Fraction:
    """Evaluate a syntax tree of whole numbers, appending them to `used`; raises ValueError for any other node."""
    match node:
        case ast.Constant(value=int(value)):
            used.append(value)
            return Fraction(value)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, used), _evaluate(right, used))
    raise ValueError(f"{type(node).__name__} is not allowed")
