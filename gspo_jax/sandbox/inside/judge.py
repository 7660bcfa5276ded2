"""Judge of programs: `python -I -S -c "from inside.judge import main; main()"`, the first process of a sandbox.

Answers each line of JSON with one line (`Judge.answer`). It runs no program or test itself: the spawner forks processes
that do, which see neither the judge nor each other. Linux only.
"""

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from .channel import Channel
from .compare import same
from .jail import Limits
from .roles import ROLES
from .spawner import Spawner, SpawnError
from .world import add_builtins

_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.02
"""Seconds between checks of resource use."""
_OWN = 0.9
"""Share of its time limit after which a program is itself to blame for not ending."""
_BUFFER_BYTES = 256 << 10
"""Bytes a socket can buffer in memory of no process. Datagram sockets hold eleven times that."""
_WHY_CHARACTERS = 200
_WRONG = "wrong output"
_TICKS = os.sysconf("SC_CLK_TCK")
_MEMORY = (b"\nRssAnon:", b"\nVmSwap:", b"\nVmPTE:")
"""Lines of /proc/PID/status: KiB not backed by files, and of page tables."""
_USUAL = (
    *("bisect", "cmath", "copy", "fractions", "functools", "heapq", "io", "itertools", "math", "operator"),
    *("queue", "random", "re", "statistics", "string", "typing"),
)


_TESTED = ("program", "prelude", "tests", "given", "setup", "entry_point")


class Broken(RuntimeError):
    """The test, checker or sandbox is at fault, not the program."""


class _Stopped(RuntimeError):
    """A program was killed."""


class _Starved(RuntimeError):
    """Time ran out while other programs had the processor."""


def main() -> None:
    """Answer requests until standard input closes."""
    prepare()
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    judge = Judge(isolated="--unsafe" not in sys.argv)
    for line in requests:
        try:
            reply = judge.answer(json.loads(line))
        except _Starved:
            reply = {"starved": True}
        except (Broken, SpawnError, OSError) as error:
            reply = {"broken": str(error)}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def prepare() -> None:
    """Prepare what programs share, before forking. Frozen, it is never collected nor copied."""
    for name in _USUAL:
        __import__(name)
    add_builtins()
    gc.collect()
    gc.freeze()


