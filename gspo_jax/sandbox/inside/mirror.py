"""The program as its tests see it: plain data, and mirrors of its classes and objects, none of whose code runs here.

A mirror has the operators of what it stands for, and asks the program for each of them. What decides a verdict is not
asked: whether an object of the program equals, exceeds or contains plain data is for the tests to say, which know only
the data; whether two objects of the program are equal is decided by what they hold. A question of this kind that only
the program could answer leaves the test without a verdict (`BrokenTest`).
"""

import builtins
import contextlib
import enum
import itertools
import sys
import types
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NoReturn

from .border import CONTAINERS, INSTANCE, Border
from .channel import Channel
from .values import MOST_ITEMS, Unsendable
from .world import fingerprint, shared_source

_NUMBER, _PROGRAM, _HEADER = "(number)", "(program)", "(header)"
"""Names under which mirrors keep what they are; no attribute of a program can be called so."""
_READS: dict[str, Callable[[Any], Any] | None] = {
    **dict.fromkeys(("__len__", "__int__", "__index__", "__length_hint__"), int),
    **dict.fromkeys(("__str__", "__repr__", "__format__"), str),
    "__bool__": bool,
    "__float__": float,
    "__complex__": complex,
    "__bytes__": bytes,
    **dict.fromkeys(
        (
            *("__getitem__", "__setitem__", "__delitem__", "__iter__", "__next__", "__reversed__"),
            *("__abs__", "__neg__", "__pos__", "__invert__", "__round__", "__trunc__", "__floor__", "__ceil__"),
            *("__enter__", "__exit__", "__aenter__", "__aexit__", "__aiter__", "__anext__"),
            *(
                f"__{reflected}{name}__"
                for reflected in ("", "r", "i")
                for name in (
                    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod"),
                    *("pow", "lshift", "rshift", "and", "xor", "or"),
                )
            ),
        )
    ),
}
"""Operators that a mirror asks the program for -> the plain type that the answer has to have, if any."""
_ORDERS = ("__lt__", "__le__", "__gt__", "__ge__")
_PLAIN_OPERATORS = ("__eq__", "__ne__", "__hash__", *_ORDERS, "__contains__")
"""Operators of builtin types, which their subclasses' mirrors keep: they compare what crossed."""
_OF_A_RAISE = ("__traceback__", "__context__", "__cause__", "__suppress_context__", "__notes__")
_SEEN = {"builtins": ("print", "input", "open"), "time": ("time", "sleep"), "random": ("random", "randint")}
"""Functions that a test may put its own in the place of, which the program would not see."""


class BrokenTest(BaseException):
    """The test itself is at fault, or cannot be judged."""


