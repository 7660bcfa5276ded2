"""The config's fields: which there are, and the type and range of each. What fields must be together is in checks.py.

Fields that are handed on as they are have their ranges where they are used: the hyper-parameters of objectives and of
mismatch corrections (`objectives`), and truncated sampling (`SamplingParams`).
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

from ml_collections import ConfigDict

from gspo_jax import objectives
from gspo_jax.config import base, benchmark, source
from gspo_jax.data.tokenizer import EOS, PAD, TURN
from gspo_jax.errors import UserError
from gspo_jax.models.config import ModelConfig
from gspo_jax.objectives import mismatch

INT32 = 2**31 - 1
"""Largest size: arrays on devices are indexed, and updates counted, with int32."""


class Range(NamedTuple):
    """Values that a numeric field may have."""

    words: str
    """The range, as it ends the sentence "use …"."""
    holds: Callable[[Any], bool]
    """Whether a number lies in it; False for NaN."""


def _from_to(low: int, high: int) -> Range:
    return Range(f"{low} to {high}", lambda x: low <= x <= high)


COUNT = _from_to(1, INT32)
COUNT_OR_0 = _from_to(0, INT32)
AXIS = Range(f"1 to {INT32}, or -1 for the remaining devices", lambda x: x == -1 or 1 <= x <= INT32)
SAMPLER_AXIS = Range(f"0 to {INT32}, or -1 for the remaining devices", lambda x: -1 <= x <= INT32)
HOST_LIMIT = _from_to(1, 2**16)  # what one machine can hold
FINITE = Range("a finite number", lambda x: -math.inf < x < math.inf)
POSITIVE = Range("a finite number above 0", lambda x: 0 < x < math.inf)
NOT_NEGATIVE = Range("a finite number, 0 or above", lambda x: 0 <= x < math.inf)
FRACTION = Range("a fraction from 0 to 1", lambda x: 0 <= x <= 1)
FRACTION_ABOVE_0 = Range("a fraction above 0, up to 1", lambda x: 0 < x <= 1)
FRACTION_BELOW_1 = Range("a fraction from 0 up to, but not including, 1", lambda x: 0 <= x < 1)

_ADAMW = {
    "learning_rate": POSITIVE,
    "warmup_updates": COUNT_OR_0,
    "b1": FRACTION_BELOW_1,
    "b2": FRACTION_BELOW_1,
    "weight_decay": NOT_NEGATIVE,
    "max_grad_norm": Range("a number above 0, or inf for no clipping", lambda x: x > 0),
}

RANGES = {
    "seed": _from_to(0, 2**32 - 1),
    "iterations": COUNT,
    "cpu_devices": HOST_LIMIT,
    **{f"mesh.{axis}": AXIS for axis in ("data", "fsdp", "expert", "tensor")},
    "processes.grace_s": COUNT,
    "processes.deadline_s": POSITIVE,
    **{f"model.architecture.{size}": COUNT for size in ("hidden_size", "num_layers", "num_heads", "num_kv_heads")},
    **{f"model.architecture.{size}": COUNT for size in ("head_dim", "intermediate_size")},
    **{f"model.architecture.{size}": COUNT_OR_0 for size in ("num_experts", "experts_per_token")},
    "model.architecture.moe_intermediate_size": COUNT_OR_0,
    "model.architecture.rope_theta": POSITIVE,
    "model.architecture.rms_norm_eps": POSITIVE,
    "model.architecture.max_position_embeddings": COUNT,
    "adapter.rank": COUNT_OR_0,
    "adapter.expert_rank": COUNT_OR_0,
    "adapter.alpha": POSITIVE,
    "coldstart.steps": COUNT_OR_0,
    "coldstart.batch": COUNT,
    "coldstart.vocab_size": _from_to(256 + len((PAD, EOS, TURN)), INT32),  # all bytes, and the special tokens
    "coldstart.log_every": COUNT,
    **{f"coldstart.optimizer.{name}": allowed for name, allowed in _ADAMW.items()},
    "data.options.train_size": COUNT,
    "data.options.test_size": COUNT,
    "data.held_out": FRACTION_BELOW_1,
    "data.limit": COUNT_OR_0,
    "data.shots": COUNT_OR_0,
    "data.prompts_per_batch": COUNT,
    "data.max_prompt_length": COUNT,
    "sampling.group_size": COUNT,
    "sampling.max_response_length": COUNT,
    "sampling.temperature": Range("a positive number; 0 would make all responses to a prompt equal", POSITIVE.holds),
    "sampling.slots": COUNT,
    **{f"sampling.mesh.{axis}": SAMPLER_AXIS for axis in ("data", "fsdp", "expert", "tensor")},
    "sampling.partial.prompts": COUNT,
    "sampling.partial.share": FRACTION_ABOVE_0,
    "sampling.rounds": COUNT,
    "environment.turns": COUNT,
    "scoring.timeout_s": POSITIVE,
    "scoring.workers": HOST_LIMIT,
    "overlong.penalty": NOT_NEGATIVE,
    "mismatch.negative_mask": NOT_NEGATIVE,
    "overlong.cache": COUNT_OR_0,
    "routing.balance_weight": NOT_NEGATIVE,
    "routing.z_weight": NOT_NEGATIVE,
    "routing.noise_every": COUNT_OR_0,
    "reference.kl_weight": NOT_NEGATIVE,
    **{f"critic.optimizer.{name}": allowed for name, allowed in _ADAMW.items()},
    "training.minibatches": COUNT,
    "training.row_tokens": COUNT,
    "training.max_skipped": COUNT,
    "training.entropy_weight": FINITE,
    "training.logprob_chunk": COUNT,
    **{f"optimizer.{name}": allowed for name, allowed in _ADAMW.items()},
    "eval.every": COUNT,
    "eval.prompts": COUNT_OR_0,
    "log.samples_every": COUNT,
    "log.samples": COUNT,
    "checkpoint.every": COUNT,
    "checkpoint.keep": COUNT,
}
"""Range of each numeric field; None is allowed besides, where it is the default."""

NAMED = {"functions": str, "rewards": float, "step_rewards": float}
"""Sections that begin empty, to which a config or a flag adds names, and the type of a name's value."""
_OPEN = ("model.architecture", "data.options", "data.sources", "benchmarks", *NAMED)
"""Sections that begin empty, to which a config adds fields."""
_HYPER_PARAMETERS = {"objective": objectives.catalogue.__all__, "mismatch": mismatch.__all__}
"""Sections with a section for each of these names, and of `functions`, whose fields may be left out."""
_OPTIONS = {"difficulty": str, "seed": int, "train_size": int, "test_size": int}
"""Types of the options of generated tasks."""
_DIFFICULTY_SETS = ("data.options.train_size", "data.options.test_size")
"""Options that may also be None: the difficulty's own size."""
TYPES = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}
"""What a user calls the types of fields."""


