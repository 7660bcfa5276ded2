"""Process of the tests: runs them against a program in another process."""

import ast
import builtins
import contextlib
import importlib
import os
import random
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import scopes, values
from .cases import Unrunnable, run_cases
from .channel import Channel
from .choose import choose
from .mirror import BrokenTest, Program
from .remote import MirrorType
from .world import describe, given_source, shared_source

_NAME = re.compile(r"\w+")  # compiled once, before forking
_CHANGES: dict[str, Callable[..., bool]] = {
    "builtins.open": lambda file, mode="r", *_, **__: bool(set(mode) & set("wax+")),
    "io.open": lambda file, mode="r", *_, **__: bool(set(mode) & set("wax+")),
    "os.open": lambda path, flags, *_, **__: bool(flags & (os.O_WRONLY | os.O_RDWR)),
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rename", "os.chdir", "os.putenv"), lambda *_, **__: True),
    "random.setstate": lambda state: True,
}
"""Functions by which a test changes its surroundings, but not the program's, and when."""
_REACHING = frozenset({"eval", "exec", "globals", "locals", "vars", "getattr", "__import__", "sys", "importlib"})
"""Names that give access to any other."""
_LACKS = (ImportError, FileNotFoundError, Unrunnable)
_NO_CALL = "'module' object is not callable"
_IS = "(is)"


class _Identity(ast.NodeTransformer):
    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if len(node.ops) > 1 or not isinstance(node.ops[0], ast.Is | ast.IsNot):
            return node
        operands = [node.left, *node.comparators]
        if any(isinstance(operand, ast.Constant) for operand in operands):
            return node
        call = ast.Call(ast.Name(_IS, ast.Load()), operands, [])
        return call if isinstance(node.ops[0], ast.Is) else ast.UnaryOp(ast.Not(), call)


def _asking_for_identity(source: str) -> Any:
    if " is " not in source:
        return source
    tree = ast.parse(source, "tests.py")
    return ast.fix_missing_locations(_Identity().visit(tree))


class _Names(dict[str, Any]):
    """Global names of tests: their own, then builtins, standard library modules, and last the program's.

    The dictionary itself holds only the tests' own.
    """

    def __init__(self, program: Program) -> None:
        super().__init__({"__name__": "tests", "__builtins__": builtins})
        self._program = program
        self._found: dict[str, Any] = {}
        self._subjects: tuple[set[str], set[str]] = (set(), set())

    def are_tested_by(self, sources: Sequence[str]) -> None:
        """Find the names of builtins and modules that mean the program's here.

        A name that a test calls is no module. Any other such name is the program's if it is the only one the program
        defines, and the tests look up nothing else to test.
        """
        mine = {name for name in self._program.names if _is_known(name)}
        if not mine:
            return
        names, taken, owners, bound, modules = (
            {name for source in sources for name in of(source)}
            for of in (scopes.looked_up, scopes.values, scopes.owners, scopes.bound, scopes.modules)
        )
        called = (names & taken) - (bound - (modules - owners))
        called = {name for name in called if name in sys.stdlib_module_names and not hasattr(builtins, name)}
        names -= bound
        others = called or names & _REACHING or {name for name in names if not _is_known(name)}
        rest = set() if others else mine & names
        self._subjects = (mine & called) | (rest if len(rest) == 1 else set()), rest

    def forget_modules(self) -> None:
        for name in self._subjects[0]:
            if _is_module(self.get(name)):
                del self[name]

    def __missing__(self, name: str) -> Any:
        if name in self._found:
            return self._found[name]
        mine, unclear = self._subjects
        if _is_known(name) and name not in mine:
            if name in unclear:
                self._program.cannot(f"the tests name nothing but builtins that the program redefines, such as {name}")
            if hasattr(builtins, name):
                raise KeyError(name)
            found = importlib.import_module(name)
        elif name in self._program.names:
            found = self._program.name(name)
            if not isinstance(type(found), MirrorType) and not isinstance(found, MirrorType):
                return found  # a call may rebind the name
        else:
            raise KeyError(name)
        self._found[name] = found
        return found