class Program(Border):
    """The program, at its tests' end of the border."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(first=2)
        self._channel = channel
        self.names: frozenset[str] = frozenset()
        """Names that it defines."""
        self.asked = 0
        """How often the tests have asked it for something."""
        self.tests: list[str] = []
        """Sources of the tests so far, whose classes the program may have to see."""
        self.named: set[type] = set()
        """Mirrors of classes that the tests have asked for by name."""
        self.broken = ""
        """Why the test can't be judged; it may have caught the exception that said so."""
        self.raised: BaseException | None = None
        """The last exception of the program."""
        self.before_each: Callable[[], None] = lambda: None
        """Is called before the program is asked for anything."""
        self.unseen = ""
        """What a test has done that the program does not see."""
        self._own: dict[type, int] = {}
        self._reading = 0
        self._replaceable = {(m, n): getattr(sys.modules[m], n) for m in _SEEN if m in sys.modules for n in _SEEN[m]}
        self._stdin, self._streams = sys.stdin, (sys.stdout, sys.stderr)

    def do(self, operation: str, *asked: Any) -> Any:
        """Return what the program answers.

        Raises:
          BrokenTest: what is asked cannot cross.
          BaseException: what the program raises.
        """
        self._check_world()
        self.asked += 1
        try:
            message = self.message(asked, do=operation) if not self._reading else self._bare(asked, operation)
        except (Unsendable, RecursionError) as error:
            self.cannot(str(error))
        del asked
        if not self._reading:
            message["drop"] = self.sweep()
        self._channel.send(message)
        answer = self._channel.receive()
        for stream, own, text in zip((sys.stdout, sys.stderr), self._streams, answer.get("printed", ()), strict=False):
            if text and stream is not own:  # a test looks at what is printed
                stream.write(str(text))
        if "broken" in answer:
            self.cannot(str(answer["broken"]))
        self._reading += 1
        try:
            found = self.accept(answer)
        finally:
            self._reading -= 1
        if not answer.get("raised"):
            return found
        if not isinstance(found, BaseException):
            raise TypeError("the program raised what is no exception")
        self.raised = found
        raise found

    def cannot(self, why: str) -> NoReturn:
        """Raise BrokenTest, and remember that the test can't be judged."""
        self.broken = self.broken or why
        raise BrokenTest(why)

    def name(self, name: str) -> Any:
        """Return the value of a global name of the program."""
        found = self.do("name", name)
        if isinstance(found, MirrorType):
            self.named.add(found)
        return found

    def pair(self, kind: type) -> None:
        """Let instances of a class that the prompt gives cross, if the program has that class, unchanged."""
        if kind.__name__ in self.names and self.do("same", kind.__name__, fingerprint(kind)):
            self.do("pair", [kind])

    def _bare(self, asked: tuple[Any, ...], operation: str) -> dict[str, Any]:
        """Return a message without what has changed: containers are being filled."""
        return {"value": self.encode(asked), "state": [], "drop": [], "do": operation}

    def _check_world(self) -> None:
        self.before_each()
        for (module, name), was in self._replaceable.items():
            if getattr(sys.modules[module], name, None) is not was:
                self.unseen = f"replaces {module}.{name}"
        if sys.stdin is not self._stdin:
            self.unseen = "replaces sys.stdin"
        if self.unseen:
            self.cannot(f"a test {self.unseen}, which the program does not see")

    # What crosses of the tests' own values.

    def describe(self, value: Any) -> Any:
        kind = type(value)
        if kind is types.BuiltinFunctionType and value.__module__ in sys.stdlib_module_names:
            return self.share(value, "function", [value.__module__, value.__name__])
        if isinstance(value, type) and _is_tests(value):
            return self._own_class(value)
        if _is_tests(kind):
            return self._instance(value, kind)
        if isinstance(value, BaseException) and not isinstance(value, BrokenTest):
            raise Unsendable(f"a test hands over an exception, {kind.__name__}, which cannot cross to the program")
        if isinstance(value, Iterator):
            return self.encode(iter(list(itertools.islice(value, MOST_ITEMS + 1))))
        raise Unsendable(f"a test hands over a {kind.__name__}, which cannot cross to the program")

    def _instance(self, value: Any, kind: type) -> Any:
        bases = [base for base in kind.__mro__ if not _is_tests(base)]
        if isinstance(value, enum.Enum):
            return self.share(value, "member", {"class": self._own_class(kind), "name": value.name})
        if bases == [object]:
            return self.share(value, INSTANCE, {"class": self._own_class(kind)})
        if bases == [tuple, object] and hasattr(kind, "_fields"):
            content = {"class": self._own_class(kind), "items": self.encode(tuple(value))}
            return self.share(value, "named", content)
        raise Unsendable(f"a test hands over a {kind.__name__}, which cannot cross to the program")

    def _own_class(self, kind: type) -> Any:
        if kind not in self._own:
            sources = (shared_source(test).get(kind.__name__) for test in reversed(self.tests))
            header = {
                "name": kind.__name__,
                "source": next(filter(None, sources), ""),
                "fields": getattr(kind, "_fields", None),
            }
            self._own[kind] = self.share(kind, "class", header)[1]
        return ["@", self._own[kind]]

    # What stands for the program's values.

    def create(self, number: int, kind: str, header: Any) -> Any:
        if kind == "class":
            return self._mirror_class(number, header)
        if kind == "generator":
            return _generated(self, number)
        if kind == "coroutine":
            return _awaited(self, number)
        if kind == "error" and "held" in header:
            return self._error(header)
        of = self.decode(header["class"])
        if of in self._own:
            return self._own_instance(kind, header, of)
        if not isinstance(of, MirrorType):
            raise ValueError("an object of no class of the program's")
        if kind in CONTAINERS:
            made = self.new_container(kind, header, of)
        elif kind == "data":
            content = self.decode(header["content"])
            made = type(content).__new__(of, content)
        elif kind == "error":
            made = of.__new__(of, *self.decode(header["args"]))
            BaseException.args.__set__(made, self.decode(header["args"]))  # type: ignore[attr-defined]
            made.__cause__ = self.decode(header["cause"])
        else:
            made = object.__new__(of)
        object.__setattr__(made, _NUMBER, number)
        return made

    def _own_instance(self, kind: str, header: Mapping[str, Any], of: type) -> Any:
        if kind == "member":
            return of[header["name"]]  # type: ignore[index]
        if kind == "named":
            return tuple.__new__(of, self.decode(header["items"]))
        return object.__new__(of)

    def _error(self, header: Mapping[str, Any]) -> BaseException:
        """Return an exception of the tests' own, the interpreter's or the standard library's."""
        own = self.decode(header["class"]) if "class" in header else None
        if own is not None and own not in self._own:
            raise ValueError("an exception of no class of the tests'")
        kind, args = own or _error_class([header["known"]]) or Exception, self.decode(header["args"])
        error = kind.__new__(kind, *args)
        if own is None:
            with contextlib.suppress(Exception):  # it may take other arguments than it keeps
                error = kind(*args)
        error.args = args
        held = self.decode(header["held"])
        for name in held:
            object.__setattr__(error, name, held[name])
        error.__cause__ = self.decode(header["cause"])
        return error

    def _mirror_class(self, number: int, header: Mapping[str, Any]) -> type:
        bases: list[Any] = [base for base in map(self.decode, header["bases"]) if isinstance(base, MirrorType)]
        data = self.decode(header["data"])
        plain = data if data is not None else _error_class(header["errors"])
        if plain is not None and not any(issubclass(base, plain) for base in bases):
            bases.append(plain)
        if not any(issubclass(base, Remote) for base in bases):
            bases.insert(0, Remote)
        content = {_PROGRAM: self, _HEADER: header, _NUMBER: number, "__module__": "program"}
        operators = set(header["operators"])
        if "__missing__" in operators:
            operators.add("__getitem__")
        content |= {name: _asked(name, _READS[name]) for name in operators & _READS.keys()}
        if "__call__" in operators:
            content["__call__"] = _call
        if "__await__" in operators:
            content["__await__"] = lambda mirror: _awaited(self, _number(mirror)).__await__()
        if data is not None:
            content |= {name: getattr(data, name) for name in _PLAIN_OPERATORS if hasattr(data, name)}
            content |= {name: _Attribute(name) for name in header["names"] if name[:2] != "__"}
        else:
            content |= {name: _ordered(name) for name in operators.intersection(_ORDERS)}
            if "__contains__" in operators:
                content["__contains__"] = _contains
        return MirrorType(str(header["name"]), tuple(bases), content)


