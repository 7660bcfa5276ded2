r"""Reward functions that are cheap and cannot hang: (prompt, completion, record) -> score, in the trainer's process.

A final answer is what follows the last `####` on its line, or the content of the last `\boxed{}`, whichever is later.
Anything that may take long goes to isolated.py. A new reward is a function here and its name in `__all__`.
"""

import ast
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

__all__ = ["countdown", "exact_answer", "format"]

Record = dict[str, str]

LONGEST = 200
"""Characters of a final answer, or of a number in a step; longer ones are wrong, which keeps every function linear."""
_MARK = re.compile(r"(?<!#)####(?!#)")
_BOX = "\\boxed{"
_NUMBER = re.compile(  # 65 | 1,234.50 | 1{,}234 | -$7 | .5 | 65% | 65 apples
    r"(?:\\?\$)?(?P<sign>[-+−]?)\s*(?:\\?\$)?(?P<whole>[0-9]{1,3}(?:(?:,|\{,\})[0-9]{3})+|[0-9]*)(?P<part>\.[0-9]*)?"
    r"\s*(?:\\?%|[A-Za-z°][A-Za-z° ]*\.?)?"
)
_FORM = re.compile(r"(?=.*[0-9])[0-9+\-−*/()., $%]+")
_EXPRESSION = re.compile(r"[0-9+\-*/() ]+")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def exact_answer(prompt: str, completion: str, record: Record) -> float:
    """1 where the final answer is record["answer"], compared as numbers (1,234.0 is 1234), else as text."""
    del prompt  # every reward has the same arguments
    answer = final_answer(completion)
    if answer is None:
        return 0.0
    got, wanted = number(answer), number(record["answer"])
    if got is None and wanted is None:
        return float(answer.split() == record["answer"].split())
    return float(got == wanted)


def format(prompt: str, completion: str, record: Record) -> float:
    r"""1 where the completion has one final answer and no second: `#### ` with a number or sum at its end, or a box."""
    del prompt, record
    marks = len(_MARK.findall(completion))
    if completion.count(_BOX):
        return float(marks == 0 and completion.count(_BOX) == 1 and bool(final_answer(completion)))
    if marks != 1:
        return 0.0
    last = completion[completion.rfind("####") + 4 :].strip()
    if len(last) > LONGEST:
        return 0.0
    return float(_FORM.fullmatch(last) is not None)


def countdown(prompt: str, completion: str, record: Record) -> float:
    """1 where the final answer is an expression that uses each of record["numbers"] once and equals record["target"].

    Allows + - * / and brackets, exactly evaluated; `= 22` after the expression is ignored.
    """
    del prompt
    answer = final_answer(completion)
    return float(answer is not None and expression_value(answer, record["numbers"]) == Fraction(record["target"]))


def expression_value(answer: str, numbers: str) -> Fraction | None:
    """The value of an expression that uses each of `numbers`, such as "3 5 7", once; None for anything else.

    `= 22` after it is ignored.
    """
    text = ascii_operators(answer.partition("=")[0]).strip()
    if _EXPRESSION.fullmatch(text) is None:
        return None
    used: list[int] = []
    value = evaluate(text, used)
    return value if sorted(used) == sorted(map(int, numbers.split())) else None


def evaluate(text: str, used: list[int] | None = None) -> Fraction | None:
    """The value of whole numbers, + - * / and brackets; None for anything else. The numbers are added to `used`."""
    try:
        return _evaluate(ast.parse(text, mode="eval").body, [] if used is None else used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):  # MemoryError: nested too deep
        return None


def final_answer(completion: str) -> str | None:
    r"""The text after the last `####` on its line, or in the last closed `\boxed{}`; None if absent or too long."""
    mark, box = completion.rfind("####"), completion.rfind(_BOX)
    answer = _boxed(completion, box + len(_BOX)) if box > mark else None
    if answer is None and mark >= 0:
        end = completion.find("\n", mark)
        answer = completion[mark + 4 : end if end >= 0 else None]
    if answer is None or len(answer) > LONGEST:
        return None
    return answer.strip(" \t*`")


def number(text: str) -> Decimal | None:
    """The value of a number as people write it, with separators, a currency or a unit; None for anything else."""
    text = text.strip()
    if len(text) > 2 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()  # LaTeX's $65$
    match = _NUMBER.fullmatch(text) if len(text) <= LONGEST else None
    if match is None:
        return None
    digits = re.sub(r"[,{}]", "", match["whole"]) + (match["part"] or "")
    if not digits.strip("."):
        return None
    return Decimal(("-" if match["sign"] in ("-", "−") else "") + digits)


def ascii_operators(text: str) -> str:
    r"""`text` with × and \times as *, ÷ as /."""
    return text.replace("×", "*").replace("÷", "/").replace("\\times", "*")


def _boxed(text: str, start: int) -> str | None:
    """The content of a box that opens before `start`, its braces balanced; None if it never closes."""
    depth = 1
    for i in range(start, min(len(text), start + LONGEST + 1)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start:i]
    return None


def _evaluate(node: ast.expr, used: list[int]) -> Fraction:
    """The value of an expression of whole numbers, which are added to `used`; raises ValueError for anything else."""
    match node:
        case ast.Constant(value=int(value)):
            used.append(value)
            return Fraction(value)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, used), _evaluate(right, used))
    raise ValueError(f"{type(node).__name__} is not allowed")
