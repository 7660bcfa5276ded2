"""Process of a program: runs it, then does what its tests ask."""

import collections
import contextlib
import copy
import enum
import io
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from . import scopes, values
from .border import INSTANCE, KINDS, Border, attributes, restore_error
from .channel import Channel
from .choose import choose
from .values import Unsendable
from .world import describe, fingerprint, new_module

if TYPE_CHECKING:
    import asyncio

_MOST_PRINTED = 1 << 20
"""Most bytes that one call may print for its test."""
_SLICE_S = 0.005
"""Seconds that coroutines run before the tests' event loop gets a turn."""
DATA: dict[type, Callable[[Any], Any]] = {
    int: int.__pos__,
    float: float.__pos__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}
"""Immutable types -> plain value of a subclass's instance."""


class Served(Border):
    """The program's own end of the border."""

    def __init__(self, channel: Channel, sources: list[str], prelude: str) -> None:
        super().__init__(first=1)
        self._channel, self._sources, self._prelude = channel, sources, prelude
        self._source = ""
        self.names = new_module("program")
        self._theirs: dict[type, int] = {}
        """Classes of the program that stand for the tests', and their numbers."""
        self._classes: dict[type, Any] = {}
        self._printed = [_Printed(1), _Printed(2)]
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(cast(Any, stream), encoding="utf-8", errors="surrogateescape", write_through=True)
            for stream in self._printed
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._operations: dict[str, Callable[..., Any]] = {
            "load": self._load,
            "pair": lambda classes: None,  # made when the message was read
            "name": self.names.__getitem__,
            "call": lambda function, args, kwargs: function(*args, **dict(kwargs)),
            "attribute": getattr,
            "set": setattr,
            "delete": delattr,
            "special": lambda value, name, *args: getattr(type(value), name)(value, *args),
            "exit": lambda manager, error: type(manager).__exit__(
                manager, *((None,) * 3 if error is None else (type(error), error, error.__traceback__))
            ),
            "isinstance": isinstance,
            "issubclass": issubclass,
            "dir": dir,
            "fields": _fields,
            "close": lambda generator: generator.close(),
            "throw": lambda generator, error: generator.throw(error),
            "send": lambda generator, item: next(generator) if item is None else generator.send(item),
            "iterate": iter,
            "length": len,
            "item": lambda value, key: value[key],
            "within": lambda value, item: item in value,
            "hash": hash,
            "copy": copy.copy,
            "deepcopy": copy.deepcopy,
            "seed": random.seed,
            "same": lambda name, other: isinstance(self.names[name], type) and fingerprint(self.names[name]) == other,
            "shared": self._shared,
            "equal": lambda one, other: (bool(one == other), _structure(one), _structure(other)),
            "start": self._start,
            "advance": self._advance,
            "result": lambda task: task.result(),
            "cancel": lambda task: task.cancel(),
        }

    def serve(self) -> None:
        """Answer until the other end closes."""
        while True:
            try:
                request = self._channel.receive()
            except EOFError:
                return
            answer = self._answer(request)
            try:
                self._channel.send(answer)
            except ValueError as error:  # too long
                self.forget(number for number, *_ in answer["state"])
                self._channel.send(self.message(RuntimeError(str(error)), raised=True))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            asked = self.accept(request)
        except Unsendable as error:
            return self.message(None, broken=str(error))
        try:
            # Keep no references to arguments or results: `sweep` would count them as the program's.
            answer = self.message(self._operations[request["do"]](*asked))
        except Unsendable as error:
            answer = self.message(None, broken=str(error))
        except BaseException as error:
            answer = self._raised(error)
        del asked
        answer["drop"] = self.sweep()
        answer["printed"] = [stream.taken() for stream in self._printed]
        return answer

    def _raised(self, error: BaseException) -> dict[str, Any]:
        error.__traceback__ = None  # its frames hold arguments
        try:
            return self.message(error, raised=True)
        except BaseException:
            return self.message(RuntimeError(describe(error)), raised=True)

    def _load(self, world: str) -> list[str]:
        with contextlib.suppress(Exception):  # the set-up will report what it lacks
            exec(world, self.names)
        try:
            exec(self._prelude, self.names)
        except BaseException as error:
            raise Unsendable(f"the prelude: {describe(error)}") from None
        self._source = choose(self._sources)
        exec(compile(self._source, "program.py", "exec"), self.names)
        modules = {n for n, value in self.names.items() if isinstance(value, types.ModuleType) and value.__name__ == n}
        return [name for name in self.names if not name.startswith("__") and name not in modules]

    def _shared(self, names: list[str], imports: list[str]) -> list[str]:
        used = scopes.shared(self._source) - scopes.imported(self._source).intersection(imports)
        return [name for name in names if name in used]

    def describe(self, value: Any) -> Any:
        kind = type(value)
        mro = type.__dict__["__mro__"].__get__(kind)
        if type in mro:
            return self._class_of(value)
        if BaseException in mro:
            return self._error(value, kind)
        if kind in self._theirs:
            return self._instance(value, ["@", self._theirs[kind]])
        if kind is types.MappingProxyType:
            return self.encode(dict(value))
        if kind in (types.GeneratorType, types.CoroutineType):
            return self.share(value, "generator" if kind is types.GeneratorType else "coroutine", None)
        header = {"class": self._class_of(kind)}
        for base in mro:
            if base in KINDS:
                container = KINDS[base]
                return self.share(value, container, (self.container_header(value, container) or {}) | header)
            if base in DATA:
                return self.share(value, "data", header | {"content": self.encode(DATA[base](value))})
        return self.share(value, "object", header)

    def _class_of(self, kind: type) -> Any:
        """Return the reference of an object's class, even one that crosses by itself (`map`)."""
        if kind not in self._classes or self._classes[kind][1] not in self._entries:
            self._classes[kind] = self.share(kind, "class", self._class_header(kind))
            if values.encode(kind, self.encode) is not None:
                del self._numbers[id(kind)]
        return self._classes[kind]

    def _instance(self, value: Any, of: Any) -> Any:
        if isinstance(value, enum.Enum):
            return self.share(value, "member", {"class": of, "name": value.name})
        if isinstance(value, tuple):
            return self.share(value, "named", {"class": of, "items": self.encode(DATA[tuple](value))})
        return self.share(value, INSTANCE, {"class": of})

    def _error(self, value: BaseException, kind: type) -> Any:
        held = {n: v for n, v in attributes(value).items() if v is not None and not isinstance(v, types.TracebackType)}
        content = {
            "args": self.encode(value.args),
            "cause": self.encode(value.__cause__),
            "context": self.encode(value.__context__),
            "suppress": value.__suppress_context__,
        }
        if kind in self._theirs:
            content |= {"class": ["@", self._theirs[kind]], "held": self.encode(held)}
        elif _is_own(kind):
            content |= {"class": self._class_of(kind)}
        else:
            content |= {"known": _path(kind), "held": self.encode(held)}
        return self.share(value, "error", content)

    def _class_header(self, value: type) -> dict[str, Any]:
        mro = value.__mro__
        errors = [_path(base) for base in mro if issubclass(base, BaseException) and not _is_own(base)]
        data = next((base for base in mro if base in DATA or base in KINDS), None)
        own = [base for base in mro if base not in (object, data) and not (errors and not _is_own(base))]
        return {
            "name": value.__name__,
            "bases": [self.encode(base) for base in value.__bases__ if _is_own(base)],
            "data": None if data is None else self.encode(data),
            "errors": errors,
            "operators": sorted({name for base in own for name in vars(base) if name[:2] == "__"}),
            "names": [] if data is None else sorted({n for base in own if _is_own(base) for n in vars(base)}),
            "equal": value.__eq__ is not object.__eq__,
            "library": not _is_own(next(base for base in mro if "__eq__" in vars(base))),
            "library_bases": [_path(base) for base in mro if base is not object and not _is_own(base)],
            "decides": type(value).__instancecheck__ is not type.__instancecheck__,
            "meta": type in mro,
            "dataclass": "__dataclass_fields__" in vars(value),
        }

    def create(self, number: int, kind: str, header: Any) -> Any:
        if kind == "class":
            made = self._their_class(header)
            self._theirs[made] = number
            return made
        if kind == "function":
            return getattr(__import__(header[0], fromlist=["*"]), header[1])
        if kind == "stream":
            return self._stream(number)
        if kind == "error":
            return self._their_error(header)
        of = self.decode(header["class"])
        if kind == "member":
            return of[header["name"]]
        if kind == "named":
            return tuple.__new__(of, self.decode(header["items"]))
        return self.new_container(kind, header, of)

    def _their_error(self, header: Mapping[str, Any]) -> BaseException:
        module, name = header["known"]
        kind, args = getattr(__import__(module, fromlist=["*"]), name), self.decode(header["args"])
        return restore_error(kind.__new__(kind, *args), args, self.decode(header["held"]))

    def _stream(self, number: int) -> Iterator[Any]:
        """Yield the items of a test's iterator, which may ask the program in between."""
        while True:
            self._channel.send(self.message(number, next=True))
            while "do" in (reply := self._channel.receive()):
                self._channel.send(self._answer(reply))
            found = self.accept(reply)
            if not found:
                return
            if (yield found[0]) is not None:
                raise Unsendable("a generator of a test, to which values are sent, cannot cross to the program")

    def _their_class(self, header: Mapping[str, Any]) -> type:
        """Return the program's class of that name, else one made from the source or fields."""
        name = header["name"]
        if not isinstance(self.names.get(name), type) and header["source"]:
            with contextlib.suppress(Exception):
                exec(compile(header["source"], "program.py", "exec"), self.names)
        found = self.names.get(name)
        if isinstance(found, type):
            return found
        if header["fields"] is not None:
            return collections.namedtuple(name, header["fields"])
        raise Unsendable(f"a test hands over a {name}, a class that the program does not have")

    def _start(self, awaitable: Any) -> "asyncio.Task[Any]":
        import asyncio  # takes a tenth of a second

        async def awaited() -> Any:
            return await awaitable

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop.create_task(awaited())

    def _advance(self, task: "asyncio.Task[Any]") -> bool:
        import asyncio

        assert self._loop is not None
        self._loop.run_until_complete(asyncio.wait({task}, timeout=_SLICE_S))
        return task.done()