def is_open(name: str) -> bool:
    """Whether a field lies in a section to which a config may add fields, or whose fields it may leave out."""
    return name.startswith(tuple(f"{section}." for section in (*_OPEN, *_HYPER_PARAMETERS)))


def check_fields(config: ConfigDict) -> None:
    """Check that a config has the fields of `base()` and no others, each of the right type and in its range.

    Raises:
      UserError: the first field that is not, with its value and what it may be.
    """
    _check_section(config, config, base(), [])
    shape = {field.name: field.type for field in dataclasses.fields(ModelConfig)}
    for section, types in (("model.architecture", shape), ("data.options", _OPTIONS)):
        for key, value in at(config, section).items():
            own_size = value is None and f"{section}.{key}" in _DIFFICULTY_SETS
            if types.get(key) in TYPES and not own_size:
                check_value(f"{section}.{key}", value, types[key])
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
    """Raise a UserError unless a field's value is of this type and in the field's range."""
    _check_type(name, value, kind)
    if name in RANGES:
        _check_range(name, value, RANGES[name])


def no_field(name: str, found: list[str], config: ConfigDict) -> NoReturn:
    """Raise a UserError for a missing field: suggest the nearest key of the section reached, or another section's.

    Args:
      name: the field asked for, dotted.
      found: the keys of `name` that exist, from the first.
      config: the whole config.
    """
    section: Any = at(config, ".".join(found)) if found else config
    if not isinstance(section, ConfigDict):
        raise UserError(f"the config has no field {name!r}; {'.'.join(found)!r} is a single value")
    key, last = name.split(".")[len(found)], name.split(".")[-1]
    there = [other for other in section if other != key]
    near = [".".join([*found, other]) for other in difflib.get_close_matches(key, there, n=1)]
    elsewhere = [field for field in names(config) if field.split(".")[-1] == last and field != name]
    near += sorted(elsewhere, key=lambda field: field.count("."))  # the policy's own before those of its parts
    hint = f"did you mean {near[0]!r}? " if near else ""
    where = f"section {'.'.join(found)!r}" if found else "the config"
    raise UserError(f"the config has no field {name!r}; {hint}{where} has {', '.join(there)}")


def names(config: ConfigDict, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields of a config."""
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from names(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _check_section(config: ConfigDict, section: ConfigDict, defaults: ConfigDict, found: list[str]) -> None:
    """Check one section, and those in it, against the same section of `base()`; `found` is its place in the config."""
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
    """Raise a UserError unless a value is of this type; whole numbers are numbers, and True and False are neither."""
    fits: Any = {float: (int, float), tuple: (tuple, list)}.get(kind, kind)
    if not isinstance(value, fits) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{name} is {value!r}; use {TYPES.get(kind, f'a {kind.__name__}')}")


def _check_range(name: str, value: float, allowed: Range) -> None:
    if not allowed.holds(value):
        raise UserError(f"{name} is {value}; use {allowed.words}")


def at(config: ConfigDict, name: str) -> Any:
    """Return the field or section with this dotted name."""
    node: Any = config
    for key in name.split("."):
        node = node[key]
    return node
