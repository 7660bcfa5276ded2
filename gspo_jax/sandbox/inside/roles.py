"""Roles of the sandbox's processes: run a program, serve calls of its functions, or test them.

The tests' process (testing.py) calls functions in the program's process (program.py) and gets back only data. So
patching `assert` or `builtins`, reading callers' frames or ending the process can only fail.
"""

import atexit
import contextlib
import io
import math
import os
import sys
import threading
from collections.abc import Callable

from .channel import Channel
from .choose import choose
from .program import answer_calls
from .testing import run_tests
from .world import describe, new_module


def run_program() -> None:
    """Run the program that arrives through descriptor 3, like `python program.py`.

    A failure of its prelude goes back through 3, which closes before the program starts.
    """
    channel = Channel.of(3)
    job = channel.receive()
    sys.stdin, sys.stdout, sys.stderr = map(_standard_stream, range(3))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.argv = ["program.py"]
    names = new_module("__main__")
    try:
        exec(compile(job["prelude"], "prelude.py", "exec"), names)
    except BaseException as error:
        channel.send({"broken": f"the prelude: {describe(error)}"})
        os._exit(1)
    channel.socket.close()
    code = 1
    try:
        exec(compile(choose(job["program"]), "program.py", "exec"), names)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        with contextlib.suppress(Exception):
            sys.stderr.write(describe(error))
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does at its end
        atexit._run_exitfuncs()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code & 0xFF)


def _standard_stream(number: int) -> io.TextIOWrapper:
    """Return a standard stream as the interpreter makes it, without newline translation."""
    raw = io.FileIO(number, "w" if number else "r", closefd=False)
    raw.name = ("<stdin>", "<stdout>", "<stderr>")[number]
    buffer = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="surrogateescape", newline="\n")


def check_output() -> None:
    """Run the checker that arrives through descriptor 3, and return its verdict there."""
    channel = Channel.of(3)
    job = channel.receive()
    sys.set_int_max_str_digits(0)
    names = new_module("checker")
    try:
        exec(compile(job["checker"], "checker.py", "exec"), names)
        verdict = float(names["check"](job["input"], job["expected"], job["output"]))
        if math.isnan(verdict):
            raise ValueError("its verdict is no number")
        channel.send({"passed": verdict > 0.5})
    except BaseException as error:
        channel.send({"broken": f"the checker: {describe(error)}"})


ROLES: dict[str, Callable[[], None]] = {
    role.__name__: role for role in (run_program, answer_calls, check_output, run_tests)
}
