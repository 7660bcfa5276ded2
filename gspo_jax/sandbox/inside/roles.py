"""What the processes of the sandbox do: run a program, answer calls of its functions, or test them.

A program never shares a process with its tests. The tests' process calls the functions of the other one and gets plain
data back, so that patching `assert` or `builtins`, reading the callers' frames or ending the process can only fail.
"""

import atexit
import builtins
import contextlib
import importlib
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from .channel import Channel
from .values import Unsendable, decode, encode

_WHY_CHARACTERS = 200
"""Characters of the reason why a test failed."""
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "attribute": getattr,
    "set": setattr,
    "item": lambda value, key: value[key],
    "length": len,
    "iterate": iter,
    "true": bool,
    "text": str,
}
"""What the tests may ask of an object of the program. Comparisons are not among them: these the tests make."""


def run_program() -> None:
    """Run a program as `python program.py` does, with the descriptors 0, 1 and 2; its source comes through 3."""
    channel = Channel.of(3)
    source = channel.receive()
    channel.socket.close()
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115  # for good
        for number, mode in enumerate(("r", "w", "w"))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.argv = ["program.py"]
    code = 1
    try:
        exec(compile(source, "program.py", "exec"), _main_module())
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        with contextlib.suppress(Exception):
            sys.stderr.write(_describe(error))
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does at its end
        atexit._run_exitfuncs()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code & 0xFF)


def answer_calls() -> None:
    """Run a program, then do with its functions and objects what the tests ask through descriptor 3."""
    channel = Channel.of(3)
    source = channel.receive()
    sys.set_int_max_str_digits(0)
    objects: list[Any] = []

    def refer(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def answer(act: Callable[[], Any]) -> None:
        try:
            channel.send({"value": encode(act(), refer)})
        except BaseException as error:
            channel.send({"raised": type(error).__name__, "why": _describe(error)})

    names: dict[str, Any] = {"__name__": "program", "__builtins__": builtins}

    def load() -> list[str]:
        exec(compile(source, "program.py", "exec"), names)
        return [name for name in names if not name.startswith("__")]

    answer(load)
    while True:
        try:
            request = channel.receive()
        except EOFError:
            return
        if "name" in request:
            answer(partial(operator.getitem, names, request["name"]))
        else:
            target, args, kwargs = (decode(request[part], objects.__getitem__) for part in ("on", "args", "kwargs"))
            answer(partial(_OPERATIONS[request["do"]], target, *args, **kwargs))


def check_output() -> None:
    """Call `check(input, expected, output)` of a checker that comes through descriptor 3; its verdict goes there."""
    channel = Channel.of(3)
    job = channel.receive()
    names: dict[str, Any] = {"__name__": "checker"}
    try:
        exec(compile(job["checker"], "checker.py", "exec"), names)
        verdict = names["check"](job["input"], job["expected"], job["output"])
        channel.send({"passed": float(verdict) > 0.5})
    except BaseException as error:
        channel.send({"broken": f"the checker: {_describe(error)}"})


class ProgramRaised(Exception):
    """The program raised an exception that is no builtin one."""


class BrokenTest(Exception):
    """The test itself is at fault."""


class _Program:
    """The program, as its tests see it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.names = self._answer()
        """Names that it defines."""

    def named(self, name: str) -> Any:
        """Return the value of one of its names."""
        self._channel.send({"name": name})
        return self._answer()

    def do(self, operation: str, on: "Remote", *args: Any, **kwargs: Any) -> Any:
        """Return the result of an operation on an object of the program."""
        try:
            parts = [encode(part, _number) for part in (on, args, kwargs)]
        except (Unsendable, RecursionError) as error:
            raise BrokenTest(str(error)) from None
        self._channel.send({"do": operation, **dict(zip(("on", "args", "kwargs"), parts, strict=True))})
        return self._answer()

    def _answer(self) -> Any:
        answer = self._channel.receive()
        if "raised" in answer:
            kind = getattr(builtins, str(answer["raised"]), None)
            raised = kind if isinstance(kind, type) and issubclass(kind, Exception) else ProgramRaised
            raise raised(str(answer["why"]))
        return decode(answer["value"], lambda number: Remote(self, int(number)))


class Remote:
    """An object of the program, in the process of its tests. Two of them are equal only if they are the same."""

    __slots__ = ("_number", "_program")

    def __init__(self, program: _Program, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._program.do("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._program.do("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.do("set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._program.do("item", self, key)

    def __len__(self) -> int:
        return int(self._program.do("length", self))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._program.do("iterate", self))

    def __bool__(self) -> bool:
        return bool(self._program.do("true", self))

    def __str__(self) -> str:
        return str(self._program.do("text", self))


def _number(value: Any) -> int:
    if not isinstance(value, Remote):
        raise Unsendable(f"a test hands over a {type(value).__name__}, which cannot cross to the program")
    return object.__getattribute__(value, "_number")


class _Names(dict[str, Any]):
    """Global names of tests: their own, then builtins, then the standard library's modules, then the program's.

    The program's come last, and never take the place of a builtin function that a test relies on.
    """

    def __init__(self, program: _Program) -> None:
        super().__init__({"__name__": "tests", "__builtins__": builtins})
        self._program = program

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in sys.stdlib_module_names:
            found = importlib.import_module(name)
        elif name in self._program.names:
            found = self._program.named(name)
        else:
            raise KeyError(name)
        self[name] = found
        return found


def run_tests() -> None:
    """Test a program that answers through descriptor 4; tests come from the judge through 3, and verdicts go there."""
    judge, channel = Channel.of(3), Channel.of(4)
    job = judge.receive()
    sys.set_int_max_str_digits(0)
    tests: list[str] = job["tests"]
    try:
        channel.send(job["program"])
        program = _Program(channel)
        names = _Names(program)
        # What the prompt gives, such as helpers, is the tests' own, and not what a program has made of it.
        with contextlib.suppress(BrokenTest):  # a prompt in words, with code in it
            _run(job["given"], names)
        _run(job["setup"], names)
        entry = job["entry_point"]
        if entry is not None:
            names[entry] = program.named(entry)
    except BrokenTest as error:
        judge.send({"broken": str(error)})
        return
    except BaseException as error:
        judge.send({"passed": [False] * len(tests), "why": f"the program: {_describe(error)}"})
        return
    passed, why = [], ""
    for test in tests:
        try:
            _run(test, names)
            if entry is not None:
                names["check"](names[entry])
            passed.append(True)
        except BrokenTest as error:
            judge.send({"broken": str(error)})
            return
        except BaseException as error:
            passed.append(False)
            why = why or _describe(error)
        judge.send({"passed": passed})
    judge.send({"passed": passed, "why": why})


def _run(source: str, names: dict[str, Any]) -> None:
    try:
        code = compile(source, "tests.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BrokenTest(f"a test does not compile: {error}") from None
    exec(code, names)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_WHY_CHARACTERS]


def _main_module() -> dict[str, Any]:
    """Return the names of a new module called `__main__`."""
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    return vars(module)


ROLES: dict[str, Callable[[], None]] = {
    role.__name__: role for role in (run_program, answer_calls, check_output, run_tests)
}
