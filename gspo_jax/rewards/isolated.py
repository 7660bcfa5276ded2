"""Reward functions that may hang or exhaust memory on hostile answers. They run only in killable workers.

Workers import this module, so it must not import jax. They see few environment variables (pool.py) and an empty `HOME`.
certain.py skips calls with a certain verdict. Add new functions to `__all__`.
"""

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from sympy import Expr

from gspo_jax.rewards import certain
from gspo_jax.rewards.answers import Announcement, announced
from gspo_jax.rewards.notation import spelled
from gspo_jax.rewards.quantities import CURRENCY, SCALE_WORDS, Number, number, stated
from gspo_jax.thoughts import answer_part

__all__ = ["math_verify", "math_verify_flexible"]

# Silences a warning that its timeouts are off. They need signals, which work only in the main thread.
logging.getLogger("math_verify").setLevel(logging.ERROR)

parse("$1$", parsing_timeout=None)  # type: ignore[arg-type]  # builds its tables before the first deadline starts

_DIGITS = r"(?<![0-9.,\\])[0-9]++(?:,[0-9]{3})*+(?:\.[0-9]++)?+"
_IN_TEXT = re.compile(  # 5 million | $5k | sold 5k, but not 2 + 5k
    rf"(?:{CURRENCY})?{_DIGITS}(?:[\s~-]|\\[,;: ])*+(?:\\text\{{\s*)?{SCALE_WORDS}(?![^\W_])\}}?"
    rf"|(?:{CURRENCY}|(?<=[A-Za-z]{{2}}\s)){_DIGITS}(?:[kKMB]|bn|mn)(?![\w-])(?!\s*[+*/=^<>\\$)}}])"
)
_GROUPS = re.compile(r"(?<=[0-9])(?:\\[,!;: ]|~|[\u00a0\u2009\u202f]|\{,\}|,\\!)++(?=[0-9]{3}(?![0-9]))")
_ESCAPED_DOLLAR = re.compile(r"\\\$\s*")
_DECIMAL_COMMA = re.compile(r"-?[0-9]+,[0-9]+")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_DIGIT = re.compile(r"\d")
_WORDS = re.compile(
    r"(?<![A-Za-z0-9])(?!(?:and|or|sqrt|pi|sin|cos|tan|log|ln|exp|infinity|inf)\b)[A-Za-z]{2,}|\(\s*or\b|[→|&]|->"
)
_PROSE = re.compile(rf"{_WORDS.pattern}|\\[([]|(?<!\\)\$")
_TEXT = re.compile(r"\\(?:text\w*|mathrm|mathbf|[mh]box)\s*\{(?!\s*(?:and|or)\b[^A-Za-z]*\})[^{}]*[A-Za-z]")
_NO_PRICE = re.compile(r"\$(?![0-9])")
_UNICODE = str.maketrans(
    {"∞": "\\infty ", "π": "\\pi ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne "}
    | {"×": "\\times ", "·": "\\cdot ", "÷": "\\div "}
)
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|([0-9]+|[A-Za-z]))")
_MIXED = re.compile(r"(?<![0-9.,/^])([0-9]+) ([0-9]+)/([0-9]+)(?![0-9])")
_TINY, _RELATIVE, _ZERO = 1e-5, 1e-6, 1e-90
_DELIMITER = re.compile(r"(?<!\\)\$|\\[([]|\\boxed")


def math_verify(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """Score 1 if the final answer is mathematically equal to record["answer"] (1/2 is 0.5), else 0.

    Only an announced answer counts (`answers.announced`). math-verify compares answers that are written differently.
    Raises ValueError if it cannot parse record["answer"].
    """
    return _checked(certain.math_verify, prompt, completion, record)


def math_verify_flexible(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """Score like `math_verify`; without an announced answer, by the last number or formula: "So it is 18" answers 18.

    Raises ValueError if math-verify cannot parse record["answer"].
    """
    return _checked(certain.math_verify_flexible, prompt, completion, record)


def _checked(decide: certain.Decider, prompt: str, completion: str, record: dict[str, Any]) -> float:
    score = decide(prompt, completion, record)
    if score is not None:
        return score
    part = answer_part(prompt, completion) or ""
    found = announced(part)  # never None for `math_verify`: its score is certain then
    said = _plain_numbers(part) if found is None else _said(found)
    return _verified(said, record["answer"])


def _said(answer: Announcement) -> str:
    """Return text in which math-verify finds the answer. A sentence is reduced to its one number or formula."""
    said, in_math = answer.text, answer.boxed
    if number(said) is None and _DIGIT.search(said) and _is_sentence(answer):
        said, in_math = stated(said), True
        if said is None:
            return ""
    value = number(said)
    text = _as_latex(said) if value is None else _digits(value)
    return f"\\boxed{{{text}}}" if in_math or _is_formula(text) else f"The answer is {text}"


def _is_sentence(answer: Announcement) -> bool:
    """Return True if an answer has words. Adjacent letters in math mode are variables."""
    if "\\begin" in answer.text:
        return False
    if answer.boxed:
        return _TEXT.search(answer.text) is not None
    return _WORDS.search(_COMMAND.sub(" ", answer.text)) is not None


def _verified(text: str, reference: str) -> float:
    gold = _parse_reference(reference)
    said = parse(text, parsing_timeout=None)  # type: ignore[arg-type]
    equal = verify(gold, said, timeout_seconds=None)  # type: ignore[arg-type]
    return float(equal and not _tiny_and_different(gold, said))


def _tiny_and_different(gold: list[Any], said: list[Any]) -> bool:
    """Return True if two numbers differ but both round to 0 at math-verify's six decimals."""
    if not all(isinstance(one[0], Expr) and one[0].is_comparable for one in (gold, said)):
        return False
    right, other = gold[0].evalf(), said[0].evalf()
    difference = abs(right - other)
    return bool(max(abs(right), abs(other)) < _TINY and difference > max(_RELATIVE * abs(right), _ZERO))


def _parse_reference(answer: Any) -> list[Any]:
    if not isinstance(answer, str):
        raise ValueError(f"the reference answer {answer!r:.200} is not a text")
    return _parse_text(answer)


@lru_cache(maxsize=1 << 12)  # a group shares its reference
def _parse_text(answer: str) -> list[Any]:
    value = number(answer)
    text = _as_latex(answer) if value is None else _digits(value)
    gold = parse(text if _DELIMITER.search(text) else f"${text}$", parsing_timeout=None)  # type: ignore[arg-type]
    if not gold:
        raise ValueError(f"the reference answer {answer!r} cannot be parsed")
    return gold


def _plain_numbers(text: str) -> str:
    text = _GROUPS.sub("", _ESCAPED_DOLLAR.sub("", text).replace("\u2212", "-"))
    return _IN_TEXT.sub(_in_digits, text)


def _as_latex(text: str) -> str:
    text = _plain_numbers(spelled(text))
    if not _NO_PRICE.search(text):
        text = text.replace("$", "")
    text = _ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", text.translate(_UNICODE))
    return _MIXED.sub(r"\1\\frac{\2}{\3}", text)


def _is_formula(text: str) -> bool:
    return _PROSE.search(_COMMAND.sub(" ", text)) is None and not _DECIMAL_COMMA.fullmatch(text)


def _digits(number: Number) -> str:
    name = f"{number.name} = " if number.name else ""
    return f"{name}{number.value:f}" + ("\\%" if number.percent else "")


def _in_digits(found: re.Match[str]) -> str:
    value = number(found[0])
    return found[0] if value is None else _digits(value)
