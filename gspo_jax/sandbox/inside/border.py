"""The border between the process of a program and the one that tests it: one end of it in each.

Whatever can change, or has no copy, has a number on both sides, so that two names for one list stay two names for one
list. A container lives twice; each message brings what has changed in it since the last one, so that a function that
sorts its argument sorts the test's list, too. A builtin iterator is a container of what is left of it. A container that
only one side still holds loses its number.
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
    """How containers of a type are read and written; by the type's own methods, which subclasses may override."""

    new: Callable[..., Any]
    read: Callable[[Any], list[Any]]
    write: Callable[[Any, list[Any]], Any]


def _write_list(value: list[Any], content: list[Any]) -> None:
    list.__setitem__(value, slice(None), content)


def _write_set(value: set[Any], content: list[Any]) -> None:
    set.clear(value)
    set.update(value, content)


def _write_deque(value: deque[Any], content: list[Any]) -> None:
    deque.clear(value)
    deque.extend(value, content)


def _write_bytearray(value: bytearray, content: list[int]) -> None:
    bytearray.__setitem__(value, slice(None), bytes(content))


def _write_array(value: "array.array[Any]", content: list[Any]) -> None:
    array.array.__setitem__(value, slice(None), array.array(value.typecode, content))


def _advance(value: Any, content: list[int]) -> None:
    """Read an iterator until as many items are left."""
    (left,) = content
    more = operator.length_hint(value) - left
    if more < 0:
        raise values.Unsendable("an iterator has got more items since it was handed over")
    for _ in range(more):
        next(value)


def _dict_of(kind: Any) -> Container:
    """Keys, then values."""

    def read(value: Any) -> list[Any]:
        return [*kind.keys(value), *kind.values(value)]

    def write(value: Any, content: list[Any]) -> None:
        kind.clear(value)
        half = len(content) // 2
        for key, item in zip(content[:half], content[half:], strict=True):
            kind.__setitem__(value, key, item)

    return Container(kind.__new__, read, write)


def attributes(value: Any) -> dict[str, Any]:
    """Return what an object holds, in its dictionary or in slots."""
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
    """Have an object hold this, whatever its class makes of it."""
    if held.keys() & {"__class__", "__dict__"}:
        raise ValueError("an object cannot become one of another class")
    for name, item in held.items():
        object.__setattr__(value, name, item)


def restore_error(error: BaseException, args: tuple[Any, ...], held: Mapping[str, Any]) -> BaseException:
    """Return an exception that holds what another one does, but for what is read-only, and follows from `args`."""
    error.args = args
    for name, item in held.items():
        with contextlib.suppress(AttributeError, TypeError):
            set_attributes(error, {name: item})
    return error


INSTANCE = "instance"
CONTAINERS: dict[str, tuple[type, Container]] = {
    "list": (list, Container(list.__new__, lambda value: [*list.__iter__(value)], _write_list)),
    "set": (set, Container(set.__new__, lambda value: [*set.__iter__(value)], _write_set)),
    "deque": (deque, Container(deque.__new__, lambda value: [*deque.__iter__(value)], _write_deque)),
    "bytearray": (
        bytearray,
        Container(bytearray.__new__, lambda value: [*bytearray.__iter__(value)], _write_bytearray),
    ),
    "ordered": (collections.OrderedDict, _dict_of(collections.OrderedDict)),
    "counter": (collections.Counter, _dict_of(dict)),
    "default": (collections.defaultdict, _dict_of(dict)),
    "dict": (dict, _dict_of(dict)),
    "array": (array.array, Container(array.array.__new__, lambda value: [*array.array.__iter__(value)], _write_array)),
    "namespace": (types.SimpleNamespace, Container(types.SimpleNamespace.__new__, _read_object, _write_object)),
    "iterator": (values.ITERATORS[0], Container(iter, lambda value: [operator.length_hint(value)], _advance)),
    INSTANCE: (object, Container(object.__new__, _read_object, _write_object)),
}
"""Kind -> the type and how it is handled, subclasses before their bases."""
KINDS = {kind_type: kind for kind, (kind_type, _) in CONTAINERS.items() if kind_type is not object}
KINDS |= dict.fromkeys(values.ITERATORS, "iterator")


class _Entry:
    """A value that has a number."""

    __slots__ = ("kind", "snapshot", "value")

    def __init__(self, value: Any, kind: str) -> None:
        self.value, self.kind = value, kind
        self.snapshot: list[Any] | None = None
        """What a container held when both sides last agreed."""


class Border:
    """One end; program.py and mirror.py say what of their own values crosses, and as what."""

    def __init__(self, first: int) -> None:
        """`first` is the first number that this end gives away; it goes on in steps of two."""
        self._entries: dict[int, _Entry] = {}
        self._numbers: dict[int, int] = {}
        self._next = first
        self._fresh: deque[int] = deque()
        self._headers: dict[int, Any] = {}
        """What the other side has to know to make a value of which it does not know the number."""
        self._announced: dict[int, list[Any]] = {}
        """State of a message that is being read, by number."""
        unheld = _Entry(object(), "")
        self._unheld = sys.getrefcount(unheld.value)

    # What the two sides add.

    def describe(self, value: Any) -> Any:
        """Return the number of a value that does not cross by itself, or what crosses of it.

        Raises:
          Unsendable: nothing does.
        """
        raise NotImplementedError

    def create(self, number: int, kind: str, header: Any) -> Any:
        """Return a value of a kind that is no container's, from the header that the other side has made."""
        raise NotImplementedError

    # Sending.

    def message(self, value: Any, **rest: Any) -> dict[str, Any]:
        """Return a message with a value and everything that has changed."""
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
        """Return what crosses of a value."""
        if type(value) in values.SCALARS and value == value:
            return value
        number = self._numbers.get(id(value))
        if number is not None:
            return ["@", number]
        if type(value) is float:  # not a number: a list that holds it equals another one only if it is the same
            return ["constant", "nan"] if value is math.nan else self.share(value, "nan", None)
        found = values.encode(value, self.encode)
        if found is not None:
            return found
        kind = KINDS.get(type(value))
        return self.describe(value) if kind is None else self.share(value, kind, self.container_header(value, kind))

    def container_header(self, value: Any, kind: str) -> dict[str, Any] | None:
        """Return what a container is besides what it holds."""
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
        """Give a value a number, under which the other side will make its own, and return its reference."""
        number = self.keep(self._next, value, kind)
        self._next += 2
        self._headers[number] = header
        self._fresh.append(number)
        return ["@", number]

    def keep(self, number: int, value: Any, kind: str) -> int:
        """Enter a value under a number."""
        self._entries[number] = _Entry(value, kind)
        self._numbers[id(value)] = number
        return number

    # Receiving.

    def accept(self, message: dict[str, Any]) -> Any:
        """Return the value of a message, after bringing what it says has changed up to date.

        Raises:
          ValueError, TypeError, KeyError: it is no message.
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
        """Return the value that `encode` was given on the other side, or what stands for it."""
        if type(data) is not list:
            return data
        kind, content = data
        return self._find(content) if kind == "@" else values.decode(kind, content, self.decode)

    def new_container(self, kind: str, header: Any, made: type | None = None) -> Any:
        """Return an empty container, of the class `made` or of its kind's own type."""
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

    # Forgetting.

    def sweep(self) -> list[int]:
        """Forget the containers that nothing else here holds, and return their numbers.

        Those of the program's own classes stay: the other side has no more than mirrors of them.
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
