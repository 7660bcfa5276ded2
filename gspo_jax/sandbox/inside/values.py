"""Python values as JSON: what crosses by itself between the process of a program and the one that tests it.

A scalar is itself, all else is [kind, content]. Only exact types are here, never a subclass, which may lie about what
it is: border.py refers to those by number, like to whatever can change.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import itertools
from collections.abc import Callable, Iterator
from typing import Any

MOST_ITEMS = 1_000_000
"""Items of a builtin iterator that cross; one that has more is an error."""
Each = Callable[[Any], Any]


class Unsendable(TypeError):
    """A value that cannot cross."""


def _items(value: Any, each: Each) -> list[Any]:
    return [each(item) for item in value]


def _text(value: Any, each: Each) -> str:
    return str(value)


def _iso(value: Any, each: Each) -> str:
    return value.isoformat()


def _iterated(value: Iterator[Any], each: Each) -> list[Any]:
    found = [each(item) for item in itertools.islice(value, MOST_ITEMS + 1)]
    if len(found) > MOST_ITEMS:
        raise Unsendable(f"an iterator has more than {MOST_ITEMS} items")
    return found


SCALARS = frozenset({type(None), bool, int, float, str})
_TYPES: dict[str, type] = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}
_TYPES |= {
    f"{value.__module__}.{value.__name__}": value
    for value in (
        *(collections.deque, collections.Counter, collections.OrderedDict, collections.defaultdict),
        *(decimal.Decimal, fractions.Fraction, datetime.datetime, datetime.date, datetime.time, datetime.timedelta),
    )
}
_NAMES = {value: name for name, value in _TYPES.items()}
_ITERATORS = tuple(
    type(iter(value)) for value in ([], (), "a", "é", b"", bytearray(), range(0), set(), {}, {}.values(), {}.items())
)
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
    type(...): ("constant", lambda value, _: "Ellipsis"),
    type(NotImplemented): ("constant", lambda value, _: "NotImplemented"),
    type({}.keys()): ("keys", _items),
    type({}.values()): ("values", _items),
    type({}.items()): ("items", _items),
    **dict.fromkeys(_ITERATORS, ("iterator", _iterated)),
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
    "constant": lambda content, _: {"Ellipsis": ..., "NotImplemented": NotImplemented}[content],
    "type": lambda content, _: _TYPES[content],
    "keys": lambda content, each: dict.fromkeys(map(each, content)).keys(),
    "values": lambda content, each: dict(enumerate(map(each, content))).values(),
    "items": lambda content, each: dict(map(each, content)).items(),
    "iterator": lambda content, each: iter(_items(content, each)),
}


def encode(value: Any, each: Each) -> Any:
    """Return what crosses of a value, whose items `each` encodes; None if it does not cross by itself."""
    if isinstance(value, type):
        return ["type", _NAMES[value]] if value in _NAMES else None
    kind, content = _ENCODERS.get(type(value), ("", None))
    return None if content is None else [kind, content(value, each)]


def decode(kind: str, content: Any, each: Each) -> Any:
    """Return the value that `encode` was given.

    Raises:
      ValueError, TypeError, KeyError: it is nothing that `encode` returns.
    """
    return _DECODERS[kind](content, each)
