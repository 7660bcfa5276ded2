"""Python values that cross by themselves between a program's process and its tests', as JSON.

A scalar is itself, anything else is [kind, content]. Only exact types count: a subclass may lie about its content.
border.py sends the rest by number.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import ipaddress
import math
import pathlib
import re
import types
import uuid
from collections.abc import Callable
from typing import Any

MOST_ITEMS = 1_000_000
Each = Callable[[Any], Any]


class Unsendable(TypeError):
    """A value that cannot cross."""


def _items(value: Any, each: Each) -> list[Any]:
    return [each(item) for item in value]


def _text(value: Any, each: Each) -> str:
    return str(value)


def _iso(value: Any, each: Each) -> str:
    return value.isoformat()


SCALARS = frozenset({type(None), bool, int, float, str})
_TYPES: dict[str, type] = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}
_PATHS = (pathlib.PurePosixPath, pathlib.PosixPath, pathlib.PureWindowsPath)
_ADDRESSES = (
    *(ipaddress.IPv4Address, ipaddress.IPv4Interface, ipaddress.IPv4Network),
    *(ipaddress.IPv6Address, ipaddress.IPv6Interface, ipaddress.IPv6Network),
)
ITERATORS = tuple(
    type(iter(value)) for value in ([], (), "a", "é", b"", bytearray(), range(0), set(), {}, {}.values(), {}.items())
)
"""Copyable iterators of known remaining length."""
_TYPES |= {
    f"{value.__module__}.{value.__name__}": value
    for value in (
        *(collections.deque, collections.Counter, collections.OrderedDict, collections.defaultdict),
        *(decimal.Decimal, fractions.Fraction, datetime.datetime, datetime.date, datetime.time, datetime.timedelta),
        *(datetime.timezone, uuid.UUID, re.Pattern, types.SimpleNamespace, type(None), type(...), type(NotImplemented)),
        *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.GeneratorType, types.ModuleType),
        *(*ITERATORS, *_PATHS, *_ADDRESSES),
    )
}
_NAMES = {value: name for name, value in _TYPES.items()}
_SPELLED: dict[str, Callable[[str], Any]] = {_NAMES[kind]: kind for kind in (*_PATHS, *_ADDRESSES)}
_CONSTANTS = {"Ellipsis": ..., "NotImplemented": NotImplemented, "nan": math.nan}
_ENCODERS: dict[type, tuple[str, Callable[[Any, Each], Any]]] = {
    tuple: ("tuple", _items),
    frozenset: ("frozenset", _items),
    bytes: ("bytes", lambda value, _: value.hex()),
    complex: ("complex", lambda value, _: [value.real, value.imag]),
    range: ("range", lambda value, _: [value.start, value.stop, value.step]),
    slice: ("slice", lambda value, each: [each(value.start), each(value.stop), each(value.step)]),
    decimal.Decimal: ("decimal", _text),
    fractions.Fraction: ("fraction", lambda value, _: [value.numerator, value.denominator]),
    datetime.datetime: ("datetime", _iso),
    datetime.date: ("date", _iso),
    datetime.time: ("time", _iso),
    datetime.timedelta: ("timedelta", lambda value, _: [value.days, value.seconds, value.microseconds]),
    datetime.timezone: ("timezone", lambda value, each: [each(part) for part in value.__getinitargs__()]),
    uuid.UUID: ("uuid", lambda value, _: value.int),
    re.Pattern: ("pattern", lambda value, each: [each(value.pattern), value.flags & ~re.DEBUG]),
    **dict.fromkeys((*_PATHS, *_ADDRESSES), ("spelled", lambda value, _: [_NAMES[type(value)], str(value)])),
    type(...): ("constant", lambda value, _: "Ellipsis"),
    type(NotImplemented): ("constant", lambda value, _: "NotImplemented"),
    type({}.keys()): ("keys", _items),
    type({}.values()): ("values", _items),
    type({}.items()): ("items", _items),
}
_DECODERS: dict[str, Callable[[Any, Each], Any]] = {
    "tuple": lambda content, each: tuple(map(each, content)),
    "frozenset": lambda content, each: frozenset(map(each, content)),
    "bytes": lambda content, _: bytes.fromhex(content),
    "complex": lambda content, _: complex(*content),
    "range": lambda content, _: range(*content),
    "slice": lambda content, each: slice(*map(each, content)),
    "decimal": lambda content, _: decimal.Decimal(content),
    "fraction": lambda content, _: fractions.Fraction(*content),
    "datetime": lambda content, _: datetime.datetime.fromisoformat(content),
    "date": lambda content, _: datetime.date.fromisoformat(content),
    "time": lambda content, _: datetime.time.fromisoformat(content),
    "timedelta": lambda content, _: datetime.timedelta(*content),
    "timezone": lambda content, each: datetime.timezone(*map(each, content)),
    "uuid": lambda content, _: uuid.UUID(int=content),
    "pattern": lambda content, each: re.compile(each(content[0]), content[1]),
    "spelled": lambda content, _: _SPELLED[content[0]](content[1]),
    "constant": lambda content, _: _CONSTANTS[content],
    "type": lambda content, _: _TYPES[content],
    "keys": lambda content, each: dict.fromkeys(map(each, content)).keys(),
    "values": lambda content, each: dict(enumerate(map(each, content))).values(),
    "items": lambda content, each: dict(map(each, content)).items(),
}


def is_copied(kind: type) -> bool:
    """Return True if values of a type cross as copies."""
    return kind in SCALARS or kind in _ENCODERS


def encode(value: Any, each: Each) -> Any:
    """Return a value's encoding, or None if it does not cross by itself. `each` encodes its items."""
    if isinstance(value, type):
        return ["type", _NAMES[value]] if value in _NAMES else None
    kind, content = _ENCODERS.get(type(value), ("", None))
    return None if content is None else [kind, content(value, each)]


def decode(kind: str, content: Any, each: Each) -> Any:
    """Return the value given to `encode`.

    Raises:
      ValueError, TypeError, KeyError: `encode` returns no such thing.
    """
    return _DECODERS[kind](content, each)
