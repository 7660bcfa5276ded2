"""Runner of unittest and pytest-style cases that a test defines but does not run."""

import sys
import types
import typing
from collections.abc import Iterable
from typing import Any

_ASYNCHRONOUS = 0x80 | 0x200


class Unrunnable(Exception):
    """A test case that only another runner can run."""


def run_cases(defined: Iterable[Any]) -> bool:
    """Run the test cases among a test's definitions and return whether there are any.

    Raises:
      BaseException: whatever a case raises.
      Unrunnable: a function needs pytest's fixtures or plugins.
    """
    found = False
    for value in defined:
        if _is_unittest(value):
            _run_unittest(value)
        elif isinstance(value, type) and value.__module__ == "tests" and value.__name__.startswith("Test"):
            for name in [name for name in dir(value) if name.startswith("test")]:
                _run_method(value(), name)
        elif isinstance(value, types.FunctionType) and value.__name__.startswith("test"):
            _run_function(value)
        else:
            continue
        found = True
    return found


def _is_unittest(value: Any) -> typing.TypeGuard[type]:
    unittest = sys.modules.get("unittest")
    return unittest is not None and isinstance(value, type) and issubclass(value, unittest.TestCase)


def _run_unittest(case: type) -> None:
    import unittest

    class Result(unittest.TestResult):
        raised: BaseException | None = None

        def addError(self, test: Any, err: Any) -> None:
            self.raised = self.raised or err[1]
            super().addError(test, err)

        addFailure = addError

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            if err is not None:
                self.addError(subtest, err)

    result = Result()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    if result.raised is not None:
        raise result.raised
    if result.unexpectedSuccesses:
        raise AssertionError("an unexpected success")


def _run_method(case: Any, name: str) -> None:
    for before in ("setup_method", "setup"):
        if hasattr(case, before):
            _run_function(getattr(case, before))
            break
    _run_function(getattr(case, name))
    if hasattr(case, "teardown_method"):
        _run_function(case.teardown_method)


def _run_function(function: types.FunctionType | types.MethodType) -> None:
    plain = function.__func__ if isinstance(function, types.MethodType) else function
    code, bound = plain.__code__, plain is not function
    needed = code.co_argcount - bound - len(plain.__defaults__ or ())
    needed += code.co_kwonlyargcount - len(plain.__kwdefaults__ or ())
    if needed or code.co_flags & _ASYNCHRONOUS:
        raise Unrunnable(f"{function.__name__} needs a runner with fixtures")
    function()
