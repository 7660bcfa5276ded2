"""Comparisons of a program's output with the expected text, in time linear in the latter.

Numbers are read as decimals: floats hold only about 16 digits.
"""

import re
from collections.abc import Callable
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation

TOLERANCE = Decimal("1e-6")
"""Absolute or relative error that `number` allows."""
_NUMBER = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d++)?", re.ASCII)
_NO_NUMBERS = {"inf": "inf", "infinity": "inf", "-inf": "-inf", "-infinity": "-inf", "nan": "nan", "-nan": "nan"}
"""Spellings of non-finite floats -> meaning."""
_CONTEXT = Context(prec=50, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[])
"""Precise enough for the error, and never raises."""


def exact(expected: str, output: str) -> bool:
    """Compare texts, except white space at the ends of lines and of the text."""
    return _lines(expected) == _lines(output)


def token(expected: str, output: str) -> bool:
    """Compare words separated by any white space."""
    wanted = expected.split()
    return wanted == output.split(maxsplit=len(wanted))


def number(expected: str, output: str) -> bool:
    """Compare words, and numbers by value: `5.`, `+5`, `05` and `0.5e1` are 5.

    TOLERANCE is an absolute error for an expected integer, absolute or relative for an expected decimal. `inf` and
    `nan` count where they are expected.
    """
    wanted = expected.split()
    got = output.split(maxsplit=len(wanted))
    return len(wanted) == len(got) and all(a == b or _near(a, b) for a, b in zip(wanted, got, strict=True))


def livecodebench(expected: str, output: str) -> bool:
    """Compare stripped lines as texts, or word by word as decimals of equal value.

    Rule of https://github.com/LiveCodeBench/LiveCodeBench, lcb_runner/evaluation/testing_util.py.
    """
    wanted = expected.strip().split("\n")
    got = output.strip().split("\n", maxsplit=len(wanted))
    return len(wanted) == len(got) and all(
        a == b or _same_decimals(a, b) for a, b in zip(map(str.strip, wanted), map(str.strip, got), strict=True)
    )


COMPARISONS: dict[str, Callable[[str, str], bool]] = {
    comparison.__name__: comparison for comparison in (exact, token, number, livecodebench)
}


def same(expected: str, output: str, how: str) -> bool:
    """Compare by one of COMPARISONS."""
    return COMPARISONS[how](expected, output)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _near(wanted: str, got: str) -> bool:
    if not (_NUMBER.fullmatch(wanted) and _NUMBER.fullmatch(got)):
        meant = _no_number(wanted)
        return meant != "" and meant == _no_number(got)
    value, found = Decimal(wanted, _CONTEXT), Decimal(got, _CONTEXT)
    if not (value.is_finite() and found.is_finite()):  # exponent out of range
        return False
    error = _CONTEXT.subtract(found, value).copy_abs()
    if error <= TOLERANCE or wanted.lstrip("+-").isdigit():
        return error <= TOLERANCE
    return error <= _CONTEXT.multiply(TOLERANCE, value.copy_abs())


def _no_number(word: str) -> str:
    return _NO_NUMBERS.get(word.lower().removeprefix("+"), "")


def _same_decimals(wanted: str, got: str) -> bool:
    words = wanted.split()
    others = got.split(maxsplit=len(words))
    try:
        return len(words) == len(others) and all(Decimal(a) == Decimal(b) for a, b in zip(words, others, strict=True))
    except InvalidOperation:  # a word, or exponent out of range
        return False
