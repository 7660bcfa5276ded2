"""Signs that a policy games its reward."""

import math
from collections.abc import Mapping
from typing import Any

from gspo_jax.measuring.held_out import rewards_in

SURE, UNSURE = 3.0, 1.0
"""Standard errors."""


def gamed(first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """Return a note if the held-out reward rose and the accuracy did not though it could, otherwise "".

    The reward rose if by more than SURE standard errors, the accuracy if by more than UNSURE. `first` and `last` are
    metrics of two evaluations of a run (`Evaluation.metrics`).
    """
    sure = SURE < _rise("eval/reward", first, last) < math.inf
    if not sure or None in _ends("eval/accuracy", first, last):
        return ""
    if _rise("eval/accuracy", first, last) > UNSURE or _at_its_limit(last):
        return ""
    functions = {name: metric for name, metric in rewards_in(last).items() if None not in _ends(metric, first, last)}
    changes = [f"{name} from {_change(metric, first, last)}" for name, metric in functions.items()]
    return (
        f"the reward may be gamed: on held-out prompts it rose from {_change('eval/reward', first, last)} "
        f"({', '.join(changes)}), while the accuracy went from {_change('eval/accuracy', first, last)}. Read the "
        "completions in held_out/. Then pay for what is missing in them, or start a new run that stays nearer to the "
        "first policy, with --config.reference.kl_weight=0.02"
    )


def _at_its_limit(last: Mapping[str, Any]) -> bool:
    accuracy, error = last.get("eval/accuracy"), last.get("eval/accuracy_stderr")
    return accuracy is not None and accuracy + UNSURE * (error or 0.0) >= 1


def _ends(name: str, first: Mapping[str, Any], last: Mapping[str, Any]) -> tuple[Any, Any]:
    return first.get(name), last.get(name)


def _change(name: str, first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    return f"{first[name]:.3g} to {last[name]:.3g}"


def _rise(name: str, first: Mapping[str, Any], last: Mapping[str, Any]) -> float:
    """Return the change in standard errors of the difference, infinite if that is 0; 0 if unknown."""
    if None in _ends(name, first, last):
        return 0.0
    error = math.hypot(*(of.get(f"{name}_stderr") or 0.0 for of in (first, last)))
    change = last[name] - first[name]
    return change / error if error else math.inf * change if change else 0.0
