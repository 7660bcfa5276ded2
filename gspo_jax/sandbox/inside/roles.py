"""What the processes of the sandbox do: run a program, answer calls of its functions, or test them.

A program never shares a process with its tests. The tests' process (testing.py) calls the functions of the other one
(program.py) and gets data back, so that patching `assert` or `builtins`, reading the callers' frames or ending the
process can only fail.
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
    """Run a program as `python program.py` does, with the descriptors 0, 1 and 2; it comes through 3.

    If its prelude fails, that goes back through 3, which is closed when the program begins.
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
    """Return standard input, output or error as the interpreter makes them, which translates no line ends."""
    raw = io.FileIO(number, "w" if number else "r", closefd=False)
    raw.name = ("<stdin>", "<stdout>", "<stderr>")[number]
    buffer = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="surrogateescape", newline="\n")


def check_output() -> None:
    """Call `check(input, expected, output)` of a checker that comes through descriptor 3; its verdict goes there."""
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
