"""Valid scores of reward functions. Workers import this module: no jax here."""

import math
from typing import Any

NONE = "returned None"
"""A function's way to say that a response has no score."""
MOST = 1e18
"""Largest absolute score. Rewards and sums of their squared deviations are float32."""


def as_float(value: Any) -> float | None:
    """Return a reward function's return value as a float, infinite on overflow; None stays None.

    Raises:
      TypeError: it is not a number.
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
    """Return why a value is not a valid score, "" if it is."""
    if score is None:
        return NONE
    if not math.isfinite(score):
        return f"returned {score}"
    return "" if abs(score) <= MOST else f"returned {score:g}; scores are from {-MOST:g} to {MOST:g}"
