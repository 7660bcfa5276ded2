"""Signs that a policy games its reward."""

import math
from collections.abc import Mapping
from typing import Any

SURE, UNSURE = 3.0, 1.0


def gamed(first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """Return a note if the held-out reward rose and the accuracy did not, otherwise "".

    The reward rose if by more than SURE standard errors, the accuracy if by more than UNSURE. `first` and `last` are
    metrics of two evaluations of a run (`Evaluation.metrics`).
    """
    if not (_rise("eval/reward", first, last) > SURE and _rise("eval/accuracy", first, last) <= UNSURE):
        return ""
    kinds = ((name.removeprefix("eval/reward/"), name) for name in last if name.startswith("eval/reward/"))
    changes = ", ".join(f"{kind} {_change(name, first, last)}" for kind, name in kinds if name in first)
    return (
        f"the policy games its reward: on held-out prompts it went from {_change('eval/reward', first, last)}, and the "
        f"accuracy from {_change('eval/accuracy', first, last)} ({changes}). Read the completions in held_out/; reward "
        "what they lack, or hold the policy near its start with --config.reference.kl_weight=0.02"
    )


def _change(name: str, first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    return f"{first[name]:.3g} to {last[name]:.3g}"


def _rise(name: str, first: Mapping[str, Any], last: Mapping[str, Any]) -> float:
    """Return the change in standard errors of the difference, infinite without an error; 0 if unknown."""
    if first.get(name) is None or last.get(name) is None:
        return 0.0
    error = math.hypot(*(of.get(f"{name}_stderr") or 0.0 for of in (first, last)))
    change = last[name] - first[name]
    return change / error if error else math.inf * change if change else 0.0