class _Printed(io.RawIOBase):
    def __init__(self, number: int) -> None:
        super().__init__()
        self._number, self._text = number, bytearray()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def write(self, text: Any) -> int:
        self._text += bytes(text)[: _MOST_PRINTED - len(self._text)]
        return len(text)

    def taken(self) -> str:
        """Return the output since the last call."""
        text = self._text.decode("utf-8", "surrogateescape")
        self._text.clear()
        return text


def _structure(value: Any) -> dict[str, Any]:
    """Return what decides equality: a dataclass's compared fields, or all attributes."""
    held, fields = attributes(value), getattr(type(value), "__dataclass_fields__", None)
    if fields is None:
        return dict(held)
    return {name: held[name] for name, field in fields.items() if field.compare and name in held}


def _fields(kind: type) -> list[Any]:
    import dataclasses

    missing = dataclasses.MISSING
    return [
        (
            *(field.name, field.type),
            *([] if default is missing else [default] for default in (field.default, field.default_factory)),
            *(field.repr, (field.init, field.compare, field.kw_only)),
        )
        for field in dataclasses.fields(kind)
    ]


def _is_own(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] not in sys.stdlib_module_names


def _path(kind: type) -> list[str]:
    return [kind.__module__, kind.__qualname__]


def answer_calls() -> None:
    """Run a program, then serve its tests at descriptor 3."""
    channel = Channel.of(3)
    job = channel.receive()
    sys.set_int_max_str_digits(0)
    Served(channel, job["program"], job["prelude"]).serve()
