"""Whether a program printed what was expected."""

import math
from collections.abc import Callable


def exact(expected: str, output: str) -> bool:
    """Compare whole texts, but for white space at the ends of lines and of the text."""
    return _lines(expected) == _lines(output)


def token(expected: str, output: str) -> bool:
    """Compare words, with any white space between them."""
    return expected.split() == output.split()


def number(expected: str, output: str) -> bool:
    """Compare words, and numbers up to an absolute or relative error of 1e-6."""
    wanted, got = expected.split(), output.split()
    return len(wanted) == len(got) and all(a == b or _near(a, b) for a, b in zip(wanted, got, strict=True))


COMPARISONS: dict[str, Callable[[str, str], bool]] = {"exact": exact, "token": token, "number": number}


def same(expected: str, output: str, how: str) -> bool:
    """Compare by one of COMPARISONS."""
    return COMPARISONS[how](expected, output)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _near(wanted: str, got: str) -> bool:
    try:
        return math.isclose(float(wanted), float(got), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False
