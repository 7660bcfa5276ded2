"""Mirrors: what tests handle in place of the program's classes and objects. No code of the program runs here.

A mirror asks the program to compute its operators, except those that decide a verdict. The tests decide whether an
object equals, exceeds or contains plain data. Two objects of the program are equal by content. A comparison that only
the program could decide leaves the test without a verdict (`Program.cannot`).
"""

import builtins
import types
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from .border import KINDS
from .values import SCALARS, Unsendable

if TYPE_CHECKING:
    from .mirror import Program

NUMBER, PROGRAM, HEADER = "(number)", "(program)", "(header)"
"""Names of mirrors' state, which are not valid attribute names."""
_ARITHMETIC = frozenset(
    f"__{reflected}{name}__"
    for reflected in ("", "r", "i")
    for name in (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod"),
        *("pow", "lshift", "rshift", "and", "xor", "or"),
    )
)
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
            *("__enter__", "__aenter__", "__aexit__", "__aiter__", "__anext__", *_ARITHMETIC),
        )
    ),
}
"""Operators computed by the program -> required type of the answer."""
_ORDERS = ("__lt__", "__le__", "__gt__", "__ge__")
_PLAIN_OPERATORS = ("__eq__", "__ne__", "__hash__", *_ORDERS, "__contains__")
"""Operators that mirrors of builtin subclasses keep."""
_OF_A_RAISE = ("__traceback__", "__context__", "__cause__", "__suppress_context__", "__notes__")
_REAL = frozenset({*SCALARS, complex, bytes, tuple, frozenset, *KINDS})
"""Types that mirrors themselves derive from."""
_isinstance, _issubclass = isinstance, issubclass


def _of_the_class(name: str) -> property:
    own = type.__dict__[name]

    def find(cls: type) -> Any:
        return _class_program(cls).do("attribute", cls, name) if _is_made(cls) else own.__get__(cls)

    return property(find)


