"""Border between the process of a program and the process of its tests. Each holds one end.

Mutable and uncopyable values have a number on both sides, which preserves identity. Each side has its own copy of a
container. Messages carry changes, so a function that sorts its argument also sorts the test's list. A builtin iterator
is a container of its remaining items.
"""

import array
import collections
import contextlib
import copy
import math
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from . import values


class Container(NamedTuple):
    """Access to a container type by its own methods, which subclasses may override."""

    new: Callable[..., Any]
    read: Callable[[Any], list[Any]]
    write: Callable[[Any, list[Any]], Any]


def _write_set(value: set[Any], content: list[Any]) -> None:
    set.clear(value)
    set.update(value, content)


def _write_deque(value: deque[Any], content: list[Any]) -> None:
    deque.clear(value)
    deque.extend(value, content)


def _advance(value: Any, content: list[int]) -> None:
    (left,) = content
    more = operator.length_hint(value) - left
    if more < 0:
        raise values.Unsendable("an iterator has got more items since it was handed over")
    for _ in range(more):
        next(value)


def _items_of(kind: Any, write: Callable[[Any, list[Any]], Any]) -> Container:
    return Container(kind.__new__, lambda value: [*kind.__iter__(value)], write)


def _sequence_of(kind: Any, copied: Callable[[Any, list[Any]], Any] = lambda _, content: content) -> Container:
    return _items_of(kind, lambda value, content: kind.__setitem__(value, slice(None), copied(value, content)))


def _dict_of(kind: Any) -> Container:

    def read(value: Any) -> list[Any]:
        return [*kind.keys(value), *kind.values(value)]

    def write(value: Any, content: list[Any]) -> None:
        kind.clear(value)
        half = len(content) // 2
        for key, item in zip(content[:half], content[half:], strict=True):
            kind.__setitem__(value, key, item)

    return Container(kind.__new__, read, write)


def attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes, including slots."""
    found = {}
    for base in type.__dict__["__mro__"].__get__(type(value)):
        for name, slot in type.__dict__["__dict__"].__get__(base).items():
            if type(slot) is types.MemberDescriptorType and not name[:2] == name[-2:] == "__":
                with contextlib.suppress(AttributeError):  # not set
                    found[name] = slot.__get__(value)
    return found | getattr(value, "__dict__", {})


def _read_object(value: Any) -> list[Any]:
    held = attributes(value)
    return [*held.keys(), *held.values()]


def _write_object(value: Any, content: list[Any]) -> None:
    half = len(content) // 2
    now = dict(zip(content[:half], content[half:], strict=True))
    for name in attributes(value).keys() - now:
        object.__delattr__(value, name)
    set_attributes(value, now)


def set_attributes(value: Any, held: Mapping[str, Any]) -> None:
    """Set attributes, bypassing the class's `__setattr__`."""
    if held.keys() & {"__class__", "__dict__"}:
        raise ValueError("an object cannot become one of another class")
    for name, item in held.items():
        object.__setattr__(value, name, item)


def restore_error(error: BaseException, args: tuple[Any, ...], held: Mapping[str, Any]) -> BaseException:
    """Restore an exception. Read-only attributes follow from `args`."""
    error.args = args
    for name, item in held.items():
        with contextlib.suppress(AttributeError, TypeError):
            set_attributes(error, {name: item})
    return error


INSTANCE = "instance"
CONTAINERS: dict[str, tuple[type, Container]] = {
    "list": (list, _sequence_of(list)),
    "set": (set, _items_of(set, _write_set)),
    "deque": (deque, _items_of(deque, _write_deque)),
    "bytearray": (bytearray, _sequence_of(bytearray, lambda _, content: bytes(content))),
    "ordered": (collections.OrderedDict, _dict_of(collections.OrderedDict)),
    "counter": (collections.Counter, _dict_of(dict)),
    "default": (collections.defaultdict, _dict_of(dict)),
    "dict": (dict, _dict_of(dict)),
    "array": (array.array, _sequence_of(array.array, lambda value, content: array.array(value.typecode, content))),
    "namespace": (types.SimpleNamespace, Container(types.SimpleNamespace.__new__, _read_object, _write_object)),
    "iterator": (values.ITERATORS[0], Container(iter, lambda value: [operator.length_hint(value)], _advance)),
    INSTANCE: (object, Container(object.__new__, _read_object, _write_object)),
}
"""Kind -> type and access, subclasses before their bases."""
KINDS = {kind_type: kind for kind, (kind_type, _) in CONTAINERS.items() if kind_type is not object}
KINDS |= dict.fromkeys(values.ITERATORS, "iterator")


class _Entry:
    __slots__ = ("kind", "snapshot", "value")

    def __init__(self, value: Any, kind: str) -> None:
        self.value, self.kind = value, kind
        self.snapshot: list[Any] | None = None
        """Content when both sides last agreed."""


