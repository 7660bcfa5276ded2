"""The program as its tests see it: plain data, and mirrors (remote.py) of its classes and objects."""

import builtins
import contextlib
import enum
import socket
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from . import scopes
from .border import CONTAINERS, INSTANCE, Border, attributes, restore_error
from .channel import Channel
from .remote import HEADER, NUMBER, PROGRAM, MirrorType, Remote, awaited, generated, know_bases, members
from .values import Unsendable
from .world import fingerprint, shared_source

_SEEN = {"builtins": ("print", "input", "open"), "time": ("time", "sleep"), "random": ("random", "randint")}
"""Functions that a test may replace, unseen by the program."""
_READ_THERE = ("iterator", "stream")
"""Kinds of test values that a program may read in ways only its own process sees."""
_WAIT_S = 1.0


class BrokenTest(BaseException):
    """The test itself is at fault, or cannot be judged."""


class Program(Border):
    """The tests' end of the border."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(first=2)
        self._channel = channel
        self.names: frozenset[str] = frozenset()
        self.asked = 0
        """Number of requests to the program."""
        self.tests: list[str] = []
        self.named: set[type] = set()
        """Mirrors of classes that the tests named."""
        self.told: set[int] = set()
        """Numbers of mirrors computed from the tests' plain data."""
        self.broken = ""
        """Why the test can't be judged. A test may catch the exception."""
        self._raised: list[BaseException] = []
        self.globals: Mapping[str, Any] = {}
        self.settled: set[str] = set()
        self.unseen = ""
        """Description of what a test did unseen by the program; "" for nothing."""
        self.talking = False
        self._own: dict[type, int] = {}
        self._reading = 0
        self._lock = threading.RLock()
        self._replaceable = {(m, n): getattr(sys.modules[m], n) for m in _SEEN if m in sys.modules for n in _SEEN[m]}
        know_bases(self)
        self._stdin, self._streams = sys.stdin, (sys.stdout, sys.stderr)

    def do(self, operation: str, *asked: Any) -> Any:
        """Return the program's answer. Threads of a test take turns.

        Raises:
          BrokenTest: the request cannot cross.
          BaseException: whatever the program raises.
        """
        if not self._lock.acquire(timeout=_WAIT_S):
            self.broken = self.broken or "a test calls the program while another call waits"
            self._channel.socket.shutdown(socket.SHUT_RDWR)  # wakes the other thread
            self.cannot(self.broken)
        try:
            self._check_world()
            self.asked += 1
            was, self.talking = self.talking, True
            try:
                found, raised = self._ask(operation, asked)
            finally:
                self.talking = was
        finally:
            self._lock.release()
        if not raised:
            return found
        if not isinstance(found, BaseException):
            raise TypeError("the program raised what is no exception")
        if type(found) is NameError and found.name in self.globals and not str(found.name).startswith(("__", "(")):
            self.cannot(f"the program uses {found.name}, which a test defines")
        self._raised.append(found)
        raise found

    def has_raised(self, error: BaseException) -> bool:
        """Return True if the program raised this."""
        return any(error is raised for raised in self._raised)

    def _ask(self, operation: str, asked: tuple[Any, ...]) -> tuple[Any, bool]:
        try:
            message = self.message(asked, do=operation) if not self._reading else self._bare(asked, operation)
        except (Unsendable, RecursionError) as error:
            self.cannot(str(error))
        del asked
        if not self._reading:
            message["drop"] = self.sweep()
        try:
            self._channel.send(message)
        except ValueError as error:  # too long
            self.cannot(str(error))
        while "next" in (answer := self._channel.receive()):
            self._channel.send(self._next_of(self._read(answer)))
        for stream, own, text in zip((sys.stdout, sys.stderr), self._streams, answer.get("printed", ()), strict=False):
            if text and stream is not own:
                stream.write(str(text))
        if "broken" in answer:
            why = str(answer["broken"])
            if any(entry.kind in _READ_THERE and number % 2 == 0 for number, entry in self._entries.items()):
                self.cannot(why)
            return RuntimeError(why), True  # any program may claim this
        return self._read(answer), bool(answer.get("raised"))

    def _read(self, message: dict[str, Any]) -> Any:
        self._reading += 1
        try:
            return self.accept(message)
        finally:
            self._reading -= 1

    def _next_of(self, number: int) -> dict[str, Any]:
        entry = self._entries[number]
        if entry.kind != "stream":
            raise ValueError(f"number {number} is no iterator of the tests")
        self.talking = False
        try:
            return self.message((next(entry.value),))
        except StopIteration:
            return self.message(())
        except Unsendable as error:
            self.cannot(str(error))
        except Exception as error:
            self.cannot(f"an iterator of a test raises {type(error).__name__}")
        finally:
            self.talking = True

    def cannot(self, why: str) -> NoReturn:
        """Raise BrokenTest and remember why the test can't be judged."""
        self.broken = self.broken or why
        raise BrokenTest(why)

    def name(self, name: str) -> Any:
        """Return a global of the program."""
        found = self.do("name", name)
        if isinstance(found, MirrorType):
            if type.__getattribute__(found, HEADER)["meta"]:
                self.cannot(f"a test names a metaclass, {name}")
            self.named.add(found)
        return found

    def pair(self, kind: type) -> None:
        """Let instances of a class from the prompt cross if the program has the class unchanged."""
        if kind.__name__ in self.names and self.do("same", kind.__name__, fingerprint(kind)):
            self.do("pair", [kind])

    def _bare(self, asked: tuple[Any, ...], operation: str) -> dict[str, Any]:
        return {"value": self.encode(asked), "state": [], "drop": [], "do": operation}

    def _check_world(self) -> None:
        self._look_for_replaced_names()
        for (module, name), was in self._replaceable.items():
            if getattr(sys.modules[module], name, None) is not was:
                self.unseen = f"replaces {module}.{name}"
        if sys.stdin is not self._stdin:
            self.unseen = "replaces sys.stdin"
        if self.unseen:
            self.cannot(f"a test {self.unseen}, which the program does not see")

    def _look_for_replaced_names(self) -> None:
        """Find globals of the program that a test has rebound, unseen by the program.

        It matters only if the program's functions use the name and not both import it.
        """
        new = (self.names & self.globals.keys()) - self.settled
        if new:
            self.settled |= new
            classes = {n for n in new if isinstance(kind := self.globals[n], type) and _is_tests(kind)}
            imports = {name for test in self.tests for name in scopes.imported(test)}
            used = self.do("shared", sorted(new - classes), sorted(imports & new))
            if used:
                self.unseen = self.unseen or f"replaces {used[0]}"

    def describe(self, value: Any) -> Any:
        kind = type(value)
        if kind is types.BuiltinFunctionType and value.__module__ in sys.stdlib_module_names:
            return self.share(value, "function", [value.__module__, value.__name__])
        if isinstance(value, type) and _is_tests(value):
            return self._own_class(value)
        if _is_tests(kind):
            return self._instance(value, kind)
        if isinstance(value, BaseException) and kind not in (BrokenTest, AssertionError):
            return self._own_error(value, kind)
        if isinstance(value, Iterator) and kind.__module__ in ("builtins", "itertools"):
            return self.share(value, "stream", None)
        raise Unsendable(f"a test hands over a {kind.__name__}, which cannot cross to the program")

    def _own_error(self, value: BaseException, kind: type) -> Any:
        """Describe a standard library exception. Assertions never cross."""
        if kind.__module__ not in sys.stdlib_module_names:
            raise Unsendable(f"a test hands over a {kind.__name__}, which cannot cross to the program")
        held = self.encode(attributes(value))
        return self.share(
            value, "error", {"known": [kind.__module__, kind.__name__], "args": self.encode(value.args), "held": held}
        )

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
            if not (kind.__name__ in self.names or header["fields"] or self._stands_alone(header["source"])):
                raise Unsendable(f"a test hands over a {kind.__name__}, a class that the program does not have")
            self._own[kind] = self.share(kind, "class", header)[1]
        return ["@", self._own[kind]]

    def _stands_alone(self, source: str) -> bool:
        try:
            exec(compile(source, "tests.py", "exec"), {})
        except NameError as error:
            return error.name in self.names
        except Exception:
            return False
        return source != ""

    def create(self, number: int, kind: str, header: Any) -> Any:
        if kind == "class":
            return self._mirror_class(number, header)
        if kind == "generator":
            return generated(self, number)
        if kind == "coroutine":
            return awaited(self, number)
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
            made.__cause__, made.__context__ = self.decode(header["cause"]), self.decode(header["context"])
            made.__suppress_context__ = bool(header["suppress"])
        else:
            made = object.__new__(of)
        object.__setattr__(made, NUMBER, number)
        return made

    def _own_instance(self, kind: str, header: Mapping[str, Any], of: type) -> Any:
        if kind == "member":
            return of[header["name"]]  # type: ignore[index]
        if kind == "named":
            return tuple.__new__(of, self.decode(header["items"]))
        return object.__new__(of)

    def _error(self, header: Mapping[str, Any]) -> BaseException:
        own = self.decode(header["class"]) if "class" in header else None
        if own is not None and own not in self._own:
            raise ValueError("an exception of no class of the tests'")
        kind, args = own or _error_class([header["known"]]) or Exception, self.decode(header["args"])
        error = kind.__new__(kind, *args)
        if own is None:
            with contextlib.suppress(Exception):  # constructors may take other arguments
                error = kind(*args)
        restore_error(error, args, self.decode(header["held"]))
        error.__cause__, error.__context__ = self.decode(header["cause"]), self.decode(header["context"])
        error.__suppress_context__ = bool(header["suppress"])
        return error

    def _mirror_class(self, number: int, header: Mapping[str, Any]) -> type:
        bases: list[Any] = [base for base in map(self.decode, header["bases"]) if isinstance(base, MirrorType)]
        data = self.decode(header["data"])
        plain = data if data is not None else _error_class(header["errors"])
        if plain is not None and not any(issubclass(base, plain) for base in bases):
            bases.append(plain)
        if not any(issubclass(base, Remote) for base in bases):
            bases.insert(0, Remote)
        content = {PROGRAM: self, HEADER: header, NUMBER: number, "__module__": "program"}
        content |= members(self, header, data)
        return MirrorType(str(header["name"]), tuple(bases), content)


def _error_class(paths: list[Any]) -> type[BaseException] | None:
    """Return the first exception class of (module, name) pairs that is already loaded.

    Skip unittest's: a runner would not count them as failures.
    """
    for module, name in paths:
        package = str(module).partition(".")[0]
        if package == "unittest":
            continue
        known = str(module) if package in sys.stdlib_module_names else ""
        found = getattr(sys.modules.get(known, builtins), str(name), None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
    return None


def _is_tests(kind: type) -> bool:
    return kind.__module__ == "tests" and not isinstance(kind, MirrorType)