class MirrorType(type):
    """A class of the program."""

    __dict__, __bases__, __mro__ = map(_of_the_class, ("__dict__", "__bases__", "__mro__"))  # type: ignore[assignment]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        program = _class_program(cls)
        if not _is_made(cls):
            program.cannot(f"a test derives {cls.__name__} from a class of the program")
        return program.do("call", cls, args, tuple(kwargs.items()))

    def __getattr__(cls, name: str) -> Any:
        return _class_program(cls).do("attribute", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        _class_program(cls).do("set", cls, name, value)

    def __delattr__(cls, name: str) -> None:
        _class_program(cls).do("delete", cls, name)

    def __dir__(cls) -> list[str]:
        return _class_program(cls).do("dir", cls)

    def __subclasses__(cls) -> list[type]:
        return _class_program(cls).do("attribute", cls, "__subclasses__")()

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
    """An object of the program. Equality with others depends on its class's `__eq__`."""

    def __getattr__(self, name: str) -> Any:
        return _program(self).do("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(self, BaseException) and name in _OF_A_RAISE:
            object.__setattr__(self, name, value)
        else:
            _program(self).do("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        _program(self).do("delete", self, name)

    def __dir__(self) -> list[str]:
        return _program(self).do("dir", self)

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
            if _header(self)["library"]:  # the library decides equality, perhaps unlike here
                if not _crosses(program, other) or program.do("equal", self, other)[0]:
                    _no(self)
            elif _undecided(self) and _crosses(program, other) and program.do("equal", self, other)[0]:
                _no(self)
            return False
        said, held, others = program.do("equal", self, other)
        equal = type(self) is type(other) and bool(held) and held == others
        if equal is not bool(said):
            _no(self)
        return equal


def members(program: "Program", header: Mapping[str, Any], data: type | None) -> dict[str, Any]:
    """Return a mirror's members. `data` is its builtin base, if any."""
    found: dict[str, Any] = {name: _Attribute(name) for name in ("__doc__", "__annotations__")}
    if header["dataclass"]:
        found["__dataclass_fields__"] = _Fields()
    operators = set(header["operators"])
    if "__missing__" in operators:
        operators.add("__getitem__")
    found |= {name: _asked(name, _READS[name]) for name in operators & _READS.keys()}
    if "__exit__" in operators:
        found["__exit__"] = _exit
    if "__call__" in operators:
        found["__call__"] = _call
    if "__await__" in operators:
        found["__await__"] = lambda mirror: awaited(program, _number(mirror)).__await__()
    if data is not None:
        found |= {name: getattr(data, name) for name in _PLAIN_OPERATORS if hasattr(data, name)}
        found |= {name: _Attribute(name) for name in header["names"] if name[:2] != "__"}
        if "__eq__" in operators:
            found["__eq__"] = _equal_as(data)
            found["__ne__"] = object.__ne__
        return found
    found |= {name: _ordered(name) for name in operators.intersection(_ORDERS)}
    if "__contains__" in operators:
        found["__contains__"] = _contains
    return found


class _Attribute:
    """Attribute that the program owns."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, mirror: Any, kind: type) -> Any:
        asked = kind if mirror is None else mirror
        return _class_program(kind).do("attribute", asked, self._name)

    def __set__(self, mirror: Any, value: Any) -> None:
        _program(mirror).do("set", mirror, self._name, value)


class _Fields:
    def __get__(self, mirror: Any, kind: type) -> dict[str, Any]:
        import dataclasses  # slow; such tests have imported it

        found = {}
        for name, of, default, factory, shown, flags in _class_program(kind).do("fields", kind):
            init, compare, kw_only = flags
            given = {"default": default[0]} if default else {"default_factory": factory[0]} if factory else {}
            field: Any = dataclasses.field(**given, init=init, repr=shown, compare=compare, kw_only=kw_only)
            field.name, field.type, field._field_type = name, of, dataclasses._FIELD  # type: ignore[attr-defined]
            found[str(name)] = field
        return found


def _asked(name: str, read: Callable[[Any], Any] | None) -> Callable[..., Any]:
    """Return an operator's method that asks the program.

    The program learns the other operand, perhaps the expected value, as in `abs(f(1) - 0.5) < 1e-6`. Plain data
    computed from it decides nothing unless the test names the object's class.
    """

    def method(self: Any, *args: Any) -> Any:
        program = _program(self)
        found = program.do("special", self, name, *args)
        calculates = name in _ARITHMETIC and not all(isinstance(value, Remote) for value in args)
        if (calculates or _number(self) in program.told) and not _undecided(self):
            if isinstance(found, Remote):
                program.told.add(_number(found))
            elif found is not NotImplemented:
                program.cannot(f"only the program could say how to calculate with a {type(self).__name__}")
        return found if read is None else read(found)

    return method


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _program(self).do("call", self, args, tuple(kwargs.items()))


def _exit(self: Any, kind: Any, error: Any, traceback: Any) -> Any:
    swallows = _program(self).do("exit", self, error)
    if swallows and error is not None:
        _program(self).cannot("only the program could say that an exception of a test is no failure")
    return swallows


def _equal_as(data: Any) -> Callable[[Any, Any], Any]:
    """Return the builtin `==` for a subclass with its own `__eq__`."""

    def method(self: Any, other: Any) -> Any:
        equal = data.__eq__(self, other)
        if self is not other and type(self) is type(other):
            said, _, _ = _program(self).do("equal", self, other)
            if bool(said) is not equal:
                _no(self)
        return equal

    return method


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
    """Return True if the test names the object's class and so may expect this object."""
    return bool(_program(mirror).named.intersection(type.__dict__["__mro__"].__get__(type(mirror))))


def _no(mirror: Any) -> NoReturn:
    _program(mirror).cannot(f"only the program could say how a {type(mirror).__name__} compares")


def _crosses(program: "Program", value: Any) -> bool:
    try:
        program.encode(value)
    except Unsendable:
        return False
    return True


def generated(program: "Program", number: int) -> Any:
    """Return a generator that advances the program's generator as it is read."""

    def generator() -> Iterator[Any]:
        mirror = program.decode(["@", number])
        operation, item = "send", None
        while True:
            try:
                found = program.do(operation, mirror, item)
            except StopIteration as end:
                return end.value
            operation, item = "send", None
            try:
                item = yield found
            except GeneratorExit:
                if not program.talking:  # may be the garbage collector
                    program.do("close", mirror)
                raise
            except BaseException as error:
                operation, item = "throw", error

    return generator()


async def awaited(program: "Program", number: int) -> Any:
    """Await a coroutine of the program, whose event loop runs whenever this one waits."""
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
    def __await__(self) -> Generator[None, None, None]:
        yield


def know_bases(program: "Program") -> None:
    """Teach isinstance and issubclass the standard library bases of the program's classes."""

    def is_instance(value: Any, kinds: Any, /) -> bool:
        if _isinstance(value, kinds):
            return True
        kind = type(value)
        return type(kind) is MirrorType and _derives(program, kind, kinds, "isinstance", value)

    def is_subclass(kind: Any, kinds: Any, /) -> bool:
        if _issubclass(kind, kinds):
            return True
        if kind is MirrorType:
            program.cannot("a test looks at the class of a class of the program")
        return type(kind) is MirrorType and _derives(program, kind, kinds, "issubclass", kind)

    builtins.isinstance, builtins.issubclass = is_instance, is_subclass


def _derives(program: "Program", mirror: type, kinds: Any, how: str, value: Any) -> bool:
    """Return True if a mirror's class has a base in `kinds` that the mirror lacks."""
    if not _is_made(mirror):
        return False
    header = type.__getattribute__(mirror, HEADER)
    for kind in kinds if type(kinds) is tuple else getattr(kinds, "__args__", (kinds,)):
        if type(kind) in (tuple, types.UnionType):
            if _derives(program, mirror, kind, how, value):
                return True
        elif type(kind) is MirrorType:
            if _is_made(kind) and type.__getattribute__(kind, HEADER)["decides"] and program.do(how, value, kind):
                program.cannot(f"only the program could say what a {kind.__name__} is")
        elif getattr(kind, "_is_protocol", False) and kind.__module__ == "tests":
            program.cannot(f"a test asks whether an object follows a protocol, {kind.__name__}")
        elif kind not in _REAL and [kind.__module__, kind.__qualname__] in header["library_bases"]:
            return True
    return False


def _is_made(kind: type) -> bool:
    """Return True for mirrors, not for Remote or classes that tests derive."""
    return NUMBER in type.__dict__["__dict__"].__get__(kind)


def _program(mirror: Any) -> "Program":
    return _class_program(type(mirror))


def _class_program(kind: type) -> "Program":
    return type.__getattribute__(kind, PROGRAM)


def _header(mirror: Any) -> Mapping[str, Any]:
    return type.__getattribute__(type(mirror), HEADER)


def _number(mirror: Any) -> int:
    return object.__getattribute__(mirror, NUMBER)
