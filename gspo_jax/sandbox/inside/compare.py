"""Whether a program printed what was expected, in time that is linear in what was.

Numbers are read as decimals and never as floats, which hold about 16 digits.
"""

import re
from collections.abc import Callable
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation

TOLERANCE = Decimal("1e-6")
"""Error that `number` allows, absolute or relative to what is expected."""
_NUMBER = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d++)?", re.ASCII)
_NO_NUMBERS = {"inf": "inf", "infinity": "inf", "-inf": "-inf", "-infinity": "-inf", "nan": "nan", "-nan": "nan"}
"""Words of floats that are no numbers, in small letters -> what they mean."""
_CONTEXT = Context(prec=50, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[])
"""Digits of the error, and exponents without which one would be an exception."""


def exact(expected: str, output: str) -> bool:
    """Compare whole texts, but for white space at the ends of lines and of the text."""
    return _lines(expected) == _lines(output)


def token(expected: str, output: str) -> bool:
    """Compare words, with any white space between them."""
    wanted = expected.split()
    return wanted == output.split(maxsplit=len(wanted))


def number(expected: str, output: str) -> bool:
    """Compare words, and numbers by their values: `5.`, `+5`, `05` and `0.5e1` are 5.

    An integer that is expected is printed exactly, or as a decimal with an absolute error of up to TOLERANCE. A decimal
    that is expected may have a relative error of it as well. `inf` and `nan` count where they are expected.
    """
    wanted = expected.split()
    got = output.split(maxsplit=len(wanted))
    return len(wanted) == len(got) and all(a == b or _near(a, b) for a, b in zip(wanted, got, strict=True))


def livecodebench(expected: str, output: str) -> bool:
    """Compare lines, without white space at their ends, as texts, or word by word as decimals of the same value.

    This is the rule of https://github.com/LiveCodeBench/LiveCodeBench, in lcb_runner/evaluation/testing_util.py.
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
    """Return whether two different words are numbers that are the same, or near enough."""
    if not (_NUMBER.fullmatch(wanted) and _NUMBER.fullmatch(got)):
        meant = _no_number(wanted)
        return meant != "" and meant == _no_number(got)
    value, found = Decimal(wanted, _CONTEXT), Decimal(got, _CONTEXT)
    if not (value.is_finite() and found.is_finite()):  # an exponent beyond those of decimals
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
    except InvalidOperation:  # a word, or an exponent beyond those of decimals
        return False
