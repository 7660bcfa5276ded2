"""Traces of the phases of chosen iterations, as xprof and Perfetto open them.

A phase is traced from its start, for at most `SECONDS`: a phase on a pod may take minutes and millions of operations,
which no profiler holds, and its first seconds have all that repeats. Folders are as xprof expects them.
"""

import json
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from etils import epath

from gspo_jax.errors import UserError
from gspo_jax.profiling import operations

SECONDS = 5.0
"""Longest trace."""
TRACED = ("reshard", "sample", "score", "update")
"""Phases in which the devices work."""
MOST = 20
"""Operations listed per phase."""
OPERATIONS_FILE = "operations.md"
_FACTS_FILE = "operations.json"
_SESSIONS = "plugins/profile"
_SUFFIXES = (".xplane.pb", ".trace.json.gz")


class Span(NamedTuple):
    """Iterations to trace, counted from 1 as on the terminal."""

    first: int
    last: int

    @property
    def words(self) -> str:
        """As in a sentence."""
        return f"iteration {self.first}" if self.first == self.last else f"iterations {self.first} to {self.last}"


def read_span(text: str) -> Span:
    """Return the iterations of `--profile=START:STOP`, both included, or of a single number.

    Raises:
      UserError: it is neither.
    """
    if (found := re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)) is None:
        raise UserError(f"--profile is {text!r}; use the iterations to trace, such as 3 or 3:5")
    span = Span(int(found[1]), int(found[2] or found[1]))
    if not 1 <= span.first <= span.last:
        raise UserError(f"--profile is {text}; iterations are counted from 1, and the first comes first, such as 3:5")
    return span


def check_span(span: Span, *, done: int, iterations: int) -> None:
    """Raise a UserError if a run with `done` of its iterations does not come to any of the span."""
    if span.first > iterations:
        raise UserError(
            f"--profile is for {span.words}, and the run has {iterations}; use at most {iterations}, or more iterations"
        )
    if span.last <= done < iterations:
        raise UserError(f"--profile is for {span.words}, and {done} are done; use {done + 1} or a later one")


class Trace:
    """A trace of this process that runs until `stop`, or for `SECONDS`."""

    def __init__(self, seconds: float = SECONDS):
        self._folder = tempfile.mkdtemp(prefix="gspo_jax-profile-")
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # tracing every Python call makes phases several times as long
        self._lock, self._error = threading.Lock(), ""
        self._seconds: float | None = None
        self._begun = time.perf_counter()
        try:
            jax.profiler.start_trace(self._folder, profiler_options=options)
        except RuntimeError as error:  # another trace of this process runs
            self._seconds, self._error = 0.0, str(error)
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        with self._lock:
            if self._seconds is None:
                self._seconds = time.perf_counter() - self._begun
                try:
                    jax.profiler.stop_trace()
                except Exception as error:  # a full disk, or a profiler that fails, must not end a run
                    self._error = f"{type(error).__name__}: {error}"

    def stop(self, folder: Path | epath.Path, *, name: str) -> tuple[float, operations.Seen]:
        """Write the trace to `folder` as `name`, if a device worked. Return its seconds, and what it shows.

        Raises:
          OSError: the trace could not be written, or not be read again.
        """
        self._timer.cancel()
        self._end()
        try:
            found = {suffix: next(Path(self._folder).rglob(f"*{suffix}"), None) for suffix in _SUFFIXES}
            written = found[".xplane.pb"]
            if self._error or written is None:
                raise OSError(self._error or "the profiler wrote nothing")
            try:
                data = jax.profiler.ProfileData.from_file(str(written))
                seen = operations.read(data, operations.compiled_programs())
            except Exception as error:  # whatever a profiler wrote must not end a run either
                raise OSError(f"it could not be read: {type(error).__name__}: {error}") from error
            for suffix, file in found.items() if seen.devices else ():
                if file is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / f"{name}{suffix}").write_bytes(file.read_bytes())
            assert self._seconds is not None
            return self._seconds, seen
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


class PhaseTraces:
    """Traces the phases of some iterations into a folder."""

    def __init__(self, folder: Path | epath.Path, span: Span, *, process: int = 0, seconds: float = SECONDS):
        """Trace phases of the iterations in `span`, each for at most so many seconds, and write to `folder`."""
        self.folder, self.span = folder, span
        self._process, self._seconds = process, seconds
        self._iteration = 0
        self._running: tuple[str, Trace] | None = None
        self._done: dict[str, dict[str, Any]] = {}
        self.seen: dict[str, operations.Seen] = {}
        """What each trace shows, by `iteration-NUMBER-PHASE`."""

    @property
    def running(self) -> bool:
        """True if a phase is being traced."""
        return self._running is not None

    def begin(self, iteration: int) -> None:
        """Begin an iteration, counted from 1."""
        self._iteration = iteration

    def start(self, phase: str) -> None:
        """Trace a phase that begins, in an iteration of the span.

        Of several of one name in an iteration the last one in which a device works is kept. Whether one is traced does
        not depend on what is seen, which differs between processes that have to meet.
        """
        if phase in TRACED and self.span.first <= self._iteration <= self.span.last:
            self._running = f"iteration-{self._iteration}-{phase}", Trace(self._seconds)

    def stop(self) -> None:
        """End the trace of the phase that ends, if there is one.

        Raises:
          OSError: it could not be written.
        """
        if self._running is None:
            return
        (name, trace), self._running = self._running, None
        seconds, seen = trace.stop(self.folder / _SESSIONS / name, name=f"process-{self._process}")
        if seen.devices:
            self._done[name], self.seen[name] = {"seconds": seconds, **seen.facts(MOST)}, seen

    def conclude(self) -> list[str]:
        """Write the tables of operations once the last iteration is traced. Return lines about them."""
        if not self._done or self._iteration < self.span.last:
            return []
        found, self._done = self._done, {}
        if self._process == 0:
            (self.folder / _FACTS_FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            (self.folder / OPERATIONS_FILE).write_text(page(found), encoding="utf-8")
        return [f"profile: {self.folder}/{OPERATIONS_FILE}; to open the traces: xprof --logdir={self.folder}"]


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown page of the most expensive operations of each trace."""
    lines = ["# Where the devices' time went", ""]
    for name, facts in found.items():
        busy = facts["running_s"] / facts["seconds"] if facts["seconds"] else 0.0
        lines += [
            f"## {name}",
            "",
            f"{facts['seconds']:.3f} s traced of {facts['devices']} devices. Programs ran in {busy:.0%} of it, and "
            f"{facts['joined']:.1%} of that is in operations of known programs.",
            "",
            *_table(facts["operations"]),
            "",
        ]
    return "\n".join(lines)


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ["| program | operation | ms | share | times | scope |", "|---|---|---|---|---|---|"]
    return head + [
        f"| `{row['program']}` | `{row['name']}` | {row['seconds'] * 1e3:.3f} | {row['share']:.1%} | "
        f"{row['times']:g} | {_code(row['scope'])} |"
        for row in rows
    ]


def _code(text: str) -> str:
    return f"`{text.replace('|', '/')}`" if text else ""
