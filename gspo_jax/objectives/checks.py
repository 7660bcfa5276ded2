"""Validation of hyper-parameters and shapes, and lookup of factories."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from jaxtyping import Array

from gspo_jax.errors import UserError, choices

Built = TypeVar("Built")


def build(
    kind: str, factories: Mapping[str, Callable[..., Built]], name: str, hyper: Mapping[str, float | str | None]
) -> Built:
    """Call `factories[name](**hyper)`; raise UserError for unknown or missing names."""
    if name not in factories:
        raise UserError(f"no {kind} {name!r}; {choices(name, factories)}")
    parameters = inspect.signature(factories[name]).parameters
    known = list(parameters)
    for given in hyper:
        if given not in known:
            says = choices(given, known) if known else "it has none"
            raise UserError(f"{name} has no hyper-parameter {given!r}; {says}")
    for parameter in parameters.values():
        if parameter.default is parameter.empty and parameter.name not in hyper:
            raise UserError(
                f"{name} needs its hyper-parameter {parameter.name!r}; give it, or a default to the function"
            )
    return factories[name](**hyper)


def check_offsets(low: float, high: float, dual_clip: float | None = None) -> None:
    """Raise UserError unless `low` and `high` are offsets from 1 (`low=0.2` clips at 0.8) and `dual_clip` > 1."""
    if not 0 <= low <= 1:
        raise UserError(f"low={low} lies outside [0, 1]; it is an offset from 1, so low=0.2 clips at 0.8")
    if not high >= 0:
        raise UserError(f"high={high} is below 0; it is an offset from 1, so high=0.2 clips at 1.2")
    if dual_clip is not None and not dual_clip > 1:
        raise UserError(f"dual_clip={dual_clip} is not above 1; it caps the ratio where Â < 0, use 3 or None for off")


def check_not_negative(remedy: str, **given: float) -> None:
    """Raise UserError unless all are finite and at least 0."""
    for name, value in given.items():
        if not 0 <= value < math.inf:
            raise UserError(f"{name}={value} is not a finite number of at least 0; {remedy}")


def check_positive(remedy: str, **given: float) -> None:
    """Raise UserError unless all are positive and finite."""
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise UserError(f"{name}={value} is not a positive number; {remedy}")


def check_fraction(remedy: str, **given: float) -> None:
    """Raise UserError unless all lie in [0, 1]."""
    for name, value in given.items():
        if not 0 <= value <= 1:
            raise UserError(f"{name}={value} lies outside [0, 1]; {remedy}")


def check_choice(known: tuple[str, ...], **given: str) -> None:
    """Raise UserError unless all are among `known`."""
    for name, value in given.items():
        if value not in known:
            raise UserError(f"no {name} {value!r}; {choices(value, known)}")


def check_tokens(**given: Array) -> None:
    """Raise ValueError unless all arrays share one shape [B, T] and the last, a mask, is boolean."""
    name, mask = list(given.items())[-1]
    if mask.ndim != 2 or any(x.shape != mask.shape for x in given.values()):
        shapes = ", ".join(f"{each} {list(x.shape)}" for each, x in given.items())
        raise ValueError(f"the shapes are {shapes}; all must be the same [B, T]")
    if mask.dtype != bool:
        raise ValueError(f"{name} is {mask.dtype}, not bool; use {name} != 0")