class Judge:
    """Runs programs in processes of their own and reports the tests they pass."""

    def __init__(self, *, isolated: bool) -> None:
        self._isolated = isolated
        self._spawner = Spawner(ROLES, isolated=isolated)
        self._nothing = os.open(os.devnull, os.O_RDWR)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a request: `{"passed": [bool, …], "why": text}`, `{"broken": text}`, `{"starved": True}`.

        Args:
          request: `program`, candidate sources (choose.py); `prelude`, run before it; `limits`, fields of Limits; and
            for functions: `tests`, sources that raise if the program fails; `given`, candidate sources from the
            prompt, and `setup`, both run before them; `entry_point`, None or the function passed to each `check`;
            for whole programs: `inputs` and `expected`, one text per test; `compare`, a name of compare.py, or
            `checker`, source of `check(input, expected, output)`; `stop`, True to stop at the first failure;
            to run a program only: `inputs` with one text, no `expected`. The reply is then `{"output", "why"}`.

        Raises:
          Broken: no verdict is possible.
        """
        limits = Limits(**request["limits"])
        if "tests" in request:
            return self._test_functions(request, limits)
        if "expected" not in request:
            output, why = self._run_program(request, request["inputs"][0], limits)
            return {"output": output, "why": why}
        passed, first = [], ""
        for text, expected in zip(request["inputs"], request["expected"], strict=True):
            output, why = self._run_program(request, text, limits)
            why = why or self._fault(request, text, expected, output, limits)
            passed.append(not why)
            first = first or why
            if request["stop"] and why:
                break
        return {"passed": passed + [False] * (len(request["inputs"]) - len(passed)), "why": first}

    def _fault(self, request: Mapping[str, Any], text: str, expected: str, output: str, limits: Limits) -> str:
        """Return why an output is wrong, "" if it is right.

        The program is at fault if the checker fails on its output but accepts the expected one.

        Raises:
          Broken: the checker is at fault.
        """
        if not request.get("checker"):
            return "" if same(expected, output, request["compare"]) else _WRONG
        try:
            return "" if self._accepts(request["checker"], text, expected, output, limits) else _WRONG
        except Broken:
            if output == expected or not self._accepts(request["checker"], text, expected, expected, limits):
                raise
        try:  # retry: the machine may have been busy
            return "" if self._accepts(request["checker"], text, expected, output, limits) else _WRONG
        except Broken as broken:
            return f"on the program's output, {broken}"[:_WHY_CHARACTERS]

    def _accepts(self, checker: str, text: str, expected: str, output: str, limits: Limits) -> bool:
        with self._processes(limits) as running:
            channel = running.start("check_output")
            try:
                running.send(channel, {"checker": checker, "input": text, "expected": expected, "output": output})
                verdict = running.receive(channel)
            except (_Stopped, EOFError, OSError, ValueError, RecursionError) as error:
                raise Broken(f"the checker gave no verdict: {str(error) or 'it ended'}") from None
        if "broken" in verdict:
            raise Broken(verdict["broken"])
        return bool(verdict["passed"])

    def _test_functions(self, request: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
        passed: list[bool] = []
        with self._processes(limits) as running:
            program, tests = socket.socketpair()
            with program, tests:
                running.spawn("answer_calls", program.fileno())
                channel = running.start("run_tests", tests.fileno())
            try:
                running.send(channel, {name: request[name] for name in _TESTED})
                while "why" not in (verdict := running.receive(channel)):
                    if "broken" in verdict:
                        raise Broken(verdict["broken"])
                    passed = verdict["passed"]
                passed, why = verdict["passed"], verdict["why"]
            except _Stopped as stop:
                why = str(stop)
            except (EOFError, OSError, ValueError):
                why = "the process of the tests ended"
        return {"passed": passed + [False] * (len(request["tests"]) - len(passed)), "why": why}

    def _run_program(self, request: Mapping[str, Any], text: str, limits: Limits) -> tuple[str, str]:
        try:
            given = text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise Broken("an input is not Unicode text") from None
        with self._processes(limits) as running, contextlib.ExitStack() as stack:
            ends = [stack.enter_context(end) for _ in range(2) for end in socket.socketpair()]
            (read, stdout), (errors, stderr) = zip(ends[::2], ends[1::2], strict=True)
            stdin = stack.enter_context(_file_of(given))
            channel = running.start("run_program", inherited=[end.fileno() for end in (stdin, stdout, stderr)])
            for end in (stdin, stdout, stderr):
                end.close()
            try:
                running.send(channel, {"program": request["program"], "prelude": request["prelude"]})
                output, said = running.read(read, errors)
                why = running.ended_badly()
                if why:
                    _raise_broken(channel)
            except _Stopped as stop:
                return "", str(stop)
            except (OSError, ValueError):  # too long, or the process has ended
                return "", "the program could not be handed over"
            last = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
            return output.decode("utf-8", "surrogateescape"), f"{why}: {last}"[:_WHY_CHARACTERS] if why else ""

    @contextlib.contextmanager
    def _processes(self, limits: Limits) -> Iterator["_Processes"]:
        running = _Processes(self._spawner, limits, isolated=self._isolated, nothing=self._nothing)
        try:
            yield running
        finally:
            running.end()


class _Processes:
    def __init__(self, spawner: Spawner, limits: Limits, *, isolated: bool, nothing: int) -> None:
        self._spawner, self._limits, self._isolated, self._nothing = spawner, limits, isolated, nothing
        self._most_s = limits.wall_s + limits.patience_s
        self._begun = self._looked = time.monotonic()
        self._deadline = self._begun + limits.wall_s
        self._pids: list[int] = []
        self._channels: list[Channel] = []

    def spawn(self, role: str, *descriptors: int, inherited: Sequence[int] = ()) -> int:
        """Start a process with `inherited` (default: null) as 0, 1, 2 and `descriptors` from 3 on."""
        pid = self._spawner.spawn(role, self._limits, [*(inherited or [self._nothing] * 3), *descriptors])
        self._pids.append(pid)
        self._begun = self._looked = time.monotonic()  # startup does not count
        self._deadline = self._begun + self._limits.wall_s
        return pid

    def start(self, role: str, *descriptors: int, inherited: Sequence[int] = ()) -> Channel:
        ours, theirs = socket.socketpair()
        with theirs:
            self.spawn(role, theirs.fileno(), *descriptors, inherited=inherited)
        ours.settimeout(self._most_s)
        self._channels.append(Channel(ours))
        return self._channels[-1]

    def send(self, channel: Channel, message: Any) -> None:
        with self._late_is_stopped():
            channel.send(message)

    def receive(self, channel: Channel) -> Any:
        """Return the next message. Raise if limits are exceeded."""
        while not select.select([channel.socket], [], [], min(_LOOK_S, self._left()))[0]:
            self._check_time()
            self._check_use()
        self._check_use()
        if time.monotonic() > self._begun + self._most_s:  # messages may arrive faster than checks
            self._check_time()
        with self._late_is_stopped():
            return channel.receive()

    @contextlib.contextmanager
    def _late_is_stopped(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            self._deadline = 0.0
            self._check_time()

    def read(self, stdout: socket.socket, stderr: socket.socket) -> tuple[bytes, bytes]:
        """Return all output. Raise if limits are exceeded."""
        end = os.pidfd_open(self._pids[0])
        found = {stdout: bytearray(), stderr: bytearray()}
        for side in found:
            side.setblocking(False)
        try:
            reading, ended = [stdout, stderr], False
            while reading and not ended:
                ready = select.select([*reading, end], [], [], min(_LOOK_S, self._left()))[0]
                ended = end in ready
                if ended:  # its children end with it, and its output is complete
                    self._kill()
                    ready = reading
                else:
                    self._check_time()
                    self._check_use()
                for side in [side for side in reading if side in ready]:
                    if not self._read(side, found[side], to_the_end=ended):
                        reading.remove(side)
        finally:
            os.close(end)
        return bytes(found[stdout]), bytes(found[stderr])

    def _read(self, side: socket.socket, found: bytearray, *, to_the_end: bool) -> bool:
        while True:
            try:
                part = side.recv(1 << 16)
            except OSError:
                return not to_the_end
            if not part:
                return False
            found += part
            if len(found) > self._limits.output_bytes:
                raise _Stopped(f"more than {self._limits.output_bytes} bytes of output")
            if not to_the_end:
                return True

    def ended_badly(self) -> str:
        """Return how the first process failed, "" for exit code 0."""
        while True:
            pid, status = os.waitpid(self._pids[0], os.WNOHANG)
            if pid:
                break
            self._check_time()
            self._check_use()
            time.sleep(0.001)
        del self._pids[0]
        code = os.waitstatus_to_exitcode(status)
        return "" if code == 0 else f"exit code {code}" if code > 0 else f"signal {-code}"

    def end(self) -> None:
        self._kill()
        for pid in self._pids:
            os.waitpid(pid, 0)
        if not self._isolated:
            self._kill_orphans()
        for channel in self._channels:
            channel.socket.close()

    def _kill(self) -> None:
        for pid in self._pids:  # not reaped, so its number is not reused
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if not self._isolated:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    def _kill_orphans(self) -> None:
        """Without namespaces: kill processes that left their group."""
        while orphans := [pid for pid in _children() if pid != self._spawner.pid]:
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _check_time(self) -> None:
        """Raise _Stopped or _Starved if time is up, not counting waits for a processor."""
        if self._left():
            return
        limits, processes, passed = self._limits, self._all(), time.monotonic() - self._begun
        waited = sum(map(_waited_s, processes))
        own = max(passed - waited, sum(map(_processor_s, processes)))  # they may also have waited for each other
        enough = own >= _OWN * limits.wall_s
        if enough or (passed >= self._most_s and limits.final):
            raise _Stopped(f"no end within {limits.wall_s:g} s")
        if passed >= self._most_s:
            raise _Starved
        self._deadline = self._begun + limits.wall_s + min(waited, limits.patience_s)

    def _check_use(self) -> None:
        now = time.monotonic()
        if now < self._looked + _LOOK_S:
            return
        self._looked, limits, processes = now, self._limits, self._all()
        if sum(map(_processor_s, processes)) > limits.processor_s:
            raise _Stopped(f"more than {limits.processor_s:g} s of processor time")
        buffers = _buffer_bytes() if self._isolated else 0
        if sum(map(_memory_bytes, processes)) + buffers > limits.memory_bytes:
            raise _Stopped(f"more than {limits.memory_bytes >> 20} MiB of memory")

    def _all(self) -> list[int]:
        if not self._isolated:
            return self._pids
        ours = (1, os.getpid(), self._spawner.pid)
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in ours]


def _raise_broken(channel: Channel) -> None:
    with contextlib.suppress(EOFError, OSError):
        raise Broken(channel.receive()["broken"])


def _file_of(content: bytes) -> BinaryIO:
    with os.fdopen(os.memfd_create("input"), "wb") as file:
        file.write(content)
        file.flush()
        return open(f"/proc/self/fd/{file.fileno()}", "rb", buffering=0)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]


def _memory_bytes(pid: int) -> int:
    status = _read(f"/proc/{pid}/status")
    return 1024 * sum(int(status.partition(name)[2].split(None, 1)[0]) for name in _MEMORY if name in status)


def _buffer_bytes() -> int:
    rows = [line.split() for line in _read("/proc/self/net/unix").splitlines()[1:]]
    # Socket names may contain line breaks.
    return _BUFFER_BYTES * sum(11 if row[4] == b"0002" else 1 for row in rows if len(row) > 4)


def _processor_s(pid: int) -> float:
    """Return processor seconds, including ended children."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS


def _waited_s(pid: int) -> float:
    """Return the seconds that threads were runnable without a processor."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0.0
    found = [_read(f"/proc/{pid}/task/{thread}/schedstat").split() for thread in threads]
    return sum(int(fields[1]) for fields in found if fields) / 1e9


def _read(place: str) -> bytes:
    try:
        file = os.open(place, os.O_RDONLY)  # twice as fast as `open`
    except OSError:
        return b""
    found = bytearray()
    try:
        while part := os.read(file, 1 << 16):
            found += part
    except OSError:
        return b""
    finally:
        os.close(file)
    return bytes(found)