def _is_known(name: str) -> bool:
    return hasattr(builtins, name) or name in sys.stdlib_module_names


def _is_module(value: Any) -> typing.TypeGuard[types.ModuleType]:
    return type(value) is types.ModuleType  # not a lookalike


class _Module(types.ModuleType):
    """Module in which tests find themselves, as unittest.main() does."""

    def __init__(self, name: str, names: _Names) -> None:
        super().__init__(name)
        object.__setattr__(self, "_names", names)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._names[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._names[name] = value

    def __delattr__(self, name: str) -> None:
        del self._names[name]

    def __dir__(self) -> list[str]:
        return list(self._names)


class _Unseen(types.ModuleType):
    """Module of the program, if a test looks for its source."""

    def __init__(self, program: Program) -> None:
        super().__init__("program")
        del self.__loader__  # it is None
        self._program = program

    def __getattr__(self, name: str) -> Any:
        if name in ("__file__", "__loader__"):
            self._program.cannot("a test looks for the source of the program")
        raise AttributeError(name)


def run_tests() -> None:
    """Test the program at descriptor 4, with tests from and verdicts to the judge at 3."""
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
    if all(passed) and not tests.program.asked:
        judge.send({"broken": "the tests ask nothing of the program"})
        return
    judge.send({"passed": passed, "why": why})


class _Tests:
    def __init__(self, channel: Channel, job: Mapping[str, Any]) -> None:
        for path, changes in _CHANGES.items():
            module, _, name = path.partition(".")
            self._watch(module, name, changes)
        self.program = Program(channel)
        self._job, self._names = job, _Names(self.program)
        self._compiled: dict[str, types.CodeType] = {}
        self._candidate: Any = None
        self._names[_IS] = self._is
        for name in ("tests", "__main__"):
            sys.modules[name] = _Module(name, self._names)
        sys.modules["program"] = _Unseen(self.program)
        sys.dont_write_bytecode = True

    def begin(self) -> None:
        """Run everything before the tests.

        Raises:
          BrokenTest: the tests are at fault.
          BaseException: the program is at fault.
        """
        program, names, job = self.program, self._names, self._job
        program.tests.append(job["setup"])
        world = shared_source(job["setup"]) if job["setup"] else {}
        entry = job["entry_point"]
        given = given_source(choose(job["given"]), _begun_with(entry)) if entry and job["given"] else ""
        self._check_sources(given)
        try:
            program.names = frozenset(program.do("load", "\n".join([*world.values(), given])))
        except BrokenTest:
            raise
        except BaseException as error:
            if isinstance(error, NameError) and error.name in scopes.bound(job["setup"]):
                program.cannot(f"the program uses {error.name}, which the set-up defines")
            self._check_without_program()
            raise
        # Helpers from the prompt are the tests' own, not the program's version.
        try:
            self._run(given)
        except (BrokenTest, Exception) as error:  # meant to be read, not run
            if self.lacks(error):
                raise
        program.broken = ""
        for value in list(names.values()):
            if isinstance(value, type) and value.__module__ == "tests":
                program.pair(value)
        program.asked = 0
        if entry is None:
            names.are_tested_by([job["setup"], *job["tests"]])
        self._set_up()
        names.forget_modules()
        if entry is not None:
            asked = program.asked
            self._candidate = names[entry] = program.name(entry) if entry.isidentifier() else eval(entry, names)
            program.asked = asked
        program.globals, program.settled = names, set(names)
        seed = random.seed

        def seeded(*args: Any, **kwargs: Any) -> None:
            seed(*args, **kwargs)
            program.do("seed", *args)

        random.seed = seeded

    def _check_sources(self, given: str) -> None:
        job = self._job
        for source in (job["setup"], *job["tests"]):
            self._compile(source)
        if not any(map(scopes.asserts, (*job["tests"], job["setup"], given))):
            self.program.cannot("the tests assert nothing" if job["tests"] else "there are no tests")

    def _check_without_program(self) -> None:
        """Raise BrokenTest if no program could pass the tests."""
        self.program.asked = 0
        try:
            exec(self._job["prelude"], {"__name__": "program"})
        except BaseException as error:
            self.program.cannot(f"the prelude: {_said(error)}")
        with contextlib.suppress(NameError):
            self._set_up()
        for test in self._job["tests"]:
            try:
                self._run(test)
            except BaseException as error:
                if self.lacks(error):
                    self.program.cannot(f"a test: {_said(error)}")
        if self._job["entry_point"] is None and not any(map(scopes.looked_up, self._job["tests"])):
            self.program.cannot("the tests ask nothing of the program")

    def _set_up(self) -> None:
        """Run the set-up. Its exceptions are its fault unless it needs the program."""
        try:
            self._run(self._job["setup"])
        except (BrokenTest, NameError):
            raise
        except BaseException as error:
            if not self.program.asked:
                self.program.cannot(f"the set-up of a test: {_said(error)}")
            raise

    def failure(self, test: str) -> str | None:
        """Run a test and return why it fails, or None."""
        before, asked = dict(self._names), self.program.asked
        self.program.tests.append(test)
        try:
            self._run(test)
            self._run_what_it_defines(test, before, asked)
            if "doctest" in sys.modules:
                self.program.cannot("a test runs doctests, which are the program's")
        except BrokenTest:
            return "the test can't be judged"
        except SystemExit as end:  # as in unittest.main()
            return None if not self.program.has_raised(end) and not end.code else _said(end)
        except BaseException as error:
            if self.lacks(error):
                self.program.broken = self.program.broken or f"a test: {_said(error)}"
            return _said(error)
        return None

    def _run_what_it_defines(self, test: str, before: Mapping[str, Any], asked: int) -> None:
        """Run a test's `check` (not the program's), or the cases that it defines and has not run itself."""
        names = self._names
        if self._job["entry_point"] is not None and "check" in names:
            names["check"](self._candidate)
            return
        new = {n: v for n, v in names.items() if before.get(n) is not v and isinstance(v, type | types.FunctionType)}
        run = scopes.values(test) if new and self.program.asked > asked else set()
        found = run_cases(value for name, value in new.items() if name not in run or isinstance(value, type))
        if not found and self._job["entry_point"] is not None:
            self.program.cannot("the test defines no check")

    def lacks(self, error: BaseException) -> bool:
        """Return True if the test, not the program, lacks a module, file or runner."""
        if self.program.has_raised(error):
            return False
        return isinstance(error, _LACKS) or self._takes_a_module(error)

    def _takes_a_module(self, error: BaseException) -> bool:
        if type(error) is AttributeError:
            return _is_module(error.obj) and error.obj.__name__ in self.program.names
        if type(error) is not TypeError or not str(error).startswith(_NO_CALL):
            return False
        values = {name: self._names.get(name) for name in self.program.names}
        return any(_is_module(value) and value.__name__ == name for name, value in values.items())

    def _run(self, source: str) -> None:
        exec(self._compile(source), self._names)

    def _compile(self, source: str) -> types.CodeType:
        if source not in self._compiled:
            try:
                self._compiled[source] = compile(_asking_for_identity(source), "tests.py", "exec")
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                self.program.cannot(f"a test does not compile: {error}")
        return self._compiled[source]

    def _is(self, one: Any, other: Any) -> bool:
        """Return `one is other`, undecidable for equal copies."""
        if one is not other and type(one) is type(other) and values.is_copied(type(one)) and one == other:
            self.program.cannot("only one process could say whether two equal values are the same one")
        return one is other

    def _watch(self, module: str, name: str, changes: Callable[..., bool]) -> None:
        function = getattr(sys.modules[module], name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if changes(*args, **kwargs):
                self.program.unseen = self.program.unseen or f"calls {module}.{name}"
            return function(*args, **kwargs)

        setattr(sys.modules[module], name, watched)


def _begun_with(entry: str) -> str:
    name = _NAME.match(entry)
    return "" if name is None else name[0]


def _said(error: BaseException) -> str:
    if isinstance(type(error), MirrorType):  # the program controls its text
        return f"{type(error).__name__}: {BaseException.__str__(error)}"[:200]
    return describe(error)
