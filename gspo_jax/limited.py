"""Time- and memory-limited processes that inspect foreign texts: chat templates, patterns, tokenizers.

Such a text can loop or grow inside a single C or Rust call. `Process` asks `python -m MODULE`, a program that calls
`serve`, and a costly question ends only that program. No jax here, nor any other slow import.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 2.0
"""Maximum CPU seconds of a question."""
EACH_S, BYTE_S = 0.02, 2e-5
"""Average CPU seconds per question, and per byte of it."""
LIMIT_BYTES = 512 << 20
"""Address space of the program."""
LIMIT_ANSWER = 256 << 20
"""Maximum bytes of an answer."""
WALL_S = 120.0
"""Seconds without an answer until a program is killed. Computation hits its CPU limit earlier."""
_TRIES = 2
_KEPT = frozenset(["PATH", "LD_LIBRARY_PATH", "LANG", "LANGUAGE", "TZ", "TMPDIR", "PYTHONHOME", "PYTHONHASHSEED"])
_QUIET = {"RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"}  # each thread would take address space


class TooMuch(Exception):
    """Raised for a costly question. The message continues a sentence: "does not end …"."""


class Process:
    """A program that answers questions of any thread, restarted after its death."""

    def __init__(self, module: str) -> None:
        """`module` calls `serve`."""
        self._module, self._lock = module, threading.Lock()
        self._program: _Program | None = None

    def ask(self, question: Any) -> Any:
        """Return the answer to a question, both JSON values.

        Raises:
          TooMuch: it takes too much time or memory, or has ended the program twice.
        """
        line = json.dumps(question).encode() + b"\n"
        with self._lock:
            ended = ""
            for _ in range(_TRIES):
                if self._program is None:
                    self._program = _Program(self._module)
                try:
                    return self._program.ask(line)
                except BaseException as error:
                    self._program.close()
                    self._program = None
                    if not isinstance(error, _Ended):
                        raise
                    ended = str(error)
            raise TooMuch(ended)


class _Ended(Exception):
    """The program ended within its limits, perhaps by another cause than the question."""


class _Program:
    def __init__(self, module: str) -> None:
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(WALL_S)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the program
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=theirs.fileno(),
                stdout=self._said,
                stderr=self._said,
                env=environment() | _QUIET,
                start_new_session=True,  # Ctrl-C reaches only the trainer, which may ask more
            )

    def ask(self, line: bytes) -> Any:
        begun = time.monotonic()
        parts = [b""]
        try:
            self._connection.sendall(line)
            while not parts[-1].endswith(b"\n"):
                parts.append(self._connection.recv(1 << 20))
                if not parts[-1] or sum(map(len, parts)) > LIMIT_ANSWER:
                    break
        except TimeoutError:
            raise TooMuch(f"has no answer within {WALL_S:g} s") from None
        except OSError:  # it ended before reading the question
            parts.append(b"")
        if not parts[-1]:
            raise self._ended(time.monotonic() - begun)
        reply = json.loads(b"".join(parts))
        if "answer" not in reply:
            raise TooMuch(f"needs more than {LIMIT_BYTES >> 20} MiB of memory")
        return reply["answer"]

    def _ended(self, seconds: float) -> Exception:
        code = self._process.wait()
        if code == -signal.SIGPROF:
            if seconds < LIMIT_S / 2:
                return TooMuch(f"takes more than {EACH_S * 1000:g} ms again and again")
            return TooMuch(f"does not end within {LIMIT_S:g} s")
        self._said.seek(0)
        said = [" ".join(line.split()) for line in self._said.read(1 << 16).decode("utf-8", "replace").split("\n")]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return _Ended(f"ends its process with {how} ({next(filter(None, said), 'no message'):.200})")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()
        self._said.close()


def quoted(error: object) -> str:
    """Return an error's text on one line of at most 200 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:197]}..."


def environment(**more: str) -> dict[str, str]:
    """Return environment variables for foreign code, without possible secrets.

    The import path is this process's. With `-P` it lacks the current directory.
    """
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith("LC_")}
    return kept | {"PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path)} | more


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer the questions of a `Process`, as its program."""
    for what, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, LIMIT_BYTES)):
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    left_s = LIMIT_S
    with socket.socket(fileno=os.dup(0)) as connection, connection.makefile("rb") as questions:
        for line in questions:
            left_s = min(left_s, LIMIT_S) + EACH_S + BYTE_S * len(line)
            begun = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, left_s)  # the signal ends the program, even in C and Rust
            try:
                reply = {"answer": answer(json.loads(line))}
            except MemoryError:
                reply = {}
            signal.setitimer(signal.ITIMER_PROF, 0)
            left_s -= time.process_time() - begun
            connection.sendall(json.dumps(reply).encode() + b"\n")