class MirrorType(type):
    """A class of the program."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        program = _class_program(cls)
        if _NUMBER not in vars(cls):
            program.cannot(f"a test derives {cls.__name__} from a class of the program")
        return program.do("call", cls, args, tuple(kwargs.items()))

    def __getattr__(cls, name: str) -> Any:
        return _class_program(cls).do("attribute", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        _class_program(cls).do("set", cls, name, value)

    def __iter__(cls) -> Iterator[Any]:
        return iter(_class_program(cls).do("iterate", cls))

    def __len__(cls) -> int:
        return int(_class_program(cls).do("length", cls))

    def __getitem__(cls, key: Any) -> Any:
        return _class_program(cls).do("item", cls, key)

    def __contains__(cls, item: Any) -> bool:
        return any(item is member for member in cls)

    def __bool__(cls) -> bool:
        return True


class Remote(metaclass=MirrorType):
    """An object of the program. It equals another one if they are the same, or of a class that says what is equal."""

    def __getattr__(self, name: str) -> Any:
        return _program(self).do("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(self, BaseException) and name in _OF_A_RAISE:
            object.__setattr__(self, name, value)
        else:
            _program(self).do("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        _program(self).do("delete", self, name)

    def __str__(self) -> str:
        return str(_program(self).do("special", self, "__str__"))

    def __repr__(self) -> str:
        return str(_program(self).do("special", self, "__repr__"))

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return _program(self).do("attribute", self, "__dict__")

    def __copy__(self) -> Any:
        return _program(self).do("copy", self)

    def __deepcopy__(self, memo: Any) -> Any:
        return _program(self).do("deepcopy", self)

    def __hash__(self) -> int:
        if "__hash__" not in _header(self)["operators"]:
            return object.__hash__(self)
        return int(_program(self).do("hash", self))

    def __eq__(self, other: object) -> bool:
        if self is other or not _header(self)["equal"]:
            return self is other
        program = _program(self)
        if not isinstance(other, Remote):
            if _undecided(self) and _crosses(program, other) and program.do("equal", self, other)[0]:
                _no(self)
            return False
        said, held, others = program.do("equal", self, other)
        equal = type(self) is type(other) and bool(held) and held == others
        if equal is not bool(said):
            _no(self)
        return equal


class _Attribute:
    """An attribute that a subclass of a builtin type has of its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, mirror: Any, kind: type) -> Any:
        asked = kind if mirror is None else mirror
        return _class_program(kind).do("attribute", asked, self._name)

    def __set__(self, mirror: Any, value: Any) -> None:
        _program(mirror).do("set", mirror, self._name, value)


