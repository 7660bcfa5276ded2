"""Checks of single fields of a config: they exist, with the right type and range. checks.py has the rest.

Hyper-parameters of objectives and mismatch corrections and `SamplingParams` are range-checked where used.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterator
from types import UnionType
from typing import Any, NoReturn, get_args

from ml_collections import ConfigDict

from gspo_jax import objectives
from gspo_jax.config import COUNT, COUNT_OR_0, FINITE, POSITIVE, RANGES, Range, base, benchmark, source
from gspo_jax.errors import UserError
from gspo_jax.models.config import Latent, ModelConfig
from gspo_jax.objectives import mismatch

NAMED = {"functions": str, "rewards": float, "step_rewards": float}
"""Initially empty sections that accept names from a config or a flag, with value types."""
_OPEN = ("model.architecture", "data.options", "data.sources", "benchmarks", *NAMED)
"""Initially empty sections that accept new fields."""
_HYPER_PARAMETERS = {"objective": objectives.catalogue.__all__, "mismatch": mismatch.__all__}
"""Sections with a subsection per name, and per user function. Their fields are optional."""
_OPTIONS = {"difficulty": str, "seed": int, "train_size": int, "test_size": int}
_OWN_SIZES = ("data.options.train_size", "data.options.test_size")
"""May be None, for the difficulty's own size."""
TYPES = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}
"""User-facing names of types."""


def is_open(name: str) -> bool:
    """Return True for fields that may be added or left out."""
    return name.startswith(tuple(f"{section}." for section in (*_OPEN, *_HYPER_PARAMETERS)))


def may_be_none(name: str) -> bool:
    """Return True for fields that may be None, whatever a config has there."""
    defaults = base()
    defaults.benchmarks.any, defaults.data.sources.any = benchmark(), source("")
    name = re.sub(r"^(benchmarks|data\.sources)\.[^.]+\.", r"\1.any.", name)
    return name in _OWN_SIZES or (name in names(defaults) and at(defaults, name) is None)


def check_fields(config: ConfigDict) -> None:
    """Check that a config has exactly the fields of `base()`, each of the right type and range."""
    _check_section(config, config, base(), [])
    shape = {field.name: field.type for field in dataclasses.fields(ModelConfig)}
    sections = [("model.architecture", shape), ("data.options", _OPTIONS)]
    if isinstance(config.model.architecture.get("latent"), ConfigDict):
        sections.append(("model.architecture.latent", {field.name: field.type for field in dataclasses.fields(Latent)}))
    for section, types in sections:
        for key, value in at(config, section).items():
            name, kind = f"{section}.{key}", types.get(key)
            kind, optional = (get_args(kind)[0], True) if isinstance(kind, UnionType) else (kind, name in _OWN_SIZES)
            if kind in TYPES and not (optional and value is None):
                check_value(name, value, kind)
    for name, section in config.data.sources.items():
        where = f"data.sources.{name}"
        _check_is_section(where, section)
        _check_section(config, section, source(""), where.split("."))
        _check_range(f"{where}.weight", section.weight, POSITIVE)
    for name, section in config.benchmarks.items():
        where = f"benchmarks.{name}"
        _check_is_section(where, section)
        _check_section(config, section, benchmark(), where.split("."))
        _check_range(f"{where}.every", section.every, COUNT_OR_0)
        _check_range(f"{where}.samples", section.samples, COUNT)
    for section, kind in NAMED.items():
        for key, value in at(config, section).items():
            _check_type(f"{section}.{key}", value, kind)
            if kind is float:
                _check_range(f"{section}.{key}", value, FINITE)


def check_value(name: str, value: Any, kind: Any) -> None:
    """Raise a UserError unless a field's value has this type and lies in the field's range."""
    _check_type(name, value, kind)
    if name in RANGES:
        _check_range(name, value, RANGES[name])


def no_field(name: str, found: list[str], config: ConfigDict) -> NoReturn:
    """Raise a UserError for a missing field, with the nearest existing one. `found` are its existing leading keys."""
    section: Any = at(config, ".".join(found)) if found else config
    if not isinstance(section, ConfigDict):
        raise UserError(f"the config has no field {name!r}; {'.'.join(found)!r} is a single value")
    key, last = name.split(".")[len(found)], name.split(".")[-1]
    there = [other for other in section if other != key]
    near = [".".join([*found, other]) for other in difflib.get_close_matches(key, there, n=1)]
    elsewhere = [field for field in names(config) if field.split(".")[-1] == last and field != name]
    near += sorted(elsewhere, key=lambda field: field.count("."))  # the policy's own fields first
    hint = f"did you mean {near[0]!r}? " if near else ""
    where = f"section {'.'.join(found)!r}" if found else "the config"
    raise UserError(f"the config has no field {name!r}; {hint}{where} has {', '.join(there)}")


def names(config: ConfigDict, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields."""
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from names(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _check_section(config: ConfigDict, section: ConfigDict, defaults: ConfigDict, found: list[str]) -> None:
    here = ".".join(found)
    known: Any = [*defaults, *_HYPER_PARAMETERS.get(here, ()), *(config.functions if here in _HYPER_PARAMETERS else ())]
    optional = bool(found) and found[0] in _HYPER_PARAMETERS
    for key in section:
        if key not in known and here not in _OPEN and not (optional and len(found) == 2):
            no_field(".".join([*found, key]), found, config)
        if key in config.functions and here in _HYPER_PARAMETERS:
            _check_is_section(".".join([*found, key]), section[key])
    for key, default in defaults.items():
        name = ".".join([*found, key])
        if key not in section:
            if optional:
                continue
            raise UserError(f"the config has no {name!r}; start from gspo_jax.config.base(), which has every field")
        value: Any = section[key]
        if isinstance(default, ConfigDict):
            _check_is_section(name, value)
            _check_section(config, value, default, [*found, key])
        elif not (value is None and default is None):
            check_value(name, value, defaults.get_type(key))


def _check_is_section(name: str, value: Any) -> None:
    if not isinstance(value, ConfigDict):
        raise UserError(f"{name} is {value!r}; it is a section, so use a ConfigDict of its fields")


def _check_type(name: str, value: Any, kind: Any) -> None:
    """Raise a UserError unless a value has this type. Whole numbers count as floats, booleans do not."""
    fits: Any = {float: (int, float), tuple: (tuple, list)}.get(kind, kind)
    shown = value.to_dict() if isinstance(value, ConfigDict) else value  # on one line
    if not isinstance(value, fits) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{name} is {shown!r}; use {TYPES.get(kind, f'a {kind.__name__}')}")


def _check_range(name: str, value: Any, allowed: Range) -> None:
    if not allowed.holds(value):
        raise UserError(f"{name} is {value!r}; use {allowed.words}")


def at(config: ConfigDict, name: str) -> Any:
    """Return the field or section with this dotted name."""
    node: Any = config
    for key in name.split("."):
        node = node[key]
    return node
