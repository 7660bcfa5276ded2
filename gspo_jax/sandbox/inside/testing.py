"""The process of the tests: runs them against a program in another process, and tells the judge which passed."""

import builtins
import importlib
import os
import random
import re
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from .channel import Channel
from .choose import choose
from .mirror import BrokenTest, MirrorType, Program
from .world import describe, given_source, shared_source

_CHANGES: dict[str, Callable[..., bool]] = {
    "builtins.open": lambda file, mode="r", *_, **__: bool(set(mode) & set("wax+")),
    "io.open": lambda file, mode="r", *_, **__: bool(set(mode) & set("wax+")),
    "os.open": lambda path, flags, *_, **__: bool(flags & (os.O_WRONLY | os.O_RDWR)),
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rename", "os.chdir", "os.putenv"), lambda *_, **__: True),
}
"""Functions by which a test changes the world around it, and when; its program has another one."""


class _Names(dict[str, Any]):
    """Global names of tests: their own, then builtins, then the standard library's modules, then the program's.

    The program's come last, and never take the place of a builtin function that a test relies on.
    """

    def __init__(self, program: Program) -> None:
        super().__init__({"__name__": "tests", "__builtins__": builtins})
        self._program = program

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in sys.stdlib_module_names:
            found = importlib.import_module(name)
        elif name in self._program.names:
            found = self._program.name(name)
            if not isinstance(type(found), MirrorType) and not isinstance(found, MirrorType):
                return found  # a call may change what the name stands for
        else:
            raise KeyError(name)
        self[name] = found
        return found


class _Module(types.ModuleType):
    """The module in which tests look for themselves, such as unittest.main() does."""

    def __init__(self, name: str, names: _Names) -> None:
        super().__init__(name)
        object.__setattr__(self, "_names", names)

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            return self._names[name]
        raise AttributeError(name)

    def __dir__(self) -> list[str]:
        return list(self._names)


def run_tests() -> None:
    """Test a program that answers through descriptor 4; tests come from the judge through 3, and verdicts go there."""
    judge, channel = Channel.of(3), Channel.of(4)
    job = judge.receive()
    sys.set_int_max_str_digits(0)
    channel.send({"program": job["program"], "prelude": job["prelude"]})
    tests = _Tests(channel, job)
    try:
        tests.begin()
    except BrokenTest as error:
        judge.send({"broken": str(error)})
        return
    except BaseException as error:
        if tests.lacks(error):
            judge.send({"broken": f"the set-up of a test: {_said(error)}"})
        else:
            judge.send({"passed": [False] * len(job["tests"]), "why": f"the program: {_said(error)}"})
        return
    passed, why = [], ""
    for test in job["tests"]:
        said = tests.failure(test)
        if tests.program.broken:
            judge.send({"broken": tests.program.broken})
            return
        passed.append(said is None)
        why = why or said or ""
        judge.send({"passed": passed})
    judge.send({"passed": passed, "why": why})


class _Tests:
    """The tests of a program."""

    def __init__(self, channel: Channel, job: Mapping[str, Any]) -> None:
        for path, changes in _CHANGES.items():
            module, _, name = path.partition(".")
            self._watch(module, name, changes)
        self.program = Program(channel)
        self._job, self._names = job, _Names(self.program)
        for name in ("tests", "__main__"):
            sys.modules[name] = _Module(name, self._names)
        sys.dont_write_bytecode = True

    def begin(self) -> None:
        """Run what comes before the tests.

        Raises:
          BrokenTest: it is at fault.
          BaseException: the program is.
        """
        program, names, job = self.program, self._names, self._job
        program.tests.append(job["setup"])
        world = shared_source(job["setup"]) if job["setup"] else {}
        entry = job["entry_point"]
        given = given_source(choose(job["given"]), re.split(r"\W", entry)[0]) if entry and job["given"] else ""
        program.names = program.do("load", "\n".join([*world.values(), given]))
        # What the prompt gives, such as helpers, is the tests' own, and not what a program has made of it.
        try:
            self._run(given)
        except (BrokenTest, Exception) as error:  # it was written to be read, and not to be run
            if self.lacks(error):
                raise
        program.broken = ""
        for value in list(names.values()):
            if isinstance(value, type) and value.__module__ == "tests":
                program.pair(value)
        self._run(job["setup"])
        if entry is not None:
            names[entry] = program.name(entry) if entry.isidentifier() else eval(entry, names)
        seed = random.seed

        def seeded(*args: Any, **kwargs: Any) -> None:
            seed(*args, **kwargs)
            program.do("seed", *args)

        random.seed = seeded

    def failure(self, test: str) -> str | None:
        """Run a test and return why it fails; None if it passes."""
        before = set(self._names)
        self.program.tests.append(test)
        try:
            self._run(test)
            if self._job["entry_point"] is not None:
                self._names["check"](self._names[self._job["entry_point"]])
            self._run_cases(set(self._names) - before)
        except BrokenTest:
            return "the test can't be judged"
        except SystemExit as end:  # as unittest.main() ends
            return None if end is not self.program.raised and not end.code else _said(end)
        except BaseException as error:
            if self.lacks(error):
                self.program.broken = self.program.broken or f"a test: {_said(error)}"
            return _said(error)
        return None

    def lacks(self, error: BaseException) -> bool:
        """Return whether a test lacks a module or file of its own, and not of the program."""
        return isinstance(error, ModuleNotFoundError | FileNotFoundError) and error is not self.program.raised

    def _run(self, source: str) -> None:
        try:
            code = compile(source, "tests.py", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            self.program.cannot(f"a test does not compile: {error}")
        exec(code, self._names)

    def _run_cases(self, names: set[str]) -> None:
        """Run the test cases of unittest that a test has defined."""
        unittest = sys.modules.get("unittest")
        cases = [self._names[name] for name in names]
        if unittest is None or not any(isinstance(c, type) and issubclass(c, unittest.TestCase) for c in cases):
            return
        suite = unittest.TestSuite(
            unittest.defaultTestLoader.loadTestsFromTestCase(case)
            for case in cases
            if isinstance(case, type) and issubclass(case, unittest.TestCase)
        )
        result = unittest.TestResult()
        suite.run(result)
        for _, said in (*result.failures, *result.errors):
            raise AssertionError(said.strip().rpartition("\n")[2])

    def _watch(self, module: str, name: str, changes: Callable[..., bool]) -> None:
        """Have a function say when it is called in a way that changes something."""
        function = getattr(sys.modules[module], name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if changes(*args, **kwargs):
                self.program.unseen = self.program.unseen or "changes files or the environment"
            return function(*args, **kwargs)

        setattr(sys.modules[module], name, watched)


def _said(error: BaseException) -> str:
    if isinstance(type(error), MirrorType):  # its text is the program's to make
        return f"{type(error).__name__}: {BaseException.__str__(error)}"[:200]
    return describe(error)