def _asked(name: str, read: Callable[[Any], Any] | None) -> Callable[..., Any]:
    """Return the method of an operator that asks the program."""

    def method(self: Any, *args: Any) -> Any:
        program = _program(self)
        found = program.do("special", self, name, *args)
        return found if read is None else read(found)

    return method


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _program(self).do("call", self, args, tuple(kwargs.items()))


def _ordered(name: str) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if isinstance(other, Remote):
            return _program(self).do("special", self, name, other)
        return _no(self) if _undecided(self) else NotImplemented

    return method


def _contains(self: Any, item: Any) -> bool:
    if isinstance(item, Remote):
        return bool(_program(self).do("within", self, item))
    if "__iter__" in _header(self)["operators"]:
        return any(item is found or item == found for found in self)
    if _undecided(self):
        _no(self)
    raise TypeError(f"argument of type {type(self).__name__!r} is not iterable")


def _undecided(mirror: Any) -> bool:
    """Return whether an object may be what a test expects, since the test names its class."""
    return bool(_program(mirror).named.intersection(type(mirror).__mro__))


def _no(mirror: Any) -> NoReturn:
    _program(mirror).cannot(f"only the program could say how a {type(mirror).__name__} compares")


def _crosses(program: Program, value: Any) -> bool:
    try:
        program.encode(value)
    except Unsendable:
        return False
    return True


def _generated(program: Program, number: int) -> Any:
    """A generator of the program, which runs as far as it is read."""

    def generator() -> Iterator[Any]:
        item: Any = None
        while True:
            try:
                found = program.do("send", program.decode(["@", number]), item)
            except StopIteration as end:
                return end.value
            item = yield found

    return generator()


async def _awaited(program: Program, number: int) -> Any:
    """A coroutine of the program. It runs in the program's event loop, which has its turn whenever this one waits."""
    task = program.do("start", program.decode(["@", number]))
    await _Turn()
    try:
        while not program.do("advance", task):
            await _Turn()
    except GeneratorExit:
        raise
    except BaseException:
        program.do("cancel", task)
        raise
    return program.do("result", task)


class _Turn:
    """Lets the tests' event loop have its turn, once."""

    def __await__(self) -> Generator[None, None, None]:
        yield


def _error_class(paths: list[Any]) -> type[BaseException] | None:
    """Return the first exception class of (module, name)s that the tests have; nothing is imported for it."""
    for module, name in paths:
        known = str(module) if str(module).partition(".")[0] in sys.stdlib_module_names else ""
        found = getattr(sys.modules.get(known, builtins), str(name), None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
    return None


def _is_tests(kind: type) -> bool:
    return kind.__module__ == "tests" and not isinstance(kind, MirrorType)


def _program(mirror: Any) -> Program:
    return _class_program(type(mirror))


def _class_program(kind: type) -> Program:
    return type.__getattribute__(kind, _PROGRAM)


def _header(mirror: Any) -> Mapping[str, Any]:
    return type.__getattribute__(type(mirror), _HEADER)


def _number(mirror: Any) -> int:
    return object.__getattribute__(mirror, _NUMBER)