class Border:
    """One end. program.py and mirror.py define how their own values cross."""

    def __init__(self, first: int) -> None:
        """Number values from `first` in steps of two."""
        self._entries: dict[int, _Entry] = {}
        self._numbers: dict[int, int] = {}
        self._next = first
        self._fresh: deque[int] = deque()
        self._headers: dict[int, Any] = {}
        """Headers of new values, by number, for the other side to create them."""
        self._announced: dict[int, list[Any]] = {}
        unheld = _Entry(object(), "")
        self._unheld = sys.getrefcount(unheld.value)

    def describe(self, value: Any) -> Any:
        """Return the encoding of a value that does not cross by itself.

        Raises:
          Unsendable: it cannot cross.
        """
        raise NotImplementedError

    def create(self, number: int, kind: str, header: Any) -> Any:
        """Return a value that is no container, from its header."""
        raise NotImplementedError

    def message(self, value: Any, **rest: Any) -> dict[str, Any]:
        """Return a message with a value and all changes."""
        new_from = self._next
        try:
            body = self.encode(value)
            self._fresh.extend(number for number, entry in self._entries.items() if _changed(entry))
            state = []
            while self._fresh:
                number = self._fresh.popleft()
                entry = self._entries[number]
                content = None
                if entry.kind in CONTAINERS:
                    entry.snapshot = CONTAINERS[entry.kind][1].read(entry.value)
                    content = [self.encode(item) for item in entry.snapshot]
                state.append([number, entry.kind, self._headers.pop(number, None), content])
        except BaseException:
            self._fresh.clear()
            self.forget(range(new_from, self._next, 2))
            raise
        return {"value": body, "state": state, "drop": [], **rest}

    def encode(self, value: Any) -> Any:
        """Return a value's encoding."""
        if type(value) in values.SCALARS and value == value:
            return value
        number = self._numbers.get(id(value))
        if number is not None:
            return ["@", number]
        if type(value) is float:  # NaN: lists that hold it are equal only if it is the same object
            return ["constant", "nan"] if value is math.nan else self.share(value, "nan", None)
        found = values.encode(value, self.encode)
        if found is not None:
            return found
        kind = KINDS.get(type(value))
        return self.describe(value) if kind is None else self.share(value, kind, self.container_header(value, kind))

    def container_header(self, value: Any, kind: str) -> dict[str, Any] | None:
        """Return what a container is apart from its content."""
        if kind == "deque":
            return {"maxlen": value.maxlen}
        if kind == "array":
            return {"typecode": value.typecode}
        if kind == "iterator":
            if operator.length_hint(value) > values.MOST_ITEMS:
                raise values.Unsendable(f"an iterator has more than {values.MOST_ITEMS} items")
            return {"items": [self.encode(item) for item in copy.copy(value)]}
        return {"factory": self.encode(value.default_factory)} if kind == "default" else None

    def share(self, value: Any, kind: str, header: Any) -> Any:
        """Number a new value for both sides and return its reference."""
        number = self.keep(self._next, value, kind)
        self._next += 2
        self._headers[number] = header
        self._fresh.append(number)
        return ["@", number]

    def keep(self, number: int, value: Any, kind: str) -> int:
        """Register a value under a number."""
        self._entries[number] = _Entry(value, kind)
        self._numbers[id(value)] = number
        return number

    def accept(self, message: dict[str, Any]) -> Any:
        """Apply a message's changes and return its value.

        Raises:
          ValueError, TypeError, KeyError: the message is malformed.
        """
        before = self._announced
        self._announced = {number: rest for number, *rest in message["state"]}
        try:
            announced = list(self._announced.items())
            for number, (kind, _, content) in announced:
                value = self._find(number)
                if self._entries[number].kind != kind:
                    raise ValueError(f"number {number} is no {kind}")
                if content is not None:
                    CONTAINERS[kind][1].write(value, [self.decode(item) for item in content])
            for number, (kind, _, content) in announced:
                if content is not None and number in self._entries:
                    self._entries[number].snapshot = CONTAINERS[kind][1].read(self._entries[number].value)
            found = self.decode(message["value"])
        finally:
            self._announced = before
        self.forget(message["drop"])
        return found

    def decode(self, data: Any) -> Any:
        """Return the value that the other side encoded, or its stand-in."""
        if type(data) is not list:
            return data
        kind, content = data
        return self._find(content) if kind == "@" else values.decode(kind, content, self.decode)

    def new_container(self, kind: str, header: Any, made: type | None = None) -> Any:
        """Return an empty container of class `made` (default: its kind's type)."""
        kind_type, container = CONTAINERS[kind]
        if kind == "array":
            return container.new(made or kind_type, header["typecode"])
        if kind == "iterator":
            return container.new([self.decode(item) for item in header["items"]])
        value = container.new(made or kind_type)
        if kind == "deque":
            deque.__init__(value, (), header["maxlen"])
        elif kind == "default":
            collections.defaultdict.__init__(value, self.decode(header["factory"]))
        return value

    def _find(self, number: int) -> Any:
        entry = self._entries.get(number)
        if entry is not None:
            return entry.value
        kind, header, _ = self._announced[number]
        if kind in CONTAINERS and not (header and "class" in header):
            value = self.new_container(kind, header)
        elif kind == "nan":
            value = float("nan")
        else:
            value = self.create(number, kind, header)
        self.keep(number, value, kind)
        return value

    def sweep(self) -> list[int]:
        """Forget containers that nothing else here holds, and return their numbers.

        Instances of the program's classes stay: the other side has only mirrors of them.
        """
        found = []
        for number in list(self._entries):
            entry = self._entries[number]
            forgettable = entry.snapshot is not None and (entry.kind == INSTANCE or type(entry.value) in KINDS)
            if forgettable and sys.getrefcount(entry.value) <= self._unheld:
                self._forget(number)
                found.append(number)
        return found

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget numbers that the other side no longer uses."""
        for number in numbers:
            self._forget(number)

    def _forget(self, number: int) -> None:
        entry = self._entries.pop(number, None)
        if entry is not None:
            self._numbers.pop(id(entry.value), None)
            self._headers.pop(number, None)


def _changed(entry: _Entry) -> bool:
    if entry.snapshot is None:
        return False
    now: Sequence[Any] = CONTAINERS[entry.kind][1].read(entry.value)
    return len(now) != len(entry.snapshot) or not all(map(operator.is_, now, entry.snapshot))
