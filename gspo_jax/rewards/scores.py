"""What a score may be: the number that a reward function returns. Workers import this module; no jax here."""

import math
from typing import Any

MOST = 1e18
"""Largest score either way. Rewards are float32, and so are sums of the squares of their deviations."""


def as_float(value: Any) -> float | None:
    """Return what a reward function has returned as a float, infinite if it is beyond these; None stays.

    Raises:
      TypeError: it is no number.
    """
    if value is None:
        return None
    if isinstance(value, str | bytes | bytearray):  # which `float` would parse
        raise TypeError(f"a score is a number, and not the text {value!r:.50}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def fault(score: float | None) -> str:
    """Return what keeps a function's return value from being a score, "" if nothing does."""
    if score is None or not math.isfinite(score):
        return f"returned {score}"
    return "" if abs(score) <= MOST else f"returned {score:g}; scores are from {-MOST:g} to {MOST:g}"
