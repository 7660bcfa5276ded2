"""Python values as JSON, between the process of a program under test and the one that tests it.

Only plain data crosses: what a program returns is rebuilt from builtin types, so that no method of the program's own,
`__eq__` say, runs where the verdict is made. Objects of other types stay where they are and cross as numbers.
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
"""Items of an iterator that cross; one that has more is an error."""


class Unsendable(TypeError):
    """A value that cannot cross."""


Refer = Callable[[Any], int]
"""Returns the number of an object that stays where it is."""


def encode(value: Any, refer: Refer | None = None) -> Any:
    """Return a value as what `json` writes: scalars as themselves, all else as [type, content].

    Instances of subclasses become instances of the builtin type. Iterators are read to their end.

    Raises:
      Unsendable: the value is, or holds, an object of another type, and there is no `refer`.
      RecursionError: it is nested too deeply, or holds itself.
    """
    if value is None or isinstance(value, (bool, str, float)):
        return value if type(value) in (type(None), bool, str, float) else _plain(value)
    if isinstance(value, int):
        return int(value)
    for kind, (type_, content) in _ENCODERS.items():
        if isinstance(value, type_) and (kind != "type" or value in _TYPES.values()):
            return [kind, content(value, lambda item: encode(item, refer))]
    if refer is None:
        raise Unsendable(f"a value of type {type(value).__name__} cannot be handed to the program")
    return ["object", refer(value)]


def decode(data: Any, find: Callable[[int], Any]) -> Any:
    """Return the value that `encode` was given; `find` returns the object, or what stands for it, by its number.

    Raises:
      ValueError, TypeError, KeyError: `data` is nothing that `encode` returns.
    """
    if not isinstance(data, list):
        return data
    kind, content = data
    if kind == "object":
        return find(content)
    return _DECODERS[kind](content, lambda item: decode(item, find))


def _plain(value: Any) -> Any:
    return str.__str__(value) if isinstance(value, str) else float(value)


def _items(value: Any, each: Callable[[Any], Any]) -> list[Any]:
    return [each(item) for item in value]


def _pairs(value: dict[Any, Any], each: Callable[[Any], Any]) -> list[Any]:
    return [[each(key), each(item)] for key, item in value.items()]


def _iterated(value: Iterator[Any], each: Callable[[Any], Any]) -> list[Any]:
    found = [each(item) for item in itertools.islice(value, MOST_ITEMS + 1)]
    if len(found) > MOST_ITEMS:
        raise Unsendable(f"an iterator has more than {MOST_ITEMS} items")
    return found


_TYPES = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_ENCODERS: dict[str, tuple[Any, Callable[[Any, Callable[[Any], Any]], Any]]] = {
    "list": (list, _items),
    "tuple": (tuple, _items),
    "dict": (dict, _pairs),
    "set": (set, _items),
    "frozenset": (frozenset, _items),
    "deque": (collections.deque, _items),
    "bytes": (bytes, lambda value, _: value.hex()),
    "bytearray": (bytearray, lambda value, _: value.hex()),
    "complex": (complex, lambda value, _: [value.real, value.imag]),
    "range": (range, lambda value, _: [value.start, value.stop, value.step]),
    "decimal": (decimal.Decimal, lambda value, _: str(value)),
    "fraction": (fractions.Fraction, lambda value, _: [value.numerator, value.denominator]),
    "datetime": (datetime.datetime, lambda value, _: value.isoformat()),
    "date": (datetime.date, lambda value, _: value.isoformat()),
    "type": (type, lambda value, _: value.__name__),  # a builtin one
    "iterator": ((Iterator, *_VIEWS), _iterated),
}
"""Kind -> (type, what of it crosses), subclasses before their bases."""
_DECODERS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "list": _items,
    "tuple": lambda content, each: tuple(map(each, content)),
    "dict": lambda content, each: {each(key): each(item) for key, item in content},
    "set": lambda content, each: set(map(each, content)),
    "frozenset": lambda content, each: frozenset(map(each, content)),
    "deque": lambda content, each: collections.deque(map(each, content)),
    "bytes": lambda content, _: bytes.fromhex(content),
    "bytearray": lambda content, _: bytearray.fromhex(content),
    "complex": lambda content, _: complex(*content),
    "range": lambda content, _: range(*content),
    "decimal": lambda content, _: decimal.Decimal(content),
    "fraction": lambda content, _: fractions.Fraction(*content),
    "datetime": lambda content, _: datetime.datetime.fromisoformat(content),
    "date": lambda content, _: datetime.date.fromisoformat(content),
    "type": lambda content, _: _TYPES[content],
    "iterator": lambda content, each: iter(_items(content, each)),
}
